"""Conformance: the ids, cos and sin of vision encoders, against the modules of Transformers."""

from __future__ import annotations

import importlib
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from tolerance import assert_within, cos_sin
from torch import Tensor

import mmpos.rotary
from mmpos import Grid, PositionTable, SegmentTable, place
from mmpos.rotary import Rotary
from mmpos.schemes import Grid2D


def transformers(module: str, name: str) -> Any:
    pytest.importorskip("transformers")
    return getattr(importlib.import_module(f"transformers.{module}"), name)


def encoder(thw: list[list[int]], scheme: Grid2D) -> PositionTable:
    """Grids before merging, each a document."""
    grids = [[Grid(height, width, frames=frames)] for frames, height, width in thw]
    return place(SegmentTable.from_documents(grids), scheme)


def same_rotation(config: Any, module: Any, positions: PositionTable, ids: Tensor) -> None:
    """The module's cos and sin at its ids are ours at our table."""
    rotary = Rotary.from_hf_config(config, precision="hf")
    ours = mmpos.rotary.cos_sin(rotary, positions, layout="transformers")
    for mine, theirs in zip(ours, module(torch.zeros(1), ids), strict=True):
        assert_within(mine.reshape(theirs.shape), theirs, cos_sin())  # of the same float32 angles


QWEN = {
    "qwen2_vl": ("Qwen2VLVisionConfig", "Qwen2VLVisionRotaryEmbedding"),
    "qwen2_5_vl": ("Qwen2_5_VLVisionConfig", "Qwen2_5_VLVisionRotaryEmbedding"),
    "qwen3_vl": ("Qwen3VLVisionConfig", "Qwen3VLVisionRotaryEmbedding"),
}


@pytest.mark.usefixtures("way")
def test_merged_order_is_that_of_transformers_vision_position_ids() -> None:
    theirs = transformers("vision_utils", "get_vision_position_ids")
    random = Random(0)
    for merge in (1, 2, 3) * 20:
        sides = [[random.randint(1, 3), random.randint(1, 5) * merge, random.randint(1, 5) * merge] for _ in range(3)]
        ours = encoder(sides, Grid2D(order="merged", spatial_merge_size=merge))
        np.testing.assert_array_equal(ours.dense().T, theirs(torch.tensor(sides), merge))


@pytest.mark.parametrize("model", QWEN)
def test_qwen_encoders_turn_by_merged_ids_with_an_axial_allocation(model: str) -> None:
    config = transformers(f"models.{model}.configuration_{model}", QWEN[model][0])()
    assert Rotary.from_hf_config(config).allocation == "axial"
    module = transformers(f"models.{model}.modeling_{model}", QWEN[model][1])(config)
    sides = [[1, 6, 10], [3, 4, 2]]
    positions = encoder(sides, Grid2D(order="merged", spatial_merge_size=2))
    ids = transformers("vision_utils", "get_vision_position_ids")(torch.tensor(sides), 2)
    same_rotation(config, module, positions, ids)


@pytest.mark.usefixtures("way")
def test_windows_of_qwen2_5_are_ranges_that_take_can_take() -> None:
    windows = transformers("vision_utils", "get_vision_window_index")
    sides, merge = [[1, 14, 10], [2, 4, 18]], 2
    positions = encoder(sides, Grid2D(order="merged", spatial_merge_size=merge))
    index, cu_seqlens = windows(torch.tensor(sides), merge, 112, 14)
    block = merge**2
    order = index.numpy()[:, None] * block + np.arange(block)
    taken = positions.take(order[:, 0], order[:, -1] + 1)  # a range of four tokens for every merged patch
    assert index.tolist() != sorted(index.tolist())
    np.testing.assert_array_equal(taken.dense(), positions.dense()[:, order.ravel()])
    first = taken.slice(0, int(cu_seqlens[1])).dense()
    assert first.max(axis=1).tolist() == [7, 7]  # 112 pixels are a window of 8×8 patches


def test_pixtral_turns_by_raster_ids_with_its_own_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers("models.pixtral.configuration_pixtral", "PixtralVisionConfig")(
        hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=96, patch_size=16
    )
    model = transformers("models.pixtral.modeling_pixtral", "PixtralVisionModel")(config).eval()
    module = model.patch_positional_embedding
    seen: list[Tensor] = []
    module.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[1]))
    sizes = [(32, 80), (96, 16)]
    with torch.no_grad():
        model(torch.zeros(2, 3, 96, 96), image_sizes=torch.tensor(sizes))
    positions = encoder([[1, height // 16, width // 16] for height, width in sizes], Grid2D())
    np.testing.assert_array_equal(positions.dense().T, seen[0])
    assert Rotary.from_hf_config(config).allocation == "pixtral"
    same_rotation(config, module, positions, seen[0])
