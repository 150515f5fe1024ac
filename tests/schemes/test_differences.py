"""Check the claims of docs/differences.md about ids against Transformers' functions and serving engines' floats."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from layouts import FRAME_RATES, IMAGE, VIDEO, Array, Layout, rope_index
from oracle import exact, placed
from refusals import assert_refused
from scheme_properties import is_symmetric

from mmpos import Grid, InvalidInputError, Placeholders, SegmentTable, Text, place
from mmpos.schemes import Grid2D, MRopeQwen25, MRopeTransformers, RopeTieV2


def test_in_transformers_ids_of_text_after_a_video_are_below_its_frames_and_contradict_the_delta() -> None:
    video = Layout(np.array([[1, 2, 3, *[VIDEO] * 20, 4]]), videos=[[5, 4, 4]])
    theirs = rope_index("qwen2_vl", video)
    assert theirs.ids[0, 0].tolist() == [0, 1, 2, *np.repeat([3, 4, 5, 6, 7], 4), 5]
    assert theirs.deltas[0] + video.input_ids.size == 8  # the first generated id, not 6
    for scheme, last, following in (("mrope-transformers", 5, 8), ("mrope", 8, 9)):
        ours = place(video.segments(), scheme)
        assert (ours.dense()[:, -1].tolist(), ours.next_positions.tolist()) == ([last] * 3, [following])


def test_an_image_with_several_frames_has_no_time_in_transformers() -> None:
    image = Layout(np.array([[1, *[IMAGE] * 3, 2]]), images=[[3, 2, 2]], rate=4)
    assert rope_index("qwen2_5_vl", image).ids[0, 0].tolist() == [0, 1, 2, 3, 2]
    assert place(image.segments(), "mrope-transformers").dense()[0].tolist() == [0, 1, 2, 3, 2]
    with pytest.raises(InvalidInputError, match=r"^documents\[0\]\[1\]: got 3 frames without a time"):
        place(image.segments(), MRopeTransformers(tokens_per_second=4))


def test_packed_documents_do_not_restart_in_transformers() -> None:
    packed = Layout(np.array([[1, 2, IMAGE, 3, 1, IMAGE, 2]]), images=[[1, 2, 2]] * 2)
    assert rope_index("qwen2_vl", packed).ids[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    ours = SegmentTable.from_input_ids(
        packed.input_ids[0], Placeholders(image=IMAGE), packed.images, spatial_merge_size=2, cu_seqlens=[0, 4, 7]
    )
    positions = place(ours, "mrope")
    cuts = positions.cu_seqlens.tolist()
    assert [positions.dense()[0, a:b].tolist() for a, b in pairwise(cuts)] == [[0, 1, 2, 3], [0, 1, 2]]


# Frame times: each function computes a video's frame ids from its seconds per frame, the rate and the frame count.


def transformers_times(seconds: float, rate: int, frames: int, listed: bool = False) -> Array:
    layout = Layout(np.full((1, frames), VIDEO), videos=[[frames, 2, 2]], rate=rate, seconds=[seconds])
    return rope_index("qwen2_5_vl", layout, listed).ids[0, 0]


def exact_times(seconds: float, rate: int, frames: int) -> Array:
    """Return the ids of mrope-transformers, which equal those of mrope-qwen2.5."""
    segments = SegmentTable.from_documents([[Grid(1, 1, frames=frames, seconds_per_frame=seconds)]])
    schemes = MRopeTransformers(tokens_per_second=rate), MRopeQwen25(tokens_per_second=rate)
    first, second = (place(segments, scheme).dense()[0] for scheme in schemes)
    np.testing.assert_array_equal(first, second)
    return first


def engines_times(seconds: float, rate: int, frames: int) -> Array:
    """Multiply in float32, by the seconds first, as SGLang does and vLLM did until January 2026."""
    return (torch.arange(frames) * torch.tensor(seconds) * rate).long().numpy()


def newer_vllm_times(seconds: float, rate: int, frames: int) -> Array:
    """Multiply in float64 after rounding the seconds to float32, as newer versions of vLLM do."""
    return (np.arange(frames) * (torch.tensor(seconds).item() * rate)).astype(np.int64)


def binary_value_times(seconds: float, rate: int, frames: int) -> Array:
    """Return exact floors for the float's binary value instead of its decimal value."""
    return np.array([int(t * Fraction(seconds) * rate) for t in range(frames)])


OTHERS: dict[str, tuple[Callable[[float, int, int], Array], int]] = {
    "tensor": (transformers_times, 0),
    "list": (partial(transformers_times, listed=True), 86),
    "engines": (engines_times, 160),
    "newer vLLM": (newer_vllm_times, 826),
    "binary": (binary_value_times, 1929),
}
"""Other computations, and how many of the 21,888 frame ids differ from ours."""


@pytest.mark.parametrize("name", OTHERS)
def test_exact_floors_equal_those_of_transformers_and_differ_from_other_computations(name: str) -> None:
    compute, wrong = OTHERS[name]
    videos = [(2 / fps, rate, 384) for rate in (2, 4, 25) for fps in FRAME_RATES]
    assert sum(frames for _, _, frames in videos) == 21_888
    assert sum(int((exact_times(*video) != compute(*video)).sum()) for video in videos) == wrong


def test_at_25_frames_per_second_the_floats_of_engines_lose_ids() -> None:
    video = (2 / 25, 25, 6)
    assert exact_times(*video).tolist() == transformers_times(*video).tolist() == [0, 2, 4, 6, 8, 10]
    assert engines_times(*video).tolist() == [0, 2, 4, 6, 8, 9]
    assert newer_vllm_times(*video).tolist() == [0, 1, 3, 5, 7, 9]


def test_frames_shorter_than_a_second_have_distinct_ids() -> None:
    assert exact_times(0.5, 2, 4).tolist() == transformers_times(0.5, 2, 4).tolist() == [0, 1, 2, 3]
    assert exact_times(1e-6, 2, 4).tolist() == [0, 0, 0, 0]  # older versions floored the seconds and gave these ids


# Fractions, and encoders.


def test_floored_ids_are_asymmetric_if_exactly_one_side_is_odd() -> None:
    for height, width in np.ndindex(6, 6):
        grid = Grid(height + 1, width + 1)
        assert is_symmetric(RopeTieV2(), [grid], before=4, start=0)
        floored = is_symmetric(RopeTieV2(rounding="floor"), [grid], before=4, start=0)
        assert floored == ((height + width) % 2 == 0)


def test_bfloat16_changes_fractional_ids_but_tables_are_integers() -> None:
    assert torch.tensor(100000.75).to(torch.bfloat16).item() == 99840
    positions = placed([Text(100_000), Grid(2, 3), Text(1)], "rope-tie-v2")
    assert positions.table.dtype == np.int64
    assert exact(positions.slice(100_000, 100_001)) == [(100_002, 100_001 + 1 / 2)]


@pytest.mark.usefixtures("way")
def test_take_selects_the_attention_windows_of_qwen2_5() -> None:
    vision_utils = pytest.importorskip("transformers.vision_utils")
    sides = torch.tensor([[1, 14, 10], [2, 4, 18]])
    index, cu_seqlens = vision_utils.get_vision_window_index(sides, 2, 112, 14)
    scheme = Grid2D(order="merged", spatial_merge_size=2)
    positions = place(SegmentTable.from_documents([[Grid.from_thw(grid)] for grid in sides.tolist()]), scheme)
    ids = vision_utils.get_vision_position_ids(sides, 2).numpy().T
    np.testing.assert_array_equal(positions.dense(), ids)
    starts = 4 * index.numpy()  # each merged patch is a range of four tokens
    taken = positions.take(starts, starts + 4)
    assert index.tolist() != sorted(index.tolist())
    np.testing.assert_array_equal(taken.dense(), ids.reshape(2, -1, 4)[:, index].reshape(2, -1))
    assert taken.slice(0, int(cu_seqlens[1])).dense().max(axis=1).tolist() == [7, 7]  # 112 pixels: 8×8 patches


# Input that one side refuses; tests/segments compares the full messages.

# Valid input that Transformers cannot process: its model, and the correct ids.
LEGAL: dict[str, tuple[str, Layout, list[list[int]]]] = {
    "two images touch": (
        "qwen2_vl", Layout(np.array([[1, IMAGE, IMAGE, IMAGE, 2]]), images=[[1, 2, 4], [1, 2, 2]]),
        [[0, 1, 1, 3, 4], [0, 1, 1, 3, 4], [0, 1, 2, 3, 4]],
    ),
    "two videos touch": (
        "qwen2_vl", Layout(np.array([[1, VIDEO, VIDEO, VIDEO, 2]]), videos=[[2, 2, 2], [1, 2, 2]]),
        [[0, 1, 2, 2, 3], [0, 1, 1, 2, 3], [0, 1, 1, 2, 3]],
    ),
    "frames without timestamps":
        ("qwen3_vl", Layout(np.array([[1, VIDEO, VIDEO, 2]]), videos=[[2, 2, 2]], apart=True), [[0, 1, 2, 3]] * 3),
}  # fmt: skip


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", LEGAL)
def test_valid_input_on_which_transformers_raises_is_placed(name: str) -> None:
    model, layout, ids = LEGAL[name]
    with pytest.raises(RuntimeError):
        rope_index(model, layout)
    assert place(layout.segments(), "mrope-transformers").dense().tolist() == ids


NO_NUMBERS = torch.full((2,), torch.nan).long().tolist()
"""Integers that this processor converts NaN to: the smallest int64 on x86, 0 on ARM64."""
SQUARE, TIMES = [[1, 2, 2]], "seconds_per_frame"

# What mmpos's error names, Transformers' first-axis ids or its error, the ids, and the rest of the layout.
ILLEGAL: dict[str, tuple[str, list[int] | type[Exception], list[Any], dict[str, Any]]] = {
    "a surplus grid": ("image_grid_thw[1]", [0, 1, 2], [1, IMAGE, 2], {"images": SQUARE * 2}),
    "runs of wrong lengths with the right sum":
        ("image_grid_thw[0]", [0, 1, 1, 1, 4, 5], [1, IMAGE, 2, *[IMAGE] * 3], {"images": [[1, 2, 6], [1, 2, 2]]}),
    "indivisible sides": ("image_grid_thw[0]", [0, 1, 2], [1, IMAGE, 2], {"images": [[1, 3, 2]]}),
    "a hole in the mask": ("attention_mask[0]", [0, 0, 1, 2], [1, 3, 3, 2], {"attention_mask": [1, 0, 1, 1]}),
    "a hole in an image":
        ("attention_mask[0]", [0, 1, 0, 2], [1, IMAGE, IMAGE, 2], {"attention_mask": [1, 1, 0, 1], "images": SQUARE}),
    "a mask with other values": ("attention_mask", [0, 0, 1, 2], [1, 3, 3, 2], {"attention_mask": [0, 2, 1, 1]}),
    "more times than videos": (TIMES, [0, 1, 2], [1, VIDEO, 2], {"videos": SQUARE, "seconds": [1.0, 2.0]}),
    "a negative time": (f"{TIMES}[0]", [0, 1, -1, 2], [1, VIDEO, VIDEO, 2], {"videos": [[2, 2, 2]], "seconds": [-1.0]}),
    "a time of NaN": (
        f"{TIMES}[0]", [0, *(1 + number for number in NO_NUMBERS), 2], [1, VIDEO, VIDEO, 2],
        {"videos": [[2, 2, 2]], "seconds": [float("nan")]},
    ),
    "a missing grid": ("image_grid_thw", StopIteration, [1, IMAGE, 2, IMAGE], {"images": SQUARE}),
    "no grids": ("image_grid_thw", TypeError, [1, IMAGE, 2], {}),
    "a run longer than its grid": ("image_grid_thw", RuntimeError, [1, *[IMAGE] * 3, 2], {"images": [[1, 2, 4]]}),
    "a row without tokens": ("attention_mask[1]", ValueError, [[1, 2]] * 2, {"attention_mask": [[1, 1], [0, 0]]}),
    "a missing time": (TIMES, StopIteration, [1, VIDEO, 2, VIDEO], {"videos": SQUARE * 2, "seconds": [1.0]}),
}  # fmt: skip


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ILLEGAL)
def test_invalid_input_that_transformers_accepts_or_does_not_locate_is_refused_with_its_location(name: str) -> None:
    named, theirs, input_ids, more = ILLEGAL[name]
    mask = np.atleast_2d(more["attention_mask"]) if "attention_mask" in more else None
    layout = Layout(np.atleast_2d(input_ids), **more | {"attention_mask": mask})
    model = "qwen2_vl" if layout.seconds is None else "qwen2_5_vl"
    if isinstance(theirs, list):
        assert rope_index(model, layout).ids[0, 0].tolist() == theirs
    else:
        with pytest.raises(theirs) as raised:
            rope_index(model, layout)
        assert "grid_thw" not in str(raised.value)
    assert_refused(f"{named}: ", layout.segments)
