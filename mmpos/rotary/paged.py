"""Handle paged caches of k and v: view all layouts as one, check caches and scales, write to slots in plain torch."""

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
"""8-bit dtypes that a cache may have."""


class Cache(NamedTuple):
    """Paged cache of k and v, and the slots that a call writes.

    Slot s is offset s mod block_size in block s // block_size. Tokens are not stored if their slot is negative, if they
    have no slot because slot_mapping is shorter (engines pad tokens this way), or, on a device, if their slot is too
    large. A slot shared by several tokens raises an error where slots are checked; where they are not (on a device or
    in a compiled graph), the slot receives a mix of the tokens' elements. Sources: vLLM's reshape_and_cache_flash,
    FlashInfer's append_paged_kv_cache.

    Attributes:
        key_cache: (blocks, block_size, num_kv_heads, head_dim) "NHD", (blocks, num_kv_heads, block_size, head_dim)
            "HND", or (slots, num_kv_heads, head_dim), with the dtype of k or, with k_scale, float8_e4m3fn or
            float8_e5m2. Strides are arbitrary: a view of a tensor with k and v, or with all layers, is written in
            place.
        value_cache: like key_cache, but with the head_dim of v and, for 8 bits, with v_scale.
        slot_mapping: (tokens,) or (batch, seq) int32 or int64, or a shorter vector for the first tokens.
        layout: "NHD" or "HND".
        k_scale: float32 divisor of k for an 8-bit cache: () or (1,) for all heads, or (num_kv_heads,). If it has the
            cache's shape without head_dim, it is an output: each stored key gets its own scale, which is the key's
            largest magnitude divided by the largest number of the cache's dtype.
        v_scale: the same for v.
        q_scale: float32 with the shape of q without head_dim; an output that receives the scale of each query. The
            rotated q is then float8_e4m3fn.
    """

    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    layout: CacheLayout = "NHD"
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    q_scale: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the caches and the scales that are not None, by name."""
        names = ("key_cache", "value_cache", "k_scale", "v_scale", "q_scale")
        return {name: x for name in names if (x := getattr(self, name)) is not None}


def pages_of(cache: Cache, like: Literal["k", "v"], x: Tensor) -> Tensor:
    """View the cache of x, a (batch, seq, heads, head_dim) k or v, as (blocks, block_size, heads, head_dim)."""
    name, pages = ("key_cache", cache.key_cache) if like == "k" else ("value_cache", cache.value_cache)
    scaled = (cache.k_scale if like == "k" else cache.v_scale) is not None
    one_of("cache.layout", cache.layout, ("NHD", "HND"))
    if not isinstance(pages, Tensor):
        raise InvalidInputError(f"{name}: got {type(pages).__name__}, want a tensor of {x.dtype} as for {like}")
    if scaled and pages.dtype == x.dtype:
        raise InvalidInputError(f"{like}_scale: got scales for a cache of {pages.dtype}, want None")
    if pages.dtype != x.dtype and not (scaled and pages.dtype in EIGHT_BITS):
        same = f"{x.dtype} as for {like}"
        if pages.dtype in EIGHT_BITS:
            raise UnsupportedError(f"{name}: got {pages.dtype} without {like}_scale, want {like}_scale, or {same}")
        if pages.dtype.itemsize == 1:
            names = " or ".join(map(str, EIGHT_BITS))
            raise UnsupportedError(f"{name}: got {pages.dtype}, want {names} with {like}_scale, or {same}")
        raise InvalidInputError(f"{name}: got {pages.dtype}, want {same}")
    if pages.device != x.device:
        raise InvalidInputError(f"{name}: got a tensor on {pages.device}, want {x.device} as for {like}")
    return as_pages(name, pages, cache.layout, *x.shape[2:])


def as_pages(name: str, cache: Tensor, layout: CacheLayout, heads: int | str, head_dim: int) -> Tensor:
    """View a cache of any dtype as (blocks, block_size, heads, head_dim); a str allows any number of heads."""
    pages = cache.unsqueeze(1) if cache.dim() == 3 else cache.transpose(1, 2) if layout == "HND" else cache
    ends = (heads if isinstance(heads, int) else pages.shape[-2], head_dim) if pages.dim() == 4 else ()
    if pages.dim() != 4 or not pages.shape[1] or pages.shape[2:] != ends:
        inner = f"block_size, {heads}, {head_dim}" if layout == "NHD" else f"{heads}, block_size, {head_dim}"
        want = f"(blocks, {inner}) or (slots, {heads}, {head_dim})"
        raise InvalidInputError(f"{name}: got shape {tuple(cache.shape)}, want {want} in layout {layout}")
    check_inference({name: cache})  # check this first: forward-mode tensors have no memory from which to read slots
    if _capacity(pages) > INT32_MAX:
        raise LimitExceededError(f"{name}: got {_capacity(pages)} slots, want <= {INT32_MAX}")
    return pages


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
    name, tokens, _ = names
    if not isinstance(slots, Tensor) or slots.dtype not in (torch.int32, torch.int64):
        got = slots.dtype if isinstance(slots, Tensor) else type(slots).__name__
        raise InvalidInputError(f"{name}: got {got}, want a tensor of int32 or int64")
    if slots.device != pages.device:
        raise InvalidInputError(f"{name}: got a tensor on {slots.device}, want {pages.device} as for {tokens}")
    if not (slots.shape == (batch, seq) or (slots.dim() == 1 and slots.shape[0] <= batch * seq)):
        raise InvalidInputError(
            f"{name}: got shape {tuple(slots.shape)}, want at most ({batch * seq},), the token count of {tokens}"
        )
    row = slots.reshape(-1).contiguous()
    on_host = row.device.type == "cpu" and not torch.compiler.is_compiling()
    if validate or on_host:
        check_slots(row.cpu().numpy(), _capacity(pages), names)
    return row


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
    if not slots.shape[0]:
        return
    kept = (slots >= 0) & (slots < capacity)  # unlike a kernel, indexing with a mask waits for the device
    places = slots[kept] // size, slots[kept] % size
    for cache, x in zip(caches, tensors, strict=True):
        as_bits(cache)[places] = as_bits(x).flatten(0, 1)[: slots.shape[0]][kept]


def read(cache: Tensor, slots: Tensor) -> Tensor:
    """Return the contents of slots as a new tensor (n, heads, head_dim); for an invalid slot, those of another slot.

    Args:
        cache: (blocks, block_size, heads, …) with at least one slot and any strides.
        slots: (n,) slots.
    """
    slots = slots.clamp(0, _capacity(cache) - 1)
    return as_bits(cache)[slots // cache.shape[1], slots % cache.shape[1]].view(cache.dtype)


def as_bits(x: Tensor) -> Tensor:
    """View an 8-bit tensor as uint8, since torch cannot index 8-bit floats on every device; return others unchanged."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _capacity(pages: Tensor) -> int:
    return pages.shape[0] * pages.shape[1]


QUERY = torch.float8_e4m3fn
"""Dtype of 8-bit q."""

LEAST_SCALE = 2.0**-100
"""Smallest computed scale: heads of zeros need a positive scale, and quotients by it must stay normal numbers."""


class Scales(NamedTuple):
    """Scales of 8-bit q, k and v, in the argument order of the operators.

    Args:
        k: (heads,) float32 divisors of k; None if k is not stored in 8 bits or its scales are computed.
        v: the same for v.
        k_computed: (blocks, block_size, heads) float32 output for the scale of each stored key, or None.
        v_computed: the same for v.
        q_computed: (batch, seq, heads) float32 output for the scale of each query; None if q keeps its dtype.
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
        """Names of the computed scales in ``Cache``."""
        computed = zip(("k_scale", "v_scale", "q_scale"), self[2:], strict=True)
        return [name for name, scale in computed if scale is not None]


NO_SCALES = Scales(None, None, None, None, None)
"""The scales if nothing is stored in 8 bits."""


class Stored(NamedTuple):
    """Arguments of a store operation other than q and k, in the argument order of the operators.

    Args:
        v: (batch, seq, heads, head_dim), with as many heads as k.
        key_cache: (blocks, block_size, heads, head_dim), with any strides.
        value_cache: the same, with the head_dim of v.
        slots: (n,) slots of the first n tokens.
        return_k: whether the rotated k is also returned.
        scales: scales of 8-bit tensors.
    """

    v: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slots: Tensor
    return_k: bool
    scales: Scales

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        """Key cache and value cache."""
        return self.key_cache, self.value_cache

    def arguments(self) -> tuple[Any, ...]:
        """Return the fields as the operators expect them, with the scales unpacked."""
        return *self[:-1], *self.scales


def quantised(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide heads by their scales and round to the nearest 8-bit number, ties to even.

    Values beyond the largest number saturate, as in vLLM's caches; NaN stays NaN.

    Args:
        x: (…, heads, head_dim).
        scale: (…, heads) float32.
        dtype: an 8-bit dtype.
    """
    largest = torch.finfo(dtype).max
    return (x.to(torch.float32) / scale.unsqueeze(-1)).clamp_(-largest, largest).to(dtype)


def computed_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute (…, heads) scales that map the largest magnitude of each head to the largest number of a dtype."""
    return (_largest(x) / torch.finfo(dtype).max).clamp_(min=LEAST_SCALE)


def scale_growth(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the (…, heads) factors >= 1 by which scales must grow so that the heads, divided by them, fit a dtype."""
    return (_largest(x) / torch.finfo(dtype).max).clamp_(min=1.0)


def _largest(x: Tensor) -> Tensor:
    if not x.shape[-1]:
        return x.new_zeros(x.shape[:-1])
    return x.abs().nan_to_num_(nan=0.0, posinf=torch.inf).amax(-1)


def scale_of_cache(
    name: str, scale: Tensor | None, cache: Tensor, pages: Tensor, layout: CacheLayout, validate: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Check the scales of an 8-bit cache; values are checked only on the host or with ``validate``.

    Args:
        name: name of the scales in error messages.
        scale: input scales (), (1,) or (heads,), or output scales with the cache's shape without head_dim; None for
            other dtypes.
        cache: the cache as the caller passed it.
        pages: the cache as (blocks, block_size, heads, head_dim).
        layout: layout of the cache.
        validate: whether to check values on a device too, which waits for the device.

    Returns:
        (heads,) input scales or None, and (blocks, block_size, heads) output scales or None.
    """
    if scale is None:
        return None, None
    _check_float32(name, scale)
    if scale.device != pages.device:
        raise InvalidInputError(f"{name}: got a tensor on {scale.device}, want {pages.device} as for the cache")
    heads = pages.shape[2]
    if scale.shape in ((), (1,), (heads,)):
        if validate or (scale.device.type == "cpu" and not torch.compiler.is_compiling()):
            _check_values(name, scale)
        return scale.expand(heads), None
    if scale.shape != cache.shape[:-1]:
        raise InvalidInputError(
            f"{name}: got shape {tuple(scale.shape)}, want () or (1,), ({heads},) with one scale per head, or "
            f"{tuple(cache.shape[:-1])} for output scales per slot and head"
        )
    return None, scale.unsqueeze(1) if scale.dim() == 2 else scale.transpose(1, 2) if layout == "HND" else scale


def scale_of_queries(scale: Tensor, q: Tensor) -> Tensor:
    """Check the output tensor for the scales of queries: float32 with the shape of q without head_dim."""
    _check_float32("q_scale", scale)
    if scale.device != q.device or scale.shape != q.shape[:-1]:
        raise InvalidInputError(
            f"q_scale: got shape {tuple(scale.shape)} on {scale.device}, "
            f"want {tuple(q.shape[:-1])} on {q.device}, the shape of q without head_dim"
        )
    return scale


def _check_float32(name: str, scale: Tensor) -> None:
    """Check that scales are a float32 tensor without gradients."""
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
        got = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
        raise InvalidInputError(f"{name}: got {got}, want a tensor of float32")
    check_inference({name: scale})


def _check_values(name: str, scale: Tensor) -> None:
    values = scale.reshape(-1).tolist()
    for i, value in enumerate(values):
        if not 0 < value < float("inf"):
            index = f"[{i}]" if scale.dim() else ""
            raise InvalidInputError(f"{name}{index}: got {value}, want a finite number > 0")
