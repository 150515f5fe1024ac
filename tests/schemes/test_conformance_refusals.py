"""Conformance: legal input that Transformers refuses, illegal input that it takes, and what ours does with both."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from layouts import IMAGE, VIDEO, Layout, rope_index

from mmpos import InvalidInputError, place


class Refused(NamedTuple):
    """Legal input that Transformers cannot take: what it raises, and the ids of one row as they should be."""

    layout: Layout
    model: str
    error: type[Exception]
    ids: list[list[int]]


LEGAL = {
    "two images touch": Refused(
        Layout(np.array([[1, IMAGE, IMAGE, IMAGE, 2]]), images=[[1, 2, 4], [1, 2, 2]]),
        "qwen2_vl",
        RuntimeError,
        [[0, 1, 1, 3, 4], [0, 1, 1, 3, 4], [0, 1, 2, 3, 4]],
    ),
    "two videos touch": Refused(
        Layout(np.array([[1, VIDEO, VIDEO, VIDEO, 2]]), videos=[[2, 2, 2], [1, 2, 2]]),
        "qwen2_vl",
        RuntimeError,
        [[0, 1, 2, 2, 3], [0, 1, 1, 2, 3], [0, 1, 1, 2, 3]],
    ),
    "frames without timestamps": Refused(
        Layout(np.array([[1, VIDEO, VIDEO, 2]]), videos=[[2, 2, 2]], apart=True),
        "qwen3_vl",
        RuntimeError,
        [[0, 1, 2, 3]] * 3,
    ),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", LEGAL)
def test_transformers_raises_on_legal_input_and_ours_answers(name: str) -> None:
    layout, model, error, ids = LEGAL[name]
    with pytest.raises(error):
        rope_index(model, layout)
    assert place(layout.segments(), "mrope-transformers").dense().tolist() == ids


class Silent(NamedTuple):
    """Illegal input that Transformers takes: the first axis of what it returns, and what ours says."""

    layout: Layout
    ids: list[list[int]]
    message: str
    model: str = "qwen2_vl"


NO_NUMBERS = torch.full((2,), torch.nan).long().numpy()
"""What this processor makes of NaN: the least int64 on x86, 0 on ARM64."""

ILLEGAL = {
    "a surplus grid": Silent(
        Layout(np.array([[1, IMAGE, 2]]), images=[[1, 2, 2]] * 2),
        [[0, 1, 2]],
        "image_grid_thw[1]: got no placeholders left, want 1 for 1x1x1 after merging; a surplus grid?",
    ),
    "runs of the wrong lengths whose sum is right": Silent(
        Layout(np.array([[1, IMAGE, 2, IMAGE, IMAGE, IMAGE]]), images=[[1, 2, 6], [1, 2, 2]]),
        [[0, 1, 1, 1, 4, 5]],
        "image_grid_thw[0]: got a run of 1 placeholder at document 0, token 1, want 3 for 1x1x3 after merging",
    ),
    "sides that merging does not divide": Silent(
        Layout(np.array([[1, IMAGE, 2]]), images=[[1, 3, 2]]),
        [[0, 1, 2]],
        "image_grid_thw[0]: got (1, 3, 2), want height and width divisible by spatial_merge_size=2",
    ),
    "a hole in the mask": Silent(
        Layout(np.array([[1, 3, 3, 2]]), attention_mask=np.array([[1, 0, 1, 1]])),
        [[0, 0, 1, 2]],
        "attention_mask[0]: got a hole, want ones in one run, padded left or right",
    ),
    "a hole in an image": Silent(
        Layout(np.array([[1, IMAGE, IMAGE, 2]]), np.array([[1, 1, 0, 1]]), images=[[1, 2, 2]]),
        [[0, 1, 0, 2]],
        "attention_mask[0]: got a hole, want ones in one run, padded left or right",
    ),
    "a mask of other numbers": Silent(
        Layout(np.array([[1, 3, 3, 2]]), attention_mask=np.array([[0, 2, 1, 1]])),
        [[0, 0, 1, 2]],
        "attention_mask: got values 0 to 2, want 0 and 1",
    ),
    "more times than videos": Silent(
        Layout(np.array([[1, VIDEO, 2]]), videos=[[1, 2, 2]], seconds=[1.0, 2.0]),
        [[0, 1, 2]],
        "seconds_per_frame: got 2 values, want 1, one per video",
        "qwen2_5_vl",
    ),
    "time that runs backwards": Silent(
        Layout(np.array([[1, VIDEO, VIDEO, 2]]), videos=[[2, 2, 2]], seconds=[-1.0]),
        [[0, 1, -1, 2]],
        "seconds_per_frame[0]: got -1.0, want > 0 (a float: >= 1e-06)",
        "qwen2_5_vl",
    ),
    "no time at all": Silent(
        Layout(np.array([[1, VIDEO, VIDEO, 2]]), videos=[[2, 2, 2]], seconds=[float("nan")]),
        [[0, *(1 + NO_NUMBERS), 2]],
        "seconds_per_frame[0]: got nan, want a number of seconds",
        "qwen2_5_vl",
    ),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ILLEGAL)
def test_transformers_is_silent_on_illegal_input_and_ours_raises(name: str) -> None:
    layout, ids, message, model = ILLEGAL[name]
    assert rope_index(model, layout).ids[0].tolist() == ids
    with pytest.raises(InvalidInputError) as raised:
        layout.segments()
    assert str(raised.value) == message


class Wordless(NamedTuple):
    """Illegal input that both refuse: what Transformers raises, which names no grid, and what ours says."""

    layout: Layout
    error: type[Exception]
    said: str
    message: str
    model: str = "qwen2_vl"


BOTH = {
    "a missing grid": Wordless(
        Layout(np.array([[1, IMAGE, 2, IMAGE]]), images=[[1, 2, 2]]),
        StopIteration,
        "^$",
        "image_grid_thw: got 1 grid, want more for 1 placeholder from document 0, token 3 on",
    ),
    "no grids": Wordless(
        Layout(np.array([[1, IMAGE, 2]])),
        TypeError,
        "'NoneType' object is not an iterator",
        "image_grid_thw: got 0 grids, want more for 1 placeholder from document 0, token 1 on",
    ),
    "a run longer than its grid": Wordless(
        Layout(np.array([[1, IMAGE, IMAGE, IMAGE, 2]]), images=[[1, 2, 4]]),
        RuntimeError,
        "expanded size of the tensor",
        "image_grid_thw: got 1 grid, want more for 1 placeholder from document 0, token 3 on",
    ),
    "a row without tokens": Wordless(
        Layout(np.array([[1, 2], [1, 2]]), np.array([[1, 1], [0, 0]])),
        ValueError,
        "non-empty list",
        "attention_mask[1]: got no tokens, want ones in one run, padded left or right",
    ),
    "a time missing": Wordless(
        Layout(np.array([[1, VIDEO, 2, VIDEO]]), videos=[[1, 2, 2]] * 2, seconds=[1.0]),
        StopIteration,
        "^$",
        "seconds_per_frame: got 1 values, want 2, one per video",
        "qwen2_5_vl",
    ),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", BOTH)
def test_what_both_refuse_has_a_place_and_a_count_in_ours(name: str) -> None:
    layout, error, said, message, model = BOTH[name]
    with pytest.raises(error, match=said):
        rope_index(model, layout)
    with pytest.raises(InvalidInputError) as raised:
        layout.segments()
    assert str(raised.value) == message
