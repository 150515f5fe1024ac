"""Contiguous M-RoPE sections for serving engines, and a vLLM plugin that serves models with positions on two axes.

Only ``plugin.register``, which vLLM calls, and ``models``, which it loads afterwards, import vLLM.

Shapes used throughout:

    ids            (3, tokens) int64, one row per section of pairs
    delta          id of a token after the prompt − its index in the request
    cos_sin_cache  (max_position, rotary_dim), cos of all pairs, then sin
"""

from mmpos_vllm.sections import Sections, qk_channels, request_positions, window_positions
from mmpos_vllm.served_model import ServedModel
from mmpos_vllm.weights import install_cache, permute_qk

__all__ = [
    "Sections",
    "ServedModel",
    "install_cache",
    "permute_qk",
    "qk_channels",
    "request_positions",
    "window_positions",
]
