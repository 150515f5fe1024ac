"""The formula that models run layer by layer, given cos and sin: four passes over q, and four over k."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmpos_bench.layers import Layer, Pair

__all__ = ["formula", "rotate"]


def formula(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """q and k (batch, seq, heads, head_dim) turned by cos and sin (batch, seq, head_dim)."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    half = q.shape[-1] // 2
    turned_q = torch.cat((-q[..., half:], q[..., :half]), dim=-1)
    turned_k = torch.cat((-k[..., half:], k[..., :half]), dim=-1)
    return q * cos + turned_q * sin, k * cos + turned_k * sin


def rotate(layer: Layer) -> Callable[[Tensor, Tensor], Pair]:
    """By the formula as it stands."""
    cos, sin = layer.tables
    return lambda q, k: formula(q, k, cos, sin)
