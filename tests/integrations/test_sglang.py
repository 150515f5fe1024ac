"""Test the positions that a processor returns to SGLang, and SGLang's rotations of sorted channels.

Tests that call SGLang 0.5.23 run only if it is installed.
"""

import os
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from refusals import assert_refused
from torch import Tensor

import mmpos
import mmpos.rotary
from mmpos import Grid, Placeholders, SegmentTable, Text
from mmpos.integrations.sections import Sections, install_cache, qk_channels
from mmpos.integrations.sglang import item_segments, mrope_positions
from mmpos.rotary import Rotary, apply_rotary

PROMPT: list[Text | Grid] = [Text(3), Grid(2, 3), Text(2), Grid(4, 1), Text(1)]
LENGTH = 16
SECTIONS = Sections(Rotary(head_dim=64), max_position=256, permuted=True)
PLACED = mmpos.place(SegmentTable.from_documents([PROMPT]))


def test_a_prompt_has_three_rows_of_ids_and_a_delta_of_shape_1_1() -> None:
    prompt, delta = mrope_positions(PLACED, SECTIONS)
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
    got = item_segments(17, [item((0, 7), (9, 16), video_grid_thw=[[2, 2, 2], [2, 2, 2]])])
    assert got.extents.T.tolist() == [[2, 2, 2], [1, 1, 1], [2, 2, 2]]
    got = item_segments(9, [item((0, 7), video_grid_thw=[[2, 2, 2]])])
    assert got.extents.T.tolist() == [[2, 2, 2], [1, 1, 1]]
    both = SimpleNamespace(offsets=torch.tensor([[0, 1], [3, 4]]), image_grid_thw=torch.tensor([[1, 1, 2], [1, 1, 2]]))
    assert item_segments(5, [both]).extents.T.tolist() == [[1, 1, 2], [1, 1, 1], [1, 1, 2]]
    assert item_segments(4, []).extents.T.tolist() == [[1, 1, 4]]


CUT = mmpos.place(SegmentTable.from_documents([PROMPT[:2]]))
TWICE = [item((0, 3), image_grid_thw=[1, 2, 2]), item((4, 5), image_grid_thw=[[1, 1, 2], [1, 1, 2]])]
META = torch.ones(1, 3, device="meta")
REFUSED: dict[str, Any] = {
    "positions: got last ids [10, 10, 11], want a prompt that ends with text, with last id 13: SGLang resumes": (
        lambda: mrope_positions(CUT, SECTIONS)
    ),
    "positions: got no tokens, want a prompt that ends": lambda: mrope_positions(PLACED.slice(0, 0), SECTIONS),
    "documents[0]: got cursor 26 plus max_new_tokens 231, want at most max_position": (
        lambda: mrope_positions(PLACED, SECTIONS, max_new_tokens=256 - 25)
    ),
    "mm_items[0]: got neither image_grid_thw nor video_grid_thw": lambda: item_segments(20, [item((0, 3))]),
    "mm_items[0].offsets: got 0 pairs, want 1": lambda: item_segments(20, [item(image_grid_thw=[1, 2, 2])]),
    "mm_items[1].offsets: got 1 pairs, want 2, one per grid": lambda: item_segments(20, TWICE),
    "offsets: got 4 placeholders from 0 to 3, want 6 for 1x2x3 after merging": (
        lambda: item_segments(20, [item((0, 3), image_grid_thw=[1, 2, 3])])
    ),
    "mm_items[0].grid_thw: got dtype float64": lambda: item_segments(20, [item((0, 3), image_grid_thw=[1, 2.0, 2])]),
    "mm_items[0].grid_thw: got Tensor on meta, want": lambda: item_segments(20, [item((0, 3), image_grid_thw=META)]),
    "mm_items[0]: got grid [1, 3, 4], want sides that are": (
        lambda: item_segments(20, [item((0, 2), image_grid_thw=[1, 3, 4])], spatial_merge_size=2)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_invalid_prompts_and_items_are_refused(message: str) -> None:
    assert_refused(message, REFUSED[message], mmpos.MmposError)


def assert_rotated(got: Sequence[Tensor], q: Tensor, k: Tensor, rotary: Rotary, channels: Tensor) -> None:
    """Check that the tensors equal, bit for bit, q and k rotated by mmpos, with channels in the given order."""
    for rotated, want in zip(got, apply_rotary(q, k, PLACED, rotary), strict=True):
        assert want is not None
        assert torch.equal(rotated.view(want.shape), want[..., channels])


def test_sglangs_rotation_equals_that_of_mmpos_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    mrope = pytest.importorskip("sglang.srt.layers.rotary_embedding.mrope", exc_type=ImportError)
    module = mrope.MRotaryEmbedding(64, 64, 256, 10000, True, torch.float32, [0, 16, 16])
    install_cache(module, SECTIONS)
    q, k = torch.randn(LENGTH, 4, 64), torch.randn(LENGTH, 2, 64)
    channels = torch.from_numpy(qk_channels(SECTIONS.rotary))
    prompt, _ = mrope_positions(PLACED, SECTIONS)
    got = module.forward_native(prompt, q[..., channels].flatten(1), k[..., channels].flatten(1))
    assert_rotated(got, q, k, SECTIONS.rotary, channels)
    module._ensure_cos_sin_cache_length(300)
    longer = Sections(SECTIONS.rotary, len(module.cos_sin_cache), permuted=True).cos_sin_cache()
    assert len(longer) > 300
    assert torch.equal(module.cos_sin_cache, longer)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import SGLang's kernels so that they run in Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1")
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    return pytest.importorskip("sglang.kernels.ops.attention.rotary_triton", exc_type=ImportError)


def test_sglangs_kernel_equals_mmpos_bit_for_bit_in_the_interpreter(kernels: ModuleType) -> None:
    q, k = torch.randn(LENGTH, 4, 64), torch.randn(LENGTH, 2, 64)
    channels = torch.from_numpy(qk_channels(SECTIONS.rotary))
    got = q[..., channels].flatten(1).contiguous(), k[..., channels].flatten(1).contiguous()
    prompt, _ = mrope_positions(PLACED, SECTIONS)
    section = list(SECTIONS.mrope_section)
    kernels.triton_mrope_fused(*got, SECTIONS.cos_sin_cache(), prompt, section, 64, 64, False, False, True, None)
    assert_rotated(got, q, k, SECTIONS.rotary, channels)


@pytest.mark.parametrize("pairing", ["adjacent", "half"])
def test_sglangs_ernie_kernel_alternates_rows_and_columns_over_unsorted_channels(
    pairing: Any, kernels: ModuleType
) -> None:
    rotary = Rotary(head_dim=64, pairing=pairing)
    cache = torch.cat(mmpos.rotary.cos_sin(rotary, torch.arange(256).expand(2, -1)), dim=1)  # type: ignore[arg-type]
    q, k = torch.randn(LENGTH, 4, 64), torch.randn(LENGTH, 2, 64)
    got = q.flatten(1).clone(), k.flatten(1).clone()
    prompt, _ = mrope_positions(PLACED, SECTIONS)
    kernels.triton_ernie45_rope_fused_inplace(*got, cache, prompt, [16, 16, 0], 64, 64, pairing == "half")
    assert_rotated(got, q, k, rotary, torch.arange(64))
