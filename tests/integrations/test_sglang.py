"""Test the positions that a processor returns to SGLang, and one of SGLang's kernels, if SGLang 0.5.23 is installed."""

import os
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from refusals import assert_refused

import mmpos
import mmpos.rotary
from mmpos import Grid, Placeholders, SegmentTable, Text
from mmpos.integrations.sglang import item_segments, mrope_positions
from mmpos.rotary import Rotary, apply_rotary

PROMPT: list[Text | Grid] = [Text(3), Grid(2, 3), Text(2), Grid(4, 1), Text(1)]
LENGTH = 16
PLACED = mmpos.place(SegmentTable.from_documents([PROMPT]))


def test_a_prompt_has_three_rows_of_ids_and_a_delta_of_shape_1_1() -> None:
    prompt, delta = mrope_positions(PLACED)
    assert (prompt.shape, prompt.dtype, delta.shape, delta.dtype) == ((3, LENGTH), torch.int64, (1, 1), torch.int64)
    assert np.array_equal(prompt, PLACED.dense()[[0, 0, 1]])
    assert delta.tolist() == [[10]]


def item(*offsets: tuple[int, int], **grids: object) -> SimpleNamespace:
    return SimpleNamespace(offsets=list(offsets) or None, **grids)


def test_segments_from_items_equal_those_from_input_ids() -> None:
    image, second = [1, 4, 6], [1, 8, 2]
    ids = [5, 5, 5, *[9] * 6, 5, *[9] * 4, 5, *[8] * 2, 5, *[8] * 2, 5]
    items = [
        item((10, 13), image_grid_thw=torch.tensor([second])),  # in any order
        item((15, 16), (18, 19), video_grid_thw=np.array([[2, 2, 4]])),
        item((3, 8), image_grid_thw=image, video_grid_thw=None),
    ]
    got = item_segments(len(ids), items, spatial_merge_size=2)
    want = SegmentTable.from_input_ids(
        ids, Placeholders(image=9, video=8), [image, second], [[2, 2, 4]], spatial_merge_size=2, frames_apart=True
    )
    assert np.array_equal(got.kind, want.kind)
    assert np.array_equal(got.extents, want.extents)


def test_items_of_several_grids_and_whole_videos_are_supported() -> None:
    got = item_segments(16, [item((1, 4), (6, 7), image_grid_thw=[[1, 2, 2], [1, 1, 2]])])
    assert got.extents.T.tolist() == [[1, 1, 1], [1, 2, 2], [1, 1, 1], [1, 1, 2], [1, 1, 8]]
    videos = item((0, 7), (9, 16), video_grid_thw=[[2, 2, 2], [2, 2, 2]], second_per_grid_ts=torch.tensor([0.5, 2]))
    got = item_segments(19, [item((18, 18), image_grid_thw=[1, 1, 1]), videos])
    assert got.extents.T.tolist() == [[2, 2, 2], [1, 1, 1], [2, 2, 2], [1, 1, 1], [1, 1, 1]]
    assert got.seconds_per_frame is not None
    assert got.seconds_per_frame.T.tolist() == [[1, 2], [0, 1], [2, 1], [0, 1], [0, 1]]
    got = item_segments(9, [item((0, 7), video_grid_thw=[[2, 2, 2]])])
    assert got.extents.T.tolist() == [[2, 2, 2], [1, 1, 1]]
    both = SimpleNamespace(offsets=torch.tensor([[0, 1], [3, 4]]), image_grid_thw=torch.tensor([[1, 1, 2], [1, 1, 2]]))
    assert item_segments(5, [both]).extents.T.tolist() == [[1, 1, 2], [1, 1, 1], [1, 1, 2]]
    assert item_segments(4, []).extents.T.tolist() == [[1, 1, 4]]


TWICE = [item((0, 3), image_grid_thw=[1, 2, 2]), item((4, 5), image_grid_thw=[[1, 1, 2], [1, 1, 2]])]
TIMES = {"video_grid_thw": [2, 1, 2], "second_per_grid_ts": [1.0, 2.0]}
PROMPTS: dict[str, Any] = {
    "positions: got last ids [10, 10, 11], want a prompt that ends with text, with last id 13: SGLang resumes":
        mmpos.place(SegmentTable.from_documents([PROMPT[:2]])),
    "positions: got no tokens, want a prompt that ends": PLACED.slice(0, 0),
    "positions: got ndarray, want a PositionTable": PLACED.dense(),
    "positions: got 2 documents, want 1": mmpos.place(SegmentTable.from_documents([PROMPT, PROMPT])),
    "positions: got 4 axes, want at most 3": mmpos.place(SegmentTable.from_documents([PROMPT]), "xd-rope"),
    "positions: got padding, want none": PLACED.pad(20),
}  # fmt: skip
ITEMS: dict[str, Any] = {
    "mm_items[0]: got neither image_grid_thw nor video_grid_thw": [item((0, 3))],
    "mm_items: got None, want a sequence of items": None,
    "mm_items[0].offsets: got 0 pairs, want 1": [item(image_grid_thw=[1, 2, 2])],
    "mm_items[0].second_per_grid_ts: got 2 values, want 1, one per grid": [item((0, 3), **TIMES)],
    "mm_items[1].offsets: got 1 pairs, want 2, one per grid": TWICE,
    "offsets: got 4 placeholders from 0 to 3, want 6 for 1x2x3 after": [item((0, 3), image_grid_thw=[1, 2, 3])],
    "mm_items[0].grid_thw: got dtype float64": [item((0, 3), image_grid_thw=[1, 2.0, 2])],
    "mm_items[0].grid_thw: got Tensor on meta": [item((0, 3), image_grid_thw=torch.ones(1, 3, device="meta"))],
}


def test_invalid_prompts_and_items_are_refused() -> None:
    for message, positions in PROMPTS.items():
        assert_refused(message, partial(mrope_positions, positions), mmpos.MmposError)
    for message, items in ITEMS.items():
        assert_refused(message, partial(item_segments, 20, items), mmpos.MmposError)
    odd = partial(item_segments, 20, [item((0, 2), image_grid_thw=[1, 3, 4])], spatial_merge_size=2)
    assert_refused("mm_items[0]: got grid [1, 3, 4], want sides that are", odd)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import SGLang's kernels so that they run in Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1")
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    return pytest.importorskip("sglang.kernels.ops.attention.rotary_triton", exc_type=ImportError)


@pytest.mark.parametrize("pairing", ["adjacent", "half"])
def test_sglangs_ernie_kernel_alternates_rows_and_columns_over_unsorted_channels(
    pairing: Any, kernels: ModuleType
) -> None:
    rotary = Rotary(head_dim=64, pairing=pairing)
    cache = torch.cat(mmpos.rotary.cos_sin(rotary, torch.arange(256).expand(2, -1)), dim=1)  # type: ignore[arg-type]
    q, k = torch.randn(LENGTH, 4, 64), torch.randn(LENGTH, 2, 64)
    got = q.flatten(1).clone(), k.flatten(1).clone()
    prompt, _ = mrope_positions(PLACED)
    kernels.triton_ernie45_rope_fused_inplace(*got, cache, prompt, [16, 16, 0], 64, 64, pairing == "half")
    for rotated, want in zip(got, apply_rotary(q, k, PLACED, rotary), strict=True):
        assert want is not None
        assert torch.equal(rotated.view(want.shape), want)
