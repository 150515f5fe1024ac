"""A scheme that a user writes is checked where it could give wrong ids, and may have any number of axes."""

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
    UnsupportedError,
    diagnose,
    place,
)
from mmpos.analysis.plot.positions import read_plane
from mmpos.cli.report import heading
from mmpos.schemes import Grid2D, Grids, Placement

SEGMENTS = SegmentTable.from_documents([[Text(1), Grid(2, 3), Text(1)]])


@dataclass(frozen=True)
class Custom(Scheme):
    """Whatever a test hands in."""

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
        (Custom({"denominator": 2}), "scheme 'custom': got a denominator, want fractional = True with it"),
        (Custom({"denominator": 0}, fractional=True), "scheme 'custom': got denominator 0, want >= 1"),
        (Custom({"step_row": [1.5, 0]}), "scheme 'custom': got step_row 1.5, want integers"),
        (Custom({"step_col": [np.ones(1), 0]}), "scheme 'custom': got step_col float64, want integers"),
        (Custom({"origin": [0]}), "scheme 'custom': got 1 origins, want 2, one per axis"),
        (Custom({}, ids=1.5), "scheme 'custom': got advance float64, want integers"),
    ],
)
def test_a_placement_that_cannot_be_right_is_refused(scheme: Scheme, message: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        place(SEGMENTS, scheme)
    assert str(raised.value) == message


def test_ids_of_zero_everywhere_would_look_like_padding() -> None:
    with pytest.raises(UnsupportedError, match="scheme 'custom': got a segment with origin and steps 0"):
        place(SegmentTable.from_documents([[Grid(1, 1)]]), Custom({"origin": [0, 0]}))


@pytest.mark.parametrize("scheme", ["mrope-qwen2.5", Grid2D(order="merged")])
def test_grids_of_too_many_pieces_are_refused_before_memory_is_spent(scheme: Any) -> None:
    with pytest.raises(LimitExceededError, match="got grids of 1048577 pieces, want at most 1048576"):
        place(SegmentTable.from_documents([[Grid(1, 1, frames=2**20 + 1)]]), scheme)


class Five(Scheme):
    """Frame, row, column, their sum, and the row twice."""

    name: ClassVar[str] = "five"
    axes = 5

    def advance(self, grids: Grids) -> Any:
        return grids.height + grids.width

    def place(self, grids: Grids, cursor: Any) -> Placement:
        return Placement([cursor] * 5, [1, 0, 0, 1, 0], [0, 1, 0, 1, 2], [0, 0, 1, 1, 0])


@pytest.mark.parametrize("order", [[1, 0, 2, 3, 4], [4, 3, 0, 1, 2], [4, 3, 2, 1, 0]])
def test_five_axes_in_another_order_are_named(order: list[int]) -> None:
    ids = place(SEGMENTS, Five()).dense()
    assert diagnose(ids, SEGMENTS, Five()).equal
    came = ", ".join(f"axis {axis}" for axis in order)
    assert diagnose(ids[order], SEGMENTS, Five()).cause == (
        f"axes are swapped: they stand in the order ({came}) and should be (axis 0, axis 1, axis 2, axis 3, axis 4)"
    )


class Sixteen(Scheme):
    """Columns, on every axis by another step."""

    name: ClassVar[str] = "sixteen"
    axes = 16

    def advance(self, grids: Grids) -> Any:
        return grids.tokens

    def place(self, grids: Grids, cursor: Any) -> Placement:
        return Placement([cursor] * 16, step_col=list(range(16)))


def test_the_order_of_many_axes_takes_no_search_through_all_orders() -> None:
    segments = SegmentTable.from_documents([[Text(1), Grid(1, 3), Text(1)]])
    cause = diagnose(place(segments, Sixteen()).dense()[::-1], segments, Sixteen()).cause
    assert cause is not None
    assert cause.startswith("axes are swapped: they stand in the order (axis 15, axis 14, axis 13, ")


def test_five_axes_are_told_and_drawn_by_number() -> None:
    placed = place(SEGMENTS, Five())
    assert heading(placed, 0) == "8 tokens, scheme five, positions (axis 0, axis 1, axis 2, axis 3, axis 4)"
    plane = read_plane(placed, 0)
    assert plane.names == ("id on axis 1", "id on axis 0")
    assert plane.images[0].points.tolist() == placed.dense()[[1, 0], 1:7].tolist()
