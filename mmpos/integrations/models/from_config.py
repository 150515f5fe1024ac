"""Settings of a model, read from its Hugging Face config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from os.path import isdir
from pathlib import Path, PurePath
from typing import Any, Literal, NoReturn

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.integrations.models.image_file import ImageFile
from mmpos.integrations.models.settings import MERGES, ModelSettings
from mmpos.rotary.config import Rotary
from mmpos.rotary.hf_config import Fields, hf_arguments
from mmpos.rotary.hf_models import (
    ALIASES,
    ENCODERS,
    MODEL_TYPES,
    TEXT_TYPES,
    TRANSFORMERS,
    UNSUPPORTED_TYPES,
    ModelType,
)
from mmpos.schemes import (
    Grid2D,
    MRopeQwen25,
    MRopeTransformers,
    RopeTieV2,
    Scheme,
    TMRope,
    TMRopeQwen3,
    XDRope,
    get_scheme,
)
from mmpos.segments.kinds import CLIP
from mmpos.segments.placeholders import CropMarkers, Placeholders
from mmpos.support.checks import did_you_mean, integer, one_of

__all__ = ["audio_chunk", "from_hf_config", "thinker", "vision_scheme"]


def from_hf_config(
    config: object,
    *,
    engine: Literal["transformers", "serving"] = "transformers",
    layer_type: str | None = None,
) -> ModelSettings:
    """Read the scheme, token ids, merge size and rotations of a model from its config.

    Args:
        config: the whole config object of a model, the contents of its config.json as a mapping, or the path of that
            file or its folder. For a path, preprocessor_config.json in the folder (or image_processor in
            processor_config.json) is also read, for `image_processor`. A mapping with only a model_type is read as the
            config class without arguments in Transformers.
        engine: implementation whose video ids are used where implementations differ (Qwen2-VL, Qwen2.5-VL,
            ERNIE-4.5-VL, PaddleOCR-VL, Qwen Omni): "transformers", or "serving" for vLLM and SGLang, in which text
            continues after the last id of a video. For Qwen Omni, see ``TMRope`` and ``TMRopeQwen3``.
        layer_type: layer type, for configs with one rotation per layer type (Gemma 3).

    Raises:
        UnsupportedError: the model type is unknown (the message suggests the most similar type and says what to do), or
            no scheme computes its positions.
        InvalidInputError: a field of the config is missing or contradicts another, or a file in the folder is missing
            or not JSON; the message names the field or file.
    """
    one_of("engine", engine, ("transformers", "serving"))
    whole = Fields.of(config)
    folder = None
    if isinstance(config, str | PurePath):
        folder = Path(config) if isdir(config) else Path(config).parent
    known = MODEL_TYPES.get(whole.kind.model_type) or _refuse(whole)
    fields = thinker(whole)
    vision = fields.part("vision_config")
    if (
        vision is None
        and "vision_config" in fields.kind.parts
        and "vision_config" not in fields.kind.defaults.get("optional_parts", ())
    ):
        raise fields.missing_part("vision_config", "the encoder")
    rotary, second = _rotary(fields, known, layer_type)
    if (actions := whole.part("dit_config")) is not None:
        _check_actions(actions, fields, rotary)
    scheme = _scheme(fields, known, engine, vision, rotary.axes)
    settings: dict[str, Any] = {"spatial_merge_size": fields.integer("spatial_merge_size", minimum=1) or 1}
    return ModelSettings(
        model_type=whole.kind.model_type,
        scheme=scheme,
        rotary=rotary,
        second_rotary=second,
        row_markers=None if vision is None or vision.kind.model_type != "pixtral" else known.row_markers,
        **_tokens(fields, known, scheme, vision),
        frames_apart=known.frames_apart,
        generates=known.generates,
        start=known.start,
        image_file=None if folder is None else ImageFile.from_folder(folder),
        audio_chunk=audio_chunk(fields) if isinstance(scheme, TMRopeQwen3) else None,
        **(settings if vision is None else settings | _encoder(fields, known, scheme, vision)),
    )


def thinker(whole: Fields) -> Fields:
    """Return the part of a config with the language model and the encoders; for most models, this is all of it."""
    fields = whole
    for name in ("thinker_config", "vlm_config"):
        fields = fields.part(name) or fields
        if name in fields.kind.parts:
            raise fields.missing_part(name, "the language model and the encoders")
    return fields


def _refuse(fields: Fields) -> NoReturn:
    """Raise the error for a model type that is missing, unknown or not supported."""
    model = fields.kind.model_type
    if not model:
        raise fields.missing("model_type", "the name of a model type")
    if model in UNSUPPORTED_TYPES:
        raise UnsupportedError(f"config.model_type: got {model!r}, which is not supported: {UNSUPPORTED_TYPES[model]}")
    raise UnsupportedError(
        f"config.model_type: got {model!r}{did_you_mean(model, MODEL_TYPES)}, want a model type of Transformers "
        f"{TRANSFORMERS} that docs/models-names.md lists; for any other model, write its rule as a scheme "
        "(docs/schemes.md) and pass the scheme to mmpos.place"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _scheme(
    fields: Fields, known: ModelType, engine: Literal["transformers", "serving"], vision: Fields | None, axes: int
) -> Scheme:
    if known.scheme in ("tmrope", "tmrope-qwen3"):
        rate = fields.integer("position_id_per_seconds", needed=True, minimum=1)
        if known.scheme == "tmrope-qwen3":
            return TMRopeQwen3(rate, engine)
        return TMRope(rate, engine, fields.integer("seconds_per_chunk", needed=True, minimum=1))
    if known.timed and vision is not None:
        rate = vision.integer("tokens_per_second", needed=True, minimum=1)
        return MRopeTransformers(rate) if engine == "transformers" else MRopeQwen25(rate)
    scheme = get_scheme(known.scheme if engine == "transformers" else known.serving or known.scheme)
    if isinstance(scheme, XDRope):
        return XDRope(axes, "batch")
    return RopeTieV2(rounding="floor") if isinstance(scheme, RopeTieV2) else scheme


def _check_actions(actions: Fields, fields: Fields, rotary: Rotary) -> None:
    """Raise UnsupportedError if the rotations of the action expert and the language model differ (pi0)."""
    if Rotary(**{"axes": 1, **hf_arguments(actions)}) != rotary:
        raise UnsupportedError(
            f"{actions.name} must have the same rotation as {fields.name}, because it attends to the latter's keys"
        )


def _tokens(fields: Fields, known: ModelType, scheme: Scheme, vision: Fields | None) -> dict[str, Any]:
    """Read the ids of placeholders, and of the markers before and after them, as far as the config has them."""
    tokens: dict[str, int | None] = {}
    for kind in ("image", "video", "audio") if CLIP in scheme.kinds else ("image", "video"):
        names = (f"{kind}_token_id", f"{kind}_token_index")
        token = fields.integer(*names)
        vocabulary = fields.own("vocabulary_map") if kind == "image" and token is None else None
        if isinstance(vocabulary, Mapping) and "<image>" in vocabulary:  # Chameleon and Emu3
            token = integer(f"{fields.name}.vocabulary_map.<image>", vocabulary["<image>"], minimum=0)
        elif token is None and vision is not None and kind != "audio":
            token = vision.integer(*names)
        tokens[kind] = token
    image, video, audio = (tokens.get(kind) for kind in ("image", "video", "audio"))
    if image is None and scheme.axes > 1:
        raise fields.missing("image_token_id", "an integer")
    crops = (
        CropMarkers(*(fields.integer(name, needed=True) for name in known.crop_markers)) if known.crop_markers else None
    )
    rows = (image, image) if known.row_separator and image is not None else None
    video = None if video == image and scheme.axes == 1 else video
    settings: dict[str, Any] = {"placeholders": Placeholders(image, video, audio, rows, crops)}
    if known.opening is not None:
        settings["opening_token_id"] = fields.integer(known.opening, needed=True, minimum=0)
    for name, pair in (("image_markers", known.markers), ("video_markers", known.video_markers)):
        ids = [fields.integer(each, each.replace("_id", "_index")) for each in pair or ()]
        if pair is None or None in ids:
            continue
        if ids[0] == ids[1]:
            raise InvalidInputError(f"config.{pair[1]} must differ from {pair[0]}, got {ids[1]}")
        settings[name] = tuple(ids)
    return settings


def audio_chunk(fields: Fields) -> int:
    """Return the number of audio frames per chunk of the Qwen3-Omni encoder."""
    audio = fields.part("audio_config")
    window = None if audio is None else audio.integer("n_window", minimum=1)
    return 2 * (window or 50)


def _rotary(fields: Fields, known: ModelType, layer_type: str | None) -> tuple[Rotary, Rotary | None]:
    """Read the rotation of the language model and, if it differs, the rotation of the second channels of pairs."""
    text = fields.part("text_config") or fields
    inside = text.own("model_type")
    inside = ALIASES.get(inside, inside) if isinstance(inside, str) else inside
    of_class = fields.kind.defaults.get("parts", {}).get("text_config")
    allowed = known.text or ({of_class} if of_class else TEXT_TYPES)
    if inside not in (None, fields.kind.model_type, *allowed):
        got = f"{inside!r} in {fields.kind.model_type!r}"
        raise UnsupportedError(f"{text.name}.model_type: got {got}, want one of {_listed(allowed)}")
    overrides: dict[str, Any] = {}
    scheme = get_scheme(known.scheme)
    if scheme.axes == 1 and text.kind.rotation.section is not None:  # the ids are equal on all axes
        overrides |= {"axes": 1, "allocation": "interleaved"}
    if isinstance(scheme, RopeTieV2):  # HunyuanImage-3.0 ignores scaling and uses another name for head_dim
        head_dim = fields.integer("attention_head_dim", needed=True, minimum=2)
        overrides |= {"head_dim": head_dim, "rotary_dim": head_dim, "pairing": "half", "scaling": None}
    by_channel = isinstance(scheme, XDRope)
    arguments = hf_arguments(fields, layer_type=layer_type, overrides=overrides, by_channel=by_channel)
    if not by_channel:
        return Rotary(**{"axes": scheme.axes, **arguments}), None
    section = arguments.get("mrope_section", "none")
    if section == "none" or len(section) < 3:
        want = "the pairs of at least three axes"
        raise InvalidInputError(f"{text.name}.rope_parameters.mrope_section: got {section}, want {want}")
    rotary = Rotary(**arguments)
    # Transformers doubles the section sizes of HunYuan-VL and applies them to channels instead of pairs.
    axes = rotary.pair_axis.repeat(2).tolist()
    common: dict[str, Any] = {"axes": rotary.axes, "mrope_section": None}
    first, second = axes[: rotary.num_pairs], axes[rotary.num_pairs :]
    return replace(rotary, allocation=first, **common), replace(rotary, allocation=second, **common)


def _encoder(fields: Fields, known: ModelType, scheme: Scheme, vision: Fields) -> dict[str, Any]:
    """Read an encoder's sizes, and its scheme and rotation if the encoder rotates by rows and columns."""
    settings: dict[str, Any] = {"patch_size": vision.integer("patch_size", minimum=1)}
    if not known.merges_frames:  # in models that merge frames, each patch covers one frame
        settings["temporal_patch_size"] = vision.integer("temporal_patch_size", minimum=1)
    else:
        settings["temporal_merge_size"] = vision.integer("temporal_merge_size", needed=True, minimum=1)
    side = vision.integer("spatial_merge_size", "merge_size", "merge_kernel_size", minimum=1)
    if known.crop_markers:
        side = MERGES[one_of("config.downsample_mode", fields.own("downsample_mode") or "16x", MERGES)]
    if side is not None:
        settings["spatial_merge_size"] = side
    elif scheme.axes >= 3:
        raise vision.missing("spatial_merge_size", "an integer")
    encoder, heads = ENCODERS.get(vision.kind.model_type), vision.get("num_attention_heads")
    # A Rotary cannot describe heads whose halves rotate separately and share keys.
    shared = encoder and encoder.kv_heads and (vision.own("num_key_value_heads") or encoder.kv_heads) != heads
    if encoder and not shared:
        settings |= {
            "vision_scheme": vision_scheme(vision),
            "vision_rotary": Rotary(**{"axes": 2, **hf_arguments(vision)}),
        }
    return settings


def vision_scheme(vision: Fields) -> Grid2D:
    """Build the scheme for an encoder in ENCODERS from its config.

    Raises:
        InvalidInputError: the config has no spatial_merge_size, on which the order of patches depends.
    """
    encoder = ENCODERS[vision.kind.model_type]
    assert encoder.order, "all of ENCODERS have an order"
    side = 1 if encoder.order == "raster" else vision.integer("spatial_merge_size", needed=True, minimum=1)
    return Grid2D(encoder.order, side, 3 if encoder.turns == "frames" else 2, encoder.first)
