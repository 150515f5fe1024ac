"""Ids equal those of peers, stored in golden files, for prompts from the peers' own tests and similar prompts.

Multimodal-RoPEs, by the authors of arXiv 2510.23095, at cd413b9e: tests/test_rope_golden_hf4571.py, for the designs
    that mmpos supports.
vLLM 0.33: the tests of PaddleOCR-VL's get_mrope_input_positions.
SGLang 0.5.23: TestMropePositionsFastPath, which extends and decodes text.
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

from mmpos import Grid, Placeholders, SegmentTable, Text, place
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


def test_text_steps_have_the_ids_of_sglang() -> None:
    """Extended tokens continue after the prefix, and a decoded token has id length − 1 on every axis."""
    prefixes, extended = [0, 100, 3], [5, 2048, 1]
    lengths = [prefix + more for prefix, more in zip(prefixes, extended, strict=True)]
    positions = place(SegmentTable.from_documents([[Text(n)] for n in lengths]), "mrope")
    ids = positions.window(range(3), prefixes, extended).dense()
    want = [token for start, stop in zip(prefixes, lengths, strict=True) for token in range(start, stop)]
    assert ids.tolist() == [want] * 3
    prompts = place(SegmentTable.from_documents([[Text(1)], [Text(5)], [Text(4000)]]), "mrope")
    decoded = prompts.window(range(3), [0, 16, 4095], [1, 1, 1])
    assert decoded.dense().tolist() == [[0, 16, 4095]] * 3


def test_windows_can_cross_a_grid_and_the_end_of_the_prompt() -> None:
    """Prefixes may end inside the image; tokens after the prompt are shifted by the prompt's delta."""
    positions = place(SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)]]), "mrope")
    whole, delta = positions.dense(), int(positions.deltas[0])
    for prefix in range(14):
        got = positions.window([0], [prefix], [5]).dense().tolist()
        after = [list(range(max(prefix, 11) + delta, max(prefix + 5, 11) + delta))] * 3
        assert got == [a + b for a, b in zip(whole[:, prefix : prefix + 5].tolist(), after, strict=True)]
