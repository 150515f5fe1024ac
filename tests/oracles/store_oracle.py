"""The oracle of stores: the cache layouts of all engines, and loops over tokens that write the expected values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmpos.rotary import Cache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""The device of caches; without a GPU, kernels run in Triton's interpreter."""

FILL = {torch.float32: 0x7FA1B2C3, torch.bfloat16: 0x7FA1, torch.float16: 0x7DA1}
"""By dtype, the bits in every untouched cell: a NaN that no computation returns."""

INTEGERS = {2: torch.int16, 4: torch.int32}
"""Integer dtypes by itemsize."""


class Held(NamedTuple):
    """Caches as an engine holds them: views of k and v, the tensors behind the views, and their layout."""

    key: Tensor
    value: Tensor
    whole: Sequence[Tensor]
    layout: str
    block_size: int

    def with_slots(self, slots: Tensor) -> Cache:
        """Build the Cache argument of a call."""
        layout: Any = self.layout
        return Cache(self.key, self.value, slots, layout)

    def at(self, view: Tensor, slot: int) -> Tensor:
        """Return the (heads, head_dim) values in a slot."""
        if view.dim() == 3:
            return view[slot]
        block, offset = divmod(slot, self.block_size)
        return view[block, offset] if self.layout == "NHD" else view[block, :, offset]


def filled(*shape: int, dtype: torch.dtype) -> Tensor:
    """Allocate a tensor of untouched cells."""
    return torch.full(shape, FILL[dtype], dtype=INTEGERS[dtype.itemsize], device=DEVICE).view(dtype)


Make = Callable[[int, int, int, int, torch.dtype], Held]


def _apart(blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype) -> Held:
    key, value = (filled(blocks, size, heads, dim, dtype=dtype) for _ in range(2))
    return Held(key, value, (key, value), "NHD", size)


def _apart_by_head(blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype) -> Held:
    key, value = (filled(blocks, heads, size, dim, dtype=dtype) for _ in range(2))
    return Held(key, value, (key, value), "HND", size)


def _stacked(blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype) -> Held:
    both = filled(2, blocks, size, heads, dim, dtype=dtype)
    return Held(both[0], both[1], (both,), "NHD", size)


def _by_page(blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype) -> Held:
    both = filled(blocks, 2, size, heads, dim, dtype=dtype)
    return Held(both[:, 0], both[:, 1], (both,), "NHD", size)


def _by_page_and_head(blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype) -> Held:
    both = filled(blocks, 2, heads, size, dim, dtype=dtype)
    return Held(both[:, 0], both[:, 1], (both,), "HND", size)


def _side_by_side(blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype) -> Held:
    both = filled(blocks, heads, size, 2 * dim, dtype=dtype)
    key, value = both.transpose(1, 2).split(dim, dim=-1)
    return Held(key, value, (both,), "NHD", size)


def _all_layers(blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype) -> Held:
    every = filled(blocks, 3, heads, size, 2 * dim, dtype=dtype)
    key, value = every[:, 1].split(dim, dim=-1)
    return Held(key, value, (every,), "HND", size)


def _pool(blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype) -> Held:
    key, value = (filled(blocks * size, heads, dim, dtype=dtype) for _ in range(2))
    return Held(key, value, (key, value), "NHD", 1)


CACHES: Mapping[str, Make] = {
    "NHD": _apart,
    "HND": _apart_by_head,
    "k and v stacked": _stacked,  # vLLM before 0.33
    "k and v by page": _by_page,  # FlashInfer NHD
    "k and v by page, HND": _by_page_and_head,  # FlashInfer HND
    "k and v side by side": _side_by_side,  # vLLM 0.33
    "all layers in a block": _all_layers,  # vLLM 0.33 for transfers
    "a pool of slots": _pool,  # SGLang
}


def write(cache: Held, k: Tensor, v: Tensor, slots: Sequence[int]) -> None:
    """Write (tokens, heads, head_dim) k and v to their slots, token by token."""
    for token, slot in enumerate(slots):
        if slot >= 0:
            cache.at(cache.key, slot).copy_(k[token])
            cache.at(cache.value, slot).copy_(v[token])


def bits(x: Tensor) -> Tensor:
    """Return the bits of every element."""
    return x.detach().contiguous().view(INTEGERS[x.dtype.itemsize]).cpu()


def assert_same_bits(got: Tensor | None, want: Tensor | None, ulps: int = 0) -> None:
    """Assert equal bits, or a distance of at most ``ulps`` units in the last place."""
    assert got is not None
    assert want is not None
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    distance = (bits(got).long() - bits(want).long()).abs()
    assert int(distance.max() if distance.numel() else 0) <= ulps


def assert_holds(got: Held, want: Held, ulps: int = 0) -> None:
    """Assert that every cell of the tensors behind the caches, including untouched cells, is as expected."""
    for a, b in zip(got.whole, want.whole, strict=True):
        assert_same_bits(a, b, ulps)


def flat(x: Any, layout: str | None) -> Tensor:
    """Reshape any layout to (tokens, heads, head_dim)."""
    x = x.transpose(1, 2) if layout == "bhsd" else x
    return x.reshape(-1, *x.shape[-2:])
