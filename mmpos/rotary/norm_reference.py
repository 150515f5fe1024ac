"""Norm and rotation in plain torch, forward and backward: the judge of the kernel, and what runs on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos.rotary.reference import Turn, blocks


def rotate(x: Tensor, out: Tensor, weight: Tensor, eps: float, turn: Turn) -> None:
    """Normalise the heads of x and turn them, in float32 with one rounding at the end.

    Args:
        x: (batch, seq, heads, head_dim) in any floating dtype and strides.
        out: likewise; it may be x.
        weight: (head_dim,) float32, what it is offset by included.
        eps: added to the mean of squares.
        turn: turns blocks.
    """
    for block, (value, scratch) in blocks(x, 2):
        value.copy_(x[block])
        value.mul_(_inverse_rms(value, scratch, eps)).mul_(weight)
        turn(value, scratch, block)
        out[block].copy_(value)


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, back: Turn, x_grad: Tensor | None, weight_grad: Tensor | None
) -> None:
    """Gradients of ``rotate``, in float32.

    With y = turned(x · r · w), r = 1/√(mean(x²) + eps), and g the gradient of y turned back, that of w is the sum of
    g · x · r over tokens and heads, and that of x is r · (g·w − x·r · mean(g·w · x·r)).

    Args:
        grad: of the output, (batch, seq, heads, head_dim).
        x: what was normalised, likewise.
        weight: (head_dim,) float32, what it is offset by included.
        eps: added to the mean of squares.
        back: turns blocks backwards.
        x_grad: where the gradient of x goes; None if nobody wants it.
        weight_grad: (head_dim,) float32 zeros to which that of the weight is added, block after block; likewise.
    """
    for block, (value, gradient, scratch) in blocks(x, 3):
        gradient.copy_(grad[block])
        back(gradient, scratch, block)
        value.copy_(x[block])
        scale = _inverse_rms(value, scratch, eps)
        value.mul_(scale)
        if weight_grad is not None:
            weight_grad.add_(torch.mul(gradient, value, out=scratch).sum((0, 1, 2)))
        if x_grad is not None:
            gradient.mul_(weight)
            mean = torch.mul(gradient, value, out=scratch).mean(-1, keepdim=True)
            x_grad[block].copy_(gradient.sub_(value.mul_(mean)).mul_(scale))


def gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor | None]:
    """The same gradients of x and weight, which can be differentiated.

    Args:
        grad: of the output, turned back, (batch, seq, heads, head_dim) float32.
        x: what was normalised, likewise in any floating dtype.
        weight: (head_dim,); None where x was turned alone.
        eps: added to the mean of squares.
        offset: added to the weight.
    """
    if weight is None:
        return grad.to(x.dtype), None
    value = x.to(torch.float32)
    scale = value.square().mean(-1, keepdim=True).add(eps).rsqrt()
    value = value * scale
    of_weight = (grad * value).sum((0, 1, 2)).to(weight.dtype)
    grad = grad * (weight.to(torch.float32) + offset)
    of_x = scale * (grad - value * (grad * value).mean(-1, keepdim=True))
    return of_x.to(x.dtype), of_weight


def _inverse_rms(value: Tensor, scratch: Tensor, eps: float) -> Tensor:
    """(…, 1) what brings heads to a mean square of 1."""
    return torch.mul(value, value, out=scratch).mean(-1, keepdim=True).add_(eps).rsqrt_()
