"""Handle paged caches of k and v: view all layouts as one, check caches, write to slots in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.rotary.memory import Form, check_inference, checked_once, form_of, got
from mmpos.support.checks import INT32_MAX, instance, one_of

CacheLayout = Literal["NHD", "HND"]


class Cache(NamedTuple):
    """Paged cache of k and v, and the slots that a call writes.

    Slot s is offset s mod block_size in block s // block_size. Tokens are not stored if their slot is negative, if they
    have no slot because slot_mapping is shorter (engines pad tokens this way), or, on a device, if their slot is too
    large. A slot shared by several tokens raises an error where slots are checked; where they are not (on a device or
    in a compiled graph), the slot receives a mix of the tokens' elements. Sources: vLLM's reshape_and_cache_flash,
    FlashInfer's append_paged_kv_cache.

    Attributes:
        key_cache: (blocks, block_size, num_kv_heads, head_dim) "NHD", (blocks, num_kv_heads, block_size, head_dim)
            "HND", or (slots, num_kv_heads, head_dim), with the dtype of k. Strides are arbitrary: a view of a tensor
            with k and v, or with all layers, is written in place.
        value_cache: like key_cache, but with the head_dim of v.
        slot_mapping: (tokens,) or (batch, seq) int32 or int64, or a shorter vector for the first tokens.
        layout: "NHD" or "HND".
    """

    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    layout: CacheLayout = "NHD"


def pages_of(cache: Cache, k: Tensor, v: Tensor) -> list[Tensor]:
    """View the caches of (batch, seq, heads, head_dim) k and v as (blocks, block_size, heads, head_dim)."""
    both = instance("cache", cache, Cache, "mmpos.rotary.Cache")[:2]
    _check_caches(*[form_of(x) for x in (*both, k, v)], cache.layout)
    return [x.unsqueeze(1) if x.dim() == 3 else x.transpose(1, 2) if cache.layout == "HND" else x for x in both]


@checked_once
def _check_caches(keys: Form | type, values: Form | type, k: Form, v: Form, layout: CacheLayout) -> None:
    one_of("cache.layout", layout, ("NHD", "HND"))
    slots = []
    for like, x, form in (("k", k, keys), ("v", v, values)):
        name = "key_cache" if like == "k" else "value_cache"
        if not isinstance(form, Form) or form.dtype != x.dtype:
            raise InvalidInputError(f"{name}: got {got(form)}, want a tensor of {x.dtype} as for {like}")
        if form.device != x.device:
            raise InvalidInputError(f"{name}: got a tensor on {form.device}, want {x.device} as for {like}")
        slots.append(check_pages(name, form, layout, *x.shape[2:]))
    if slots[0] != slots[1]:
        (blocks, size), (want_blocks, want_size) = slots[1], slots[0]
        raise InvalidInputError(
            f"value_cache: got {blocks} blocks of {size} slots, want {want_blocks} of {want_size} as for key_cache"
        )


def check_pages(name: str, form: Form, layout: CacheLayout, heads: int | str, head_dim: int) -> tuple[int, int]:
    """Check a cache, in which a str allows any number of heads, and return its blocks and block_size."""
    shape = [*form.shape]
    if len(shape) == 3:
        shape.insert(1, 1)
    elif layout == "HND":
        shape[1:3] = shape[2:0:-1]
    if len(shape) != 4 or not shape[1] or shape[2:] != [heads if isinstance(heads, int) else shape[2], head_dim]:
        inner = f"block_size, {heads}, {head_dim}" if layout == "NHD" else f"{heads}, block_size, {head_dim}"
        want = f"(blocks, {inner}) or (slots, {heads}, {head_dim})"
        raise InvalidInputError(f"{name}: got shape {tuple(form.shape)}, want {want} in layout {layout}")
    check_inference({name: form})
    blocks, size = shape[:2]
    if blocks * size > INT32_MAX:
        raise LimitExceededError(f"{name}: got {blocks * size} slots, want <= {INT32_MAX}")
    return blocks, size


class SlotNames(NamedTuple):
    """Argument names for error messages about slots.

    Args:
        slots: name of the slots.
        tokens: name of the tensor with the tokens that are stored in the slots.
        cache: name of the cache.
    """

    slots: str
    tokens: str
    cache: str


STORED = SlotNames("slot_mapping", "q", "key_cache")
"""Argument names of ``rotate_and_store``."""


def slots_of(slots: Tensor, batch: int, seq: int, pages: Tensor, validate: bool, names: SlotNames = STORED) -> Tensor:
    """Check the slots of (batch, seq) tokens and return them as one vector; see ``Cache.slot_mapping``.

    Values are checked only on the host or with ``validate``.
    """
    _check_slots(form_of(slots), batch, seq, pages.device, names)
    row = slots.reshape(-1).contiguous()
    if validate or (row.is_cpu and not torch.compiler.is_compiling()):
        check_slots(row.cpu().numpy(), _capacity(pages), names)
    return row


@checked_once
def _check_slots(form: Form | type, batch: int, seq: int, device: torch.device, names: SlotNames) -> None:
    name, tokens, _ = names
    if not isinstance(form, Form) or form.dtype not in (torch.int32, torch.int64):
        raise InvalidInputError(f"{name}: got {got(form)}, want a tensor of int32 or int64")
    if form.device != device:
        raise InvalidInputError(f"{name}: got a tensor on {form.device}, want {device} as for {tokens}")
    if not (form.shape == (batch, seq) or (len(form.shape) == 1 and form.shape[0] <= batch * seq)):
        raise InvalidInputError(
            f"{name}: got shape {tuple(form.shape)}, want at most ({batch * seq},), the token count of {tokens}"
        )


def check_slots(row: npt.NDArray[np.int32 | np.int64], capacity: int, names: SlotNames) -> None:
    """Raise for the first token whose slot exceeds the capacity or is also the slot of an earlier token."""
    if row.max(initial=-1) >= capacity:
        token = int((row >= capacity).argmax())
        raise InvalidInputError(
            f"{names.slots}[{token}]: got {row[token]}, want < {capacity}, the number of slots of {names.cache}"
        )
    slots = np.sort(row)  # several times faster than torch.sort
    if ((slots[1:] == slots[:-1]) & (slots[1:] >= 0)).any():
        order = row.argsort(kind="stable")
        repeats = np.flatnonzero((slots[1:] == slots[:-1]) & (slots[1:] >= 0))
        earlier, token = order[repeats[order[repeats + 1].argmin()] + np.arange(2)].tolist()
        raise InvalidInputError(
            f"{names.slots}[{token}]: got {row[token]}, the slot of token {earlier}, want a slot for each token"
        )


def write(caches: Sequence[Tensor], tensors: Sequence[Tensor], slots: Tensor) -> None:
    """Write tokens to their slots and skip tokens whose slot is negative or too large.

    Args:
        caches: (blocks, block_size, heads, head_dim), all with the same blocks and block_size, and any strides.
        tensors: one (batch, seq, heads, head_dim) tensor per cache, with any strides.
        slots: (n,) slots of the first n tokens: block · block_size + offset.
    """
    capacity, size = _capacity(caches[0]), caches[0].shape[1]
    kept = (slots >= 0) & (slots < capacity)  # unlike a kernel, indexing with a mask waits for the device
    places = slots[kept] // size, slots[kept] % size
    for cache, x in zip(caches, tensors, strict=True):
        cache[places] = x.flatten(0, 1)[: slots.shape[0]][kept]


def read(cache: Tensor, slots: Tensor) -> Tensor:
    """Return the contents of slots as a new tensor (n, heads, head_dim); for an invalid slot, those of another slot.

    Args:
        cache: (blocks, block_size, heads, head_dim) with at least one slot and any strides.
        slots: (n,) slots.
    """
    slots = slots.clamp(0, _capacity(cache) - 1)
    return cache[slots // cache.shape[1], slots % cache.shape[1]]


def _capacity(pages: Tensor) -> int:
    return pages.shape[0] * pages.shape[1]


class Stored(NamedTuple):
    """Arguments of a store operation other than q and k, in the argument order of the operators.

    Args:
        v: (batch, seq, heads, head_dim), with as many heads as k.
        key_cache: (blocks, block_size, heads, head_dim), with any strides.
        value_cache: the same, with the head_dim of v.
        slots: (n,) slots of the first n tokens.
        return_k: whether the rotated k is also returned.
    """

    v: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slots: Tensor
    return_k: bool
