"""The rotation in plain torch: the judge of the kernel and of the extension, and what does all that they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 18
"""Channels rotated at a time: the float32 copies of a block stay in a core's cache."""

Block: TypeAlias = tuple[slice, slice]
"""Where a block lies in batch and seq."""

Turn: TypeAlias = Callable[[Tensor, Tensor, Block], None]
"""Turns float32 heads of a block in place, given room of the same shape; channels behind the pairs are left alone."""


def rotate(tensors: Sequence[tuple[Tensor, Tensor]], cos: Tensor, sin: Tensor, *, adjacent: bool) -> None:
    """Rotate the first 2·pairs channels of each tensor into another, and copy the rest.

    Arithmetic is in float32 with one rounding at the end; products and sums are rounded one by one,
    as the kernel does it, so both give the same bits.

    Args:
        tensors: pairs (x, out) of (batch, seq, heads, head_dim) in any floating dtype and strides; out may be x.
        cos: (batch, seq, pairs) float32.
        sin: likewise.
        adjacent: whether pair j is channels (2j, 2j + 1) instead of (j, j + pairs).
    """
    turn = turning(cos, sin, adjacent)
    for x, out in tensors:
        rotate_by(turn, x, out, 2 * cos.shape[-1])


def turning(cos: Tensor, sin: Tensor, adjacent: bool) -> Turn:
    """What turns blocks by these cos and sin, (batch, seq, pairs) float32."""
    spread = _interleave if adjacent else _concatenate
    cos, sin = spread(cos, cos).unsqueeze(2), spread(-sin, sin).unsqueeze(2)

    def turn(value: Tensor, scratch: Tensor, block: Block) -> None:
        value, scratch = value[..., : cos.shape[-1]], scratch[..., : cos.shape[-1]]
        _swap_halves(value, scratch, adjacent)
        value.mul_(cos[block]).add_(scratch.mul_(sin[block]))

    return turn


def rotate_by(turn: Turn, x: Tensor, out: Tensor, width: int) -> None:
    """Turn the first channels of a tensor, and copy the rest."""
    if out.data_ptr() != x.data_ptr() and x.shape[-1] > width:
        out[..., width:].copy_(x[..., width:])
    for block, (value, scratch) in blocks(x[..., :width], 2):
        value.copy_(x[block][..., :width])
        turn(value, scratch, block)
        out[block][..., :width].copy_(value)


def blocks(x: Tensor, buffers: int) -> Iterator[tuple[Block, list[Tensor]]]:
    """Cut batch and seq so that a block has about BLOCK_ELEMENTS channels, with float32 buffers of its shape."""
    batch, seq, heads, head_dim = x.shape
    tokens = max(1, BLOCK_ELEMENTS // max(1, heads * head_dim))
    rows = max(1, tokens // max(1, seq))
    held: list[Tensor] = []
    for b in range(0, batch, rows):
        for s in range(0, seq, tokens):
            block = slice(b, b + rows), slice(s, s + tokens)
            shape = x[block].shape
            if not held or held[0].shape != shape:
                held = [torch.empty(shape, dtype=torch.float32, device=x.device) for _ in range(buffers)]
            yield block, held


def _swap_halves(value: Tensor, turned: Tensor, adjacent: bool) -> None:
    half = value.shape[-1] // 2
    if adjacent:
        turned[..., 0::2].copy_(value[..., 1::2])
        turned[..., 1::2].copy_(value[..., 0::2])
    else:
        turned[..., :half].copy_(value[..., half:])
        turned[..., half:].copy_(value[..., :half])


def _interleave(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack((first, second), dim=-1).flatten(-2)


def _concatenate(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat((first, second), dim=-1)
