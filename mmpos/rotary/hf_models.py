"""Rotations of the model types in Transformers 5.24: the parts that their configs do not specify."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeVar

T = TypeVar("T")

TRANSFORMERS = "5.24"
"""The version of Transformers whose model types are known."""


def by_name(rows: Mapping[str, T]) -> Mapping[str, T]:
    """Expand a table whose keys are space-separated names into one entry per name."""
    return MappingProxyType({name: row for names, row in rows.items() for name in names.split()})


@dataclass(frozen=True)
class Encoder:
    """Rotation and patch positions of a vision encoder.

    Args:
        turns: the axes by which the channels of a head are rotated. "rows": a block by rows, then one by columns;
            "columns": columns first; "in turn": alternately by columns and rows; "frames": blocks by frames, rows and
            columns, with the remaining channels unrotated; "halves": each half acts as a head, the first rotated by
            columns and the second by rows; "ladder": as in Pixtral.
        order: patch order: "raster", or "merged" in blocks of spatial_merge_size; None if no scheme produces the
            encoder's positions.
        first: id of the first row and column; if it is 1, a class token may have id 0.
        kv_heads: for "halves", number of kv heads if the config omits it.
        note: peculiarities, for readers.
    """

    turns: Literal["rows", "columns", "in turn", "frames", "halves", "ladder"] = "rows"
    order: Literal["raster", "merged"] | None = "raster"
    first: int = 0
    kv_heads: int | None = None
    note: str = ""


@dataclass(frozen=True)
class RotationType:
    """Rotation of one model type.

    Args:
        adjacent: whether channels (2j, 2j + 1) instead of two halves are paired if the config has no rope_interleave.
        section: default of mrope_section.
        interleaved: whether M-RoPE is interleaved regardless of the config.
        partial: default of partial_rotary_factor; None means that rope_type "default" ignores the field and rotates all
            channels. All other rope types use the field.
        factor_unread: whether the model's class ignores a partial_rotary_factor outside of rope_parameters.
        reads_rotary_dim: whether rotary_dim is read if there is no partial_rotary_factor.
        unscaled: whether rope_parameters is ignored.
        theta: the base if no config can change it.
        old_names: whether the fields outside of rope_parameters are named rotary_emb_base and rotary_pct.
        alpha: whether rope_type "dynamic" with an alpha is NTK scaling by alpha.
        head_dim_unread: whether head_dim is ignored, and a head has hidden_size / num_attention_heads channels.
        width: a field and a multiplier, whose product divided by num_attention_heads is the default of head_dim.
        full_head_dim: default of global_head_dim, the head_dim of full-attention layers.
        layer_theta: fields with the base of each layer type in configs without rope_parameters per layer type.
        scaled_layers: layer types to which rope_scaling of such configs applies.
        layer_bases: whether layer_rope_theta contains the base of each layer; a base of 0 means that the layer is not
            rotated.
        encoder: rotation of a vision encoder by rows and columns.
    """

    adjacent: bool = False
    section: tuple[int, int, int] | None = None
    interleaved: bool = False
    partial: float | None = None
    factor_unread: bool = False
    reads_rotary_dim: bool = False
    unscaled: bool = False
    theta: float | None = None
    old_names: bool = False
    alpha: bool = False
    head_dim_unread: bool = False
    width: tuple[str, int] = ("hidden_size", 1)
    full_head_dim: int | None = None
    layer_theta: Mapping[str, str] = field(default_factory=dict, hash=False)
    scaled_layers: tuple[str, ...] = ("full_attention",)
    layer_bases: bool = False
    encoder: Encoder | None = None


PLAIN = RotationType()
"""Rotation of all model types without an entry: the halves of a whole head are paired, with the config's parameters."""


def _encoder(
    turns: Literal["rows", "columns", "in turn", "frames", "halves", "ladder"] = "rows",
    order: Literal["raster", "merged"] | None = "merged",
    note: str = "",
    first: int = 0,
) -> RotationType:
    return RotationType(encoder=Encoder(turns, order, first, note=note))


_ADJACENT = RotationType(adjacent=True)
_PARTIAL = RotationType(partial=1.0)
_WINDOWS = "some layers attend within windows; the original patch order is restored after the last layer"
_BOTH = ("full_attention", "sliding_attention")

ROTATIONS: Mapping[str, RotationType] = by_name(
    {
        """
            axk1 axk2 bailing_hybrid blt_global_transformer blt_local_decoder blt_local_encoder blt_patcher cohere
            cohere2 cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 ernie4_5 ernie4_5_moe glm_moe_dsa helium
            llama4_text longcat_flash mistral4 openai_privacy_filter pe_audio_encoder pe_audio_video_encoder
            pe_video_encoder youtu
        """: _ADJACENT,
        "glm glm4 glm4_moe_lite moonshine moonshine_streaming": RotationType(adjacent=True, partial=1.0),
        """
            glm4_moe glmasr_encoder laguna mellum minimax_m3_vl_text nemotron nemotron3_5_transcribe_asr_audio
            nemotron3_5_transcribe_word_timestamp nemotron3_diarization_audio persimmon phi phi3 phi4_multimodal
            qwen3_next recurrent_gemma sarvam_moe solar_open stablelm step3p5 zaya
        """: _PARTIAL,
        "bamba": RotationType(partial=1.0, factor_unread=True),
        "mimo_v2_flash": RotationType(partial=0.334),
        "minimax_m2": RotationType(partial=1.0, reads_rotary_dim=True),
        "gpt_neox gpt_neox_japanese": RotationType(partial=1.0, old_names=True),
        "codegen gptj": RotationType(adjacent=True, unscaled=True, theta=1e4, reads_rotary_dim=True),
        "roformer": RotationType(adjacent=True, unscaled=True, theta=1e4),
        "esm": RotationType(unscaled=True),
        "zamba2": RotationType(width=("hidden_size", 2)),
        "deepseek_ocr2_text unlimited_ocr_text": RotationType(head_dim_unread=True),
        "dots3_note_audio_encoder": RotationType(head_dim_unread=True, partial=1.0),
        "embedding_gemma2_text gemma4_text gemma4_unified_text": RotationType(full_head_dim=512),
        "diffusion_gemma_text": RotationType(full_head_dim=512, partial=1.0),
        "granite_swa granitemoe_swa": RotationType(layer_bases=True),
        "gemma3_text gemma3n_text t5gemma2_decoder t5gemma2_text": RotationType(
            layer_theta={"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
        ),
        "modernbert modernbert-decoder": RotationType(
            layer_theta={"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"},
            scaled_layers=_BOTH,
        ),
        "neomme": RotationType(partial=1.0, layer_theta=dict.fromkeys(_BOTH, "rope_theta"), scaled_layers=()),
        "olmo3": RotationType(layer_theta={"full_attention": "rope_theta"}),
        "hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text": RotationType(alpha=True),
        "paddleocr_vl_text qwen2_5_omni_talker qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text": RotationType(
            section=(16, 24, 24)
        ),
        """
            cohere_compass_text cosmos3_edge_text qwen3_omni_moe_talker_text qwen3_omni_moe_text qwen3_vl_moe_text
            qwen3_vl_text
        """: RotationType(section=(24, 20, 20), interleaved=True),
        "qwen3_5_moe_text qwen3_5_text qwen4_exp_text": RotationType(
            section=(11, 11, 10), interleaved=True, partial=1.0
        ),
        "hy_v4_vl_text": RotationType(section=(12, 10, 10), interleaved=True, adjacent=True),
        "glm4v_text glm_ocr_text": RotationType(section=(8, 12, 12), adjacent=True, partial=1.0),
        "glm4v_moe_text glm_image_text": RotationType(section=(8, 12, 12), partial=1.0),
        "ernie4_5_vl_moe_text": RotationType(section=(22, 22, 20), adjacent=True),
        """
            cohere_compass_vision dots3_note_vision_encoder ernie4_5_vl_moe_vision glm4v_moe_vision glm4v_vision
            glm5_next_vision glm_ocr_vision qwen3_5_moe_vision qwen3_5_vision qwen3_omni_moe_vision_encoder
            qwen3_vl_moe_vision qwen3_vl_vision qwen4_exp_vision
        """: _encoder(),
        "qwen2_vl_vision": RotationType(encoder=Encoder(order="merged"), width=("embed_dim", 1)),
        "exaone4_5_vision qwen2_5_omni_vision_encoder qwen2_5_vl_vision": _encoder(note=_WINDOWS),
        "lfm3_vl_vision": _encoder(note="convolution layers are not rotated"),
        "paddleocr_vl_vision": _encoder(order="raster", note="patches are merged after the encoder"),
        "mlcd_vision_model video_llama_3_vision": _encoder(order=None),
        "minimax_m3_vl_vision": _encoder("frames"),
        "pixtral": _encoder("ladder", "raster"),
        "kimi_k25_vision": _encoder("in turn", "raster", "frames have absolute positions"),
        "step3p5_vision": _encoder("columns", "raster", "in addition to learned absolute positions"),
        "muse_glimmer_vision muse_spark_vision": _encoder("columns", "raster", _WINDOWS, first=1),
        "sam3_vit_model": RotationType(adjacent=True, encoder=Encoder("columns", None)),
        "inkling2_vision": RotationType(
            adjacent=True,
            encoder=Encoder("columns", "merged", 1, note="a class token precedes the patches of each image"),
        ),
        "llama4_vision_model": RotationType(
            adjacent=True,
            head_dim_unread=True,
            encoder=Encoder("columns", first=1, note="tiles of image_size; a class token follows each tile's patches"),
        ),
        "gemma4_vision": RotationType(
            encoder=Encoder(
                "halves",
                kv_heads=12,
                note="view the halves of a head as heads, rotated by columns and by rows",
            )
        ),
    }
)
"""Model types whose rotation differs from PLAIN."""

ENCODERS: Mapping[str, Encoder] = MappingProxyType(
    {name: row.encoder for name, row in sorted(ROTATIONS.items()) if row.encoder is not None and row.encoder.order}
)
"""Vision encoders whose positions are known."""

_COORDINATES = "the positions are coordinates between -1 and 1 instead of patch indices"
_EARLIER = "its attention to earlier frames rotates only part of the keys"
_WHOLE_HEADS = "it rotates all heads as one, by rows and columns"

OTHER_ROTATIONS: Mapping[str, str] = by_name(
    {
        "clvp_encoder": "it also rotates values",
        "dbrx": "Transformers does not read the base in its attn_config",
        "deepseek_v4": "it rotates the last channels of a head instead of the first",
        "dinov3_vit eomt_dinov3 sapiens2": _COORDINATES,
        "dots3_note_text": "its layers use different pairings",
        "edgetam_video sam2_video sam3_tracker_video": _EARLIER,
        "efficientloftr": _WHOLE_HEADS,
        "hunyuan_vl_text": "it rotates the two channels of a pair by different axes; mmpos.from_hf_config supports it",
        "mistral_large4_text": "its frequencies are weights",
        "nanochat": "it rotates in the opposite direction",
    }
)
"""Model types whose rotation is not supported, with the reasons."""

UNSUPPORTED_ENCODERS: Mapping[str, str] = by_name(
    {
        "deepseek_ocr2_encoder": "its patches, and the queries after them, have text positions",
        "dinov3_vit eomt_dinov3 sapiens2": _COORDINATES,
        "edgetam_video sam2_video sam3_tracker_video": _EARLIER,
        "efficientloftr": _WHOLE_HEADS,
        "mlcd_vision_model": "the angles of its class token are weights",
        "pe_video_encoder": "its frames have text positions",
        "sam3_vit_model": "its layers have positions within windows or fractions of a window",
        "video_llama_3_vision": "the number of merged patches is an input for each image",
        "vjepa2": "the two channels of a pair have different frequencies",
    }
)
"""Vision encoders whose positions no scheme produces, with the reasons."""

TEXT_AT_TOP = ("hunyuan_vl", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl")
"""Model types whose earliest configs have the fields of text_config at the top level, next to vision_config."""

OTHER_TYPES: Mapping[str, str] = MappingProxyType({"exaone4_5_text": "exaone4", "kimi_k2": "deepseek_v3"})
"""Model types of nested configs in the earliest releases, mapped to the types that Transformers uses for them."""
