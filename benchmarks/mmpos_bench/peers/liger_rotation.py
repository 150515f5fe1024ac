"""Liger's kernel, given cos and sin; it writes into the q and k that it is given, and needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmpos_bench.layers import Layer, Pair

if not torch.cuda.is_available():
    raise ImportError("its kernel needs a GPU")  # before seconds are spent on what follows

from liger_kernel.ops.rope import LigerRopeFunction

__all__ = ["rotate", "rotate_"]


def rotate_(layer: Layer) -> Callable[[Tensor, Tensor], Pair]:
    """In place; it takes heads before tokens, in memory that has tokens first."""
    cos, sin = layer.tables

    def call(q: Tensor, k: Tensor) -> Pair:
        found: Any = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return found[0].transpose(1, 2), found[1].transpose(1, 2)

    return call


rotate = rotate_
"""Into new tensors it cannot: what training calls is the same function, which spoils its arguments."""
