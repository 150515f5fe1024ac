"""A scheme that a user writes is checked where it could give wrong ids."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from mmpos import Grid, InvalidInputError, LimitExceededError, Scheme, SegmentTable, Text, UnsupportedError, place
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
