"""Liger's norm and then its rotation, which writes into what the norm made; it needs a GPU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mmpos_bench.layers import Layer, Pair
from mmpos_bench.peers.liger_rotation import rotate_

from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # isort: skip  (the line above says what is missing)

__all__ = ["norm_rotate"]


def norm_rotate(layer: Layer, weights: Pair, eps: float) -> Callable[[Tensor, Tensor], Pair]:
    """In two launches for norms and one for the rotation."""
    turn = rotate_(layer)

    def call(q: Tensor, k: Tensor) -> Pair:
        q, k = (
            LigerRMSNormFunction.apply(x, w, eps, 0.0, "gemma", False) for x, w in zip((q, k), weights, strict=True)
        )
        return turn(q, k)

    return call
