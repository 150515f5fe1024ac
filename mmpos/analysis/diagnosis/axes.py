"""Mistakes of axes: rows for columns, sides exchanged, patches in another order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mmpos.analysis.diagnosis.case import Case, Guess
from mmpos.analysis.diagnosis.mistakes import ColumnMajor
from mmpos.positions.rows import axis_names
from mmpos.segments.table import GRID, SegmentTable


def permuted(case: Case) -> Iterator[Guess]:
    """The same rows of ids in another order: each row that came is the axis, not yet taken, that it resembles most."""
    names = axis_names(case.positions.axes)
    want, order = case.held(case.want), list[int]()
    for row in case.got:
        alike = np.stack([case.near(axis[None], row[None]) for axis in want])
        # An order that does not give the first difference is none, however much else it gives.
        score = np.where(alike[:, case.first], 1 + alike.sum(axis=1), 0)
        score[order] = -1
        order.append(int(score.argmax()))
    if order != sorted(order):
        found = ", ".join(names[axis] for axis in order)
        words = f"axes are swapped: they stand in the order ({found}) and should be ({', '.join(names)})"
        yield Guess(words, case.want[order])


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
