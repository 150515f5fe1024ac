"""Positions of the supported model types; `mmpos.rotary.hf_models` describes their language models and encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mmpos.rotary.hf_models import OTHER_ROTATIONS, by_name
from mmpos.schemes import get_scheme

__all__ = ["MODEL_TYPES", "TEXT_TYPES", "UNSUPPORTED_TYPES", "ModelType"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TEXT_TYPES = _names("""
    cohere cohere2 deepseek_v3 exaone4 gemma gemma2 gemma3_text glm4 gpt_oss granite hyperclovax lfm2 lfm3 llama
    ministral3 mistral mistral4 mixtral olmo2 persimmon phi3 qwen2 qwen2_moe qwen3 qwen3_moe smollm3 starcoder2
""")
"""Language models with one id per token, from zero, used on their own or as parts of other models."""


@dataclass(frozen=True)
class ModelType:
    """Positions of a model type.

    Args:
        scheme: name of the scheme in Transformers, or in the model's own code.
        note: peculiarities of the model type, as text.
        serving: name of the scheme in the serving engines; "" if it is the same as ``scheme``.
        text: permitted types of the language model. If empty, the type that the model's class defines is permitted, or
            any of TEXT_TYPES if the class defines none.
        markers: config fields with the token ids before and after an image.
        video_markers: config fields with the token ids around a video, if videos use the same placeholders as images.
        timed: whether frames are placed by time in seconds, at vision_config.tokens_per_second.
        frames_apart: whether every frame of a video is a separate grid.
        merges_frames: whether vision_config.temporal_merge_size frames of a video become one.
        row_markers: names of the token after each row except the last and of the token after the last row, if the
            encoder is Pixtral's; such images have no markers around them.
        opening: config field with the id of the token before an image, if an extra placeholder follows this token and
            each row ends with a separate token.
        row_separator: whether each row of an image ends with an extra placeholder, and each image begins and ends with
            one.
        generates: whether the model generates images; the grids of generated images follow the grids in the prompt.
        start: id of the first token in a document.
        crop_markers: config fields with the ids of CropMarkers, if each image is split into a thumbnail and tiles; the
            patches are then merged 4×4, or 2×2 if downsample_mode is "4x".
    """

    scheme: str
    note: str = ""
    serving: str = ""
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

    @property
    def has_rope_index(self) -> bool:
        """Whether the class in Transformers has ``get_rope_index``, as it does if the model has more than two axes."""
        return get_scheme(self.scheme).axes > 2


_VISION = ("vision_start_token_id", "vision_end_token_id")
_IMAGE, _VIDEO = (("image_start_token_id", "image_end_token_id"), ("video_start_token_id", "video_end_token_id"))
_GEMMA = ("boi_token_id", "eoi_token_id")
_TIMES = "timestamps between frames"
_QWEN35 = "a quarter of each head is rotated; only layers with full attention have rotations"
_SLIDING = "two rotations: pass layer_type"
_NO_ROPE = "layers with full attention have no rotation"
_ENGINES = "different ids in serving engines: see engine"


def _frames_apart(note: str, **fields: Any) -> ModelType:
    return ModelType("mrope-qwen3", note, markers=_VISION, frames_apart=True, **fields)


def _flat(note: str = "", text: str = "", **fields: Any) -> ModelType:
    return ModelType("flatten", note, text=_names(text), **fields)


_TIMESTAMPS = _frames_apart(_TIMES)
_GLM = ModelType(
    "mrope-qwen3",
    "video frames use the placeholders of images, between video markers",
    markers=_IMAGE,
    video_markers=_VIDEO,
    frames_apart=True,
)
_QWEN25_OMNI = ModelType("tmrope", f"audio and video interleaved by time in chunks; {_ENGINES}", markers=_VISION)
_QWEN3_OMNI = ModelType("tmrope-qwen3", f"audio and video interleaved by time per token; {_ENGINES}", markers=_VISION)

MODEL_TYPES: Mapping[str, ModelType] = by_name(
    {
        "qwen2_vl": ModelType("mrope-transformers", "text after a video: see engine", "mrope", markers=_VISION),
        "qwen2_5_vl": ModelType(
            "mrope-transformers",
            "videos in seconds; the encoder attends in windows and restores the patch order afterwards",
            "mrope-qwen2.5",
            markers=_VISION,
            timed=True,
        ),
        "qwen3_vl qwen3_vl_moe": _TIMESTAMPS,
        "qwen3_5 qwen3_5_moe": replace(_TIMESTAMPS, note=_QWEN35),
        "qwen4_exp": _frames_apart("partial_rotary_factor of each head is rotated; see Qwen3.5"),
        "cohere_compass": _frames_apart("the rotation depends on the type of layer: pass layer_type"),
        "cosmos3_edge": _frames_apart(f"{_TIMES}; the encoder has no rotation"),
        "cosmos3_omni": _frames_apart(f"{_TIMES}; the encoder of Qwen3-VL", text=_names("qwen3_vl_text")),
        "qwen2_5_omni qwen2_5_omni_thinker": _QWEN25_OMNI,
        "qwen3_omni_moe qwen3_omni_moe_thinker": _QWEN3_OMNI,
        "glm4v glm4v_moe": _GLM,
        "glm46v glmga": replace(_GLM, text=_names("glm4v_text glm4v_moe_text")),
        "glm_ocr": _GLM,
        "ernie4_5_vl_moe": ModelType(
            "mrope-transformers",
            "rows and columns alternate, frames have the lowest frequencies; video frames are merged",
            "mrope",
            markers=_IMAGE,
            merges_frames=True,
        ),
        "paddleocr_vl": ModelType(
            "mrope-transformers", "patches are merged after the encoder", "mrope", markers=_VISION
        ),
        "hunyuan_image_3_moe": ModelType(
            "rope-tie-v2",
            "half-integers are floored; rope_scaling has no effect; size and time tokens precede patches",
            text=_names("hunyuan_image_3_moe"),
        ),
        "hunyuan_vl": ModelType(
            "xd-rope",
            "Transformers counts images over the batch and rotates the two channels of a pair by different axes: see "
            "second_rotary",
            markers=("im_start_id", "im_end_id"),
            row_separator=True,
        ),
        "glm_image": ModelType(
            "mrope",
            "ids of generated images are computed in advance: see generated",
            markers=_IMAGE,
            generates=True,
        ),
        "neomme": ModelType(
            "naive-2d",
            "two rotations: pass layer_type; an encoder; rows of images end in a separate token",
            opening="document_token_id",
        ),
        "mistral3": _flat(
            "rows end in [IMG_BREAK], the last in [IMG_END], whose ids are not in the config",
            row_markers=("[IMG_BREAK]", "[IMG_END]"),
        ),
        "llava": _flat(
            "if the encoder is Pixtral's, rows end as in mistral3",
            row_markers=("[IMG_BREAK]", "[IMG_END]"),
        ),
        """
            aria chameleon deepseek_ocr2 deepseek_vl deepseek_vl_hybrid fast_vlm got_ocr2 granite4_vision
            granite_docling hyperclovax_vision_v2 idefics2 idefics3 internvl janus lfm2_vl lighton_ocr llava_next
            llava_next_video llava_onevision ovis2 perception_lm pp_chart2table qianfan_ocr smolvlm unlimited_ocr
            video_llava vipllava
        """: _flat(),
        "emu3 fuyu molmo2": _flat("rows end in a separate token: call segments without grids"),
        "gemma3 shieldgemma2 diffusion_gemma embedding_gemma2 gemma3n gemma4 gemma4_unified": _flat(
            _SLIDING, markers=_GEMMA
        ),
        "lfm3_vl": _flat(_SLIDING, markers=_VISION, frames_apart=True),
        "step3p7": _flat(_SLIDING),
        "modernvbert": _flat(_SLIDING, "modernbert"),
        "ultravbert": _flat(_SLIDING, "ultrabert"),
        "aya_vision cohere2_vision exaone4_5": _flat(_NO_ROPE),
        "muse_glimmer muse_spark": _flat(_NO_ROPE, frames_apart=True),
        "llama4": _flat("every fourth layer has no rotation"),
        "minimax_m3_vl": _flat(frames_apart=True),
        "kimi_k25": _flat("a part of each head is rotated; a chunk of a video is a grid of one frame"),
        "minicpm_ocr minicpmv4_6": _flat(_QWEN35, "qwen3_5_text"),
        "minicpmv4_7": ModelType(
            "mrope-canvas",
            "grids are (1, height, width) of target_sizes, thumbnails and slices in order; see Qwen3.5",
            text=_names("qwen3_5_text"),
            crop_markers=("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id"),
        ),
        "video_llama_3": _flat("videos are merged by 2×2, images are not: call segments without grids"),
        "blip-2 instructblip instructblipvideo": _flat("only with a language model that has RoPE, not with OPT or T5"),
        "paligemma": _flat("ids count from one: see start", start=1),
        "pi0": _flat("state and actions continue the prompt as text; if masks exclude the prompt, ids count from one"),
        "idefics mllama": _flat("images are read through cross-attention and have no ids"),
        """
            phi4_multimodal audioflamingo3 fun_asr_nano glmasr granite_speech granite_speech_plus kyutai_speech_to_text
            moss_transcribe_diarize musicflamingo qwen2_audio qwen3_asr vibevoice vibevoice_asr voxtral
        """: _flat("audio is counted as text"),
        "voxtral_realtime": _flat("audio is counted as text", "voxtral_realtime_text"),
        "gemma3_text lfm3": _flat(_SLIDING),
        " ".join(sorted(TEXT_TYPES - {"gemma3_text", "lfm3"})): _flat("text only"),
    }
)
"""All model types that from_hf_config supports."""

_PASS_ONE = "pass the config of one to Rotary.from_hf_config"
UNSUPPORTED_TYPES: Mapping[str, str] = by_name(
    {
        "dots3_note": OTHER_ROTATIONS["dots3_note_text"],
        "mistral_large4": OTHER_ROTATIONS["mistral_large4_text"],
        "blip florence2 git pp_formulanet": "the positions are a learned table, not a rotation",
        "kosmos-2 kosmos-2.5": "the positions are sinusoids added to the input, not a rotation",
        "pix2struct udop": "the positions are T5's distance buckets, not a rotation",
        "inkling2 inkling_mm_model": "the positions are learned biases of distances, not a rotation",
        "glm5_next nemo_speechlm nemotron_h_omni": "its language model has no positions",
        "t5gemma2": f"encoder and decoder have separate sequences: {_PASS_ONE}",
        "vision-encoder-decoder": "images are not in the sequence of the text: pass the config of its decoder",
        "colmodernvbert colpali": "it embeds with the model in its vlm_config: pass that config",
        "colqwen2": "its images count as text unless it gets the ids of the model in its vlm_config: pass that config",
        "jev": "it decides with the model in its text_config: pass that config",
        "gemma4_assistant gemma4_unified_assistant": "it attends to the keys of its target model: pass that config",
        "pe_audio pe_audio_video pe_video": f"text and media have separate encoders: {_PASS_ONE}",
        "evolla": "its input is proteins instead of images",
    }
)
"""Model types that from_hf_config refuses, with the reason."""
