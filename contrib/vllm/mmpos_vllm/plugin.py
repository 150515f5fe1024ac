"""The entry point of the vLLM plugin: architectures by name, imported when a checkpoint uses one of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["ARCHITECTURES", "register"]

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "MMPosQwen2VLForConditionalGeneration": "mmpos_vllm.models:PlacedQwen2VL",
        "MMPosQwen2_5_VLForConditionalGeneration": "mmpos_vllm.models:PlacedQwen25VL",
        "MMPosQwen3VLForConditionalGeneration": "mmpos_vllm.models:PlacedQwen3VL",
    }
)
"""Module and class of each architecture."""


def register() -> None:
    """Register the architectures with vLLM, which may call this function more than once per process."""
    from vllm import ModelRegistry

    for architecture, path in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, path)
