"""Paged caches of k and v: view every layout as one, check it and its scales, and write to slots in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.rotary.memory import check_inference
from mmpos.support.checks import INT32_MAX, one_of

CacheLayout = Literal["NHD", "HND"]

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes of 8 bits that a cache may have."""


class Cache(NamedTuple):
    """A paged cache of k and v, and which of its slots a call writes.

    Slot s is offset s mod block_size of block s // block_size. A token whose slot is negative is not stored, and so is
    one without a slot behind the end of the mapping, by which engines pad, and on a device one whose slot is too
    large. A slot for several tokens is an error where slots are read; unread, on a device or in a compiled graph, it
    gets some elements of each. Sources: vLLM's reshape_and_cache_flash, FlashInfer's append_paged_kv_cache.

    Attributes:
        key_cache: (blocks, block_size, num_kv_heads, head_dim) "NHD", (blocks, num_kv_heads, block_size, head_dim)
            "HND", or (slots, num_kv_heads, head_dim), in the dtype of k, or with k_scale in float8_e4m3fn or
            float8_e5m2, any strides: a view of what holds k and v together, or all layers, is written where it lies.
        value_cache: likewise, with the head_dim of v, and v_scale.
        slot_mapping: (tokens,) or (batch, seq) int32 or int64, or a row of fewer for the first tokens.
        layout: "NHD" or "HND".
        k_scale: float32 by which k is divided before it is rounded to a cache of 8 bits: () or (1,) for all, or
            (num_kv_heads,). Of the cache's shape without head_dim they are not read but written: each key that is
            stored gets its own, its largest magnitude by the largest number of the cache's dtype.
        v_scale: likewise of v.
        q_scale: float32 of the shape of q without head_dim, to which a scale for each query is written; q then comes
            back as float8_e4m3fn.
    """

    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    layout: CacheLayout = "NHD"
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    q_scale: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return what is read or written beside the slots, by name."""
        names = ("key_cache", "value_cache", "k_scale", "v_scale", "q_scale")
        return {name: x for name in names if (x := getattr(self, name)) is not None}


def pages_of(cache: Cache, like: Literal["k", "v"], x: Tensor) -> Tensor:
    """View the cache of k or v as (blocks, block_size, heads, head_dim), if (batch, seq, heads, head_dim) x fits."""
    name, pages = ("key_cache", cache.key_cache) if like == "k" else ("value_cache", cache.value_cache)
    scaled = (cache.k_scale if like == "k" else cache.v_scale) is not None
    one_of("cache.layout", cache.layout, ("NHD", "HND"))
    if not isinstance(pages, Tensor):
        raise InvalidInputError(f"{name}: got {type(pages).__name__}, want a tensor of {x.dtype} as {like}")
    if scaled and pages.dtype == x.dtype:
        raise InvalidInputError(f"{like}_scale: got scales for a cache of {pages.dtype}, want None")
    if pages.dtype != x.dtype and not (scaled and pages.dtype in EIGHT_BITS):
        plainly = f"{x.dtype} as {like}"
        if pages.dtype in EIGHT_BITS:
            raise UnsupportedError(
                f"{name}: got {pages.dtype}, which needs scales, want {like}_scale beside it, or {plainly}"
            )
        if pages.dtype.itemsize == 1:
            names = " or ".join(map(str, EIGHT_BITS))
            raise UnsupportedError(f"{name}: got {pages.dtype}, want {names} with {like}_scale, or {plainly}")
        raise InvalidInputError(f"{name}: got {pages.dtype}, want {plainly}")
    if pages.device != x.device:
        raise InvalidInputError(f"{name}: got a tensor on {pages.device}, want {x.device} as {like}")
    return as_pages(name, pages, cache.layout, *x.shape[2:])


def as_pages(name: str, cache: Tensor, layout: CacheLayout, heads: int | str, head_dim: int) -> Tensor:
    """View a cache as ``pages_of`` does, of any dtype and device; heads may be a word, for any number of them."""
    pages = cache.unsqueeze(1) if cache.dim() == 3 else cache.transpose(1, 2) if layout == "HND" else cache
    ends = (heads if isinstance(heads, int) else pages.shape[-2], head_dim) if pages.dim() == 4 else ()
    if pages.dim() != 4 or not pages.shape[1] or pages.shape[2:] != ends:
        inner = f"block_size, {heads}, {head_dim}" if layout == "NHD" else f"{heads}, block_size, {head_dim}"
        want = f"(blocks, {inner}) or (slots, {heads}, {head_dim})"
        raise InvalidInputError(f"{name}: got shape {tuple(cache.shape)}, want {want} in layout {layout}")
    check_inference({name: cache})  # before slots are read, which forward mode has no memory of
    if _capacity(pages) > INT32_MAX:
        raise LimitExceededError(f"{name}: got {_capacity(pages)} slots, want <= {INT32_MAX}")
    return pages


class SlotNames(NamedTuple):
    """Names of arguments, for messages about slots.

    Args:
        slots: of the slots.
        tokens: of the tensor whose tokens they are of.
        cache: of the cache.
    """

    slots: str
    tokens: str
    cache: str


STORED = SlotNames("slot_mapping", "q", "key_cache")
"""Names in ``rotate_and_store``."""


def slots_of(slots: Tensor, batch: int, seq: int, pages: Tensor, validate: bool, names: SlotNames = STORED) -> Tensor:
    """Check the slots of (batch, seq) tokens and return them as one row; see ``Cache.slot_mapping``.

    Their values are read only on a host, or with validate.
    """
    name, tokens, _ = names
    if not isinstance(slots, Tensor) or slots.dtype not in (torch.int32, torch.int64):
        got = slots.dtype if isinstance(slots, Tensor) else type(slots).__name__
        raise InvalidInputError(f"{name}: got {got}, want a tensor of int32 or int64")
    if slots.device != pages.device:
        raise InvalidInputError(f"{name}: got a tensor on {slots.device}, want {pages.device} as {tokens}")
    if not (slots.shape == (batch, seq) or (slots.dim() == 1 and slots.shape[0] <= batch * seq)):
        raise InvalidInputError(
            f"{name}: got shape {tuple(slots.shape)}, want at most ({batch * seq},), the tokens of {tokens}"
        )
    row = slots.reshape(-1).contiguous()
    on_host = row.device.type == "cpu" and not torch.compiler.is_compiling()
    if validate or on_host:
        check_slots(row.cpu().numpy(), _capacity(pages), names)
    return row


def check_slots(row: npt.NDArray[np.int32 | np.int64], capacity: int, names: SlotNames) -> None:
    """Raise for the first token whose slot is beyond the caches, or an earlier token's as well."""
    if row.max(initial=-1) >= capacity:
        token = int((row >= capacity).argmax())
        raise InvalidInputError(
            f"{names.slots}[{token}]: got {row[token]}, want < {capacity}, the slots of {names.cache}"
        )
    slots = np.sort(row)  # several times as fast as torch's
    if ((slots[1:] == slots[:-1]) & (slots[1:] >= 0)).any():
        order = row.argsort(kind="stable")
        again = np.flatnonzero((slots[1:] == slots[:-1]) & (slots[1:] >= 0))
        earlier, token = order[again[order[again + 1].argmin()] + np.arange(2)].tolist()
        raise InvalidInputError(
            f"{names.slots}[{token}]: got {row[token]}, the slot of token {earlier}, want one of its own: a slot of "
            "two tokens holds some of each"
        )


def write(caches: Sequence[Tensor], tensors: Sequence[Tensor], slots: Tensor) -> None:
    """Write tokens into their slots; one whose slot the caches do not have is skipped.

    Args:
        caches: (blocks, block_size, heads, head_dim) of equal blocks, any strides.
        tensors: what goes into each, (batch, seq, heads, head_dim), any strides.
        slots: (n,) slots of the first n tokens: block · block_size + offset.
    """
    capacity, size = _capacity(caches[0]), caches[0].shape[1]
    if not slots.shape[0]:
        return
    kept = (slots >= 0) & (slots < capacity)  # counting them waits for a device, as no kernel does
    places = slots[kept] // size, slots[kept] % size
    for cache, x in zip(caches, tensors, strict=True):
        _movable(cache)[places] = _movable(x).flatten(0, 1)[: slots.shape[0]][kept]


def read(cache: Tensor, slots: Tensor) -> Tensor:
    """Read slots into a new (n, heads, head_dim); what comes for one that the cache does not have is some other's.

    Args:
        cache: (blocks, block_size, heads, …), any strides, of one slot at least.
        slots: (n,) slots.
    """
    slots = slots.clamp(0, _capacity(cache) - 1)
    return _movable(cache)[slots // cache.shape[1], slots % cache.shape[1]].view(cache.dtype)


def _movable(x: Tensor) -> Tensor:
    """View 8-bit floats as bytes, since torch does not index them everywhere."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _capacity(pages: Tensor) -> int:
    return pages.shape[0] * pages.shape[1]


QUERY = torch.float8_e4m3fn
"""Dtype of a q of 8 bits."""

LEAST_SCALE = 2.0**-100
"""The least scale that is computed: heads of zeros need one, and what is divided by it stays a normal number."""


class Scales(NamedTuple):
    """Scales of q, k and v where they are stored in 8 bits, in the order in which the operators take them.

    Args:
        k: (heads,) float32 by which k is divided; None where it is not stored in 8 bits or they are computed.
        v: likewise of v.
        k_computed: (blocks, block_size, heads) float32 where the scale of each key that is stored is written, or None.
        v_computed: likewise of v.
        q_computed: (batch, seq, heads) float32 where that of each query is written, or None for q in its own dtype.
    """

    k: Tensor | None
    v: Tensor | None
    k_computed: Tensor | None
    v_computed: Tensor | None
    q_computed: Tensor | None

    @property
    def are_none(self) -> bool:
        """Whether nothing is stored in 8 bits."""
        return all(x is None for x in self)

    @property
    def written(self) -> list[str]:
        """Names of those that are computed, as ``Cache`` has them."""
        computed = zip(("k_scale", "v_scale", "q_scale"), self[2:], strict=True)
        return [name for name, scale in computed if scale is not None]


NO_SCALES = Scales(None, None, None, None, None)
"""Nothing is stored in 8 bits."""


class Stored(NamedTuple):
    """All that storing takes beside q and k, in the order in which the operators take it.

    Args:
        v: (batch, seq, heads, head_dim), with the heads of k.
        key_cache: (blocks, block_size, heads, head_dim), any strides.
        value_cache: likewise, with the head_dim of v.
        slots: (n,) slots of the first n tokens.
        return_k: whether rotated k is wanted outside of the cache too.
        scales: of what is stored in 8 bits.
    """

    v: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slots: Tensor
    return_k: bool
    scales: Scales

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        """Those of k and of v."""
        return self.key_cache, self.value_cache

    def arguments(self) -> tuple[Any, ...]:
        """Return all of it in one row."""
        return *self[:-1], *self.scales


def quantised(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide heads by their scales and round to the nearest numbers of 8 bits, ties to even.

    All beyond the largest number becomes that number, as vLLM's caches have it; NaN stays.

    Args:
        x: (…, heads, head_dim).
        scale: (…, heads) float32.
        dtype: of 8 bits.
    """
    largest = torch.finfo(dtype).max
    return (x.to(torch.float32) / scale.unsqueeze(-1)).clamp_(-largest, largest).to(dtype)


def computed_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the (…, heads) scales that bring the largest channel of heads to the largest number of a dtype."""
    return (_largest(x) / torch.finfo(dtype).max).clamp_(min=LEAST_SCALE)


def grown(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the (…, heads) factor, at least 1, by which scales must grow for heads, in units of them, to fit."""
    return (_largest(x) / torch.finfo(dtype).max).clamp_(min=1.0)


def _largest(x: Tensor) -> Tensor:
    if not x.shape[-1]:
        return x.new_zeros(x.shape[:-1])
    return x.abs().nan_to_num_(nan=0.0, posinf=torch.inf).amax(-1)


def scale_of_cache(
    name: str, scale: Tensor | None, cache: Tensor, pages: Tensor, layout: CacheLayout, validate: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Check the scales of a cache of 8 bits; their values are read only on a host, or with validate.

    Args:
        name: of the scales, for messages.
        scale: (), (1,) or (heads,), which are read, or of the cache's shape without head_dim, which are written; None
            for a cache of other dtypes.
        cache: as it came.
        pages: it as (blocks, block_size, heads, head_dim).
        layout: of the cache.
        validate: whether to wait for a device.

    Returns:
        (heads,) those that are read, or None, and (blocks, block_size, heads) those that are written, or None.
    """
    if scale is None:
        return None, None
    _check_float32(name, scale)
    if scale.device != pages.device:
        raise InvalidInputError(f"{name}: got a tensor on {scale.device}, want {pages.device} as the cache")
    heads = pages.shape[2]
    if scale.shape in ((), (1,), (heads,)):
        if validate or (scale.device.type == "cpu" and not torch.compiler.is_compiling()):
            _check_values(name, scale)
        return scale.expand(heads), None
    if scale.shape != cache.shape[:-1]:
        raise InvalidInputError(
            f"{name}: got shape {tuple(scale.shape)}, want () or (1,), ({heads},), one for each head, or "
            f"{tuple(cache.shape[:-1])}, one for each slot and head, which are written"
        )
    return None, scale.unsqueeze(1) if scale.dim() == 2 else scale.transpose(1, 2) if layout == "HND" else scale


def scale_of_queries(scale: Tensor, q: Tensor) -> Tensor:
    """Check where the scales of queries are written, float32 of the shape of q without head_dim."""
    _check_float32("q_scale", scale)
    if scale.device != q.device or scale.shape != q.shape[:-1]:
        raise InvalidInputError(
            f"q_scale: got shape {tuple(scale.shape)} on {scale.device}, "
            f"want {tuple(q.shape[:-1])} on {q.device}, q without head_dim"
        )
    return scale


def _check_float32(name: str, scale: Tensor) -> None:
    """Check a tensor of scales, which gradients do not go through."""
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
        got = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
        raise InvalidInputError(f"{name}: got {got}, want a tensor of float32")
    check_inference({name: scale})


def _check_values(name: str, scale: Tensor) -> None:
    values = scale.reshape(-1).tolist()
    for i, value in enumerate(values):
        if not 0 < value < float("inf"):
            place = f"[{i}]" if scale.dim() else ""
            raise InvalidInputError(f"{name}{place}: got {value}, want a finite number > 0")
