"""The rotation in plain torch: the judge of the kernel and of the extension, and what does all that they do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 18
"""Channels rotated at a time: the float32 copies of a block stay in a core's cache."""


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
    spread = _interleave if adjacent else _concatenate
    cos, sin = spread(cos, cos).unsqueeze(2), spread(-sin, sin).unsqueeze(2)
    for x, out in tensors:
        _rotate(x, out, cos, sin, adjacent)


def _rotate(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, adjacent: bool) -> None:
    """Rotate one tensor by cos and sin of every channel, (batch, seq, 1, 2·pairs)."""
    width = cos.shape[-1]
    if out.data_ptr() != x.data_ptr() and x.shape[-1] > width:
        out[..., width:].copy_(x[..., width:])
    value = turned = result = x.new_empty(0, dtype=torch.float32)
    for batch, seq in _blocks(x):
        source = x[batch, seq, :, :width]
        if value.shape != source.shape:
            value, turned, result = (torch.empty(source.shape, dtype=torch.float32, device=x.device) for _ in range(3))
        value.copy_(source)
        _swap_halves(value, turned, adjacent)
        torch.mul(value, cos[batch, seq], out=result)
        result.add_(turned.mul_(sin[batch, seq]))
        out[batch, seq, :, :width].copy_(result)


def _blocks(x: Tensor) -> Iterator[tuple[slice, slice]]:
    """Cut batch and seq so that a block has about BLOCK_ELEMENTS channels."""
    batch, seq, heads, head_dim = x.shape
    tokens = max(1, BLOCK_ELEMENTS // max(1, heads * head_dim))
    rows = max(1, tokens // max(1, seq))
    for b in range(0, batch, rows):
        for s in range(0, seq, tokens):
            yield slice(b, b + rows), slice(s, s + tokens)


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
