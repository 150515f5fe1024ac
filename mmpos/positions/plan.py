"""Plans: what a scheme says of each shape of grid, kept, so that one pass in C places a batch by looking it up."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mmpos.errors import MmposError
from mmpos.positions.table import PositionTable, of_bytes
from mmpos.positions.table_rows import AXES
from mmpos.schemes import Grids, Placement, Scheme
from mmpos.segments.kinds import GRID
from mmpos.segments.table import SegmentTable
from mmpos.support import native
from mmpos.support.checks import IntArray

__all__ = ["MAX_SHAPES", "Plan", "forget_plans", "place_by_plan", "plan_of"]

MAX_SHAPES = 4096
"""Most shapes of grids that the plan of a scheme keeps; with more, it begins anew."""

_SHAPE, _ROW, _PER_AXIS = 4, 7, 5
"""Numbers of a shape; those of a row before its axes, and of each axis, as csrc/plan.c has them."""

_CURSORS = (0, 1, 4099)
"""Cursors for which a scheme is asked: two say how its ids follow the cursor, the third one that they are linear."""

_NONE = np.iinfo(np.int64).min


class Plan:
    """What a scheme says of each shape of grid so far: a hash table that is never changed, but replaced.

    Args:
        scheme: a scheme with ``by_shape``.
    """

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self.rules = scheme.frames, scheme.row_separators
        self.table = np.zeros((2, _ROW + _PER_AXIS * scheme.axes), np.int64)

    def add(self, shapes: IntArray) -> None:
        """Ask the scheme for shapes that are not in the plan yet.

        Args:
            shapes: (4, shapes) frames, height, width, and whether rows end in a separator; each once.
        """
        rows = _rows(self.scheme, shapes)
        known = self.table[self.table[:, 0] > 0]
        if len(known) + len(rows) <= MAX_SHAPES:
            rows = np.concatenate([known, rows])
        table = np.zeros((2 << len(rows).bit_length(), rows.shape[1]), np.int64)
        assert native.core is not None
        native.core.enter(table, rows)
        self.table = table  # at once, for threads that read the one before


def plan_of(scheme: Scheme) -> Plan | None:
    """Return the plan of a scheme, one for all that are equal; None for a scheme without one."""
    if not vars(type(scheme)).get("by_shape"):
        return None
    try:
        return _plan_of(scheme)
    except TypeError:  # a scheme of somebody's own that cannot be hashed
        return None


@lru_cache(maxsize=64)
def _plan_of(scheme: Scheme) -> Plan:
    return Plan(scheme)


def forget_plans() -> None:
    """Forget all plans, which changes no result."""
    _plan_of.cache_clear()


def place_by_plan(scheme: Scheme, segments: SegmentTable, start: npt.ArrayLike, strict: bool) -> PositionTable | None:
    """Place a batch by the plan of its scheme; None where the general way must place it, or say what is wrong.

    Args:
        scheme: the scheme.
        segments: the documents.
        start: as for ``place``, unchecked.
        strict: whether grids must not touch.
    """
    core, plan = native.core, plan_of(scheme)
    if core is None or plan is None or type(start) not in (int, np.ndarray):
        return None
    timed = segments.seconds_per_frame is not None
    for _ in range(2):
        placed = core.place(
            segments.kind, segments.extents, segments.segment_offsets, segments.row_separator, timed, start,
            plan.table, (strict, *plan.rules),
        )  # fmt: skip
        if placed is None:
            return None
        if type(placed) is tuple:
            return of_bytes(placed, AXES + 4 * scheme.axes, scheme.fractional, scheme.label)
        shapes = _new_shapes(segments, plan)
        if shapes.shape[1] > MAX_SHAPES:
            return None
        plan.add(shapes)
    return None  # another thread has begun the plan anew


def _new_shapes(segments: SegmentTable, plan: Plan) -> IntArray:
    """Return the shapes of the grids of a batch that a plan does not have, (4, shapes), each once."""
    grid = segments.kind == GRID
    separator = np.zeros(grid.size, np.int64) if segments.row_separator is None else segments.row_separator
    shapes = np.unique(np.concatenate([segments.extents[:, grid], separator[None, grid]]), axis=1)
    if shapes.shape[1] > MAX_SHAPES:
        return shapes
    known = {tuple(row) for row in plan.table[:, :_SHAPE].tolist()}
    new = [i for i, shape in enumerate(shapes.T.tolist()) if tuple(shape) not in known]
    # A plan that is full begins anew, with all shapes of the batch.
    return shapes if len(known) + len(new) > MAX_SHAPES else shapes[:, new]


def _rows(scheme: Scheme, shapes: IntArray) -> IntArray:
    """Make the rows of shapes: what the scheme says of each, or no denominator where that is not affine."""
    rows = np.zeros((shapes.shape[1], _ROW + _PER_AXIS * scheme.axes), np.int64)
    rows[:, :_SHAPE] = shapes.T
    try:
        rows[:, _SHAPE:] = _numbers(scheme, shapes)
    except (MmposError, _NotAffineError):
        if len(rows) > 1:  # which of them it is
            return np.concatenate([_rows(scheme, shapes[:, i : i + 1]) for i in range(len(rows))])
    return rows


class _NotAffineError(Exception):
    """The general way must place these grids."""


def _numbers(scheme: Scheme, shapes: IntArray) -> IntArray:
    """Ask a scheme for the numbers of shapes, (shapes, numbers of a row after the shape).

    Raises:
        _NotAffineError: ids that are not linear in the cursor, cut into pieces, or no integers.
        MmposError: what the scheme refuses.
    """
    count, times = shapes.shape[1], len(_CURSORS)
    extents = np.tile(shapes[:3], times)
    separator = np.tile(shapes[3] > 0, times) if shapes[3].any() else None
    none = np.zeros(count * times, np.int64)
    grids = Grids(extents, none, np.arange(count * times), separator)
    cursor = np.repeat(np.array(_CURSORS, np.int64), count)
    if scheme.unit(grids) is not None:
        raise _NotAffineError
    placement, demanded = scheme.place(grids, cursor), scheme.next_after(grids, cursor)
    if placement.pieces is not None and placement.pieces.tokens.size != none.size:
        raise _NotAffineError
    consumed, _ = _linear(scheme.advance(grids), count, slope=0)
    lowest = np.full(count, _NONE) if demanded is None else _linear(demanded, count, slope=1)[0]
    denominator, _ = _linear(placement.denominator, count, slope=0)
    if not scheme.fractional and (denominator != 1).any():
        raise _NotAffineError
    columns = [consumed, lowest, denominator]
    for axis in range(scheme.axes):
        columns += _linear(_of_axis(scheme, placement, "origin", axis), count)
        columns += (
            _linear(_of_axis(scheme, placement, step, axis), count, slope=0)[0]
            for step in ("step_frame", "step_row", "step_col")
        )
    return np.stack(columns, axis=1)


def _of_axis(scheme: Scheme, placement: Placement, name: str, axis: int) -> IntArray | int:
    per_axis = getattr(placement, name)
    if per_axis is None:
        return 0
    if len(per_axis) != scheme.axes:
        raise _NotAffineError
    values: IntArray | int = per_axis[axis]
    return values


def _linear(values: IntArray | int, count: int, slope: int | None = None) -> tuple[IntArray, IntArray]:
    """Return the values at cursor 0, and their slope, (count,) each."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise _NotAffineError
    at = np.broadcast_to(array.astype(np.int64), len(_CURSORS) * count).reshape(len(_CURSORS), count)
    per_cursor = at[1] - at[0]
    if (at[2] - at[0] != _CURSORS[2] * per_cursor).any() or (slope is not None and (per_cursor != slope).any()):
        raise _NotAffineError
    return at[0], per_cursor
