"""PositionTable.from_arrays accepts every table that place returns, and checks everything that expansion relies on."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
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
    place,
)
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
from mmpos.support import native

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
