"""Positions for vLLM: ids of a request from its multimodal features, and weights and caches for its kernels.

Nothing here imports vLLM but ``plugin.register``, which vLLM calls, and ``models``, which it then asks for.
"""

from mmpos.integrations.vllm.requests import check_apart, mrope_input_positions, request_segments
from mmpos.integrations.vllm.settings import ServedModel

__all__ = ["ServedModel", "check_apart", "mrope_input_positions", "request_segments"]
