"""Configs of every known model type, and the settings that must come of them."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from transformers import CONFIG_MAPPING

import mmpos
from mmpos.integrations.models import ModelSettings
from mmpos.rotary import NTK, PRoPE, Rotary, YaRN
from mmpos.schemes import (
    Flatten,
    Grid2D,
    MRope,
    MRopeCanvas,
    MRopeQwen3,
    MRopeTransformers,
    Naive2D,
    RopeTieV2,
    TMRope,
    TMRopeQwen3,
    XDRope,
)
from mmpos.segments import CropMarkers, Placeholders

CONFIGS: Any = CONFIG_MAPPING
"""Config classes by model type."""
TEXT = 5
"""A token of text."""
GLM_TEXT = {"head_dim": 128, "partial_rotary_factor": 0.5}
"""Settings of the released checkpoints that the defaults of the class lack."""
COHERE_TEXT = {
    "layer_types": ["sliding_attention", "full_attention"] * 20,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [24, 20, 20]},
        "full_attention": None,
    },
}
"""The class has no base: one type of layer turns, the other does not."""
OMNI_TEXT = {"num_attention_heads": 32, "head_dim": 128}
"""As released: 28 heads of the class do not divide its hidden size."""
XDROPE = {"rope_parameters": {"type": "xdrope", "alpha": 1000.0, "factor": 1.0, "xdrope_section": [16] * 4}}
"""Of the released checkpoint, under the names that it has."""
ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_omni_moe": {"thinker_config": {"text_config": OMNI_TEXT}},
    "qwen3_omni_moe_thinker": {"text_config": OMNI_TEXT},
    "cohere_compass": {"text_config": COHERE_TEXT},
    "glm4v": {"text_config": GLM_TEXT},
    "glm_image": {"text_config": GLM_TEXT},
    "hunyuan_vl": {"text_config": {"hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128, **XDROPE}},
    "glm46v": {"text_config": {"model_type": "glm4v_text", **GLM_TEXT}},
    "glm4v_moe": {"text_config": GLM_TEXT},
    "glmga": {"text_config": {"model_type": "glm4v_text", **GLM_TEXT}},
    "minicpmv4_7": {
        "image_token_id": 20,
        "video_token_id": 21,
        "image_start_id": 22,
        "image_end_id": 23,
        "slice_start_id": 24,
        "slice_end_id": 25,
        "newline_id": 26,
    },
    **{name: {"text_config": {"model_type": "llama"}} for name in ("blip-2", "instructblip", "instructblipvideo")},
}
LAYER_TYPES = {
    **dict.fromkeys(("cohere_compass", "gemma3_text"), "sliding_attention"),
    **dict.fromkeys(("diffusion_gemma", "gemma3", "gemma3n", "gemma4", "gemma4_unified"), "full_attention"),
    **dict.fromkeys(("lfm3", "lfm3_vl", "shieldgemma2", "step3p7"), "full_attention"),
    **dict.fromkeys(("embedding_gemma2", "modernvbert", "neomme", "ultravbert"), "full_attention"),
}
"""Which of several rotations is expected."""
HUNYUAN = {
    "model_type": "hunyuan_image_3_moe",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "attention_head_dim": 128,
    "rope_theta": 10000.0,
    "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "custom"},
    "max_position_embeddings": 22800,
    "patch_size": 1,
    "image_token_id": 128006,
    "im_start_id": 128000,
    "im_end_id": 128001,
}


def config_of(model: str) -> Any:
    return HUNYUAN if model == "hunyuan_image_3_moe" else CONFIGS[model](**deepcopy(dict(ARGUMENTS.get(model, {}))))


def settings_of(model: str, **options: Any) -> ModelSettings:
    return mmpos.from_hf_config(config_of(model), layer_type=LAYER_TYPES.get(model), **options)


QWEN2 = Rotary(128, theta=1e6, allocation="sections", mrope_section=(16, 24, 24))
QWEN3 = Rotary(128, theta=5e5, allocation="mrope-interleaved")
QWEN35 = Rotary(256, rotary_dim=64, allocation="mrope-interleaved", mrope_section=(11, 11, 10))
GLM = Rotary(128, rotary_dim=64, allocation="sections", mrope_section=(8, 12, 12))
XDRIVEN = Rotary(128, scaling=NTK(1000.0))
ERNIE = Rotary(128, theta=5e5, axes=3, allocation=[1, 2] * 22 + [0] * 20, pairing="adjacent")


def blocks(*axes: int, pairs: int) -> dict[str, Any]:
    """Arguments of a rotation by blocks of so many pairs, one for each of these axes."""
    return {"allocation": [axis for axis in axes for _ in range(pairs)], "axes_dim": [2 * pairs] * len(axes)}


EXPECTED_ENCODERS: dict[str, tuple[Grid2D, Rotary]] = {
    **{
        encoder: (Grid2D("merged", 2), Rotary(head_dim, allocation="axial"))
        for head_dim, encoders in {
            64: "dots3_note_vision_encoder glm5_next_vision glm_ocr_vision",
            72: "cohere_compass_vision qwen3_5_moe_vision qwen3_5_vision qwen3_omni_moe_vision_encoder "
            "qwen3_vl_moe_vision qwen3_vl_vision qwen4_exp_vision",
            80: "ernie4_5_vl_moe_vision qwen2_vl_vision",
            128: "glm4v_moe_vision glm4v_vision",
            224: "exaone4_5_vision qwen2_5_omni_vision_encoder qwen2_5_vl_vision",
        }.items()
        for encoder in encoders.split()
    },
    "gemma4_vision": (Grid2D(), Rotary(32, theta=100.0, axes=2, allocation="heads", head_axes=[1, 0] * 12)),
    "inkling2_vision": (Grid2D("merged", 2, first=1), Rotary(64, pairing="adjacent", **blocks(1, 0, pairs=16))),
    "kimi_k25_vision": (Grid2D(), Rotary(72, allocation=[1, 0] * 18, axes_dim=[36, 36])),
    "lfm3_vl_vision": (Grid2D("merged", 2), Rotary(64, theta=1e6, allocation="axial")),
    "llama4_vision_model": (Grid2D(first=1), Rotary(48, pairing="adjacent", **blocks(1, 0, pairs=12))),
    "minimax_m3_vl_vision": (Grid2D("merged", 2, 3), Rotary(80, axes=3, rotary_dim=78, allocation="axial")),
    "muse_glimmer_vision": (Grid2D(first=1), Rotary(96, **blocks(1, 0, pairs=24))),
    "muse_spark_vision": (Grid2D(first=1), Rotary(96, **blocks(1, 0, pairs=24))),
    "paddleocr_vl_vision": (Grid2D(), Rotary(72, allocation="axial")),
    "pixtral": (Grid2D(), Rotary(64, allocation="pixtral")),
    "step3p5_vision": (Grid2D(), Rotary(96, **blocks(1, 0, pairs=24))),
}
"""Positions and rotation of encoders with the defaults of their classes."""


def encoder(model_type: str) -> dict[str, Any]:
    """Settings of a model with this encoder inside."""
    return dict(zip(("vision_scheme", "vision_rotary"), EXPECTED_ENCODERS[model_type], strict=True))


def merged(head_dim: int) -> dict[str, Any]:
    return {"vision_scheme": Grid2D("merged", 2), "vision_rotary": Rotary(head_dim, allocation="axial")}


def raster(head_dim: int, allocation: str) -> dict[str, Any]:
    return {"vision_scheme": Grid2D(), "vision_rotary": Rotary(head_dim, allocation=allocation)}


QWEN_IDS: dict[str, Any] = {
    "placeholders": Placeholders(151655, 151656),
    "image_markers": (151652, 151653),
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
APART_16 = {**QWEN_IDS, **merged(72), "patch_size": 16, "frames_apart": True}
COHERE_IDS = {"placeholders": Placeholders(255031, 255032), "image_markers": (255028, 255029)}
QWEN35_IDS = {"placeholders": Placeholders(248056, 248057), "image_markers": (248053, 248054)}
GLM_FIELDS = {
    "placeholders": Placeholders(151343, 151344),
    "image_markers": (151339, 151340),
    "video_markers": (151341, 151342),
    "spatial_merge_size": 2,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "frames_apart": True,
    **merged(128),
}
GLM_MOE = {"placeholders": Placeholders(151363, 151364)}
GLM_OCR = {"placeholders": Placeholders(59280, 59281), "image_markers": (59256, 59257)}


def line(head_dim: int, theta: float = 1e4, **arguments: Any) -> Rotary:
    return Rotary(head_dim, theta=theta, axes=1, **arguments)


def flat(rotary: Rotary, **rest: Any) -> tuple[Any, Rotary, dict[str, Any]]:
    return Flatten(), rotary, rest


MERGED_14: dict[str, Any] = {"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2}

# The class of a thinker knows no markers of images; configs as released have them.
OMNI_IDS: dict[str, Any] = {
    "placeholders": Placeholders(151655, 151656, 151646),
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
OMNI25 = (TMRope(), QWEN2, {**OMNI_IDS, **merged(224), "patch_size": 14})
OMNI3 = (
    TMRopeQwen3(tokens_per_second=25),
    replace(QWEN3, theta=1e6),
    {**OMNI_IDS, **merged(72), "patch_size": 16, "audio_chunk": 100},
)

EXPECTED: dict[str, tuple[Any, Rotary, dict[str, Any]]] = {
    "qwen2_5_omni": OMNI25,
    "qwen2_5_omni_thinker": OMNI25,
    "qwen3_omni_moe": OMNI3,
    "qwen3_omni_moe_thinker": OMNI3,
    "qwen2_vl": (MRopeTransformers(), QWEN2, {**QWEN_IDS, **merged(80), "patch_size": 14}),
    "qwen2_5_vl": (MRopeTransformers(4), QWEN2, {**QWEN_IDS, **merged(224), "patch_size": 14}),
    "qwen3_vl": (MRopeQwen3(), QWEN3, APART_16),
    "qwen3_vl_moe": (MRopeQwen3(), QWEN3, APART_16),
    "qwen3_5": (MRopeQwen3(), QWEN35, {**APART_16, **QWEN35_IDS}),
    "qwen3_5_moe": (MRopeQwen3(), QWEN35, {**APART_16, **QWEN35_IDS}),
    "qwen4_exp": (
        MRopeQwen3(),
        replace(QWEN35, rotary_dim=256, mrope_section=(107, 11, 10)),
        {**APART_16, **QWEN35_IDS},
    ),
    "cohere_compass": (MRopeQwen3(), replace(QWEN3, theta=5e4), {**APART_16, **COHERE_IDS}),
    "cosmos3_edge": (
        MRopeQwen3(),
        replace(QWEN3, theta=1e8),
        {
            "placeholders": Placeholders(19, 18),
            "image_markers": (20, 21),
            "spatial_merge_size": 2,
            "patch_size": 16,
            "frames_apart": True,
        },
    ),
    "cosmos3_omni": (MRopeQwen3(), QWEN3, APART_16),
    "glm4v": (MRopeQwen3(), replace(GLM, pairing="adjacent"), GLM_FIELDS),
    "glm46v": (MRopeQwen3(), replace(GLM, pairing="adjacent"), {**GLM_FIELDS, "video_markers": (151361, 151362)}),
    "glmga": (MRopeQwen3(), replace(GLM, pairing="adjacent"), {**GLM_FIELDS, "video_markers": (151361, 151362)}),
    "glm4v_moe": (MRopeQwen3(), GLM, {**GLM_FIELDS, **GLM_MOE}),
    "glm_ocr": (
        MRopeQwen3(),
        Rotary(64, allocation="sections", mrope_section=(8, 12, 12), pairing="adjacent"),
        {**GLM_FIELDS, **GLM_OCR, **merged(64), "video_markers": (59258, 59259)},
    ),
    "ernie4_5_vl_moe": (
        MRopeTransformers(),
        ERNIE,
        {
            "placeholders": Placeholders(100295, 103367),
            "image_markers": (101304, 101305),
            "spatial_merge_size": 2,
            "temporal_merge_size": 2,
            "patch_size": 14,
            **merged(80),
        },
    ),
    "paddleocr_vl": (
        MRopeTransformers(),
        replace(QWEN2, theta=5e5),
        {
            "placeholders": Placeholders(100295, 100296),
            "image_markers": (101305, 101306),
            "spatial_merge_size": 2,
            "patch_size": 14,
            **raster(72, "axial"),
        },
    ),
    "hunyuan_image_3_moe": (RopeTieV2(rounding="floor"), Rotary(128), {"placeholders": Placeholders(128006)}),
    "hunyuan_vl": (
        XDRope(counting="batch"),
        replace(XDRIVEN, allocation=[0] * 32 + [1] * 32, axes=4),
        {
            "second_rotary": replace(XDRIVEN, allocation=[2] * 32 + [3] * 32, axes=4),
            "placeholders": Placeholders(120120, rows=(120120, 120120)),
            "image_markers": (120118, 120119),
            "spatial_merge_size": 2,
            "patch_size": 16,
            "temporal_patch_size": 1,
        },
    ),
    "glm_image": (
        MRope(),
        GLM,
        {"placeholders": Placeholders(167855), "image_markers": (16384, 16385), "patch_size": 16, "generates": True},
    ),
    "neomme": (
        Naive2D(),
        Rotary(64, rotary_dim=16, theta=1e6),
        {"placeholders": Placeholders(6), "opening_token_id": 5},
    ),
    "mistral3": (
        Flatten(),
        line(128, 1e9),
        {
            "placeholders": Placeholders(10),
            "row_markers": ("[IMG_BREAK]", "[IMG_END]"),
            "spatial_merge_size": 2,
            "patch_size": 14,
            **raster(64, "pixtral"),
        },
    ),
    "lighton_ocr": (
        Flatten(),
        line(128, 1e6),
        {"placeholders": Placeholders(151655), "spatial_merge_size": 2, "patch_size": 14, **raster(64, "pixtral")},
    ),
    "llava": (Flatten(), line(128), {"placeholders": Placeholders(32000), "patch_size": 14}),
    "llava_next": (Flatten(), line(128), {"placeholders": Placeholders(32000), "patch_size": 14}),
    "llava_onevision": (
        Flatten(),
        line(128),
        {"placeholders": Placeholders(151646, 151647), "patch_size": 14},
    ),
    "internvl": (Flatten(), line(128), {"placeholders": Placeholders(151667), "patch_size": 14}),
    "idefics2": (Flatten(), line(128), {"placeholders": Placeholders(32001), "patch_size": 32}),
    "idefics3": (Flatten(), line(128), {"placeholders": Placeholders(128257), "patch_size": 32}),
    "smolvlm": (Flatten(), line(128), {"placeholders": Placeholders(128257), "patch_size": 32}),
    "deepseek_vl": (Flatten(), line(128), {"placeholders": Placeholders(100015), "patch_size": 16}),
    "janus": (Flatten(), line(128), {"placeholders": Placeholders(100581), "patch_size": 16}),
    "emu3": (Flatten(), line(128, 1e6), {}),
    "fuyu": (Flatten(), line(64, rotary_dim=32), {"placeholders": Placeholders(71011)}),
    "gemma3": (
        Flatten(),
        line(256, 1e6),
        {"placeholders": Placeholders(262144), "image_markers": (255999, 256000), "patch_size": 16},
    ),
    "gemma3_text": (Flatten(), line(256, 1e4), {}),
    "aria": flat(line(128), placeholders=Placeholders(9), patch_size=32),
    "chameleon": flat(line(128)),
    "deepseek_ocr2": flat(line(128), placeholders=Placeholders(128815)),
    "deepseek_vl_hybrid": flat(line(128), placeholders=Placeholders(100015), patch_size=16),
    "fast_vlm": flat(line(128), placeholders=Placeholders(151646)),
    "got_ocr2": flat(line(64, 1e6), placeholders=Placeholders(151859), patch_size=16),
    "granite4_vision": flat(line(128), placeholders=Placeholders(32000), patch_size=32),
    "granite_docling": flat(line(64), placeholders=Placeholders(100337), patch_size=16),
    "hyperclovax_vision_v2": flat(line(128), placeholders=Placeholders(128060, 128061), **MERGED_14, **merged(224)),
    "lfm2_vl": flat(line(80, 1e6), placeholders=Placeholders(396), patch_size=16),
    "llava_next_video": flat(line(128), placeholders=Placeholders(32001, 32000), patch_size=14),
    "ovis2": flat(line(128), placeholders=Placeholders(151665), patch_size=14),
    "paligemma": flat(line(256), placeholders=Placeholders(256000), patch_size=14, start=1),
    "pi0": flat(line(256), placeholders=Placeholders(257152), patch_size=14),
    "perception_lm": flat(line(128), placeholders=Placeholders(128002, 128003)),
    "pp_chart2table": flat(line(64, 1e6), placeholders=Placeholders(151859), patch_size=16),
    "qianfan_ocr": flat(line(128), placeholders=Placeholders(151667), patch_size=14),
    "unlimited_ocr": flat(line(128), placeholders=Placeholders(128815)),
    "video_llava": flat(line(128), placeholders=Placeholders(32000, 32001), patch_size=14),
    "vipllava": flat(line(128), placeholders=Placeholders(32000), patch_size=14),
    "molmo2": flat(line(128), placeholders=Placeholders(151938), patch_size=14),
    "shieldgemma2": flat(
        line(256, 1e6), placeholders=Placeholders(262144), image_markers=(255999, 256000), patch_size=16
    ),
    "diffusion_gemma": flat(
        line(512, 1e6, scaling=PRoPE(0.25)),
        placeholders=Placeholders(258880),
        image_markers=(255999, 258882),
        patch_size=16,
        **encoder("gemma4_vision"),
    ),
    "embedding_gemma2": flat(line(512, 1e6), placeholders=Placeholders(258880, 258884), image_markers=(255999, 258882)),
    "gemma3n": flat(line(256, 1e6), placeholders=Placeholders(262145), image_markers=(255999, 262144)),
    "gemma4": flat(
        line(512, 1e6, scaling=PRoPE(0.25)),
        placeholders=Placeholders(258880, 258884),
        image_markers=(255999, 258882),
    ),
    "gemma4_unified": flat(
        line(512, 1e6, scaling=PRoPE(0.25)),
        placeholders=Placeholders(258880, 258884),
        image_markers=(255999, 258882),
    ),
    "lfm3_vl": flat(
        line(128, 1e6, scaling=PRoPE(0.5)),
        placeholders=Placeholders(125030, 125029),
        image_markers=(125009, 125010),
        patch_size=16,
        temporal_patch_size=2,
        spatial_merge_size=2,
        **encoder("lfm3_vl_vision"),
        frames_apart=True,
    ),
    "modernvbert": flat(line(64, 160000.0), placeholders=Placeholders(50407), patch_size=16),
    "ultravbert": flat(line(128, 2560000.0), placeholders=Placeholders(49191), patch_size=16),
    "step3p7": flat(line(128), placeholders=Placeholders(151679), patch_size=14, **encoder("step3p5_vision")),
    "aya_vision": flat(line(128, pairing="adjacent"), placeholders=Placeholders(255036), patch_size=14),
    "cohere2_vision": flat(line(128, pairing="adjacent"), placeholders=Placeholders(255036), patch_size=16),
    "exaone4_5": flat(line(128), placeholders=Placeholders(67, 68), **MERGED_14, **encoder("exaone4_5_vision")),
    "muse_glimmer": flat(
        line(128),
        placeholders=Placeholders(200092, 200091),
        patch_size=14,
        spatial_merge_size=2,
        frames_apart=True,
        **encoder("muse_glimmer_vision"),
    ),
    "muse_spark": flat(
        line(64, 5e5),
        placeholders=Placeholders(200092, 200091),
        patch_size=14,
        spatial_merge_size=2,
        frames_apart=True,
        **encoder("muse_spark_vision"),
    ),
    "llama4": flat(
        line(128, 5e5, pairing="adjacent"),
        placeholders=Placeholders(200092),
        patch_size=14,
        **encoder("llama4_vision_model"),
    ),
    "minimax_m3_vl": flat(
        line(128, 5e6),
        placeholders=Placeholders(200025, 200026),
        **MERGED_14,
        frames_apart=True,
        **encoder("minimax_m3_vl_vision"),
    ),
    "kimi_k25": flat(
        line(64, pairing="adjacent"),
        placeholders=Placeholders(163605, 163840),
        patch_size=14,
        spatial_merge_size=2,
        **encoder("kimi_k25_vision"),
    ),
    "minicpm_ocr": flat(line(256, rotary_dim=64), patch_size=16),
    "minicpmv4_6": flat(line(256, rotary_dim=64), patch_size=16),
    "minicpmv4_7": (
        MRopeCanvas(),
        QWEN35,
        {
            "placeholders": Placeholders(20, 21, crops=CropMarkers(22, 23, 24, 25, 26)),
            "spatial_merge_size": 4,
            "patch_size": 16,
        },
    ),
    "video_llama_3": flat(line(128), placeholders=Placeholders(151655, 151656), patch_size=16),
    "blip-2": flat(line(128), patch_size=14),
    "instructblip": flat(line(128), patch_size=14),
    "instructblipvideo": flat(line(128), patch_size=14),
    "idefics": flat(line(128), patch_size=14),
    "mllama": flat(line(128, 5e5), placeholders=Placeholders(128256), patch_size=14),
    "phi4_multimodal": flat(line(96), placeholders=Placeholders(200010), patch_size=14),
    "audioflamingo3": flat(line(128)),
    "musicflamingo": flat(line(128)),
    "fun_asr_nano": flat(line(128)),
    "glmasr": flat(line(128)),
    "granite_speech": flat(line(128)),
    "granite_speech_plus": flat(line(128)),
    "kyutai_speech_to_text": flat(line(64)),
    "moss_transcribe_diarize": flat(line(128, 1e6)),
    "qwen2_audio": flat(line(128)),
    "qwen3_asr": flat(line(128)),
    "vibevoice": flat(line(128)),
    "vibevoice_asr": flat(line(128)),
    "voxtral": flat(line(128, 1e8)),
    "voxtral_realtime": flat(line(128, 1e6)),
    "lfm3": flat(line(128, 1e6, scaling=PRoPE(0.5))),
    "cohere2": flat(line(128, pairing="adjacent")),
    "deepseek_v3": flat(line(64, pairing="adjacent")),
    "exaone4": flat(line(128)),
    "hyperclovax": flat(line(128)),
    "lfm2": flat(line(80, 1e6)),
    "mistral4": flat(line(64, pairing="adjacent", scaling=YaRN(128, 8192, mscale=1, mscale_all_dim=1))),
    "cohere": (Flatten(), line(128, 5e5, pairing="adjacent"), {}),
    "gemma": (Flatten(), line(256), {}),
    "gemma2": (Flatten(), line(256), {}),
    "glm4": (Flatten(), line(128, rotary_dim=64, pairing="adjacent"), {}),
    "gpt_oss": (Flatten(), line(64, 1.5e5, scaling=YaRN(32, 4096, truncate=False)), {}),
    "granite": (Flatten(), line(128), {}),
    "llama": (Flatten(), line(128), {}),
    "ministral3": (Flatten(), line(128, 1e6, scaling=YaRN(16, 16384, mscale=1, mscale_all_dim=1)), {}),
    "mistral": (Flatten(), line(128), {}),
    "mixtral": (Flatten(), line(128, 1e6), {}),
    "olmo2": (Flatten(), line(128), {}),
    "persimmon": (Flatten(), line(64, rotary_dim=32), {}),
    "phi3": (Flatten(), line(96), {}),
    "qwen2": (Flatten(), line(128), {}),
    "qwen2_moe": (Flatten(), line(128), {}),
    "qwen3": (Flatten(), line(128), {}),
    "qwen3_moe": (Flatten(), line(64), {}),
    "smollm3": (Flatten(), line(128, 2e6), {}),
    "starcoder2": (Flatten(), line(128), {}),
}
