"""The formula of models, compiled by torch.compile, given cos and sin; it must be able to compile here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmpos_bench.layers import Layer, Pair
from mmpos_bench.peers.eager_rotation import formula

__all__ = ["rotate"]

# Without a compiler on the machine this fails, and the peer is missing.
torch.compile(torch.neg)(torch.zeros(1))


def rotate(layer: Layer) -> Callable[[Tensor, Tensor], Pair]:
    """By a function compiled for this shape alone: what was compiled for others would count against a limit."""
    torch.compiler.reset()
    cos, sin = layer.tables
    compiled = torch.compile(formula, dynamic=False)
    return lambda q, k: compiled(q, k, cos, sin)
