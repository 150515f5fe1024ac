"""Rotate q and k by multimodal positions, with exact phases and one fused kernel each for forward and backward.

Shapes used throughout:

    q              (tokens, num_heads, head_dim) "thd", (batch, seq, num_heads, head_dim) "bshd",
                   or (batch, num_heads, seq, head_dim) "bhsd"; k has the same layout with num_kv_heads
    inv_freq       (pairs,) radians per position; pairs = rotary_dim / 2
    cos, sin       (tokens, pairs) or (batch, seq, pairs) float32
"""

from typing import TYPE_CHECKING

from mmpos.rotary.config import Rotary
from mmpos.rotary.scaling import NTK, DynamicNTK, Linear, Linspace, Llama3, LongRoPE, PRoPE, Scaling, YaRN
from mmpos.support.extras import lazy_names

if TYPE_CHECKING:
    from mmpos.rotary.apply import QKV, angles, apply_rotary, cos_sin, rerotate, rotate_and_store, split_qkv
    from mmpos.rotary.device import DevicePositions
    from mmpos.rotary.paged import Cache
    from mmpos.rotary.reference import Norm

__all__ = [
    "NTK",
    "QKV",
    "Cache",
    "DevicePositions",
    "DynamicNTK",
    "Linear",
    "Linspace",
    "Llama3",
    "LongRoPE",
    "Norm",
    "PRoPE",
    "Rotary",
    "Scaling",
    "YaRN",
    "angles",
    "apply_rotary",
    "cos_sin",
    "rerotate",
    "rotate_and_store",
    "split_qkv",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        "mmpos.rotary",
        {
            "Cache": "paged",
            "DevicePositions": "device",
            "Norm": "reference",
            "QKV": "apply",
            "angles": "apply",
            "apply_rotary": "apply",
            "cos_sin": "apply",
            "rerotate": "apply",
            "rotate_and_store": "apply",
            "split_qkv": "apply",
        },
        extra="all",
        what="rotations",
    )
