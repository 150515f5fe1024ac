"""SegmentTable: documents, arrays and spans build the same table."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import CASES, Document, batches, fields, settled

from mmpos import Grid, InvalidInputError, SegmentTable, Text, place
from mmpos.segments.table import GRID, TEXT

ANYTHING = next(case for case in CASES if case.name == "flatten")


def test_from_documents_builds_a_table() -> None:
    video = Grid(2, 2, frames=3, seconds_per_frame=0.5)
    segments = SegmentTable.from_documents([[Text(3), Grid(1, 4), video], [Grid(2, 3, row_separator=True)]])
    assert fields(segments) == {
        "kind": [TEXT, GRID, GRID, GRID],
        "extents": [[1, 1, 3, 1], [1, 1, 2, 2], [3, 4, 2, 3]],
        "segment_offsets": [0, 3, 4],
        "seconds_per_frame": [[0, 0, 1, 0], [1, 1, 2, 1]],
        "row_separator": [False, False, False, True],
        "extra_tokens": None,
    }
    assert segments.lengths.tolist() == [3, 4, 12, 8]
    assert segments.num_documents == 2
    assert segments.num_tokens == 27
    assert repr(segments) == "SegmentTable(2 documents, 4 segments (3 grids), 27 tokens)"


def test_zero_documents_are_accepted() -> None:
    nothing = {"kind": [], "extents": [[], [], []], "segment_offsets": [0]}
    nothing |= {"seconds_per_frame": None, "row_separator": None, "extra_tokens": None}
    assert fields(SegmentTable.from_documents([])) == nothing
    assert fields(SegmentTable.from_spans([], [], [])) == nothing
    assert fields(SegmentTable.from_arrays([], [], [0])) == nothing


def test_grid_from_thw_expects_frames_height_and_width() -> None:
    grid = Grid.from_thw(np.array([3, 1, 2]), row_separator=True)
    assert grid == Grid(1, 2, frames=3, row_separator=True)
    assert grid.extents == (3, 1, 2)
    assert Grid.from_thw(torch.tensor([3, 1, 2])) == Grid(1, 2, frames=3)


@pytest.mark.parametrize(
    ("seconds", "want"),
    [
        (0.1, Fraction(1, 10)),
        (1 / 3, Fraction(1, 3)),
        (2, 2),
        (np.float32(1.5), Fraction(3, 2)),
        (Fraction(7, 9), None),
    ],
)
def test_floats_become_the_nearest_simple_fraction(seconds: float | Fraction, want: Fraction | None) -> None:
    assert Grid(1, 1, seconds_per_frame=seconds).seconds_per_frame == (seconds if want is None else want)


@settled
@given(batches(ANYTHING), st.booleans(), st.sampled_from([list, np.asarray, torch.tensor]))
def test_spans_and_arrays_give_the_same_table_as_documents(
    batch: list[Document], separator: bool, kind: Callable[..., Any]
) -> None:
    documents: list[Document] = []
    spans: list[tuple[int, tuple[int, int, int], int, Any]] = []
    lengths = []
    for d, document in enumerate(batch):
        documents.append([])
        length = 0
        for part in document:
            before = documents[-1][-1] if documents[-1] else None
            if isinstance(part, Grid):
                spans.append((length, part.extents, d, part.seconds_per_frame))
                documents[-1].append(replace(part, row_separator=separator))
                length += part.frames * part.height * (part.width + separator)
                continue
            length += part.length
            if isinstance(before, Text):  # spans cannot distinguish adjacent runs of text
                documents[-1][-1] = Text(before.length + part.length)
            else:
                documents[-1].append(part)
        lengths.append(length)
    want = SegmentTable.from_documents(documents)
    offsets, grid_thw, owner, seconds = map(list, zip(*spans, strict=True)) if spans else ([],) * 4
    got = SegmentTable.from_spans(
        lengths,
        kind(offsets) if spans else [],
        grid_thw,
        kind(owner) if spans else [],
        seconds_per_frame=seconds if spans else None,
        row_separator=separator and bool(spans),
    )
    assert fields(got) == fields(want)
    arrays = {name: array for name, array in vars(want).items() if array is not None}
    arrays["kind"] = kind(want.kind.tolist()) if want.kind.size else []
    assert fields(SegmentTable.from_arrays(**arrays)) == fields(want)


ONE, SQUARE = [[1, 1, 1]], [[1, 2, 2]]

# Error messages, and the lengths, offsets, grids and other arguments that cause them.
REFUSED: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "grid_thw: got shape (0,), want (2, 3)": ([5], [0, 2], [], {}),
    "grid_thw: got shape (1, 2), want (1, 3)": ([5], [0], [[1, 2]], {}),
    "grid_thw: got dtype float64, want integers": ([5], [0], [[1.0, 1.0, 1.0]], {}),
    "grid_thw[0, 1]: got 0, want >= 1": ([5], [0], [[1, 0, 1]], {}),
    "offsets[0]: got -1, want >= 0": ([5], [-1], ONE, {}),
    "lengths[1]: got 0, want >= 1": ([5, 0], [0], ONE, {"documents": [0]}),
    "lengths: got shape (), want (n,)": (5, [], [], {}),
    "documents: got None, want the document of each span, since there are 2 lengths": ([5, 5], [0], ONE, {}),
    "documents[0]: got 2, want <= 1": ([5, 5], [0], ONE, {"documents": [2]}),
    "documents[1]: got 0 after 1, want ascending indices": ([5, 5], [0, 0], ONE * 2, {"documents": [1, 0]}),
    "offsets[1]: got 3 in document 0, want >= 4, the end of the span before it": ([9], [0, 3], SQUARE * 2, {}),
    "offsets[0]: the span of 4 tokens ends at 10, want <= 9, the length of document 0": ([9], [6], SQUARE, {}),
    "seconds_per_frame: got 0 values, want 1, one per span": ([5], [0], ONE, {"seconds_per_frame": []}),
    "seconds_per_frame: got 2 values, want 1, one per span": ([5], [0], ONE, {"seconds_per_frame": [1, 2]}),
    "seconds_per_frame[0]: got 0, want > 0 (a float: >= 1e-06)": ([5], [0], ONE, {"seconds_per_frame": [0]}),
    "seconds_per_frame: got 1.5, want a list of seconds": ([5], [0], ONE, {"seconds_per_frame": 1.5}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_invalid_spans_are_refused(message: str) -> None:
    lengths, offsets, grid_thw, options = REFUSED[message]
    with pytest.raises(InvalidInputError) as error:
        SegmentTable.from_spans(lengths, offsets, grid_thw, **options)
    assert str(error.value) == message


def test_the_callers_arrays_stay_unchanged_and_writable() -> None:
    kind, extents, offsets = np.array([0, 1], np.uint8), np.array([[1, 1], [1, 2], [3, 2]]), np.array([0, 2])
    before = kind.copy(), extents.copy(), offsets.copy()
    segments = SegmentTable(kind, extents, offsets)
    place(segments).pad(20)
    for array, old in zip((kind, extents, offsets), before, strict=True):
        assert array.flags.writeable
        np.testing.assert_array_equal(array, old)


def test_tables_of_equal_documents_are_equal() -> None:
    documents: list[Document] = [[Text(3), Grid(2, 3), Text(2)], [Text(1)]]
    table = SegmentTable.from_documents(documents)
    plain = SegmentTable.from_arrays(
        table.kind,
        table.extents,
        table.segment_offsets,
        seconds_per_frame=[[0] * 4, [1] * 4],
        row_separator=[False] * 4,
        extra_tokens=[0] * 4,
    )
    timed = SegmentTable.from_documents([[Grid(2, 3, frames=2, seconds_per_frame=Fraction(1, 2))]])
    equal = [SegmentTable.from_spans([11, 1], [3], [[1, 2, 3]], [0]), pickle.loads(pickle.dumps(table)), plain]
    assert equal == [table] * 3
    assert {table, *equal} == {table}
    assert timed == SegmentTable.from_spans([12], [0], [[2, 2, 3]], seconds_per_frame=[0.5])
    others: list[list[Document]] = [
        [[Text(3), Grid(2, 3), Text(3)]],
        [[Text(3), Grid(3, 2), Text(2)], [Text(1)]],
        [[Text(3), Grid(2, 3, row_separator=True), Text(2)], [Text(1)]],
        [[Text(3), Grid(2, 3, seconds_per_frame=1), Text(2)], [Text(1)]],
    ]
    assert [other for other in [*map(SegmentTable.from_documents, others), 3] if other == table] == []


@pytest.mark.parametrize(
    "name", ["kind", "extents", "segment_offsets", "seconds_per_frame", "row_separator", "lengths"]
)
def test_the_arrays_of_a_table_are_read_only(name: str) -> None:
    grid = Grid(1, 1, row_separator=True, seconds_per_frame=1)
    array = getattr(SegmentTable.from_documents([[grid]]), name)
    with pytest.raises(ValueError, match="read-only"):
        array[...] = 0
