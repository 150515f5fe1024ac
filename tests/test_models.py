"""Settings from configs: whole values for every model type, and the code of Transformers beside them."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel
from transformers.vision_utils import get_vision_position_ids

import mmpos
from mmpos.models import MODEL_TYPES, TEXT_TYPES, UNSUPPORTED_TYPES, ModelSettings
from mmpos.models.known import ENCODER_ORDERS
from mmpos.rotary import DynamicNTK, Rotary, YaRN, apply_rotary
from mmpos.schemes import Flatten, Grid2D, MRope, MRopeQwen3, MRopeQwen25, MRopeTransformers, RopeTieV2

HF = 2e-6
"""Float32 products of numbers below 5 in another order; cos and sin of the same float32 angles."""

GLM_TEXT = {"head_dim": 128, "partial_rotary_factor": 0.5}
"""What the released checkpoints say, and the defaults of the class do not."""
ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "glm4v": {"text_config": GLM_TEXT},
    "glm46v": {"text_config": {"model_type": "glm4v_text", **GLM_TEXT}},
    "glm4v_moe": {"text_config": GLM_TEXT},
}
LAYER_TYPES = {"gemma3": "full_attention", "gemma3_text": "sliding_attention"}
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
    return HUNYUAN if model == "hunyuan_image_3_moe" else CONFIG_MAPPING[model](**ARGUMENTS.get(model, {}))


def settings_of(model: str, **options: Any) -> ModelSettings:
    return mmpos.from_hf_config(config_of(model), layer_type=LAYER_TYPES.get(model), **options)


# Whole settings.

QWEN2 = Rotary(128, theta=1e6, allocation="sections", mrope_section=(16, 24, 24))
QWEN3 = Rotary(128, theta=5e5, allocation="mrope-interleaved")
QWEN35 = Rotary(256, rotary_dim=64, allocation="mrope-interleaved", mrope_section=(11, 11, 10))
GLM = Rotary(128, rotary_dim=64, allocation="sections", mrope_section=(8, 12, 12))
ERNIE = Rotary(128, theta=5e5, axes=3, allocation=[1, 2] * 22 + [0] * 20, pairing="adjacent")


def merged(head_dim: int) -> dict[str, Any]:
    return {"vision_scheme": Grid2D("merged", 2), "vision_rotary": Rotary(head_dim, allocation="axial")}


def raster(head_dim: int, allocation: str) -> dict[str, Any]:
    return {"vision_scheme": Grid2D(), "vision_rotary": Rotary(head_dim, allocation=allocation)}


QWEN_IDS: dict[str, Any] = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "image_markers": (151652, 151653),
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
APART_16 = {**QWEN_IDS, **merged(72), "patch_size": 16, "frames_apart": True}
QWEN35_IDS = {"image_token_id": 248056, "video_token_id": 248057, "image_markers": (248053, 248054)}
GLM_FIELDS = {
    "image_token_id": 151343,
    "video_token_id": 151344,
    "image_markers": (151339, 151340),
    "video_markers": (151341, 151342),
    "spatial_merge_size": 2,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "frames_apart": True,
    **merged(128),
}
GLM_MOE = {"image_token_id": 151363, "video_token_id": 151364}
GLM_OCR = {"image_token_id": 59280, "video_token_id": 59281, "image_markers": (59256, 59257)}


def line(head_dim: int, theta: float = 1e4, **arguments: Any) -> Rotary:
    return Rotary(head_dim, theta=theta, axes=1, **arguments)


EXPECTED: dict[str, tuple[Any, Rotary, dict[str, Any]]] = {
    "qwen2_vl": (MRopeTransformers(), QWEN2, {**QWEN_IDS, **merged(80), "patch_size": 14}),
    "qwen2_5_vl": (MRopeTransformers(4), QWEN2, {**QWEN_IDS, **merged(224), "patch_size": 14}),
    "qwen3_vl": (MRopeQwen3(), QWEN3, APART_16),
    "qwen3_vl_moe": (MRopeQwen3(), QWEN3, APART_16),
    "qwen3_5": (MRopeQwen3(), QWEN35, {**APART_16, **QWEN35_IDS}),
    "qwen3_5_moe": (MRopeQwen3(), QWEN35, {**APART_16, **QWEN35_IDS}),
    "glm4v": (MRopeQwen3(), replace(GLM, pairing="adjacent"), GLM_FIELDS),
    "glm46v": (MRopeQwen3(), replace(GLM, pairing="adjacent"), {**GLM_FIELDS, "video_markers": (151361, 151362)}),
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
            "image_token_id": 100295,
            "video_token_id": 103367,
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
            "image_token_id": 100295,
            "video_token_id": 100296,
            "image_markers": (101305, 101306),
            "spatial_merge_size": 2,
            "patch_size": 14,
            **raster(72, "axial"),
        },
    ),
    "hunyuan_image_3_moe": (RopeTieV2(rounding="floor"), Rotary(128), {"image_token_id": 128006}),
    "mistral3": (
        Flatten(),
        line(128, 1e9),
        {"image_token_id": 10, "spatial_merge_size": 2, "patch_size": 14, **raster(64, "pixtral")},
    ),
    "lighton_ocr": (
        Flatten(),
        line(128, 1e6),
        {"image_token_id": 151655, "spatial_merge_size": 2, "patch_size": 14, **raster(64, "pixtral")},
    ),
    "llava": (Flatten(), line(128), {"image_token_id": 32000, "patch_size": 14}),
    "llava_next": (Flatten(), line(128), {"image_token_id": 32000, "patch_size": 14}),
    "llava_onevision": (
        Flatten(),
        line(128),
        {"image_token_id": 151646, "video_token_id": 151647, "patch_size": 14},
    ),
    "internvl": (Flatten(), line(128), {"image_token_id": 151667, "patch_size": 14}),
    "idefics2": (Flatten(), line(128), {"image_token_id": 32001, "patch_size": 32}),
    "idefics3": (Flatten(), line(128), {"image_token_id": 128257, "patch_size": 32}),
    "smolvlm": (Flatten(), line(128), {"image_token_id": 128257, "patch_size": 32}),
    "deepseek_vl": (Flatten(), line(128), {"image_token_id": 100015, "patch_size": 16}),
    "janus": (Flatten(), line(128), {"image_token_id": 100581, "patch_size": 16}),
    "emu3": (Flatten(), line(128, 1e6), {}),
    "fuyu": (Flatten(), line(64, rotary_dim=32), {"image_token_id": 71011}),
    "gemma3": (
        Flatten(),
        line(256, 1e6),
        {"image_token_id": 262144, "image_markers": (255999, 256000), "patch_size": 16},
    ),
    "gemma3_text": (Flatten(), line(256, 1e4), {}),
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


@pytest.mark.parametrize("model", MODEL_TYPES)
def test_a_config_and_its_mapping_give_these_settings(model: str) -> None:
    scheme, rotary, rest = EXPECTED[model]
    expected = ModelSettings(model, scheme, rotary, **rest)
    assert settings_of(model) == expected
    config = config_of(model)
    told = config if isinstance(config, dict) else json.loads(config.to_json_string(use_diff=False))
    assert mmpos.from_hf_config(told, layer_type=LAYER_TYPES.get(model)) == expected


def test_every_model_type_has_a_case_here() -> None:
    assert EXPECTED.keys() == MODEL_TYPES.keys()


@pytest.mark.parametrize(
    ("model", "scheme"),
    [
        ("qwen2_vl", MRope()),
        ("qwen2_5_vl", MRopeQwen25(4)),
        ("qwen3_vl", MRopeQwen3()),
        ("ernie4_5_vl_moe", MRope()),
        ("paddleocr_vl", MRope()),
        ("hunyuan_image_3_moe", RopeTieV2(rounding="floor")),
        ("llava", Flatten()),
    ],
)
def test_serving_engines_have_schemes_of_their_own_for_videos_alone(model: str, scheme: Any) -> None:
    assert settings_of(model, engine="serving") == replace(settings_of(model), scheme=scheme)


# The code of Transformers.

MROPE = [name for name, (scheme, _, _) in EXPECTED.items() if scheme.axes == 3]
TEXT, BEGIN, END = 5, -1, -2
LAYOUTS = [
    [[3, (1, 4, 6), 2, (1, 2, 2), 4], [(1, 6, 4), 7]],
    [[2, (2, 4, 4), 3, (1, 4, 8), 1, (4, 2, 6), 5], [4, (1, 8, 2)], [6]],
    [[1, (6, 2, 2), 1, (2, 6, 4)], [(2, 2, 4), 2, (1, 2, 2), 1, (4, 4, 4), 3]],
]
"""Batches of documents of text lengths and (frames, height, width) before merging; one frame is an image."""


def modeling(model: str) -> Any:
    return importlib.import_module(f"transformers.models.{model}.modeling_{model}")


def classes(module: Any) -> list[Any]:
    """Those of a module itself."""
    return [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]


def rotation_of(module: Any, vision: bool) -> Any:
    """The rotary embedding of the language model, or of the encoder."""
    names = {value.__name__: value for value in classes(module) if value.__name__.endswith("RotaryEmbedding")}
    (found,) = (value for name, value in names.items() if ("Vision" in name) == vision)
    return found


def tokens_of(settings: ModelSettings, documents: list[list[Any]]) -> tuple[list[list[int]], list[Any], list[Any]]:
    """Rows of token ids as the processor of the model makes them, and grids of images and videos."""
    rows: list[list[int]] = []
    images: list[Any] = []
    videos: list[Any] = []
    for document in documents:
        row: list[int] = []
        for part in document:
            if isinstance(part, int):
                row += [TEXT] * part
                continue
            frames, height, width = part
            patches = height * width // settings.spatial_merge_size**2
            if frames == 1:
                images.append(part)
                row += [settings.image_token_id or 0] * patches
                continue
            videos.append(part)
            begin, end = settings.video_markers or (TEXT, TEXT)
            token = settings.image_token_id if settings.video_markers else settings.video_token_id
            frame = [token or 0] * patches
            if settings.frames_apart:
                row += [begin, *((frame + [TEXT]) * frames), end]
            else:
                row += frame * (frames // settings.temporal_merge_size)
        rows.append(row)
    return rows, images, videos


def kinds_of(settings: ModelSettings, rows: list[list[int]]) -> Any:
    """Transformers' mm_token_type_ids."""
    if settings.video_markers is None:
        return [[(t == settings.image_token_id) + 2 * (t == settings.video_token_id) for t in row] for row in rows]
    begin, end = settings.video_markers
    told = SimpleNamespace(image_token_id=settings.image_token_id, video_start_id=begin, video_end_id=end)
    processor = importlib.import_module("transformers.models.glm4v.processing_glm4v").Glm4vProcessor
    return processor.create_mm_token_type_ids(told, rows)


def padded(rows: list[list[int]], side: str, value: int = 0) -> Any:
    width = max(map(len, rows))
    pads = [[value] * (width - len(row)) for row in rows]
    return torch.tensor([pad + row if side == "left" else row + pad for row, pad in zip(rows, pads, strict=True)])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model", MROPE)
def test_ids_are_those_of_get_rope_index(model: str, side: str) -> None:
    config = config_of(model)
    settings = settings_of(model)
    (kind,) = (value for value in classes(modeling(model)) if "get_rope_index" in vars(value))
    told: Any = SimpleNamespace(config=config)
    told.get_vision_position_ids = kind.get_vision_position_ids.__get__(told)
    for documents in LAYOUTS:
        rows, images, videos = tokens_of(settings, documents)
        ids, mask = padded(rows, side), padded([[1] * len(row) for row in rows], side)
        grids = [torch.tensor(grid) if grid else None for grid in (images, videos)]
        theirs, delta = kind.get_rope_index(
            told, ids, padded(kinds_of(settings, rows), side), *grids, attention_mask=mask
        )
        segments = settings.segments(ids, *grids, attention_mask=mask)
        ours = settings.place(segments)
        np.testing.assert_array_equal(ours.dense().reshape(theirs.shape), theirs * mask)
        assert ours.next_positions.tolist() == [len(row) + int(d) for row, d in zip(rows, delta, strict=True)]


def turned(settings_rotary: Rotary, positions: Any, module: Any, cos: Any, sin: Any, apply: str) -> None:
    """Compare q as ours and theirs turn it; channels that do not turn must stay."""
    rotary = replace(settings_rotary, precision="hf")
    q = torch.randn(1, 2, positions.num_tokens, rotary.head_dim, generator=torch.Generator().manual_seed(0))
    ours, _ = apply_rotary(q, None, positions, rotary, layout="bhsd")
    assert ours is not None
    turn = q[..., : rotary.rotary_dim]
    if apply == "apply_rotary_pos_emb_vision":
        theirs = getattr(module, apply)(*[turn[0].transpose(0, 1)] * 2, cos, sin)[0].transpose(0, 1)[None]
    else:
        theirs = getattr(module, apply)(turn, turn, cos, sin)[0]
    torch.testing.assert_close(ours[..., : rotary.rotary_dim], theirs, rtol=0, atol=HF)
    assert torch.equal(ours[..., rotary.rotary_dim :], q[..., rotary.rotary_dim :])


@pytest.mark.parametrize("model", [name for name in MROPE if name != "glm46v"])
def test_rotations_are_those_of_the_language_model(model: str) -> None:
    settings, text = settings_of(model), config_of(model).text_config
    positions = settings.place(
        mmpos.SegmentTable.from_documents([[mmpos.Text(3), mmpos.Grid(2, 5), mmpos.Text(40), mmpos.Grid(4, 3)]])
    )
    module = modeling(model)
    ids = torch.from_numpy(positions.dense(dtype="int64"))[:, None]
    cos, sin = rotation_of(module, vision=False)(text)(torch.zeros(1), ids)
    turned(settings.rotary, positions, module, cos, sin, "apply_rotary_pos_emb")


@pytest.mark.parametrize("model", ENCODER_ORDERS.keys() - {"pixtral"})
def test_positions_and_rotations_are_those_of_the_encoder(model: str) -> None:
    settings, vision, module = settings_of(model), config_of(model).vision_config, modeling(model)
    assert settings.vision_scheme is not None
    assert settings.vision_rotary is not None
    grids = [(1, 4, 6), (2, 2, 8)]
    documents = [[mmpos.Grid.from_thw(grid)] for grid in grids]
    positions = mmpos.place(mmpos.SegmentTable.from_documents(documents), settings.vision_scheme)
    side = 1 if model == "paddleocr_vl" else vision.spatial_merge_size
    theirs = get_vision_position_ids(torch.tensor(grids), side)
    np.testing.assert_array_equal(positions.dense().T, theirs)
    cos, sin = rotation_of(module, vision=True)(vision)(torch.zeros(1), theirs)
    turned(settings.vision_rotary, positions, module, cos, sin, "apply_rotary_pos_emb_vision")


def test_positions_and_rotations_are_those_of_pixtral() -> None:
    settings, module = settings_of("mistral3"), modeling("pixtral")
    vision = config_of("mistral3").vision_config
    assert settings.vision_scheme is not None
    assert settings.vision_rotary is not None
    width = vision.image_size // vision.patch_size
    documents = [[mmpos.Grid(3, 5)], [mmpos.Grid(4, 2)]]
    positions = mmpos.place(mmpos.SegmentTable.from_documents(documents), settings.vision_scheme)
    ids = module.position_ids_in_meshgrid([torch.zeros(1, 3, 5), torch.zeros(1, 4, 2)], width)
    row, col = positions.dense()
    np.testing.assert_array_equal(row * width + col, ids)
    cos, sin = module.PixtralRotaryEmbedding(vision)(torch.zeros(1), ids)
    turned(settings.vision_rotary, positions, module, cos[None], sin[None], "apply_rotary_pos_emb")


def text_config(model: str) -> Any:
    return CONFIG_MAPPING["emu3"]().text_config if model == "emu3" else CONFIG_MAPPING[model]()


@pytest.mark.parametrize("model", sorted(TEXT_TYPES - {"gemma3"}))
def test_rotations_are_those_of_every_text_model(model: str) -> None:
    told = text_config(model)
    settings = mmpos.from_hf_config({"model_type": "emu3", "text_config": told} if model == "emu3" else told)
    ids = torch.tensor([[TEXT] * 9])
    positions = settings.place(settings.segments(ids))
    assert positions.dense().tolist() == [list(range(9))]
    module = modeling(model)
    cos, sin = rotation_of(module, vision=False)(told)(torch.zeros(1), torch.arange(9)[None])
    turned(settings.rotary, positions, module, cos, sin, "apply_rotary_pos_emb")


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
def test_gemma3_turns_by_the_type_of_layer(layer_type: str) -> None:
    told, module = CONFIG_MAPPING["gemma3_text"](), modeling("gemma3")
    settings = mmpos.from_hf_config(told, layer_type=layer_type)
    positions = settings.place(settings.segments([[TEXT] * 9]))
    cos, sin = module.Gemma3RotaryEmbedding(told)(torch.zeros(1), torch.arange(9)[None], layer_type)
    turned(settings.rotary, positions, module, cos, sin, "apply_rotary_pos_emb")
