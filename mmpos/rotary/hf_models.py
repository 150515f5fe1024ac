"""The table of model types in Transformers 5.24: what their configs leave open, and the defaults of their classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from mmpos.schemes import get_scheme

TRANSFORMERS = "5.24"
"""The version of Transformers whose model types are known."""

Turns: TypeAlias = Literal["rows", "columns", "in turn", "frames", "halves", "ladder"]


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

    turns: Turns = "rows"
    order: Literal["raster", "merged"] | None = "merged"
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
        reads_rotary_dim: whether rotary_dim is read if there is no partial_rotary_factor.
        unscaled: whether rope_parameters is ignored.
        theta: the base if no config can change it.
        base_names: fields outside of rope_parameters with the base.
        factor_names: fields outside of rope_parameters with the partial_rotary_factor.
        alpha: whether rope_type "dynamic" with an alpha is NTK scaling by alpha.
        head_dim_unread: whether head_dim is ignored, and a head has hidden_size / num_attention_heads channels.
        width: a field and a multiplier, whose product divided by num_attention_heads is the default of head_dim.
        full_head_dim: default of global_head_dim, the head_dim of full-attention layers.
        layer_theta: fields with the base of each layer type in configs without rope_parameters per layer type.
        scaled_layers: layer types to which rope_scaling of such configs applies.
        layer_bases: whether layer_rope_theta contains the base of each layer; a base of 0 means that the layer is not
            rotated.
        encoder: rotation of a vision encoder by rows and columns.
        refused: why Rotary cannot describe the rotation.
        unplaced: for a vision encoder, why no scheme produces its positions.
    """

    adjacent: bool = False
    section: tuple[int, int, int] | None = None
    interleaved: bool = False
    partial: float | None = None
    reads_rotary_dim: bool = False
    unscaled: bool = False
    theta: float | None = None
    base_names: tuple[str, ...] = ("rope_theta",)
    factor_names: tuple[str, ...] = ("partial_rotary_factor",)
    alpha: bool = False
    head_dim_unread: bool = False
    width: tuple[str, int] = ("hidden_size", 1)
    full_head_dim: int | None = None
    layer_theta: Mapping[str, str] = field(default_factory=dict, hash=False)
    scaled_layers: tuple[str, ...] = ("full_attention",)
    layer_bases: bool = False
    encoder: Encoder | None = None
    refused: str = ""
    unplaced: str = ""


@dataclass(frozen=True)
class ModelType:
    """Positions and rotation of a model type, and the arguments of its models.

    Args:
        scheme: name of the scheme in Transformers, or in the model's own code; "" if from_hf_config does not read it.
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
        row_separator: whether each row of an image or frame ends with an extra placeholder.
        generates: whether the model generates images; the grids of generated images follow the grids in the prompt.
        start: id of the first token in a document.
        crop_markers: config fields with the ids of CropMarkers, if each image is split into a thumbnail and tiles; the
            patches are then merged 4×4, or 2×2 if downsample_mode is "4x".
        text_at_top: whether the earliest configs have the fields of text_config at the top level, next to
            vision_config.
        rotation: the rotation of its q and k, if the type is a language model or an encoder.
        inputs: flags of `mmpos.data.ModelInputs` if its models separate the documents of a pack, or the reason for
            refusing packs; None if that is not known.
        refused: why from_hf_config refuses it.
    """

    scheme: str = ""
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
    text_at_top: bool = False
    rotation: RotationType = RotationType()
    inputs: tuple[str, ...] | str | None = None
    refused: str = ""

    @property
    def has_rope_index(self) -> bool:
        """Whether the class in Transformers has ``get_rope_index``, as it does if the model has more than two axes."""
        return get_scheme(self.scheme).axes > 2


UNLISTED = ModelType()
"""Row of all other model types of Transformers: their code pairs the halves of whole heads."""

UNKNOWN = RotationType(
    alpha=True,
    reads_rotary_dim=True,
    base_names=("rope_theta", "rotary_emb_base"),
    factor_names=("partial_rotary_factor", "rotary_pct"),
)
"""Rotation of a model type that Transformers does not have: any field that a class may read is read."""

_VISION = ("vision_start_token_id", "vision_end_token_id")
_IMAGE, _VIDEO = (("image_start_token_id", "image_end_token_id"), ("video_start_token_id", "video_end_token_id"))
_GEMMA = ("boi_token_id", "eoi_token_id")
_BREAKS = ("[IMG_BREAK]", "[IMG_END]")
_CROPS = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")
_TEXT: tuple[str, ...] = ()
_IMAGES = ("text_row", "images")
_OMNI = "it takes audio as features, which are not passed on"
_TIMES = "timestamps between frames"
_QWEN35 = "a quarter of each head is rotated; only layers with full attention have rotations"
_SLIDING = "two rotations: pass layer_type"
_NO_ROPE = "layers with full attention have no rotation"
_ENGINES = "different ids in serving engines: see engine"
_ROW_TOKENS = "rows end in a separate token: call segments without grids"
_PASS_ONE = "pass the config of one to Rotary.from_hf_config"
_PAIRINGS, _WEIGHTS = "its layers use different pairings", "its frequencies are weights"
_COORDINATES = "the positions are coordinates between -1 and 1 instead of patch indices"
_EARLIER = "its attention to earlier frames rotates only part of the keys"
_WHOLE_HEADS = "it rotates all heads as one, by rows and columns"
_WINDOWS = "some layers attend within windows; the original patch order is restored after the last layer"
_BOTH = ("full_attention", "sliding_attention")
_ADJACENT, _PARTIAL = RotationType(adjacent=True), RotationType(partial=1.0)


def _frames_apart(note: str, text: str = "", **fields: Any) -> ModelType:
    values = {"markers": _VISION, "inputs": _IMAGES, **fields}
    return ModelType("mrope-qwen3", note, text=frozenset(text.split()), frames_apart=True, **values)


def _flat(note: str = "", text: str = "", **fields: Any) -> ModelType:
    return ModelType("flatten", note, text=frozenset(text.split()), **fields)


def _rotating(**fields: Any) -> ModelType:
    return ModelType(rotation=RotationType(**fields))


def _encoder(
    turns: Turns = "rows",
    order: Literal["raster", "merged"] | None = "merged",
    first: int = 0,
    *,
    kv_heads: int | None = None,
    note: str = "",
    **fields: Any,
) -> ModelType:
    return ModelType(rotation=RotationType(encoder=Encoder(turns, order, first, kv_heads, note), **fields))


_GLM = _frames_apart(
    "video frames use the placeholders of images, between video markers", markers=_IMAGE, video_markers=_VIDEO
)

_ROWS: Mapping[str, ModelType] = {
    # Whole models with several axes.
    "qwen2_vl": ModelType(
        "mrope-transformers", "text after a video: see engine", "mrope",
        markers=_VISION, text_at_top=True, inputs=_IMAGES,
    ),
    "qwen2_5_vl": ModelType(
        "mrope-transformers",
        "videos in seconds; the encoder attends in windows and restores the patch order afterwards",
        "mrope-qwen2.5",
        markers=_VISION, timed=True, text_at_top=True, inputs=_IMAGES,
    ),
    "qwen3_vl qwen3_vl_moe": _frames_apart(_TIMES),
    "qwen3_5 qwen3_5_moe": _frames_apart(_QWEN35, inputs=(*_IMAGES, "seq_idx")),
    "qwen4_exp": _frames_apart(
        "partial_rotary_factor of each head is rotated; see Qwen3.5",
        inputs="n-grams and convolutions of its PLE layers cross the bounds of documents in a row",
    ),
    "cohere_compass": _frames_apart("the rotation depends on the type of layer: pass layer_type"),
    "cosmos3_edge": _frames_apart(f"{_TIMES}; the encoder has no rotation"),
    "cosmos3_omni": _frames_apart(f"{_TIMES}; the encoder of Qwen3-VL", "qwen3_vl_text"),
    "hy_v4_vl": _frames_apart(
        "a part of each head is rotated; rows end in an extra placeholder, and there is no text between frames",
        markers=None, row_separator=True,
        inputs="its rows end in a placeholder with features, where an Example has a separator without features",
    ),
    "qwen2_5_omni qwen2_5_omni_thinker": ModelType(
        "tmrope", f"audio and video interleaved by time in chunks; {_ENGINES}", markers=_VISION, inputs=_OMNI
    ),
    "qwen3_omni_moe qwen3_omni_moe_thinker": ModelType(
        "tmrope-qwen3", f"audio and video interleaved by time per token; {_ENGINES}", markers=_VISION, inputs=_OMNI
    ),
    "glm4v glm4v_moe": _GLM,
    "glm46v glmga": replace(_GLM, text=frozenset({"glm4v_text", "glm4v_moe_text"})),
    "glm_ocr": _GLM,
    "ernie4_5_vl_moe": ModelType(
        "mrope-transformers",
        "rows and columns alternate, frames have the lowest frequencies; video frames are merged",
        "mrope",
        markers=_IMAGE, merges_frames=True, inputs=(*_IMAGES, "expert_types"),
    ),
    "paddleocr_vl": ModelType(
        "mrope-transformers", "patches are merged after the encoder", "mrope",
        markers=_VISION, text_at_top=True, inputs=(*_IMAGES, "planes"),
    ),
    "hunyuan_image_3_moe": ModelType(
        "rope-tie-v2",
        "half-integers are floored; rope_scaling has no effect; size and time tokens precede patches",
        text=frozenset({"hunyuan_image_3_moe"}),
    ),
    "hunyuan_vl": ModelType(
        "xd-rope",
        "Transformers counts images over the batch and rotates the two channels of a pair by different axes: see "
        "second_rotary",
        markers=("im_start_id", "im_end_id"), row_separator=True, text_at_top=True,
        inputs="it rejects the text row from which its mask would read the documents",
    ),
    "glm_image": ModelType(
        "mrope", "ids of generated images are computed in advance: see generated", markers=_IMAGE, generates=True,
        inputs="its batches hold the images to generate and images_per_sample, which an Example does not have",
    ),
    "neomme": ModelType(
        "naive-2d",
        "two rotations: pass layer_type; an encoder; rows of images end in a separate token",
        opening="document_token_id",
        rotation=RotationType(partial=1.0, layer_theta=dict.fromkeys(_BOTH, "rope_theta"), scaled_layers=()),
    ),
    # Whole models with one axis.
    "mistral3": _flat(
        "rows end in [IMG_BREAK], the last in [IMG_END], whose ids are not in the config",
        row_markers=_BREAKS, inputs=_TEXT,
    ),
    "llava": _flat(
        "if the encoder is Pixtral's, rows end as in mistral3", row_markers=_BREAKS, inputs=_TEXT
    ),
    """
        aria chameleon deepseek_ocr2 deepseek_vl_hybrid fast_vlm got_ocr2 granite4_vision granite_docling
        hyperclovax_vision_v2 lfm2_vl llava_next_video ovis2 perception_lm pp_chart2table qianfan_ocr unlimited_ocr
        video_llava vipllava
    """: _flat(),
    "deepseek_vl idefics2 idefics3 internvl janus lighton_ocr llava_next llava_onevision smolvlm": _flat(inputs=_TEXT),
    "apertus1p5 molmo2": _flat(_ROW_TOKENS),
    "emu3 fuyu": _flat(_ROW_TOKENS, inputs=_TEXT),
    "gemma3": _flat(_SLIDING, markers=_GEMMA, inputs=_TEXT),
    "shieldgemma2 diffusion_gemma embedding_gemma2 gemma3n gemma4 gemma4_unified": _flat(_SLIDING, markers=_GEMMA),
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
        text=frozenset({"qwen3_5_text"}), crop_markers=_CROPS,
        inputs="it takes images as slices with target_sizes, which an Example does not have",
    ),
    "video_llama_3": _flat("videos are merged by 2×2, images are not: call segments without grids"),
    "blip-2 instructblip instructblipvideo": _flat("only with a language model that has RoPE, not with OPT or T5"),
    "paligemma": _flat("ids count from one: see start", start=1),
    "pi0": _flat("state and actions continue the prompt as text; if masks exclude the prompt, ids count from one"),
    "idefics mllama": _flat("images are read through cross-attention and have no ids"),
    """
        audioflamingo3 fun_asr_nano glmasr granite_speech granite_speech_plus kyutai_speech_to_text
        moss_transcribe_diarize musicflamingo omniasr qwen2_audio qwen3_asr vibevoice vibevoice_asr voxtral
    """: _flat("audio is counted as text"),
    "phi4_multimodal": _flat("audio is counted as text", rotation=_PARTIAL),
    "voxtral_realtime": _flat("audio is counted as text", "voxtral_realtime_text"),
    # Language models, on their own or as parts of other models.
    "exaone4 hyperclovax lfm2": _flat("text only"),
    """
        gemma gemma2 granite llama ministral3 mistral mixtral olmo2 qwen2 qwen2_moe qwen3 qwen3_moe smollm3 starcoder2
    """: _flat("text only", inputs=_TEXT),
    "gpt_oss": _flat("text only", inputs="its masks do not read the documents of a row from position_ids"),
    "cohere2 deepseek_v3 mistral4": _flat("text only", rotation=_ADJACENT),
    "cohere": _flat("text only", rotation=_ADJACENT, inputs=_TEXT),
    "glm4": _flat("text only", rotation=RotationType(adjacent=True, partial=1.0), inputs=_TEXT),
    "persimmon phi3": _flat("text only", rotation=_PARTIAL, inputs=_TEXT),
    "gemma3_text": _flat(
        _SLIDING, inputs=_TEXT,
        rotation=RotationType(
            layer_theta={"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
        ),
    ),
    "lfm3": _flat(_SLIDING),
    # Whole models that are refused.
    "dots3_note": ModelType(refused=_PAIRINGS),
    "mistral_large4": ModelType(refused=_WEIGHTS),
    "blip florence2 git pp_formulanet": ModelType(refused="the positions are a learned table, not a rotation"),
    "kosmos-2 kosmos-2.5": ModelType(refused="the positions are sinusoids added to the input, not a rotation"),
    "pix2struct udop": ModelType(refused="the positions are T5's distance buckets, not a rotation"),
    "inkling2 inkling2_loop inkling_mm_model": ModelType(
        refused="the positions are learned biases of distances, not a rotation"
    ),
    "glm5_next nemo_speechlm nemotron_h_omni": ModelType(refused="its language model has no positions"),
    "t5gemma2": ModelType(refused=f"encoder and decoder have separate sequences: {_PASS_ONE}"),
    "vision-encoder-decoder": ModelType(
        refused="images are not in the sequence of the text: pass the config of its decoder"
    ),
    "colmodernvbert colpali": ModelType(refused="it embeds with the model in its vlm_config: pass that config"),
    "colqwen2": ModelType(
        refused="its images count as text unless it gets the ids of the model in its vlm_config: pass that config"
    ),
    "jev": ModelType(refused="it decides with the model in its text_config: pass that config"),
    "gemma4_assistant gemma4_unified_assistant": ModelType(
        refused="it attends to the keys of its target model: pass that config"
    ),
    "pe_audio pe_audio_video pe_video": ModelType(refused=f"text and media have separate encoders: {_PASS_ONE}"),
    "evolla": ModelType(refused="its input is proteins instead of images"),
    # Other language models, and parts of models.
    """
        axk1 axk2 bailing_hybrid blt_global_transformer blt_local_decoder blt_local_encoder blt_patcher cohere2_moe
        deepseek_v2 deepseek_v32 ernie4_5 ernie4_5_moe glm_moe_dsa helium llama4_text longcat_flash
        openai_privacy_filter pe_audio_encoder pe_audio_video_encoder youtu
    """: _rotating(adjacent=True),
    "glm glm4_moe_lite moonshine moonshine_streaming": _rotating(adjacent=True, partial=1.0),
    """
        glm4_moe glmasr_encoder laguna mellum minimax_m3_vl_text nemotron nemotron3_5_transcribe_asr_audio
        nemotron3_5_transcribe_word_timestamp nemotron3_diarization_audio phi qwen3_next recurrent_gemma sarvam_moe
        solar_open stablelm step3p5 zaya
    """: _rotating(partial=1.0),
    "bamba": _rotating(partial=1.0, factor_names=()),
    "mimo_v2_flash": _rotating(partial=0.334),
    "minimax_m2": _rotating(partial=1.0, reads_rotary_dim=True),
    "gpt_neox gpt_neox_japanese": _rotating(
        partial=1.0, base_names=("rotary_emb_base",), factor_names=("rotary_pct",)
    ),
    "codegen gptj": _rotating(adjacent=True, unscaled=True, theta=1e4, reads_rotary_dim=True),
    "roformer": _rotating(adjacent=True, unscaled=True, theta=1e4),
    "esm": _rotating(unscaled=True),
    "zamba2": _rotating(width=("hidden_size", 2)),
    "deepseek_ocr2_text unlimited_ocr_text": _rotating(head_dim_unread=True),
    "dots3_note_audio_encoder": _rotating(head_dim_unread=True, partial=1.0),
    "embedding_gemma2_text gemma4_text gemma4_unified_text": _rotating(full_head_dim=512),
    "diffusion_gemma_text": _rotating(full_head_dim=512, partial=1.0),
    "granite_swa granitemoe_swa": _rotating(layer_bases=True),
    "gemma3n_text t5gemma2_decoder t5gemma2_text": _rotating(
        layer_theta={"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
    ),
    "modernbert modernbert-decoder": _rotating(
        layer_theta={"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"},
        scaled_layers=_BOTH,
    ),
    "olmo3": _rotating(layer_theta={"full_attention": "rope_theta"}),
    "hunyuan_v1_dense hunyuan_v1_moe": _rotating(alpha=True),
    "hunyuan_vl_text": _rotating(
        alpha=True,
        refused="it rotates the two channels of a pair by different axes; mmpos.from_hf_config supports it",
    ),
    "paddleocr_vl_text qwen2_5_omni_talker qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text": _rotating(
        section=(16, 24, 24)
    ),
    """
        cohere_compass_text cosmos3_edge_text qwen3_omni_moe_talker_text qwen3_omni_moe_text qwen3_vl_moe_text
        qwen3_vl_text
    """: _rotating(section=(24, 20, 20), interleaved=True),
    "qwen3_5_moe_text qwen3_5_text qwen4_exp_text": _rotating(section=(11, 11, 10), interleaved=True, partial=1.0),
    "hy_v4_vl_text": _rotating(section=(12, 10, 10), interleaved=True, adjacent=True),
    "glm4v_text glm_ocr_text": _rotating(section=(8, 12, 12), adjacent=True, partial=1.0),
    "glm4v_moe_text glm_image_text": _rotating(section=(8, 12, 12), partial=1.0),
    "ernie4_5_vl_moe_text": _rotating(section=(22, 22, 20), adjacent=True),
    "clvp_encoder": _rotating(refused="it also rotates values"),
    "dbrx": _rotating(refused="Transformers does not read the base in its attn_config"),
    "deepseek_v4": _rotating(refused="it rotates the last channels of a head instead of the first"),
    "dots3_note_text": _rotating(refused=_PAIRINGS),
    "mistral_large4_text": _rotating(refused=_WEIGHTS),
    "nanochat": _rotating(refused="it rotates in the opposite direction"),
    # Encoders.
    """
        cohere_compass_vision dots3_note_vision_encoder ernie4_5_vl_moe_vision glm4v_moe_vision glm4v_vision
        glm5_next_vision glm_ocr_vision qwen3_5_moe_vision qwen3_5_vision qwen3_omni_moe_vision_encoder
        qwen3_vl_moe_vision qwen3_vl_vision qwen4_exp_vision
    """: _encoder(),
    "qwen2_vl_vision": _encoder(width=("embed_dim", 1)),
    "exaone4_5_vision qwen2_5_omni_vision_encoder qwen2_5_vl_vision": _encoder(note=_WINDOWS),
    "lfm3_vl_vision": _encoder(note="convolution layers are not rotated"),
    "paddleocr_vl_vision": _encoder("rows", "raster", note="patches are merged after the encoder"),
    "minimax_m3_vl_vision": _encoder("frames"),
    "pixtral": _encoder("ladder", "raster"),
    "kimi_k25_vision": _encoder("in turn", "raster", note="frames have absolute positions"),
    "step3p5_vision": _encoder("columns", "raster", note="in addition to learned absolute positions"),
    "muse_glimmer_vision muse_spark_vision": _encoder("columns", "raster", 1, note=_WINDOWS),
    "inkling2_vision": _encoder(
        "columns", "merged", 1, note="a class token precedes the patches of each image", adjacent=True
    ),
    "llama4_vision_model": _encoder(
        "columns", "raster", 1, note="tiles of image_size; a class token follows each tile's patches",
        adjacent=True, head_dim_unread=True,
    ),
    "gemma4_vision": _encoder(
        "halves", "raster", kv_heads=12, note="view the halves of a head as heads, rotated by columns and by rows"
    ),
    "mlcd_vision_model": _encoder("rows", None, unplaced="the angles of its class token are weights"),
    "video_llama_3_vision": _encoder("rows", None, unplaced="the number of merged patches is an input for each image"),
    "sam3_vit_model": _encoder(
        "columns", None, adjacent=True, unplaced="its layers have positions within windows or fractions of a window"
    ),
    "pe_video_encoder": _rotating(adjacent=True, unplaced="its frames have text positions"),
    "deepseek_ocr2_encoder": _rotating(unplaced="its patches, and the queries after them, have text positions"),
    "vjepa2": _rotating(unplaced="the two channels of a pair have different frequencies"),
    "dinov3_vit eomt_dinov3 sapiens2": _rotating(refused=_COORDINATES, unplaced=_COORDINATES),
    "edgetam_video sam2_video sam3_tracker_video": _rotating(refused=_EARLIER, unplaced=_EARLIER),
    "efficientloftr": _rotating(refused=_WHOLE_HEADS, unplaced=_WHOLE_HEADS),
}  # fmt: skip

MODELS: Mapping[str, ModelType] = MappingProxyType(
    {name: row for names, row in _ROWS.items() for name in names.split()}
)
"""All model types of which more is known than the defaults of their classes."""

MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType({name: row for name, row in MODELS.items() if row.scheme})
"""All model types that from_hf_config supports."""

UNSUPPORTED_TYPES: Mapping[str, str] = MappingProxyType({x: row.refused for x, row in MODELS.items() if row.refused})
"""Model types that from_hf_config refuses, with the reason."""

OTHER_ROTATIONS: Mapping[str, str] = MappingProxyType(
    {name: row.rotation.refused for name, row in MODELS.items() if row.rotation.refused}
)
"""Model types whose rotation is not supported, with the reasons."""

UNSUPPORTED_ENCODERS: Mapping[str, str] = MappingProxyType(
    {name: row.rotation.unplaced for name, row in MODELS.items() if row.rotation.unplaced}
)
"""Vision encoders whose positions no scheme produces, with the reasons."""

TEXT_TYPES = frozenset({"gemma3_text", "lfm3", *(name for name, row in MODELS.items() if row.note == "text only")})
"""Language models with one id per token, from zero, used on their own or as parts of other models."""

ENCODERS: Mapping[str, Encoder] = MappingProxyType(
    {name: encoder for name in sorted(MODELS) if (encoder := MODELS[name].rotation.encoder) and encoder.order}
)
"""Vision encoders whose positions are known."""

ALIASES: Mapping[str, str] = MappingProxyType({"exaone4_5_text": "exaone4", "kimi_k2": "deepseek_v3"})
"""Model types of nested configs in the earliest releases, mapped to the types that Transformers uses for them."""


@cache
def class_defaults() -> Mapping[str, Mapping[str, Any]]:
    """Load the relevant defaults of the config classes in Transformers 5.24, by model type.

    ``names`` contains alternative field names, ``parts`` the model types of nested configs, ``auto_parts`` the model
    types of nested configs that do not state their model type, ``part_defaults`` the default field values of nested
    configs, ``absent_parts`` the field values of nested configs that are absent, and ``optional_parts`` the nested
    configs that are absent by default. Model types with a rotation have ``rope_theta``, which is null if their class
    has no default. tests/helpers/hf_classes.py writes the file.
    """
    table = json.loads(files(__package__).joinpath("hf_defaults.json").read_text(encoding="utf-8"))
    return MappingProxyType(table)
