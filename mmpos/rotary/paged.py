"""Paged caches of k and v: view every layout as one, check it, and write to slots in plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.support.checks import INT32_MAX

__all__ = ["EIGHT_BITS", "CacheLayout", "SlotNames", "as_pages", "in_bytes", "pages_of", "read", "slots_of", "write"]

CacheLayout = Literal["NHD", "HND"]

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes of 8 bits that a cache may have."""


def pages_of(name: str, cache: Tensor, layout: CacheLayout, like: tuple[str, Tensor], scaled: bool = False) -> Tensor:
    """View a cache as (blocks, block_size, heads, head_dim), whatever its layout and strides.

    Args:
        name: of the cache, for messages.
        cache: (blocks, block_size, heads, head_dim) "NHD", (blocks, heads, block_size, head_dim) "HND", or
            (slots, heads, head_dim), which is a block size of 1 in both.
        layout: of a cache of four dimensions.
        like: what is written into it, (batch, seq, heads, head_dim), and its name, k or v.
        scaled: whether scales came with it.
    """
    other, x = like
    if not isinstance(cache, Tensor):
        raise InvalidInputError(f"{name}: got {type(cache).__name__}, want a tensor of {x.dtype} as {other}")
    if scaled and cache.dtype == x.dtype:
        raise InvalidInputError(f"{other}_scale: got scales for a cache of {cache.dtype}, want None")
    if cache.dtype != x.dtype and not (scaled and cache.dtype in EIGHT_BITS):
        plainly = f"{x.dtype} as {other}"
        if cache.dtype in EIGHT_BITS:
            raise UnsupportedError(
                f"{name}: got {cache.dtype}, which needs scales, want {other}_scale beside it, or {plainly}"
            )
        if cache.dtype.itemsize == 1:
            names = " or ".join(map(str, EIGHT_BITS))
            raise UnsupportedError(f"{name}: got {cache.dtype}, want {names} with {other}_scale, or {plainly}")
        raise InvalidInputError(f"{name}: got {cache.dtype}, want {plainly}")
    if cache.device != x.device:
        raise InvalidInputError(f"{name}: got a tensor on {cache.device}, want {x.device} as {other}")
    return as_pages(name, cache, layout, *x.shape[2:])


def as_pages(name: str, cache: Tensor, layout: CacheLayout, heads: int | str, head_dim: int) -> Tensor:
    """View a cache as ``pages_of`` does, of any dtype and device; heads may be a word, for any number of them."""
    pages = cache.unsqueeze(1) if cache.dim() == 3 else cache.transpose(1, 2) if layout == "HND" else cache
    ends = (heads if isinstance(heads, int) else pages.shape[-2], head_dim) if pages.dim() == 4 else ()
    if pages.dim() != 4 or not pages.shape[1] or pages.shape[2:] != ends:
        inner = f"block_size, {heads}, {head_dim}" if layout == "NHD" else f"{heads}, block_size, {head_dim}"
        want = f"(blocks, {inner}) or (slots, {heads}, {head_dim})"
        raise InvalidInputError(f"{name}: got shape {tuple(cache.shape)}, want {want} in layout {layout}")
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
    """Check slots and return them as one row; their values are read only on a host, or with validate.

    Args:
        slots: (batch, seq), or at most batch · seq in one dimension; int32 or int64.
        batch: rows of tokens.
        seq: tokens in each.
        pages: the cache, as of ``pages_of``.
        validate: whether to wait for a device.
        names: of arguments, for messages.
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
        _check_slots(row.cpu().numpy(), _capacity(pages), names)
    return row


def _check_slots(row: npt.NDArray[np.int32 | np.int64], capacity: int, names: SlotNames) -> None:
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


def in_bytes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """View tensors of several dtypes as bytes, so that their memory can be compared; a traced graph has none yet."""
    if torch.compiler.is_compiling() or len({x.dtype.itemsize for x in tensors.values()}) <= 1:
        return dict(tensors)
    return {name: _bytes_of(x) for name, x in tensors.items()}


def _bytes_of(x: Tensor) -> Tensor:
    size = x.dtype.itemsize
    shape, stride = (*x.shape, size), (*(step * size for step in x.stride()), 1)
    empty = torch.empty(0, dtype=torch.uint8, device=x.device)
    return empty.set_(x.untyped_storage(), x.storage_offset() * size, shape, stride)


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
    caches, tensors = [_movable(x) for x in caches], [_movable(x) for x in tensors]
    rows = [x.flatten(0, 1)[: slots.shape[0]] for x in tensors]
    if slots.device.type != "cpu":
        _write_waiting_for_nothing(caches, rows, slots)
        return
    low, high = slots.aminmax()
    if low < 0 or high >= capacity:
        kept = (slots >= 0) & (slots < capacity)
        rows, slots = [x[kept] for x in rows], slots[kept]
    places = slots // size, slots % size
    for cache, x in zip(caches, rows, strict=True):
        cache[places] = x


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


def _write_waiting_for_nothing(caches: Sequence[Tensor], rows: Sequence[Tensor], slots: Tensor) -> None:
    """Write without a count of the tokens that are kept: a token that is skipped repeats one that is not."""
    if not _capacity(caches[0]):
        return
    kept = (slots >= 0) & (slots < _capacity(caches[0]))
    token = torch.where(kept, torch.arange(slots.shape[0], device=slots.device), kept.int().argmax())
    slot = slots[token].clamp(0, _capacity(caches[0]) - 1)
    places = slot // caches[0].shape[1], slot % caches[0].shape[1]
    for cache, x in zip(caches, rows, strict=True):
        # Where none is kept, they all write what is there.
        cache[places] = torch.where(kept.any(), x[token], cache[places])


def _capacity(pages: Tensor) -> int:
    return pages.shape[0] * pages.shape[1]
