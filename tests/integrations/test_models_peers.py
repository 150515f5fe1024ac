"""Ids and rotations of model settings equal those of Transformers."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from layouts import padded
from model_configs import LAYER_TYPES, TEXT, config_of, settings_of
from rope_batches import classes, method_of, modeling
from tolerance import EXACT, assert_within, cos_sin, rotations

import mmpos
import mmpos.rotary
from mmpos.integrations.models import MODEL_TYPES, ModelSettings
from mmpos.rotary import apply_rotary

MROPE = [name for name, row in MODEL_TYPES.items() if row.scheme.startswith("mrope")]
WITH_VIDEOS = [name for name in MROPE if name not in ("glm_image", "minicpmv4_7")]
LAYOUTS: list[list[list[Any]]] = [
    [[3, (1, 4, 6), 2, (1, 2, 2), 4], [(1, 6, 4), 7]],
    [[2, (2, 4, 4), 3, (1, 4, 8), 1, (4, 2, 6), 5], [4, (1, 8, 2)], [6]],
    [[1, (6, 2, 2), 1, (2, 6, 4)], [(2, 2, 4), 2, (1, 2, 2), 1, (4, 4, 4), 3]],
]
"""Batches of documents: text lengths, and (frames, height, width) before merging; a single frame is an image."""


def rotation_of(module: object) -> Any:
    """Return the language model's rotary embedding class."""
    names = {kind.__name__: kind for kind in classes(module) if kind.__name__.endswith("RotaryEmbedding")}
    (rotation,) = (kind for name, kind in names.items() if "Vision" not in name)
    return rotation


def tokens_of(settings: ModelSettings, documents: list[list[Any]]) -> tuple[list[list[int]], list[Any], list[Any]]:
    """Return rows of token ids as the model's processor writes them, the image grids, and the video grids."""
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
                row += [settings.placeholders.image or 0] * patches
                continue
            videos.append(part)
            begin, end = settings.video_markers or (TEXT, TEXT)
            token = settings.placeholders.image if settings.video_markers else settings.placeholders.video
            frame = [token or 0] * patches
            if settings.frames_apart:
                row += [begin, *[*frame, TEXT] * frames, end]
            else:
                row += frame * (frames // settings.temporal_merge_size)
        rows.append(row)
    return rows, images, videos


def kinds_of(settings: ModelSettings, rows: list[list[int]]) -> Any:
    """Return Transformers' mm_token_type_ids."""
    if settings.video_markers is None:
        return [
            [(t == settings.placeholders.image) + 2 * (t == settings.placeholders.video) for t in row] for row in rows
        ]
    begin, end = settings.video_markers
    tokens = SimpleNamespace(image_token_id=settings.placeholders.image, video_start_id=begin, video_end_id=end)
    processor = importlib.import_module("transformers.models.glm4v.processing_glm4v").Glm4vProcessor
    return processor.create_mm_token_type_ids(tokens, rows)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model", WITH_VIDEOS)
def test_ids_equal_those_of_get_rope_index(model: str, side: str) -> None:
    config = config_of(model)
    settings = settings_of(model)
    method = method_of(model, config)
    for documents in LAYOUTS:
        rows, images, videos = tokens_of(settings, documents)
        ids, mask = padded(rows, side), padded([[1] * len(row) for row in rows], side)
        grids = [torch.tensor(grid) if grid else None for grid in (images, videos)]
        theirs, delta = method(ids, padded(kinds_of(settings, rows), side), *grids, attention_mask=mask)
        segments = settings.segments(ids, *grids, attention_mask=mask, seconds_per_frame=[1] * len(videos))
        ours = settings.place(segments)
        np.testing.assert_array_equal(ours.dense().reshape(theirs.shape), theirs * mask)
        assert ours.next_positions.tolist() == [len(row) + int(d) for row, d in zip(rows, delta, strict=True)]


@pytest.mark.parametrize("model", [name for name in MROPE if name not in ("glm46v", "glmga", "cosmos3_omni")])
def test_rotations_equal_those_of_the_language_model(model: str) -> None:
    settings, text = settings_of(model), config_of(model).text_config
    positions = settings.place(
        mmpos.SegmentTable.from_documents([[mmpos.Text(3), mmpos.Grid(2, 5), mmpos.Text(40), mmpos.Grid(4, 3)]])
    )
    module = modeling({"minicpmv4_7": "qwen3_5"}.get(model, model))
    ids = torch.from_numpy(positions.dense(dtype="int64"))[:, None]
    options = {"layer_type": LAYER_TYPES[model]} if model in LAYER_TYPES else {}
    cos, sin = rotation_of(module)(text)(torch.zeros(1), ids, **options)
    rotary = replace(settings.rotary, precision="hf")
    q = torch.randn(1, 2, positions.num_tokens, rotary.head_dim, generator=torch.Generator().manual_seed(0))
    ours, _ = apply_rotary(q, None, positions, rotary, layout="bhsd")
    assert ours is not None
    rotated = q[..., : rotary.rotary_dim]
    theirs = module.apply_rotary_pos_emb(rotated, rotated, cos, sin)[0]
    assert_within(ours[..., : rotary.rotary_dim], theirs, rotations(theirs, cos_sin()))  # from the same float32 angles
    assert torch.equal(ours[..., rotary.rotary_dim :], q[..., rotary.rotary_dim :])


XD_SEGMENTS = mmpos.SegmentTable.from_documents(
    [[mmpos.Text(3), mmpos.Grid(2, 5, row_separator=True), mmpos.Text(40), mmpos.Grid(4, 3, row_separator=True)]]
)


def test_the_two_channels_of_a_hunyuan_vl_pair_have_different_axes() -> None:
    settings, text, module = settings_of("hunyuan_vl"), config_of("hunyuan_vl").text_config, modeling("hunyuan_vl")
    positions = settings.place(XD_SEGMENTS)
    cos, sin = module.HunYuanVLRotaryEmbedding(text)(torch.zeros(1), torch.from_numpy(positions.dense())[:, None])
    assert settings.second_rotary is not None
    q = torch.randn(1, 2, positions.num_tokens, 128, generator=torch.Generator().manual_seed(0))
    ours = torch.empty_like(q)
    for channels, rotary in ((slice(64), settings.rotary), (slice(64, None), settings.second_rotary)):
        rotated, _ = apply_rotary(q, None, positions, replace(rotary, precision="hf"), layout="bhsd")
        assert rotated is not None
        ours[..., channels] = rotated[..., channels]
    theirs = module.apply_rotary_pos_emb(q, q, cos, sin)[0]
    assert_within(ours, theirs, rotations(theirs, cos_sin()))


def test_serving_engines_rotate_both_channels_of_a_hunyuan_vl_pair_by_one_axis() -> None:
    settings = settings_of("hunyuan_vl", engine="serving")
    assert settings.second_rotary is None
    positions = settings.place(XD_SEGMENTS)
    base = 10000.0 * 1000.0 ** (128 / 126)
    angles = [[int(ids[j // 16]) * base ** (-j / 64) for j in range(64)] for ids in positions.dense().T]
    cos, sin = mmpos.rotary.cos_sin(settings.rotary, positions)
    assert_within((cos[0], sin[0]), (np.cos(angles), np.sin(angles)), EXACT)
