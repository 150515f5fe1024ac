"""What the code of Transformers 5.23 does and no config says: how each model type pairs channels and shares axes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["ADJACENT_MODELS", "AXIAL_MODELS", "INTERLEAVED_MODELS", "OTHER_ROTATIONS", "SECTIONS"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ADJACENT_MODELS = _names("""
    axk1 axk2 bailing_hybrid blt codegen cohere cohere2 cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 ernie4_5
    ernie4_5_moe ernie4_5_vl_moe glm glm4 glm4_moe_lite glm4v glm_moe_dsa glm_ocr gptj helium llama4 longcat_flash
    mistral4 mistral_large4 moonshine moonshine_streaming openai_privacy_filter roformer youtu
""")
"""Model types (without _text) whose language model pairs channels (2j, 2j + 1)."""

AXIAL_MODELS = _names("""
    cohere_compass ernie4_5_vl_moe exaone4_5 glm4v glm4v_moe glm_ocr mlcd paddleocr_vl qwen2_5_omni
    qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe qwen3_vl qwen3_vl_moe video_llama_3
""")
"""Model types (without _vision…) whose vision encoder turns a block of rows, then one of columns, in halves."""

INTERLEAVED_MODELS = _names("cosmos3_edge qwen3_5 qwen3_5_moe qwen3_omni_moe qwen3_vl qwen3_vl_moe")
"""Model types (without _text) whose M-RoPE interleaves, whether or not their config says so."""

SECTIONS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {
        **dict.fromkeys(_names("paddleocr_vl qwen2_5_omni qwen2_5_vl qwen2_vl"), (16, 24, 24)),
        **dict.fromkeys(_names("glm4v glm4v_moe glm_image glm_ocr"), (8, 12, 12)),
        **dict.fromkeys(_names("cosmos3_edge qwen3_omni_moe qwen3_vl qwen3_vl_moe"), (24, 20, 20)),
        **dict.fromkeys(_names("qwen3_5 qwen3_5_moe"), (11, 11, 10)),
        "ernie4_5_vl_moe": (22, 22, 20),
    }
)
"""mrope_section where a config of the model type (without _text) leaves it out."""

OTHER_ROTATIONS: Mapping[str, str] = MappingProxyType(
    {
        "deepseek_v4": "it turns the last channels of a head, not the first",
        "dots3_note": "its layers pair channels in two ways",
        "hunyuan_vl": "it turns the two channels of a pair by different axes",
        "nanochat": "it turns the other way round",
    }
)
"""Model types whose language model rotates in a way that Rotary does not describe, and which."""
