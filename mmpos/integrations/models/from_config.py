"""Settings of a model from its Hugging Face config, and the model types whose positions are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, Literal

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.integrations.models.image_file import ImageFile
from mmpos.integrations.models.settings import ModelSettings
from mmpos.rotary.config import Rotary
from mmpos.rotary.hf_config import Fields, hf_arguments
from mmpos.rotary.hf_models import OTHER_ROTATIONS
from mmpos.schemes import Grid2D, MRopeQwen25, MRopeTransformers, RopeTieV2, Scheme, get_scheme
from mmpos.support.checks import one_of

__all__ = ["ENCODER_ORDERS", "MODEL_TYPES", "TEXT_TYPES", "UNSUPPORTED_TYPES", "ModelType", "from_hf_config"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TEXT_TYPES = _names("""
    cohere emu3_text_model gemma gemma2 gemma3_text glm4 gpt_oss granite llama ministral3 mistral mixtral olmo2
    persimmon phi3 qwen2 qwen2_moe qwen3 qwen3_moe smollm3 starcoder2
""")
"""Language models with one id per token, from zero: models by themselves, and parts of others."""


@dataclass(frozen=True)
class ModelType:
    """Positions of a model type, as its code has them.

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
        note: peculiarities, for readers.
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
        "qwen4_exp": _frames_apart("qwen4_exp_text", "partial_rotary_factor of a head turns; see Qwen3.5"),
        "cohere_compass": _frames_apart("cohere_compass_text", "layers turn by their type, or not: pass layer_type"),
        "cosmos3_edge": _frames_apart("cosmos3_edge_text", "timestamps between frames; the encoder has no rotation"),
        "cosmos3_omni": _frames_apart("qwen3_vl_text", "timestamps between frames; the encoder of Qwen3-VL"),
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
    cohere_compass_vision ernie4_5_vl_moe_vision glm4v_vision glm4v_moe_vision glm_ocr_vision qwen2_vl_vision
    qwen2_5_vl_vision qwen3_5_vision qwen3_5_moe_vision qwen3_vl_vision qwen3_vl_moe_vision qwen4_exp_vision
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


def from_hf_config(
    config: object,
    *,
    engine: Literal["transformers", "serving"] = "transformers",
    layer_type: str | None = None,
) -> ModelSettings:
    """Read the scheme, token ids, merge size and rotations of a model from its config.

    Args:
        config: the whole config object of a model, the mapping of its config.json, or the folder with that, where
            preprocessor_config.json (or image_processor in processor_config.json) is read for `image_processor`.
        engine: whose ids on videos, where they differ (Qwen2-VL, Qwen2.5-VL, ERNIE-4.5-VL, PaddleOCR-VL): of
            "transformers", whose config this is, or of "serving" engines, where text goes on after the last id of a
            video.
        layer_type: type of layer, where the config has a rotation for each (Gemma 3).

    Raises:
        UnsupportedError: a model type that is not known, or whose positions have no scheme here; the message names
            those that are known.
        InvalidInputError: the config lacks a field, or contradicts itself; the message names the field. Or a file of
            the folder is missing or not JSON; the message names the file.
    """
    one_of("engine", engine, ("transformers", "serving"))
    fields = Fields.of(config)
    known = _known(fields)
    vision = fields.part("vision_config")
    if vision is None and "vision_config" in fields.parts:
        raise fields.missing("vision_config", "the config of the encoder")
    scheme = _scheme(known, engine, vision)
    many_axes = scheme.axes > 1
    settings: dict[str, Any] = {"spatial_merge_size": fields.integer("spatial_merge_size", minimum=1) or 1}
    return ModelSettings(
        model_type=fields.model_type,
        scheme=scheme,
        rotary=_rotary(fields, known, scheme, layer_type),
        image_token_id=fields.integer("image_token_id", "image_token_index", needed=many_axes),
        video_token_id=fields.integer("video_token_id", "video_token_index"),
        image_markers=_pair(fields, known.markers),
        row_markers=None if vision is None or vision.model_type != "pixtral" else known.row_markers,
        video_markers=_pair(fields, known.video_markers),
        frames_apart=known.frames_apart,
        image_file=ImageFile.beside(Path(config)) if isinstance(config, str | PurePath) else None,
        **(settings if vision is None else settings | _encoder(known, scheme, vision)),
    )


def _known(fields: Fields) -> ModelType:
    model = fields.model_type
    if not model:
        raise fields.missing("model_type", "the name of a model type")
    if model in UNSUPPORTED_TYPES:
        raise UnsupportedError(f"config.model_type: got {model!r}, want another: {UNSUPPORTED_TYPES[model]}")
    if model not in MODEL_TYPES:
        raise UnsupportedError(f"config.model_type: got {model!r}, want one of {_listed(MODEL_TYPES)}")
    return MODEL_TYPES[model]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _scheme(known: ModelType, engine: str, vision: Fields | None) -> Scheme:
    if known.timed and vision is not None:
        rate = vision.integer("tokens_per_second", needed=True, minimum=1)
        return MRopeTransformers(rate) if engine == "transformers" else MRopeQwen25(rate)
    scheme = get_scheme(known.scheme if engine == "transformers" else known.serving)
    return RopeTieV2(rounding="floor") if isinstance(scheme, RopeTieV2) else scheme


def _rotary(fields: Fields, known: ModelType, scheme: Scheme, layer_type: str | None) -> Rotary:
    text = fields.part("text_config") or fields
    inside = text.own("model_type")
    if inside not in {None, fields.model_type, *known.text}:
        got = f"{inside!r} inside {fields.model_type!r}"
        raise UnsupportedError(f"{text.name}.model_type: got {got}, want one of {_listed(known.text)}")
    overrides: dict[str, Any] = {}
    if isinstance(scheme, RopeTieV2):  # HunyuanImage-3.0 turns by theta alone, and names head_dim otherwise
        head_dim = fields.integer("attention_head_dim", needed=True, minimum=2)
        overrides |= {"head_dim": head_dim, "rotary_dim": head_dim, "pairing": "half", "scaling": None}
    arguments = hf_arguments(fields, layer_type=layer_type, overrides=overrides)
    return Rotary(**{"axes": scheme.axes, **arguments})


def _pair(fields: Fields, names: tuple[str, str] | None) -> tuple[int, int] | None:
    """Return the ids of a marker before and one after, where the config has both."""
    if names is None:
        return None
    begin, end = (fields.integer(name, name.replace("_id", "_index")) for name in names)
    if begin is None or end is None:
        return None
    if begin == end:
        before, after = names
        raise InvalidInputError(f"config.{after}: got {end}, want another than {before}")
    return begin, end


def _encoder(known: ModelType, scheme: Scheme, vision: Fields) -> dict[str, Any]:
    """Read the sizes of an encoder, and its positions and rotation where it rotates by rows and columns."""
    settings: dict[str, Any] = {name: vision.integer(name, minimum=1) for name in ("patch_size", "temporal_patch_size")}
    if known.merges_frames:
        settings["temporal_merge_size"] = vision.integer("temporal_merge_size", needed=True, minimum=1)
    if scheme.axes == 3:
        settings["spatial_merge_size"] = vision.integer("spatial_merge_size", needed=True, minimum=1)
    if vision.model_type in ENCODER_ORDERS:
        order = ENCODER_ORDERS[vision.model_type]
        side = 1 if order == "raster" else vision.integer("spatial_merge_size", needed=True, minimum=1)
        settings |= {"vision_scheme": Grid2D(order, side), "vision_rotary": Rotary(**hf_arguments(vision))}
    return settings
