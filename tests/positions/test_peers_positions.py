"""Ids equal those of peers, stored in golden files, for prompts from the peers' own tests and similar prompts.

Multimodal-RoPEs, by the authors of arXiv 2510.23095, at cd413b9e: tests/test_rope_golden_hf4571.py, for the designs
    that mmpos supports.
vLLM 0.33: the tests of PaddleOCR-VL's get_mrope_input_positions.
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import exact

from mmpos import Placeholders, SegmentTable, place
from mmpos.integrations.vllm import mrope_input_positions
from mmpos.schemes import V2PE

GOLDEN = Path(__file__).parents[1] / "golden"
DESIGNS, PADDLE = (
    json.loads((GOLDEN / name).read_text())["cases"] for name in ("multimodal_ropes.json", "paddleocr_vl.json")
)


@pytest.mark.parametrize("case", DESIGNS, ids=[f"{case['design']} {i}" for i, case in enumerate(DESIGNS)])
def test_ids_equal_those_of_the_designs_in_multimodal_ropes(case: dict[str, Any]) -> None:
    scheme = case["scheme"] if isinstance(case["scheme"], str) else V2PE(case["scheme"][1])
    grids = (case["image_grid_thw"], case["video_grid_thw"])
    merge = case["spatial_merge_size"]
    segments = SegmentTable.from_input_ids(
        case["input_ids"], Placeholders(55, 56), *grids, spatial_merge_size=merge, frames_apart=True
    )
    positions = place(segments, scheme)
    assert exact(positions) == list(zip(*[map(Fraction, axis) for axis in case["position_ids"]], strict=True))
    assert positions.deltas.tolist() == [int(case["delta"])]


@pytest.mark.parametrize("case", PADDLE, ids=range(len(PADDLE)))
def test_paddleocr_prompts_have_the_ids_of_vllm(case: dict[str, Any]) -> None:
    features = [
        SimpleNamespace(
            modality="image",
            data={"image_grid_thw": SimpleNamespace(data=torch.tensor([1, 2 * height, 2 * width]))},
            mm_position=SimpleNamespace(offset=offset, length=height * width, is_embed=None),
        )
        for offset, (height, width) in zip(case["offsets"], case["grids"], strict=True)
    ]
    ids, delta = mrope_input_positions(case["input_ids"], features, scheme="mrope", spatial_merge_size=2)
    assert ids.tolist() == case["position_ids"]
    assert delta == int(ids.max()) + 1 - len(case["input_ids"])
