"""The model types whose positions are known, and what no config says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from mmpos.rotary.hf_models import OTHER_ROTATIONS

__all__ = ["ENCODER_ORDERS", "MODEL_TYPES", "TEXT_TYPES", "UNSUPPORTED_TYPES", "ModelType"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TEXT_TYPES = _names("""
    cohere emu3_text_model gemma gemma2 gemma3_text glm4 gpt_oss granite llama ministral3 mistral mixtral olmo2
    persimmon phi3 qwen2 qwen2_moe qwen3 qwen3_moe smollm3 starcoder2
""")
"""Language models with one id per token, from zero: models by themselves, and parts of others."""


@dataclass(frozen=True)
class ModelType:
    """What the code of a model type does with positions.

    Args:
        scheme: name of the scheme in Transformers, or in the model's own code.
        serving: name of the scheme in the serving engines.
        text: types of language model that may stand inside.
        markers: fields of the config with the ids before and after an image.
        video_markers: fields with the ids around a video, where its placeholders are those of images.
        timed: frames are placed in seconds, at vision_config.tokens_per_second.
        frames_apart: every frame of a video is a grid of its own.
        merges_frames: vision_config.temporal_merge_size frames of a video become one.
        row_markers: names of the tokens after the rows of an image, all but the last and the last, if its encoder is
            Pixtral's; nothing stands around it then.
        note: what is special, for people.
    """

    scheme: str
    serving: str
    text: frozenset[str] = field(repr=False)
    markers: tuple[str, str] | None = None
    video_markers: tuple[str, str] | None = None
    timed: bool = False
    frames_apart: bool = False
    merges_frames: bool = False
    row_markers: tuple[str, str] | None = None
    note: str = ""


_VISION = ("vision_start_token_id", "vision_end_token_id")
_IMAGE, _VIDEO = (("image_start_token_id", "image_end_token_id"), ("video_start_token_id", "video_end_token_id"))


def _frames_apart(text: str, note: str = "") -> ModelType:
    return ModelType("mrope-qwen3", "mrope-qwen3", _names(text), _VISION, frames_apart=True, note=note)


def _glm(text: str) -> ModelType:
    note = "frames of videos have the placeholders of images, between the markers of a video"
    names = _names(text)
    return ModelType("mrope-qwen3", "mrope-qwen3", names, _IMAGE, _VIDEO, frames_apart=True, note=note)


def _flat(note: str = "", text: frozenset[str] = TEXT_TYPES, markers: tuple[str, str] | None = None) -> ModelType:
    return ModelType("flatten", "flatten", text, markers, note=note)


def _pixtral(note: str) -> ModelType:
    return ModelType("flatten", "flatten", TEXT_TYPES, row_markers=("[IMG_BREAK]", "[IMG_END]"), note=note)


_QWEN35 = "a quarter of a head turns; only layers with full attention have rotations"
_SLIDING = "two rotations: pass layer_type"

MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "qwen2_vl": ModelType(
            "mrope-transformers", "mrope", _names("qwen2_vl_text"), _VISION, note="text after a video: see engine"
        ),
        "qwen2_5_vl": ModelType(
            "mrope-transformers",
            "mrope-qwen2.5",
            _names("qwen2_5_vl_text"),
            _VISION,
            timed=True,
            note="videos in seconds; the encoder attends in windows, whose order it undoes",
        ),
        "qwen3_vl": _frames_apart("qwen3_vl_text", "timestamps between frames"),
        "qwen3_vl_moe": _frames_apart("qwen3_vl_moe_text", "timestamps between frames"),
        "qwen3_5": _frames_apart("qwen3_5_text", _QWEN35),
        "qwen3_5_moe": _frames_apart("qwen3_5_moe_text", _QWEN35),
        "glm4v": _glm("glm4v_text"),
        "glm4v_moe": _glm("glm4v_moe_text"),
        "glm46v": _glm("glm4v_text glm4v_moe_text"),
        "glm_ocr": _glm("glm_ocr_text"),
        "ernie4_5_vl_moe": ModelType(
            "mrope-transformers",
            "mrope",
            _names("ernie4_5_vl_moe_text"),
            _IMAGE,
            merges_frames=True,
            note="rows and columns alternate, frames have the lowest frequencies; frames of videos are merged",
        ),
        "paddleocr_vl": ModelType(
            "mrope-transformers",
            "mrope",
            _names("paddleocr_vl_text"),
            _VISION,
            note="patches are merged after the encoder",
        ),
        "hunyuan_image_3_moe": ModelType(
            "rope-tie-v2",
            "rope-tie-v2",
            _names("hunyuan_image_3_moe"),
            note="half-integers are floored; rope_scaling has no effect; size and time tokens stand before patches",
        ),
        "mistral3": _pixtral("rows end in [IMG_BREAK], the last in [IMG_END], whose ids the config does not hold"),
        "lighton_ocr": _flat(),
        "llava": _pixtral("the encoder may be Pixtral's: rows end as those of mistral3 then"),
        "llava_next": _flat(),
        "llava_onevision": _flat(),
        "internvl": _flat(),
        "idefics2": _flat(),
        "idefics3": _flat(),
        "smolvlm": _flat(),
        "deepseek_vl": _flat(),
        "janus": _flat(),
        "emu3": _flat("rows end in a token of their own: without grids all tokens count alike"),
        "fuyu": _flat("rows end in a token of their own: without grids all tokens count alike"),
        "gemma3": _flat(_SLIDING, _names("gemma3_text"), ("boi_token_id", "eoi_token_id")),
        **{name: _flat(text=_names(name)) for name in sorted(TEXT_TYPES - _names("emu3_text_model gemma3_text"))},
        "gemma3_text": _flat(_SLIDING, _names("gemma3_text")),
    }
)
"""Every model type that from_hf_config knows."""

Order = Literal["raster", "merged"]

_MERGED_ENCODERS = _names("""
    ernie4_5_vl_moe_vision glm4v_vision glm4v_moe_vision glm_ocr_vision qwen2_vl_vision qwen2_5_vl_vision
    qwen3_5_vision qwen3_5_moe_vision qwen3_vl_vision qwen3_vl_moe_vision
""")
_RASTER_ENCODERS = _names("paddleocr_vl_vision pixtral")

ENCODER_ORDERS: Mapping[str, Order] = MappingProxyType(
    {name: "merged" if name in _MERGED_ENCODERS else "raster" for name in sorted(_MERGED_ENCODERS | _RASTER_ENCODERS)}
)
"""Vision encoders that turn by rows and columns, and the order of their patches."""

UNSUPPORTED_TYPES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("qwen2_5_omni", "qwen2_5_omni_thinker", "qwen3_omni_moe", "qwen3_omni_moe_thinker"),
            "audio and video share ids by time",
        ),
        "hunyuan_vl": OTHER_ROTATIONS["hunyuan_vl_text"],
        "glm_image": "ids of the images that it generates are set ahead of them",
        "paligemma": "its ids count from one",
    }
)
"""Model types that from_hf_config refuses, and why."""
