"""flashinfer's kernel, given a cache of cos and sin in float32 with a row for every token; it needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmpos_bench.layers import Layer, Pair

if not torch.cuda.is_available():
    raise ImportError("its kernel needs a GPU")  # before seconds are spent on what follows

from flashinfer.rope import apply_rope_with_cos_sin_cache, apply_rope_with_cos_sin_cache_inplace

__all__ = ["rotate", "rotate_"]


def rotate(layer: Layer) -> Callable[[Tensor, Tensor], Pair] | None:
    """Into new tensors; None for a dtype that it does not take."""
    if layer.dtype == torch.float32:
        return None
    arguments = _arguments(layer)

    def call(q: Tensor, k: Tensor) -> Pair:
        found: Any = apply_rope_with_cos_sin_cache(query=_flat(q), key=_flat(k), **arguments)
        return found[0].view_as(q), found[1].view_as(k)

    return call


def rotate_(layer: Layer) -> Callable[[Tensor, Tensor], Pair] | None:
    """In place; None for a dtype that it does not take."""
    if layer.dtype == torch.float32:
        return None
    arguments = _arguments(layer)

    def call(q: Tensor, k: Tensor) -> Pair:
        apply_rope_with_cos_sin_cache_inplace(query=_flat(q), key=_flat(k), **arguments)
        return q, k

    return call


def _arguments(layer: Layer) -> dict[str, Any]:
    cache = torch.cat((layer.angles.cos(), layer.angles.sin()), dim=-1).float()
    rows = torch.arange(layer.tokens, device=layer.device)
    return {"positions": rows, "head_size": layer.shape.head_dim, "cos_sin_cache": cache, "is_neox": True}


def _flat(x: Tensor) -> Tensor:
    """(tokens, heads · head_dim), the same memory."""
    return x.view(x.shape[1], -1)
