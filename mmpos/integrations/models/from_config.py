"""Settings of a model from its Hugging Face config, and the model types whose positions are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, Literal

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.integrations.models.encoders import ENCODERS
from mmpos.integrations.models.image_file import ImageFile
from mmpos.integrations.models.settings import MERGES, ModelSettings
from mmpos.rotary.config import Rotary
from mmpos.rotary.hf_config import Fields, hf_arguments
from mmpos.rotary.hf_models import HALVES_APART, OTHER_ROTATIONS, OTHER_TYPES, SECTIONS
from mmpos.schemes import (
    MRopeQwen25,
    MRopeTransformers,
    RopeTieV2,
    Scheme,
    TMRope,
    TMRopeQwen3,
    XDRope,
    get_scheme,
)
from mmpos.segments.placeholders import CropMarkers, Placeholders
from mmpos.support.checks import integer, one_of

__all__ = ["MODEL_TYPES", "TEXT_TYPES", "UNSUPPORTED_TYPES", "ModelType", "audio_chunk", "from_hf_config"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TEXT_TYPES = _names("""
    cohere cohere2 deepseek_v3 exaone4 gemma gemma2 gemma3_text glm4 gpt_oss granite hyperclovax lfm2 lfm3 llama
    ministral3 mistral mistral4 mixtral olmo2 persimmon phi3 qwen2 qwen2_moe qwen3 qwen3_moe smollm3 starcoder2
""")
"""Language models with one id per token, from zero: models by themselves, and parts of others."""


@dataclass(frozen=True)
class ModelType:
    """Positions of a model type, as its code has them.

    Args:
        scheme: name of the scheme in Transformers, or in the model's own code.
        serving: name of the scheme in the serving engines.
        text: types of language model that may stand inside; none: that of the model's class, or one of TEXT_TYPES where
            its class leaves it open.
        markers: fields of the config with the ids before and after an image.
        video_markers: fields with the ids around a video, where its placeholders are those of images.
        timed: frames are placed in seconds, at vision_config.tokens_per_second.
        frames_apart: every frame of a video is a grid of its own.
        merges_frames: vision_config.temporal_merge_size frames of a video become one.
        row_markers: names of the tokens after the rows of an image, all but the last and the last, if its encoder is
            Pixtral's; nothing stands around it then.
        opening: field with the id of the token before an image, where one placeholder more stands between them and rows
            end in a token of their own.
        row_separator: rows of images end in one more placeholder, and images begin and end in one more.
        generates: images are generated, and their grids stand behind those of the prompt.
        start: id of the first token of a document.
        crop_markers: fields with the ids of CropMarkers, where images are thumbnails and tiles; their patches are then
            merged by 4×4, or by 2×2 if downsample_mode is "4x".
        note: peculiarities, for readers.
    """

    scheme: str
    serving: str
    text: frozenset[str] = field(default=frozenset(), repr=False)
    markers: tuple[str, str] | None = None
    video_markers: tuple[str, str] | None = None
    timed: bool = False
    frames_apart: bool = False
    merges_frames: bool = False
    row_markers: tuple[str, str] | None = None
    opening: str | None = None
    row_separator: bool = False
    generates: bool = False
    start: int = 0
    crop_markers: tuple[str, ...] = ()
    note: str = ""


_VISION = ("vision_start_token_id", "vision_end_token_id")
_IMAGE, _VIDEO = (("image_start_token_id", "image_end_token_id"), ("video_start_token_id", "video_end_token_id"))


def _frames_apart(text: str, note: str = "") -> ModelType:
    return ModelType("mrope-qwen3", "mrope-qwen3", _names(text), _VISION, frames_apart=True, note=note)


def _glm(text: str) -> ModelType:
    note = "frames of videos have the placeholders of images, between the markers of a video"
    names = _names(text)
    return ModelType("mrope-qwen3", "mrope-qwen3", names, _IMAGE, _VIDEO, frames_apart=True, note=note)


def _flat(note: str = "", **arguments: Any) -> ModelType:
    return ModelType("flatten", "flatten", note=note, **arguments)


def _all(names: str, known: ModelType) -> dict[str, ModelType]:
    return dict.fromkeys(names.split(), known)


def _pixtral(note: str) -> ModelType:
    return _flat(note, row_markers=("[IMG_BREAK]", "[IMG_END]"))


def _omni(scheme: str, text: str, note: str) -> ModelType:
    return ModelType(scheme, scheme, _names(text), _VISION, note=f"{note}; other ids in serving engines: see engine")


_IN_CHUNKS, _BY_TOKEN = (
    "audio and video on one clock, merged in chunks",
    "audio and video on one clock, merged by token",
)
_QWEN35 = "a quarter of a head turns; only layers with full attention have rotations"
_SLIDING = "two rotations: pass layer_type"
_NO_ROPE = "layers of full attention have no rotation"
_AUDIO = "audio is counted as text"
_GEMMA = ("boi_token_id", "eoi_token_id")

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
        "qwen2_5_omni": _omni("tmrope", "qwen2_5_omni_text", _IN_CHUNKS),
        "qwen2_5_omni_thinker": _omni("tmrope", "qwen2_5_omni_text", _IN_CHUNKS),
        "qwen3_omni_moe": _omni("tmrope-qwen3", "qwen3_omni_moe_text", _BY_TOKEN),
        "qwen3_omni_moe_thinker": _omni("tmrope-qwen3", "qwen3_omni_moe_text", _BY_TOKEN),
        "glm4v": _glm("glm4v_text"),
        "glm4v_moe": _glm("glm4v_moe_text"),
        **_all("glm46v glmga", _glm("glm4v_text glm4v_moe_text")),
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
        "hunyuan_vl": ModelType(
            "xd-rope",
            "xd-rope",
            _names("hunyuan_vl_text"),
            ("im_start_id", "im_end_id"),
            row_separator=True,
            note="Transformers counts images over the batch and turns the channels of a pair apart: see second_rotary",
        ),
        "glm_image": ModelType(
            "mrope",
            "mrope",
            _names("glm_image_text"),
            _IMAGE,
            generates=True,
            note="ids of the images that it generates are laid ahead of them: see generated",
        ),
        "neomme": ModelType(
            "naive-2d",
            "naive-2d",
            opening="document_token_id",
            note="two rotations: pass layer_type; an encoder; rows of images end in a token of their own",
        ),
        "mistral3": _pixtral("rows end in [IMG_BREAK], the last in [IMG_END], whose ids the config does not hold"),
        "llava": _pixtral("the encoder may be Pixtral's: rows end as those of mistral3 then"),
        **_all(
            """
            aria chameleon deepseek_ocr2 deepseek_vl deepseek_vl_hybrid fast_vlm got_ocr2 granite4_vision
            granite_docling hyperclovax_vision_v2 idefics2 idefics3 internvl janus lfm2_vl lighton_ocr llava_next
            llava_next_video llava_onevision ovis2 perception_lm pp_chart2table qianfan_ocr smolvlm unlimited_ocr
            video_llava vipllava
            """,
            _flat(),
        ),
        **_all(
            "emu3 fuyu molmo2",
            _flat("rows end in a token of their own: without grids all tokens count alike"),
        ),
        **_all("gemma3 shieldgemma2", _flat(_SLIDING, markers=_GEMMA)),
        **_all("diffusion_gemma embedding_gemma2 gemma3n gemma4 gemma4_unified", _flat(_SLIDING, markers=_GEMMA)),
        "lfm3_vl": _flat(_SLIDING, markers=_VISION, frames_apart=True),
        "step3p7": _flat(_SLIDING),
        "modernvbert": _flat(_SLIDING, text=_names("modernbert")),
        "ultravbert": _flat(_SLIDING, text=_names("ultrabert")),
        **_all("aya_vision cohere2_vision exaone4_5", _flat(_NO_ROPE)),
        **_all("muse_glimmer muse_spark", _flat(_NO_ROPE, frames_apart=True)),
        "llama4": _flat("every fourth layer has no rotation"),
        "minimax_m3_vl": _flat(frames_apart=True),
        "kimi_k25": _flat("a part of each head turns; a chunk of a video is a grid of one frame"),
        **_all("minicpm_ocr minicpmv4_6", _flat(_QWEN35, text=_names("qwen3_5_text"))),
        "minicpmv4_7": ModelType(
            "mrope-canvas",
            "mrope-canvas",
            _names("qwen3_5_text"),
            crop_markers=("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id"),
            note="grids are (1, height, width) of target_sizes, thumbnails and slices in order; see Qwen3.5",
        ),
        "video_llama_3": _flat("videos are merged by 2×2, images are not: without grids all tokens count alike"),
        **_all("blip-2 instructblip instructblipvideo", _flat("with a language model that turns: not OPT, not T5")),
        "paligemma": _flat("ids count from one: see start", start=1),
        "pi0": _flat("state and actions go on after the prompt as text; where masks leave it out, ids count from one"),
        **_all("idefics mllama", _flat("images are beside the text, in layers of cross-attention")),
        "phi4_multimodal": _flat(_AUDIO),
        **_all(
            """
            audioflamingo3 fun_asr_nano glmasr granite_speech granite_speech_plus kyutai_speech_to_text
            moss_transcribe_diarize musicflamingo qwen2_audio qwen3_asr vibevoice vibevoice_asr voxtral
            """,
            _flat(_AUDIO),
        ),
        "voxtral_realtime": _flat(_AUDIO, text=_names("voxtral_realtime_text")),
        **_all("gemma3_text lfm3", _flat(_SLIDING)),
        **dict.fromkeys(sorted(TEXT_TYPES - _names("gemma3_text lfm3")), _flat("text alone")),
    }
)
"""Every model type that from_hf_config knows."""

UNSUPPORTED_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "dots3_note": OTHER_ROTATIONS["dots3_note_text"],
        "mistral_large4": OTHER_ROTATIONS["mistral_large4_text"],
        **dict.fromkeys(
            ("blip", "florence2", "git", "pp_formulanet"), "its positions are a learned table, nothing turns"
        ),
        **dict.fromkeys(("kosmos-2", "kosmos-2.5"), "its positions are sinusoids added to the input, nothing turns"),
        **dict.fromkeys(("pix2struct", "udop"), "distances fall into the buckets of T5, nothing turns"),
        **dict.fromkeys(("inkling2", "inkling_mm_model"), "distances have learned biases, nothing turns"),
        **dict.fromkeys(("glm5_next", "nemo_speechlm", "nemotron_h_omni"), "its language model has no positions"),
        "t5gemma2": "encoder and decoder have a sequence each: pass the config of one to Rotary.from_hf_config",
        "vision-encoder-decoder": "images are beside the text: pass the config of its decoder",
        **dict.fromkeys(("colmodernvbert", "colpali"), "it embeds by the model in its vlm_config: pass that"),
        "colqwen2": "its images count as text unless it is given the ids of the model in its vlm_config: pass that",
        "jev": "it decides by the model in its text_config: pass that",
        **dict.fromkeys(
            ("gemma4_assistant", "gemma4_unified_assistant"),
            "it reads the keys of the model that it drafts for: pass that",
        ),
        **dict.fromkeys(
            ("pe_audio", "pe_audio_video", "pe_video"),
            "text and what it describes have an encoder each: pass the config of one to Rotary.from_hf_config",
        ),
        "evolla": "it takes proteins, no images",
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
        engine: whose ids on videos, where they differ (Qwen2-VL, Qwen2.5-VL, ERNIE-4.5-VL, PaddleOCR-VL, Qwen Omni): of
            "transformers", whose config this is, or of "serving" engines, where text goes on after the last id of a
            video; for Qwen Omni see ``TMRope`` and ``TMRopeQwen3``. Under HunYuan-VL, whose rotation, too, and whether
            images are counted over the batch.
        layer_type: type of layer, where the config has a rotation for each (Gemma 3).

    Raises:
        UnsupportedError: a model type that is not known, or whose positions have no scheme here; the message names
            those that are known.
        InvalidInputError: the config lacks a field, or contradicts itself; the message names the field. Or a file of
            the folder is missing or not JSON; the message names the file.
    """
    one_of("engine", engine, ("transformers", "serving"))
    whole = Fields.of(config)
    known = _known(whole)
    fields = whole
    for name in ("thinker_config", "vlm_config"):
        fields = fields.part(name) or fields
        if name in fields.parts:
            raise fields.missing(name, "the config of the language model and the encoders")
    vision = fields.part("vision_config")
    if vision is None and "vision_config" in fields.parts and "vision_config" not in fields.optional_parts:
        raise fields.missing("vision_config", "the config of the encoder")
    rotary, second = _rotary(fields, known, engine, layer_type)
    actions = whole.part("dit_config")
    if actions is not None and Rotary(**{"axes": 1, **hf_arguments(actions)}) != rotary:
        want = f"that of {fields.name}, whose keys it reads"
        raise UnsupportedError(f"{actions.name}: got a rotation of its own, want {want}")
    scheme = _scheme(fields, known, engine, vision, rotary.axes)
    many_axes = scheme.axes > 1
    image, video = (_placeholder(fields, vision, name) for name in ("image", "video"))
    if image is None and many_axes:
        raise fields.missing("image_token_id", "an integer")
    settings: dict[str, Any] = {"spatial_merge_size": fields.integer("spatial_merge_size", minimum=1) or 1}
    return ModelSettings(
        model_type=whole.model_type,
        scheme=scheme,
        rotary=rotary,
        second_rotary=second,
        placeholders=Placeholders(
            image,
            None if video == image and not many_axes else video,
            _placeholder(fields, None, "audio") if scheme.clips else None,
            (image, image) if known.row_separator and image is not None else None,
            _crop_markers(fields, known),
        ),
        image_markers=_pair(fields, known.markers),
        row_markers=None if vision is None or vision.model_type != "pixtral" else known.row_markers,
        opening_token_id=None if known.opening is None else fields.integer(known.opening, needed=True, minimum=0),
        video_markers=_pair(fields, known.video_markers),
        frames_apart=known.frames_apart,
        generates=known.generates,
        start=known.start,
        image_file=ImageFile.beside(Path(config)) if isinstance(config, str | PurePath) else None,
        audio_chunk=audio_chunk(fields) if isinstance(scheme, TMRopeQwen3) else None,
        **(settings if vision is None else settings | _encoder(fields, known, scheme, vision)),
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
    scheme = get_scheme(known.scheme if engine == "transformers" else known.serving)
    if isinstance(scheme, XDRope):
        return XDRope(axes, "batch" if engine == "transformers" else "document")
    return RopeTieV2(rounding="floor") if isinstance(scheme, RopeTieV2) else scheme


def _placeholder(fields: Fields, vision: Fields | None, kind: str) -> int | None:
    names = (f"{kind}_token_id", f"{kind}_token_index")
    token = fields.integer(*names)
    vocabulary = fields.own("vocabulary_map") if kind == "image" and token is None else None
    if isinstance(vocabulary, Mapping) and "<image>" in vocabulary:  # of Chameleon and Emu3
        return integer(f"{fields.name}.vocabulary_map.<image>", vocabulary["<image>"], minimum=0)
    return vision.integer(*names) if token is None and vision is not None else token


def audio_chunk(fields: Fields) -> int:
    """Read how many frames of audio the encoder of Qwen3-Omni takes at a time."""
    audio = fields.part("audio_config")
    window = None if audio is None else audio.integer("n_window", minimum=1)
    return 2 * (window or 50)


def _rotary(fields: Fields, known: ModelType, engine: str, layer_type: str | None) -> tuple[Rotary, Rotary | None]:
    """Read the rotation of the language model, and that of the second channels where it is another."""
    text = fields.part("text_config") or fields
    inside = text.own("model_type")
    inside = OTHER_TYPES.get(inside, inside)
    of_class = fields.defaults.get("parts", {}).get("text_config")
    allowed = known.text or ({of_class} if of_class else TEXT_TYPES)
    if inside not in {None, fields.model_type, *allowed}:
        got = f"{inside!r} inside {fields.model_type!r}"
        raise UnsupportedError(f"{text.name}.model_type: got {got}, want one of {_listed(allowed)}")
    overrides: dict[str, Any] = {}
    scheme = get_scheme(known.scheme)
    if scheme.axes == 1 and text.model_type in SECTIONS:  # all its axes have the ids of text
        overrides |= {"axes": 1, "allocation": "interleaved"}
    if isinstance(scheme, RopeTieV2):  # HunyuanImage-3.0 turns by theta alone, and names head_dim otherwise
        head_dim = fields.integer("attention_head_dim", needed=True, minimum=2)
        overrides |= {"head_dim": head_dim, "rotary_dim": head_dim, "pairing": "half", "scaling": None}
    arguments = hf_arguments(fields, layer_type=layer_type, overrides=overrides, released=isinstance(scheme, XDRope))
    if not isinstance(scheme, XDRope):
        return Rotary(**{"axes": scheme.axes, **arguments}), None
    section = arguments.get("mrope_section", "none")
    if section == "none" or len(section) < 3:
        want = "pairs of each of three axes or more"
        raise InvalidInputError(f"{text.name}.rope_parameters.mrope_section: got {section}, want {want}")
    rotary = Rotary(**arguments)
    return (rotary, None) if engine == "serving" else _apart(rotary)


def _apart(rotary: Rotary) -> tuple[Rotary, Rotary]:
    """Allot axes to channels where Transformers has those of pairs, twice as many of each: (first, second channels)."""
    axes = rotary.pair_axis.repeat(2).tolist()
    told: dict[str, Any] = {"axes": rotary.axes, "mrope_section": None}
    first, second = axes[: rotary.num_pairs], axes[rotary.num_pairs :]
    return replace(rotary, allocation=first, **told), replace(rotary, allocation=second, **told)


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


def _crop_markers(fields: Fields, known: ModelType) -> CropMarkers | None:
    if not known.crop_markers:
        return None
    return CropMarkers(*(fields.integer(name, needed=True) for name in known.crop_markers))


def _encoder(fields: Fields, known: ModelType, scheme: Scheme, vision: Fields) -> dict[str, Any]:
    """Read the sizes of an encoder, and its positions and rotation where it rotates by rows and columns."""
    settings: dict[str, Any] = {"patch_size": vision.integer("patch_size", minimum=1)}
    if not known.merges_frames:  # whose patches are of one frame, whatever a file says
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
    apart = HALVES_APART.get(vision.model_type)
    shared = apart is not None and (vision.own("num_key_value_heads") or apart) != vision.get("num_attention_heads")
    if vision.model_type in ENCODERS and not shared:  # halves of heads that share keys turn as no Rotary says
        encoder = ENCODERS[vision.model_type]
        settings |= {"vision_scheme": encoder.scheme(vision), "vision_rotary": Rotary(**hf_arguments(vision))}
    return settings
