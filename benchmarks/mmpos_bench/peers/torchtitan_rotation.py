"""torchtitan's rotation of halves, given its cache in float32 for the tokens of the layer alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torchtitan.models.common.rope import CosSinRoPE

from mmpos_bench.layers import Layer, Pair

__all__ = ["rotate"]


def rotate(layer: Layer) -> Callable[[Tensor, Tensor], Pair]:
    """Into new tensors."""
    cos, sin = layer.angles.cos(), layer.angles.sin()
    cache = torch.cat((cos, cos, sin, sin), dim=-1).float()[None, :, None]
    return lambda q, k: CosSinRoPE.apply_rotary_emb(q, k, cache)
