"""Rotations of q and k by multimodal positions: exact phases, one fused kernel, forward and backward.

Shapes used throughout:
    q              (tokens, num_heads, head_dim) "thd", (batch, seq, num_heads, head_dim) "bshd",
                   or (batch, num_heads, seq, head_dim) "bhsd"; k likewise with num_kv_heads
    inv_freq       (pairs,) rad per position; pairs = rotary_dim / 2
    cos, sin       (tokens, pairs) or (batch, seq, pairs) float32
"""

from typing import TYPE_CHECKING

from mmpos.rotary.config import Rotary
from mmpos.rotary.scaling import NTK, DynamicNTK, Linear, Llama3, LongRoPE, PRoPE, Scaling, YaRN
from mmpos.support.extras import lazy_names

if TYPE_CHECKING:
    from mmpos.rotary.apply import apply_rotary
    from mmpos.rotary.device import DevicePositions
    from mmpos.rotary.embedding import RotaryEmbedding
    from mmpos.rotary.storing import rotate_and_store

__all__ = [
    "NTK",
    "DevicePositions",
    "DynamicNTK",
    "Linear",
    "Llama3",
    "LongRoPE",
    "PRoPE",
    "Rotary",
    "RotaryEmbedding",
    "Scaling",
    "YaRN",
    "apply_rotary",
    "rotate_and_store",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        "mmpos.rotary",
        {
            "DevicePositions": "device",
            "RotaryEmbedding": "embedding",
            "apply_rotary": "apply",
            "rotate_and_store": "storing",
        },
        extra="all",
        what="rotations",
    )
