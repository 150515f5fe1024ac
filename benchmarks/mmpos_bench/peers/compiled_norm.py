"""torch's norm and the formula of models, compiled together by torch.compile; it must be able to compile here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from mmpos_bench.layers import Layer, Pair
from mmpos_bench.peers.eager_rotation import formula

__all__ = ["norm_rotate"]

# Without a compiler on the machine this fails, and the peer is missing.
torch.compile(torch.neg)(torch.zeros(1))


def norm_rotate(layer: Layer, weights: Pair, eps: float) -> Callable[[Tensor, Tensor], Pair]:
    """By a function compiled for this shape alone."""
    torch.compiler.reset()
    cos, sin = layer.tables

    def both(q: Tensor, k: Tensor) -> Pair:
        q, k = (rms_norm(x, x.shape[-1:], w, eps) for x, w in zip((q, k), weights, strict=True))
        return formula(q, k, cos, sin)

    return torch.compile(both, dynamic=False)
