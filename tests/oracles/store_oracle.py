"""The oracle of stores: the cache layouts of all engines, and loops over tokens that write the expected values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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


@contextmanager
def poisoned() -> Iterator[None]:
    """Have torch fill all new memory with NaN, so that elements that are never written show up."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


Make = Callable[[int, int, int, int, torch.dtype], Held]


def _made(layout: str, shapes: Callable[..., Sequence[Sequence[int]]], views: Callable[..., Sequence[Tensor]]) -> Make:
    def make(blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype) -> Held:
        whole = [filled(*shape, dtype=dtype) for shape in shapes(blocks, size, heads, dim)]
        key, value = views(*whole)
        return Held(key, value, whole, layout, size if key.dim() == 4 else 1)

    return make


def _apart(key: Tensor, value: Tensor) -> Sequence[Tensor]:
    return key, value


CACHES: Mapping[str, Make] = {
    "NHD": _made("NHD", lambda b, s, h, d: [(b, s, h, d)] * 2, _apart),
    "HND": _made("HND", lambda b, s, h, d: [(b, h, s, d)] * 2, _apart),
    # vLLM before 0.33
    "k and v stacked": _made("NHD", lambda b, s, h, d: [(2, b, s, h, d)], lambda x: (x[0], x[1])),
    # FlashInfer
    "k and v by page": _made("NHD", lambda b, s, h, d: [(b, 2, s, h, d)], lambda x: (x[:, 0], x[:, 1])),
    "k and v by page, HND": _made("HND", lambda b, s, h, d: [(b, 2, h, s, d)], lambda x: (x[:, 0], x[:, 1])),
    # vLLM 0.33, and for transfers
    "k and v side by side": _made(
        "NHD", lambda b, s, h, d: [(b, h, s, 2 * d)], lambda x: x.transpose(1, 2).chunk(2, -1)
    ),
    "all layers in a block": _made("HND", lambda b, s, h, d: [(b, 3, h, s, 2 * d)], lambda x: x[:, 1].chunk(2, -1)),
    # SGLang
    "a pool of slots": _made("NHD", lambda b, s, h, d: [(b * s, h, d)] * 2, _apart),
}
"""Caches by the functions that give the shapes of their tensors, and the views of k and v."""


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
