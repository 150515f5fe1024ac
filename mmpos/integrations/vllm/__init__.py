"""Positions for vLLM: ids of a request from its multimodal features, and models with matching weights and caches.

Only ``plugin.register``, which vLLM calls, and ``models``, which it loads afterwards, import vLLM.
"""

from mmpos.integrations.vllm.requests import check_apart, mrope_input_positions, request_segments
from mmpos.integrations.vllm.settings import ServedModel

__all__ = ["ServedModel", "check_apart", "mrope_input_positions", "request_segments"]
