"""The functions of Transformers' Qwen2-VL, given cos and sin: of its language model, and of its vision encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb, apply_rotary_pos_emb_vision

from mmpos_bench.layers import Layer, Pair

__all__ = ["rotate"]


def rotate(layer: Layer) -> Callable[[Tensor, Tensor], Pair]:
    """By the function for such a layer; that of the encoder has no batch and computes in float32."""
    cos, sin = layer.tables
    if layer.shape.allocation != "axial":
        return lambda q, k: apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)

    def encoder(q: Tensor, k: Tensor) -> Pair:
        found: Any = apply_rotary_pos_emb_vision(q[0], k[0], cos[0], sin[0])
        return found[0][None], found[1][None]

    return encoder
