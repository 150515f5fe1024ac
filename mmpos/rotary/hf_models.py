"""Tables of how the code of Transformers 5.23 rotates each model type, where no config says it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = [
    "ADJACENT",
    "ALPHA",
    "ALTERNATING",
    "AXIAL",
    "COLUMNS_FIRST",
    "FACTOR_UNREAD",
    "FIXED_THETA",
    "FULL_HEAD_DIM",
    "HALVES_APART",
    "HEAD_DIM_UNREAD",
    "INTERLEAVED",
    "LAYER_BASES",
    "LAYER_THETA",
    "OLD_NAMES",
    "OTHER_ROTATIONS",
    "OTHER_TYPES",
    "PARTIAL",
    "ROTARY_DIM",
    "SCALED_LAYERS",
    "SECTIONS",
    "TEXT_AT_TOP",
    "UNSCALED",
    "WIDTHS",
    "WITH_FRAMES",
]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ADJACENT = _names("""
    axk1 axk2 bailing_hybrid blt_global_transformer blt_local_decoder blt_local_encoder blt_patcher codegen cohere
    cohere2 cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 ernie4_5 ernie4_5_moe ernie4_5_vl_moe_text glm glm4
    glm4_moe_lite glm4v_text glm_moe_dsa glm_ocr_text gptj helium inkling2_vision llama4_text llama4_vision_model
    longcat_flash mistral4 moonshine moonshine_streaming openai_privacy_filter pe_audio_encoder pe_audio_video_encoder
    pe_video_encoder roformer sam3_vit_model youtu
""")
"""Model types that pair channels (2j, 2j + 1), where no rope_interleave says otherwise; all others are of halves."""

AXIAL = _names("""
    cohere_compass_vision dots3_note_vision_encoder ernie4_5_vl_moe_vision exaone4_5_vision gemma4_vision
    glm4v_moe_vision glm4v_vision glm5_next_vision glm_ocr_vision inkling2_vision kimi_k25_vision lfm3_vl_vision
    llama4_vision_model minimax_m3_vl_vision mlcd_vision_model muse_glimmer_vision muse_spark_vision paddleocr_vl_vision
    qwen2_5_omni_vision_encoder qwen2_5_vl_vision qwen2_vl_vision qwen3_5_moe_vision qwen3_5_vision
    qwen3_omni_moe_vision_encoder qwen3_vl_moe_vision qwen3_vl_vision qwen4_exp_vision sam3_vit_model
    step3p5_vision video_llama_3_vision
""")
"""Vision encoders that turn a block of rows, then one of columns, where the tables below say nothing else."""

ALTERNATING = _names("kimi_k25_vision")
"""Vision encoders that turn by columns and by rows in turn."""

COLUMNS_FIRST = _names("""
    inkling2_vision llama4_vision_model muse_glimmer_vision muse_spark_vision sam3_vit_model step3p5_vision
""")
"""Vision encoders that turn a block of columns, then one of rows."""

HALVES_APART: Mapping[str, int] = MappingProxyType({"gemma4_vision": 12})
"""Vision encoders that turn each half of a head as a head of its own, the first by columns, the second by rows, and how
many kv heads they have if left out."""

WITH_FRAMES = _names("minimax_m3_vl_vision")
"""Vision encoders that turn a block of frames, one of rows, one of columns, and leave what three blocks leave."""

INTERLEAVED = _names("""
    cohere_compass_text cosmos3_edge_text qwen3_5_moe_text qwen3_5_text qwen3_omni_moe_talker_text
    qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text qwen4_exp_text
""")
"""Model types whose M-RoPE interleaves, whether or not their config says so."""

SECTIONS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {
        **dict.fromkeys(
            _names("paddleocr_vl_text qwen2_5_omni_talker qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text"),
            (16, 24, 24),
        ),
        **dict.fromkeys(_names("glm4v_moe_text glm4v_text glm_image_text glm_ocr_text"), (8, 12, 12)),
        **dict.fromkeys(
            _names("""
                cohere_compass_text cosmos3_edge_text qwen3_omni_moe_talker_text qwen3_omni_moe_text
                qwen3_vl_moe_text qwen3_vl_text
            """),
            (24, 20, 20),
        ),
        **dict.fromkeys(_names("qwen3_5_moe_text qwen3_5_text qwen4_exp_text"), (11, 11, 10)),
        "ernie4_5_vl_moe_text": (22, 22, 20),
    }
)
"""mrope_section where a config leaves it out."""

PARTIAL: Mapping[str, float] = MappingProxyType(
    {
        **dict.fromkeys(
            _names("""
                bamba diffusion_gemma_text dots3_note_audio_encoder glm glm4 glm4_moe glm4_moe_lite glm4v_moe_text
                glm4v_text glm_image_text glm_ocr_text glmasr_encoder gpt_neox gpt_neox_japanese laguna mellum
                minimax_m2 minimax_m3_vl_text moonshine moonshine_streaming nemotron
                nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_word_timestamp nemotron3_diarization_audio
                neomme persimmon phi phi3 phi4_multimodal qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text
                recurrent_gemma solar_open stablelm step3p5 zaya
            """),
            1.0,
        ),
        "mimo_v2_flash": 0.334,
    }
)
"""Model types with rope_type "default" that turn partial_rotary_factor of a head, and how much where it is left out.

All others turn all of it, whatever their config says; every other rope_type heeds it.
"""

FACTOR_UNREAD = _names("bamba")
"""Model types whose class overwrites a partial_rotary_factor beside rope_parameters by its own."""

UNSCALED = _names("codegen esm gptj roformer")
"""Model types that read no rope_parameters."""

ROTARY_DIM = _names("codegen gptj minimax_m2")
"""Model types that turn rotary_dim channels where there is no partial_rotary_factor."""

OLD_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        model: {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
        for model in ("gpt_neox", "gpt_neox_japanese")
    }
)
"""Older names of fields beside rope_parameters."""

ALPHA = _names("hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text")
"""Model types whose dynamic scaling is NTK with an alpha, if there is one."""

FIXED_THETA: Mapping[str, float] = MappingProxyType(dict.fromkeys(_names("codegen gptj roformer"), 10000.0))
"""Model types whose base no config can change."""

HEAD_DIM_UNREAD = _names("deepseek_ocr2_text dots3_note_audio_encoder llama4_vision_model unlimited_ocr_text")
"""Model types whose head_dim is hidden_size over num_attention_heads, whatever head_dim says."""

WIDTHS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {"qwen2_vl_vision": ("embed_dim", 1), "zamba2": ("hidden_size", 2)}
)
"""The field, and how many times it, that the heads share where head_dim is left out; for all others hidden_size."""

FULL_HEAD_DIM: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(_names("diffusion_gemma_text embedding_gemma2_text gemma4_text gemma4_unified_text"), 512)
)
"""Model types whose layers of full attention have the head_dim of global_head_dim, and what it is if left out."""

_GEMMA3 = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
_MODERNBERT = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
LAYER_THETA: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gemma3_text": _GEMMA3,
        "gemma3n_text": _GEMMA3,
        "modernbert": _MODERNBERT,
        "modernbert-decoder": _MODERNBERT,
        "neomme": {"full_attention": "rope_theta", "sliding_attention": "rope_theta"},
        "olmo3": {"full_attention": "rope_theta"},
        "t5gemma2_decoder": _GEMMA3,
        "t5gemma2_text": _GEMMA3,
    }
)
"""Fields with the base of each layer type in configs older than one rope_parameters entry per layer type."""

SCALED_LAYERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        **dict.fromkeys(LAYER_THETA, _names("full_attention")),
        **dict.fromkeys(_names("modernbert modernbert-decoder"), _names("full_attention sliding_attention")),
        "neomme": frozenset(),
    }
)
"""Layer types that rope_scaling of those configs is for."""

LAYER_BASES = _names("granite_swa granitemoe_swa")
"""Model types whose layer_rope_theta is the base of each layer, unless it is 0: such a layer does not turn."""

TEXT_AT_TOP = _names("hunyuan_vl paddleocr_vl qwen2_5_vl qwen2_vl")
"""Model types whose first configs have the fields of text_config beside vision_config."""

OTHER_TYPES: Mapping[str, str] = MappingProxyType({"exaone4_5_text": "exaone4", "kimi_k2": "deepseek_v3"})
"""Names that first configs of a model have for the type of a config inside, and what Transformers takes them for."""

OTHER_ROTATIONS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            _names("dinov3_vit eomt_dinov3 sapiens2"), "its positions are places between -1 and 1, not of patches"
        ),
        **dict.fromkeys(
            _names("edgetam_video sam2_video sam3_tracker_video"),
            "its attention to earlier frames turns part of the keys alone",
        ),
        "clvp_encoder": "it turns values too",
        "dbrx": "Transformers does not read the base in its attn_config",
        "deepseek_v4": "it turns the last channels of a head, not the first",
        "dots3_note_text": "its layers pair channels in two ways",
        "efficientloftr": "it turns all heads as one, by rows and columns",
        "hunyuan_vl_text": "it turns the two channels of a pair by different axes; mmpos.from_hf_config has both",
        "mistral_large4_text": "its frequencies are weights",
        "nanochat": "it turns the other way round",
    }
)
"""Model types whose rotation is not read, and what is special about it."""
