"""Mistakes of axes: rows for columns, sides exchanged, patches in another order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

from mmpos.columns import AXIS_NAMES
from mmpos.diagnosis.case import Case, Guess
from mmpos.diagnosis.mistakes import ColumnMajor
from mmpos.segments import GRID, SegmentTable


def permuted(case: Case) -> Iterator[Guess]:
    """The same rows of ids in another order."""
    names = AXIS_NAMES[case.positions.axes]
    for order in permutations(range(len(names))):
        if list(order) != sorted(order):
            found = ", ".join(names[axis] for axis in order)
            words = f"axes are swapped: they stand in the order ({found}) and should be ({', '.join(names)})"
            yield Guess(words, case.want[list(order)])


def sides_exchanged(case: Case) -> Iterator[Guess]:
    """Grids whose height was taken for their width."""
    exchanged = _exchanged(case)
    ids = None if exchanged is None else case.placed(segments=exchanged)
    if ids is not None:
        yield Guess("height and width of grids are exchanged", ids)


def column_major(case: Case) -> Iterator[Guess]:
    """Patches one column after the other."""
    exchanged = _exchanged(case)
    if exchanged is None or case.scheme is None:
        return
    ids = case.placed(ColumnMajor(case.scheme), exchanged)
    if ids is not None:
        yield Guess("patches are in column-major order: column after column, not row after row", ids)


def _exchanged(case: Case) -> SegmentTable | None:
    """The documents with height and width of their grids exchanged; none if rows end in separators."""
    segments = case.segments
    if segments is None or segments.row_separator is not None:
        return None
    extents = segments.extents.copy()
    grid = segments.kind == GRID
    extents[1:, grid] = segments.extents[:0:-1, grid]
    return replace(segments, extents=extents)
