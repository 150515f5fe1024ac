"""flash-attention's kernel, given half of cos and sin; a launch for q and one for k; it needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmpos_bench.layers import Layer, Pair

if not torch.cuda.is_available():
    raise ImportError("its kernel needs a GPU")  # before seconds are spent on what follows

from flash_attn.layers.rotary import apply_rotary_emb

__all__ = ["rotate", "rotate_"]


def rotate(layer: Layer, *, inplace: bool = False) -> Callable[[Tensor, Tensor], Pair]:
    """Into new tensors."""
    half = layer.shape.head_dim // 2
    cos, sin = (table[0, :, :half].contiguous() for table in layer.tables)
    turn: Any = partial(apply_rotary_emb, cos=cos, sin=sin, inplace=inplace)
    return lambda q, k: (turn(q), turn(k))


rotate_ = partial(rotate, inplace=True)
"""In place."""
