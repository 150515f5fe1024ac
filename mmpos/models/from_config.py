"""The door of the room: from a config to the settings of its model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from mmpos.checks import one_of
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.models.fields import Fields
from mmpos.models.known import ENCODER_ORDERS, MODEL_TYPES, UNSUPPORTED_TYPES, ModelType
from mmpos.models.settings import ModelSettings
from mmpos.rotary.config import Rotary
from mmpos.rotary.hf_config import check_config, hf_arguments
from mmpos.schemes import Grid2D, MRopeQwen25, MRopeTransformers, RopeTieV2, Scheme, get_scheme

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
    check_config(config)
    told = Fields("config", config)
    known = _known(told.model_type())
    vision = told.part("vision_config")
    scheme = _scheme(known, engine, told)
    many_axes = scheme.axes > 1
    return ModelSettings(
        model_type=told.model_type(),
        scheme=scheme,
        rotary=_rotary(told, known, scheme, layer_type),
        image_token_id=told.integer("image_token_id", "image_token_index", needed=many_axes),
        video_token_id=told.integer("video_token_id", "video_token_index"),
        image_markers=_pair(told, known.markers),
        row_markers=None if vision is None or _encoder_type(told, vision) != "pixtral" else known.row_markers,
        video_markers=_pair(told, known.video_markers),
        spatial_merge_size=_merge(told, scheme),
        temporal_merge_size=_side(told, "temporal_merge_size") if known.merges_frames else 1,
        patch_size=None if vision is None else vision.integer("patch_size", minimum=1),
        temporal_patch_size=None if vision is None else vision.integer("temporal_patch_size", minimum=1),
        frames_apart=known.frames_apart,
        **_encoder(told, vision),
    )


def _known(model: str) -> ModelType:
    if model in UNSUPPORTED_TYPES:
        raise UnsupportedError(f"config.model_type: got {model!r}, want another: {UNSUPPORTED_TYPES[model]}")
    if model not in MODEL_TYPES:
        raise UnsupportedError(f"config.model_type: got {model!r}, want one of {_listed(MODEL_TYPES)}")
    return MODEL_TYPES[model]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _side(told: Fields, name: str) -> int:
    """A size that the config of the encoder must say."""
    vision = told.part("vision_config")
    if vision is None:
        raise told.missing("vision_config", "the config of the encoder")
    return vision.integer(name, needed=True, minimum=1)


def _scheme(known: ModelType, engine: str, told: Fields) -> Scheme:
    if known.timed:
        rate = _side(told, "tokens_per_second")
        return MRopeTransformers(rate) if engine == "transformers" else MRopeQwen25(rate)
    scheme = get_scheme(known.scheme if engine == "transformers" else known.serving)
    return RopeTieV2(rounding="floor") if isinstance(scheme, RopeTieV2) else scheme


def _rotary(told: Fields, known: ModelType, scheme: Scheme, layer_type: str | None) -> Rotary:
    text = told.part("text_config") or told
    if not known.text & {text.model_type(), text.part_type()}:
        got = f"{text.model_type()!r} inside {told.model_type()!r}"
        raise UnsupportedError(f"{text.name}.model_type: got {got}, want one of {_listed(known.text)}")
    overrides: dict[str, Any] = {}
    if isinstance(scheme, RopeTieV2):  # HunyuanImage-3.0 turns by theta alone, and has its own word for head_dim
        overrides["scaling"] = None
        head_dim = told.integer("attention_head_dim", minimum=2)
        if head_dim is not None:
            overrides |= {"head_dim": head_dim, "rotary_dim": head_dim}
    arguments = hf_arguments(told.config, layer_type=layer_type, overrides=overrides)
    return Rotary(**{"axes": scheme.axes, **arguments})


def _merge(told: Fields, scheme: Scheme) -> int:
    if scheme.axes == 3:
        return _side(told, "spatial_merge_size")
    return told.integer("spatial_merge_size", minimum=1) or 1


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


def _encoder_type(told: Fields, vision: Fields) -> str:
    """The model type of the encoder, without _vision."""
    # The first config.json of Qwen2-VL and Qwen2.5-VL do not name their encoders, which are always their own.
    return told.model_type() if vision.get("model_type") is None else vision.part_type()


def _encoder(told: Fields, vision: Fields | None) -> dict[str, Any]:
    """Positions and rotation of an encoder whose rows and columns turn."""
    if vision is None:
        return {}
    encoder = _encoder_type(told, vision)
    if encoder not in ENCODER_ORDERS:
        return {}
    order = ENCODER_ORDERS[encoder]
    side = 1 if order == "raster" else vision.integer("spatial_merge_size", needed=True, minimum=1)
    allocation = "pixtral" if encoder == "pixtral" else "axial"
    rotary = Rotary.from_hf_config(vision.config, allocation=allocation, pairing="half")
    return {"vision_scheme": Grid2D(order, side), "vision_rotary": rotary}
