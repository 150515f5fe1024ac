"""PositionTable: worked examples of every method, all forms of dense ids, checks of ``from_arrays``, and ids of peers.

Golden files hold the ids of peers for prompts from their own tests and similar prompts:

Multimodal-RoPEs, by the authors of arXiv 2510.23095, at cd413b9e: tests/test_rope_golden_hf4571.py, for the designs
    that mmpos supports.
vLLM 0.33: the tests of PaddleOCR-VL's get_mrope_input_positions.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import Document, exact, place_document, placed
from results import assert_equal

from mmpos import (
    SCHEMES,
    Grid,
    InvalidInputError,
    LimitExceededError,
    MmposError,
    PositionTable,
    SegmentTable,
    Text,
    UnsupportedError,
    place,
)
from mmpos.integrations.vllm import mrope_input_positions
from mmpos.positions import expand
from mmpos.positions.table_rows import (
    AXES,
    DELTA,
    DENOMINATOR,
    FIRST_SEGMENT,
    FIRST_TOKEN,
    HEIGHT,
    NEXT_POSITION,
    NO_POSITION,
    OFFSET,
    SKIP,
    WIDTH,
)
from mmpos.schemes import V2PE, Grid2D, Scheme
from mmpos.segments import Audio, Clip, Placeholders, Thumbnail, Tile
from mmpos.segments.kinds import Segment
from mmpos.support import native

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

DENSE = [[0, 1, 2, 6, 6, 6, 10, 10, 10, 14, 15], [0, 1, 2, 5, 8, 11, 5, 8, 11, 14, 15]]


@pytest.fixture(name="one")
def _one() -> PositionTable:
    return placed([Text(3), Grid(2, 3), Text(2)], "rope-tie")


@pytest.fixture(name="batch")
def _batch() -> PositionTable:
    documents: list[Document] = [[Text(3), Grid(2, 3), Text(2)], [Text(2)], [Text(1), Grid(1, 1)]]
    return place(SegmentTable.from_documents(documents), "rope-tie", [0, 7, 100])


def test_the_rows_of_the_table_have_names(one: PositionTable) -> None:
    rows = [one.offset, one.skip, one.height, one.width, one.denominator]
    assert [row.tolist() for row in rows] == [[0, 3, 9], [0, 0, 0], [1, 2, 1], [3, 3, 2], [1, 1, 1]]
    assert one.origin.tolist() == [[0, 6, 14], [0, 5, 14]]
    assert one.step_frame.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert one.step_row.tolist() == [[0, 4, 0], [0, 0, 0]]
    assert one.step_col.tolist() == [[1, 0, 1], [1, 3, 1]]
    by_axis = np.stack([one.origin, one.step_frame, one.step_row, one.step_col], axis=1).reshape(8, 3)
    np.testing.assert_array_equal(one.table, np.concatenate([rows, by_axis]))
    assert one.documents.tolist() == [[0], [0], [16], [5]]
    assert (one.axes, one.num_segments, one.num_documents, one.num_tokens) == (2, 3, 1, 11)
    assert (one.scheme, one.fractional) == ("rope-tie", False)
    assert repr(one) == "PositionTable(1 document, 3 segments, 11 tokens, 2 axes, scheme='rope-tie')"


@pytest.mark.parametrize(
    "name", ["cu_seqlens", "lengths", "real_lengths", "segment_lengths", "next_positions", "deltas"]
)
def test_computed_arrays_are_read_only(batch: PositionTable, name: str) -> None:
    with pytest.raises(ValueError, match="read-only"):
        getattr(batch, name)[0] = 7


@pytest.mark.usefixtures("way")
def test_tables_with_equal_values_are_equal(batch: PositionTable) -> None:
    whole = PositionTable.concatenate([batch.window([d], [0], [length]) for d, length in enumerate(batch.lengths)])
    equal = [whole, pickle.loads(pickle.dumps(batch)), batch.keep([True] * batch.num_tokens)]
    assert equal == [batch] * 3
    assert {batch, *equal} == {batch}
    arrays = batch.table, batch.documents, batch.num_tokens
    others = [
        place(SegmentTable.from_documents([[Text(11)], [Text(2)], [Text(2)]]), "rope-tie", [0, 7, 100]),
        batch.slice(0, 14),
        batch.pad(11),
        PositionTable.from_arrays(*arrays, fractional=False, scheme="mine"),
        PositionTable.from_arrays(*arrays, fractional=True, scheme="rope-tie"),
        "rope-tie",
    ]
    assert [other for other in others if other == batch] == []


def test_cu_seqlens_and_lengths_describe_the_documents(batch: PositionTable) -> None:
    assert batch.cu_seqlens.tolist() == [0, 11, 13, 15]
    assert batch.cu_seqlens.dtype == np.int32
    assert batch.lengths.tolist() == [11, 2, 2]
    assert batch.segment_lengths.tolist() == [3, 6, 2, 2, 1, 1]
    assert batch.max_seqlen == 11
    assert batch.next_positions.tolist() == [16, 9, 104]
    assert batch.deltas.tolist() == [5, 0, 2]


def test_dense_axes_can_be_repeated_and_reordered(one: PositionTable) -> None:
    assert one.dense(axes=(0, 0, 1)).tolist() == [DENSE[0], DENSE[0], DENSE[1]]
    assert one.dense(axes=(1,)).tolist() == [DENSE[1]]
    assert one.dense(axes=()).shape == (0, 11)
    columns = np.full((11, 2), -7)
    assert one.dense(out=columns.T).tolist() == columns.T.tolist() == DENSE
    halves = placed([Text(1), Grid(1, 2)], "rope-tie-v2")
    assert [x.dense().dtype.name for x in (one, halves)] == ["int32", "float64"]
    assert halves.dense(axes=(1, 0, 1)).tolist() == [[0, 1, 2], [0, 1.5, 1.5], [0, 1, 2]]


@pytest.mark.parametrize("scheme", ["rope-tie", "rope-tie-v2", "mrope"])
def test_ids_are_expanded_across_blocks(scheme: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments begin, end and continue at the boundaries of blocks."""
    monkeypatch.setattr(expand, "BLOCK", 256)
    documents: list[Document] = [
        [Text(256), Grid(2, 128), Text(255), Grid(3, 1)],
        [part for n in range(15) for part in (Text(1), Grid(5, n + 1))],
        [Text(257)],
        [Grid(10, 27), Text(2)],
    ]
    ids = [position for document in documents for position in place_document(document, scheme, 3).ids]
    positions = place(SegmentTable.from_documents(documents), scheme, 3)
    want = np.array(ids, np.float64).T
    np.testing.assert_array_equal(positions.dense(), want)
    for begin, end in ((0, positions.num_tokens), (7, 1_500)):
        out = np.full((positions.axes, end - begin), np.nan)  # not what memory held before
        np.testing.assert_array_equal(positions.slice(begin, end).dense(out=out), want[:, begin:end])
    numerators, denominators = positions.rationals()
    np.testing.assert_array_equal(numerators / denominators, want)


def test_ids_reach_both_ends_of_int32() -> None:
    top = placed([Text(4), Grid(1, 1), Text(3)], "flatten", INT32_MAX - 7)
    assert top.dense().tolist() == [list(range(INT32_MAX - 7, INT32_MAX + 1))]
    assert top.next_positions.tolist() == [INT32_MAX + 1]
    assert top.decode(0).num_tokens == 0
    bottom = placed([Text(2), Grid(1, 1)], "flatten", INT32_MIN)
    assert bottom.dense().tolist() == [[INT32_MIN, INT32_MIN + 1, INT32_MIN + 2]]
    assert placed([Text(2**31 - 1)], "flatten").slice(INT32_MAX - 2, INT32_MAX).dense().tolist() == [
        [INT32_MAX - 2, INT32_MAX - 1]
    ]


def test_tables_with_more_tokens_than_the_int32_maximum_can_be_sliced() -> None:
    documents = [[Text(INT32_MAX)] for _ in range(4)]
    positions = place(SegmentTable.from_documents(documents), "flatten")
    begin = 3 * INT32_MAX
    assert positions.num_tokens == 4 * INT32_MAX
    assert positions.slice(begin - 2, begin + 2).dense().tolist() == [[INT32_MAX - 2, INT32_MAX - 1, 0, 1]]
    with pytest.raises(LimitExceededError) as error:
        _ = positions.cu_seqlens
    assert str(error.value) == "cu_seqlens: got 8589934588 tokens, want at most 2**31 - 1 for int32"


def test_the_largest_denominators_stay_exact() -> None:
    assert placed([Grid(3, 5)], "rope-tie-fractional").denominator.tolist() == [12]  # lcm(4, 6)
    height, width = 46336, 46337
    positions = placed([Text(1), Grid(height, width)], "rope-tie-fractional")
    area = height * width
    assert positions.denominator.tolist() == [1, (height + 1) * (width + 1)]
    last = positions.slice(positions.num_tokens - 2, positions.num_tokens)
    row = Fraction((area + 1) * height, height + 1)
    assert exact(last) == [(row, Fraction((area + 1) * j, width + 1)) for j in (width - 1, width)]
    assert positions.next_positions.tolist() == [area + 1]


@pytest.mark.usefixtures("way")
def test_only_documents_that_continue_require_a_next_position() -> None:
    """The videos of documents 0 and 2 end half an id after a whole id; document 1 ends with text."""
    half: Document = [Grid(1, 1, frames=2, seconds_per_frame=Fraction(1, 26))]
    positions = place(SegmentTable.from_documents([half, [Text(3)], half]), "tmrope-qwen3")
    assert positions.resumable.tolist() == [False, True, False]
    windows = positions.window([1, 0, 2, 1], [2, 1, 3, 5], [3, 1, 0, 1])
    assert windows.dense()[0].tolist() == [2, 3, 4, 0.5, 5]
    assert windows.resumable.tolist() == [True, False, False, True]
    assert windows.documents[2, [0, 3]].tolist() == [5, 6]
    decoded = positions.decode([0, 2, 0])
    assert decoded.dense()[0].tolist() == [3, 4]
    assert decoded.resumable.tolist() == [False, True, False]
    message = r"^next_positions: got document 2 of tmrope-qwen3, whose end is not one whole id"
    with pytest.raises(UnsupportedError, match=message):
        positions.window([1, 2], [2, 2], [3, 1])
    with pytest.raises(UnsupportedError, match=message):
        positions.decode([0, 1, 1])


def test_documents_are_padded_to_one_common_length_or_to_one_length_each(batch: PositionTable) -> None:
    longest = batch.pad()
    assert longest.lengths.tolist() == [11, 11, 11]
    assert longest.width[longest.is_padding].tolist() == [9, 9]
    assert batch.pad([11, 3, 4], "left").dense()[1].tolist() == [*DENSE[1], 0, 7, 8, 0, 0, 100, 102]
    assert batch.pad([12, 2, 3]).dense()[0].tolist() == [*DENSE[0], 0, 7, 8, 100, 102, 0]


WIDE = "a grid of width 3 (segment 1)"


@pytest.mark.parametrize(
    ("scheme", "token", "what"),
    [
        ("rope-tie", 1, "token 1 of a run of text (segment 0): position (1, 1)"),
        ("rope-tie", 7, f"row 1, column 1 of {WIDE}: position (10, 8) = (6, 5) + 1·(4, 0) + 1·(0, 3)"),
        ("rope-tie-v2", 4, f"row 0, column 1 of {WIDE}: position (5, 11/2) = (5, 9/2) + 0·(1, 0) + 1·(0, 1)"),
        ("mrope", 8, f"frame 0, row 1, column 2 of {WIDE}: position (3, 4, 5) = (3, 3, 3) + 0·(1, 0, 0) + 1·(0, 1, 0) "
                     "+ 2·(0, 0, 1)"),
        ("rows", 2, "token 2 of a run of text (segment 0): position (0, 2)"),
        ("flatten", 11, "padding (segment 3): position (0)"),
    ],
)  # fmt: skip
def test_explain_describes_a_token_and_its_position(scheme: str, token: int, what: str) -> None:
    positions = placed([Text(3), Grid(2, 3), Text(2)], scheme).pad(12)
    assert positions.explain(token) == f"token {token} (documents[0], token {token}) is {what}"


def test_segments_are_grids_padding_or_text() -> None:
    documents: list[Document] = [[Text(2), Grid(2, 3), Text(1), Grid(1, 2)], [Grid(1, 1, frames=2)]]
    positions = place(SegmentTable.from_documents(documents), "mrope").pad(12)
    assert positions.is_grid.tolist() == [False, True, False, True, False, True, False]
    assert positions.is_padding.tolist() == [False] * 4 + [True, False, True]
    assert positions.slice(4, 5).is_grid.tolist() == [True]


# The descriptions of all tokens, a line for each segment.
DESCRIPTIONS: list[tuple[str | Scheme, list[Segment], list[str]]] = [
    ("tmrope", [Text(1), Audio(2), Clip(1, 2, frames=2, audio=1, seconds_per_frame=Fraction(1, 25)), Text(1)], [
        "token 0 of a run of text",
        "token 0 of a run of audio | token 1 of a run of audio",
        "marker 0 before a clip | marker 1 before a clip | "
        "frame 0, row 0, column 0 of a clip of width 2 | frame 0, row 0, column 1 of a clip of width 2 | "
        "frame 1, row 0, column 0 of a clip of width 2 | frame 1, row 0, column 1 of a clip of width 2 | "
        "token 0 of the audio of a clip | marker 0 after a clip | marker 1 after a clip",
        "token 0 of a run of text",
    ]),
    ("mrope-canvas", [Thumbnail(2, 1, tokens_after=1), Tile(1, 2, tokens_after=2)], [
        "marker 0 before a thumbnail | row 0, column 0 of a thumbnail of width 1 | "
        "row 1, column 0 of a thumbnail of width 1 | marker 0 after a thumbnail | "
        "token 0 past the marker after a thumbnail",
        "marker 0 before a tile | row 0, column 0 of a tile of width 2 | row 0, column 1 of a tile of width 2 | "
        "marker 0 after a tile | token 0 past the marker after a tile | token 1 past the marker after a tile",
    ]),
    ("naive-2d", [Grid(2, 1, row_separator=True)], [
        "row 0, column 0 of a grid of width 1 | the separator after row 0 of a grid of width 1 | "
        "row 1, column 0 of a grid of width 1 | the separator after row 1 of a grid of width 1",
    ]),
    (Grid2D(order="merged", spatial_merge_size=2), [Grid(2, 4)], [
        " | ".join(f"token {patch} of a grid of width 4" for patch in range(8)),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "document", "descriptions"), DESCRIPTIONS)
def test_describe_states_the_kind_and_the_segment_of_every_token(
    scheme: str | Scheme, document: list[Segment], descriptions: list[str]
) -> None:
    segments = SegmentTable.from_documents([document])
    positions = place(segments, scheme)
    want = [f"{words} (segment {s})" for s, line in enumerate(descriptions) for words in line.split(" | ")]
    assert [positions.describe(token, segments) for token in range(positions.num_tokens)] == want
    padded = SegmentTable.from_input_ids([[1, 0]], Placeholders(), attention_mask=[[1, 0]])
    assert place(padded, "flatten").describe(1, padded) == "padding (segment 1)"


def test_explain_decomposes_the_positions_of_patches_but_not_of_markers() -> None:
    segments = SegmentTable.from_documents([[Text(3), Clip(2, 2, frames=2, audio=26, seconds_per_frame=1), Text(1)]])
    positions = place(segments, "tmrope")
    assert [positions.explain(token, segments).partition("segment 1): ")[2] for token in (3, 6, 9)] == [
        "position (3, 3, 3)",
        "position (4, 4, 5) = (4, 4, 4) + 0·(0, 1, 0) + 1·(0, 0, 1)",
        "position (29, 4, 4) = (29, 4, 4) + 0·(0, 1, 0) + 0·(0, 0, 1)",
    ]


ONE, THREE, MROPE = (
    place(SegmentTable.from_documents(n * [[Text(1)]]), scheme)
    for n, scheme in ((1, "rope-tie"), (3, "rope-tie"), (1, "mrope"))
)


@pytest.mark.usefixtures("way")
def test_documents_of_a_batch_are_removed_replaced_and_added(batch: PositionTable, one: PositionTable) -> None:
    text, halves = placed([Text(2)], "rope-tie"), placed([Text(1), Grid(1, 2)], "rope-tie-v2")
    updated = batch.updated(remove=np.array([0]), replace={2: text}, add=[one.slice(4, 9), halves])
    assert updated.dense().tolist() == [
        [7, 8, 0, 1, 6, 6, 10, 10, 10, 0, 1.5, 1.5],
        [7, 8, 0, 1, 8, 11, 5, 8, 11, 0, 1, 2],
    ]
    assert updated.cu_seqlens.tolist() == [0, 2, 4, 9, 12]
    assert (updated.next_positions.tolist(), updated.deltas.tolist()) == ([9, 2, 16, 3], [0, 0, 5, 0])
    assert updated.updated(add=[batch, halves]).scheme == updated.scheme == "rope-tie + rope-tie-v2"
    assert batch.updated() == batch
    assert batch.updated(remove=range(3)) == batch.window([], [], [])


AS_MANY = "want a PositionTable with as many axes as the first"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: PositionTable.concatenate([]), "tables: got none, want at least one"),
        (lambda: PositionTable.concatenate([ONE, 3]), rf"tables\[1\]: got int, {AS_MANY}"),  # type: ignore[list-item]
        (lambda: PositionTable.concatenate([ONE, MROPE]), rf"tables\[1\]: got 3 axes, {AS_MANY}"),
        (lambda: THREE.updated(remove=[0, 3]), r"remove\[1\]: got 3, want <= 2"),
        (lambda: THREE.updated(remove=[1, 0, 1]), r"remove\[2\]: got 1, which is also in remove"),
        (lambda: THREE.updated(remove=[1], replace={1: ONE}), r"remove\[0\]: got 1, which is also in replace"),
        (lambda: THREE.updated(remove=1), "remove: got 1, want a sequence of numbers"),  # type: ignore[arg-type]
        (lambda: THREE.updated(replace=[ONE]), "replace: got list, want a mapping from documents to tables"),  # type: ignore[arg-type]
        (lambda: THREE.updated(replace={3: ONE}), "replace: got 3, want <= 2"),
        (lambda: THREE.updated(replace={0: THREE}), r"replace\[0\]: got 3 documents, want 1"),
        (lambda: THREE.updated(replace={2: 7}), rf"replace\[2\]: got int, {AS_MANY}"),  # type: ignore[dict-item]
        (lambda: THREE.updated(add=THREE), "add: got PositionTable, want a list of PositionTables"),  # type: ignore[arg-type]
        (lambda: THREE.updated(add=[ONE, MROPE]), rf"add\[1\]: got 3 axes, {AS_MANY}"),
    ],
)
@pytest.mark.usefixtures("way")
def test_impossible_batches_are_refused(change: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{message}$"):
        change()


# from_arrays accepts every table that place returns, and checks everything that expansion relies on.

SEGMENTS = SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(1), Grid(2, 2), Text(1)]])
GRIDS = SegmentTable.from_documents([[Grid(2, 4, seconds_per_frame=1)]])
PLACED = place(SEGMENTS)


def from_arrays(positions: PositionTable, **changes: Any) -> PositionTable:
    names = ("table", "documents", "num_tokens", "fractional", "scheme")
    return PositionTable.from_arrays(**({name: getattr(positions, name) for name in names} | changes))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_placed_tables_and_their_views_are_accepted(scheme: str) -> None:
    placed = place(SEGMENTS if SCHEMES[scheme].text else GRIDS, scheme)
    views = [placed, placed.slice(1, 5), placed.slice(4, 4), placed.window([], [], []), placed.pad(20, "left")]
    for view in views:
        assert_equal(from_arrays(view), view)


def changed(row: int, segment: int, value: int) -> dict[str, Any]:
    table = PLACED.table.copy()
    table[row, segment] = value
    return {"table": table}


def document(row: int, which: int, value: int) -> dict[str, Any]:
    documents = PLACED.documents.copy()
    documents[row, which] = value
    return {"documents": documents}


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"table": PLACED.table[:-1]}, "table: got 12 rows, want 5 + 4·axes for 1 to 16 axes"),
    ({"table": PLACED.table[:5]}, "table: got 5 rows, want 5 + 4·axes for 1 to 16 axes"),
    ({"table": PLACED.table.astype(float)}, "table: got dtype float64, want integers"),
    ({"documents": PLACED.documents[:3]}, "documents: got shape (3, 2), want (4, n)"),
    ({"documents": PLACED.documents[:, :0]}, "documents: got none, want the documents of 6 segments"),
    ({"num_tokens": -1}, "num_tokens: got -1, want >= 0"),
    ({"num_tokens": 16}, "table.offset[5]: got 16 before 16, want at least one token"),
    ({"num_tokens": 15}, "table.offset[5]: got 16, want <= 15"),
    ({"fractional": 1}, "fractional: got 1, want True or False"),
    ({"scheme": None}, "scheme: got None, want a name"),
    (changed(OFFSET, 0, 1), "table.offset[0]: got 1, want 0, the first token"),
    (changed(OFFSET, 2, 3), "table.offset[1]: got 3 before 3, want at least one token"),
    (changed(OFFSET, 2, -5), "table.offset[2]: got -5, want >= 0"),
    (changed(SKIP, 1, -1), "table.skip[1]: got -1, want >= 0"),
    (changed(SKIP, 1, 2**31), "table.skip[1]: got 2147483648, want <= 2147483647"),
    (changed(SKIP, 1, 2**31 - 1), "table.skip + tokens - 1[1]: got 2147483652, want <= 2147483647"),
    (changed(HEIGHT, 1, 0), "table.height[1]: got 0, want >= 1"),
    (changed(WIDTH, 1, 0), "table.width[1]: got 0, want >= 1"),
    (changed(DENOMINATOR, 1, 0), "table.denominator[1]: got 0, want >= 1"),
    (changed(DENOMINATOR, 1, 2), "table.denominator[1]: got 2, want <= 1"),
    (document(FIRST_SEGMENT, 0, 1), "documents.first_segment must ascend from 0"),
    (document(FIRST_SEGMENT, 1, 7), "documents.first_segment[1]: got 7, want <= 6"),
    ({"num_tokens": 2**63 - 1}, "table.segment_lengths[5]: got 9223372036854775791, want <= 2147483648"),
    (
        document(DELTA, 1, NO_POSITION),
        f"documents.next_position[1]: got 10 with delta {NO_POSITION}, want {NO_POSITION} for both or neither",
    ),
    (document(FIRST_TOKEN, 1, 10), "documents.first_token[1]: got 10, want 11, the offset of its segment"),
]


NEXT = "want a value from -2**31 to 2**31"
BEYOND: list[tuple[dict[str, Any], str]] = [
    (changed(AXES, 1, 2**31), "table[:, 1]: got ids from 5 to 2147483652, want ids within int32"),
    (changed(AXES + 2, 1, -(2**40)), "table[:, 1]: got ids from -1099511627770 to 11, want ids within int32"),
    (changed(AXES + 3, 1, 2**62), "table[:, 1]: got numerators up to 9.22e+18, want at most 2**62"),
    (document(NEXT_POSITION, 1, 2**31 + 1), f"documents[1]: got next position 2147483649, {NEXT}"),
    (document(NEXT_POSITION, 0, -(2**40)), f"documents[0]: got next position -1099511627776, {NEXT}"),
    (document(DELTA, 1, 2**63 - 1), "documents.delta[1]: got 9223372036854775807, want at most 2**62 in magnitude"),
]


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        *((InvalidInputError, *row) for row in INVALID),
        *((LimitExceededError, *row) for row in BEYOND),
    ],
)
def test_invalid_tables_are_refused(error: type[MmposError], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(error) as caught:
        from_arrays(PLACED, **changes)
    assert str(caught.value) == message


def test_a_step_that_no_token_uses_may_be_of_any_size() -> None:
    assert (from_arrays(PLACED, **changed(AXES + 1, 1, 2**63 - 1)).dense() == PLACED.dense()).all()


EXTREME = st.sampled_from([0, 1, -1, 2, 5, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**31), NO_POSITION])


@pytest.mark.skipif(native.core is None, reason="the extension was not built")
@given(
    st.sampled_from(["rope-tie", "mrope", "v2pe", "vrope", "rope-tie-v2"]),
    st.lists(st.tuples(st.booleans(), st.integers(0, 10**6), EXTREME), max_size=2),
    st.booleans(),
)
def test_the_extension_accepts_the_same_tables_as_python(
    scheme: str, changes: list[tuple[bool, int, int]], fractional: bool
) -> None:
    placed = place(SEGMENTS, scheme).slice(1, 13)
    table, documents = placed.table.copy(), placed.documents.copy()
    for of_documents, where, value in changes:
        (documents if of_documents else table).flat[where % (documents if of_documents else table).size] = value
    from twins import both  # requires the extension

    both(lambda: from_arrays(placed, table=table, documents=documents, fractional=fractional))


@given(st.integers(0, PLACED.table.size - 1), st.integers(-(2**63), 2**63 - 1))
def test_accepted_tables_expand_within_int32(where: int, value: int) -> None:
    table = PLACED.table.copy()
    table.flat[where] = value
    try:
        checked = from_arrays(PLACED, table=table)
    except (InvalidInputError, LimitExceededError):
        return
    ids, denominators = checked.rationals()
    assert (denominators == 1).all()
    assert ids.min() >= -(2**31)
    assert ids.max() < 2**31
    assert (checked.dense(dtype=np.int64) == ids).all()


@given(
    st.integers(NEXT_POSITION, DELTA), st.sampled_from([0, -1, 1]), st.sampled_from([0, 2**31, -(2**31), 2**62, 2**63])
)
def test_accepted_tables_continue_within_int32(row: int, by: int, near: int) -> None:
    value = max(-(2**63), min(near + by, 2**63 - 1))
    try:
        checked = from_arrays(PLACED, **document(row, 1, value))
        more = [checked.decode(2), checked.window([1], [3], [4])]
    except (InvalidInputError, LimitExceededError):
        return
    for grown in more:
        np.testing.assert_array_equal(grown.dense(), grown.rationals()[0])
        assert repr(from_arrays(grown)) == repr(grown)


def test_the_rows_of_a_video_restart_in_every_frame_up_to_the_last_id() -> None:
    video = place(SegmentTable.from_documents([[Grid(2, 1, frames=3)]]), "mrope")
    table = video.table.copy()
    table[AXES + 4] = 2**31 - 2  # the origin of rows
    assert from_arrays(video, table=table).dense()[1].tolist() == [2**31 - 2, 2**31 - 1] * 3
    table[AXES + 4] += 1
    with pytest.raises(LimitExceededError, match="want ids within int32"):
        from_arrays(video, table=table)


def test_a_cursor_beyond_int32_is_refused_by_place() -> None:
    documents = SegmentTable.from_documents([[Text(1)], [Text(1), Grid(1, 2)]])
    assert place(documents, start=[0, 2**31 - 6]).next_positions.tolist() == [1, 2**31]
    with pytest.raises(LimitExceededError) as caught:
        place(documents, start=[0, 2**31 - 5])
    assert str(caught.value) == "documents[1]: got next position 2147483649, want a value from -2**31 to 2**31"


# Peers.

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
