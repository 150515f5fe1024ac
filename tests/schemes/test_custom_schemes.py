"""User-defined schemes: placements are checked, and schemes may have any number of axes."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from mmpos import (
    Grid,
    InvalidInputError,
    LimitExceededError,
    Scheme,
    SegmentTable,
    Text,
    diagnose,
    fingerprint,
    place,
)
from mmpos.analysis.plot import read_plane
from mmpos.cli.report import heading
from mmpos.schemes import SCHEMES, Grid2D, Grids, Placement, QwenImage, RopeTie, TextRuns, check
from mmpos.segments.kinds import Segment

SEGMENTS = SegmentTable.from_documents([[Text(1), Grid(2, 3), Text(1)]])


@dataclass(frozen=True)
class Custom(Scheme):
    """A scheme whose placements a test specifies by options."""

    name: ClassVar[str] = "custom"
    options: Any
    ids: Any = 6
    axes = 2
    fractional: bool = False

    def advance(self, grids: Grids) -> Any:
        return np.full(grids.width.size, self.ids)

    def place(self, grids: Grids, cursor: Any) -> Placement:
        return Placement(**{"origin": [cursor, cursor], **self.options})


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (Custom({"denominator": 2}), "scheme 'custom': got a denominator, want none unless fractional = True"),
        (Custom({"denominator": 0}, fractional=True), "scheme 'custom': got denominator 0, want >= 1"),
        (Custom({"step_row": [1.5, 0]}), "scheme 'custom': got step_row 1.5, want integers"),
        (Custom({"step_col": [np.ones(1), 0]}), "scheme 'custom': got step_col float64, want integers"),
        (Custom({"origin": [0]}), "scheme 'custom': got 1 origins, want 2, one per axis"),
        (Custom({}, ids=1.5), "scheme 'custom': got advance float64, want integers"),
    ],
)
def test_an_invalid_placement_is_refused(scheme: Scheme, message: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        place(SEGMENTS, scheme)
    assert str(raised.value) == message


@pytest.mark.parametrize("scheme", ["mrope-qwen2.5", "tmrope", Grid2D(order="merged")])
def test_grids_with_too_many_pieces_are_refused_before_memory_is_allocated(scheme: Any) -> None:
    with pytest.raises(LimitExceededError, match="got grids cut into 1048577 pieces, want at most 1048576"):
        place(SegmentTable.from_documents([[Grid(1, 1, frames=2**20 + 1, seconds_per_frame=1)]]), scheme)


@dataclass(frozen=True)
class Many(Scheme):
    """A scheme with any number of axes, which have different steps."""

    name: ClassVar[str] = "many"
    axes: int = 5

    def advance(self, grids: Grids) -> Any:
        return grids.tokens

    def place(self, grids: Grids, cursor: Any) -> Placement:
        steps = range(self.axes)
        return Placement([cursor] * self.axes, step_row=[axis % 3 for axis in steps], step_col=list(steps))


@pytest.mark.parametrize("order", [[1, 0, 2, 3, 4], [4, 3, 0, 1, 2], [*reversed(range(16))]])
def test_axes_in_the_wrong_order_are_identified(order: list[int]) -> None:
    ids = place(SEGMENTS, Many(len(order))).dense()
    assert diagnose(ids, SEGMENTS, Many(len(order))).equal
    swapped, want = (", ".join(f"axis {axis}" for axis in axes) for axes in (order, range(len(order))))
    cause = f"axes are swapped: got the order ({swapped}), want ({want})"
    assert diagnose(ids[order], SEGMENTS, Many(len(order))).cause == cause


def test_unnamed_axes_are_printed_and_drawn_by_number() -> None:
    placed = place(SEGMENTS, Many())
    assert heading(placed, 0) == "8 tokens, scheme many, positions (axis 0, axis 1, axis 2, axis 3, axis 4)"
    plane = read_plane(placed, 0)
    assert plane.names == ("id on axis 1", "id on axis 0")
    assert plane.images[0].points.tolist() == placed.dense()[[1, 0], 1:7].tolist()


@dataclass(frozen=True)
class Still(Scheme):
    """A scheme that places all tokens at the start of the document."""

    name: ClassVar[str] = "still"
    axes = 2
    resumable = False

    def advance(self, grids: Grids) -> Any:
        return np.zeros_like(grids.width)

    def advance_text(self, runs: TextRuns) -> Any:
        return np.zeros_like(runs.lengths)

    def place(self, grids: Grids, cursor: Any) -> Placement:
        return Placement([grids.start] * 2)

    def place_text(self, runs: TextRuns, cursor: Any) -> Placement:
        return Placement([runs.start] * 2)


def test_a_document_whose_ids_are_all_0_is_not_padding() -> None:
    segments = SegmentTable.from_documents([[Text(5), Grid(2, 3, frames=2), Text(1), Grid(1, 4)]])
    positions = place(segments, Still())
    columns = [[1, 1, 1, 0, 0, 0, 1], [4, 3, 1, 0, 1, 0, 0], [1, 1, 1, 0, 0, 0, 1], [1, 4, 1, 0, 1, 0, 0]]
    assert positions.table[2:9].T.tolist() == columns
    padded = positions.pad(25)
    assert padded.is_padding.tolist() == [False] * 4 + [True]
    assert padded.is_grid.tolist() == [False, True, False, True, False]
    assert padded.real_lengths.tolist() == [22]
    assert positions.padded(25)[1].tolist() == [[1] * 22 + [0] * 3]
    assert not padded.rationals()[0].any()
    assert positions.explain(4).endswith("is token 4 of a run of text (segment 0): position (0, 0)")
    assert positions.describe(12, segments) == "frame 1, row 0, column 1 of a grid of width 3 (segment 1)"
    assert positions.token_types(segments).tolist() == [0] * 5 + [1] * 12 + [0] + [1] * 4
    assert fingerprint(padded) == fingerprint(np.zeros((2, 22), np.int32))
    assert str(diagnose(np.zeros((2, 22), np.int32), segments, Still())).startswith("All 22 tokens")
    elsewhere = place(segments, Still(), start=7)
    assert elsewhere.table[3].tolist() == [5, 3, 1, 4]
    assert elsewhere.is_grid.tolist() == [False, True, False, True]
    assert (elsewhere.dense() == 7).all()


@dataclass(frozen=True)
class Bent(Scheme):
    """A scheme whose ids are linear in the cursor only over part of its range."""

    name: ClassVar[str] = "bent"
    axes = 2
    bend: str = "negative"

    def advance(self, grids: Grids) -> Any:
        return grids.height + grids.width

    def place(self, grids: Grids, cursor: Any) -> Placement:
        origin = {
            "negative": lambda: np.maximum(cursor, 0),
            "sixth": lambda: cursor + (grids.number >= 5),
            "far": lambda: cursor + (cursor > 4099),
        }[self.bend]()
        return Placement([origin, cursor], step_row=[1, 0], step_col=[0, 1])


@dataclass(frozen=True)
class Declared(Bent):
    """The same scheme with a wrong declaration."""

    linear_in = ("cursor",)


BENDS: dict[str, tuple[int, list[list[Segment]], list[int]]] = {  # first id, documents, first ids of the patches
    "negative": (-9, [[Text(1), Grid(1, 1)]], [0]),
    "sixth": (0, [[Grid(1, 1), Text(1)] * 6], [0, 3, 6, 9, 12, 16]),
    "far": (4099, [[Grid(1, 1), Text(1), Grid(1, 1)]], [4099, 4103]),
}


@pytest.mark.parametrize("bend", BENDS)
@pytest.mark.usefixtures("way")
def test_a_scheme_that_declares_nothing_has_the_same_ids_with_and_without_the_extension(bend: str) -> None:
    start, documents, want = BENDS[bend]
    segments = SegmentTable.from_documents(documents)
    place(SegmentTable.from_documents([[Text(1), Grid(1, 1), Text(1)]]), Bent(bend))
    ids = place(segments, Bent(bend), start).dense()[0]
    assert ids[(segments.kind == 1).repeat(segments.lengths)].tolist() == want


@pytest.mark.parametrize("bend", BENDS)
def test_check_finds_ids_that_are_not_as_declared(bend: str) -> None:
    with pytest.raises(InvalidInputError, match=r"^scheme 'bent': origin\[0\] of a grid of .* must be linear in c"):
        check(Declared(bend))


@pytest.mark.parametrize("scheme", [*(kind() for kind in SCHEMES.values()), RopeTie(axes=3), QwenImage(layered=True)])
def test_the_schemes_of_mmpos_place_grids_as_they_declare(scheme: Scheme) -> None:
    if scheme.linear_in is None:
        with pytest.raises(InvalidInputError, match="got linear_in None, want some of cursor, start, number, text_tok"):
            check(scheme)
    else:
        check(scheme, points=200)


class Backwards(Scheme):
    """A scheme whose grids move the cursor back."""

    name: ClassVar[str] = "backwards"
    linear_in = ("cursor",)
    axes = 1

    def advance(self, grids: Grids) -> Any:
        return -grids.width

    def place(self, grids: Grids, cursor: Any) -> Placement:
        return Placement([cursor])


@pytest.mark.usefixtures("way")
def test_a_scheme_that_moves_the_cursor_back_is_refused() -> None:
    segments = SegmentTable.from_documents([[Text(1)], [Text(2), Grid(1, 24), Text(1)]])
    with pytest.raises(
        InvalidInputError, match=r"^scheme 'backwards': got advance -24 for documents\[1\]\[1\], want >= "
    ):
        place(segments, Backwards())
    with pytest.raises(InvalidInputError, match=r"^scheme 'backwards': got advance -\d+ for a grid of .*, want >= 0$"):
        check(Backwards())
