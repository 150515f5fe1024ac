"""The door of the room: from a config to the settings of its model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.integrations.models.known import ENCODER_ORDERS, MODEL_TYPES, UNSUPPORTED_TYPES, ModelType
from mmpos.integrations.models.settings import ModelSettings
from mmpos.rotary.config import Rotary
from mmpos.rotary.hf_config import Fields, hf_arguments
from mmpos.schemes import Grid2D, MRopeQwen25, MRopeTransformers, RopeTieV2, Scheme, get_scheme
from mmpos.support.checks import one_of

__all__ = ["from_hf_config"]


def from_hf_config(
    config: Any,
    *,
    engine: Literal["transformers", "serving"] = "transformers",
    layer_type: str | None = None,
) -> ModelSettings:
    """The scheme, token ids, merge size and rotations of a model, from its config alone.

    Args:
        config: the whole config object of a model, or the mapping of its config.json.
        engine: whose ids on videos, where they differ (Qwen2-VL, Qwen2.5-VL, ERNIE-4.5-VL, PaddleOCR-VL): of
            "transformers", whose config this is, or of "serving" engines, where text goes on after the last id of a
            video.
        layer_type: which rotation, where the config has one for each type of layer (Gemma 3).

    Raises:
        UnsupportedError: a model type that is not known, or whose positions have no scheme here; the message names
            those that are known.
        InvalidInputError: the config does not say what is needed, or contradicts itself; the message names the field.
    """
    one_of("engine", engine, ("transformers", "serving"))
    told = Fields.of(config)
    known = _known(told)
    vision = told.part("vision_config")
    if vision is None and "vision_config" in told.parts:
        raise told.missing("vision_config", "the config of the encoder")
    scheme = _scheme(known, engine, vision)
    many_axes = scheme.axes > 1
    settings: dict[str, Any] = {"spatial_merge_size": told.integer("spatial_merge_size", minimum=1) or 1}
    return ModelSettings(
        model_type=told.model_type,
        scheme=scheme,
        rotary=_rotary(told, known, scheme, layer_type),
        image_token_id=told.integer("image_token_id", "image_token_index", needed=many_axes),
        video_token_id=told.integer("video_token_id", "video_token_index"),
        image_markers=_pair(told, known.markers),
        row_markers=None if vision is None or vision.model_type != "pixtral" else known.row_markers,
        video_markers=_pair(told, known.video_markers),
        frames_apart=known.frames_apart,
        **(settings if vision is None else settings | _encoder(known, scheme, vision)),
    )


def _known(told: Fields) -> ModelType:
    model = told.model_type
    if not model:
        raise told.missing("model_type", "the name of a model type")
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


def _rotary(told: Fields, known: ModelType, scheme: Scheme, layer_type: str | None) -> Rotary:
    text = told.part("text_config") or told
    inside = text.own("model_type")
    if inside not in {None, told.model_type, *known.text}:
        got = f"{inside!r} inside {told.model_type!r}"
        raise UnsupportedError(f"{text.name}.model_type: got {got}, want one of {_listed(known.text)}")
    overrides: dict[str, Any] = {}
    if isinstance(scheme, RopeTieV2):  # HunyuanImage-3.0 turns by theta alone, and has its own word for head_dim
        head_dim = told.integer("attention_head_dim", needed=True, minimum=2)
        overrides |= {"head_dim": head_dim, "rotary_dim": head_dim, "pairing": "half", "scaling": None}
    arguments = hf_arguments(told, layer_type=layer_type, overrides=overrides)
    return Rotary(**{"axes": scheme.axes, **arguments})


def _pair(told: Fields, names: tuple[str, str] | None) -> tuple[int, int] | None:
    """Ids of a marker before and one after, where the config has both."""
    if names is None:
        return None
    begin, end = (told.integer(name, name.replace("_id", "_index")) for name in names)
    if begin is None or end is None:
        return None
    if begin == end:
        raise InvalidInputError(f"config.{names[1]}: got {end}, want another than {names[0]}")
    return begin, end


def _encoder(known: ModelType, scheme: Scheme, vision: Fields) -> dict[str, Any]:
    """Sizes of an encoder, and its positions and rotation if its rows and columns turn."""
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
