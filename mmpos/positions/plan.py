"""Plans: cached placements of each grid shape under a scheme, so that one C pass places a batch by lookup."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mmpos.errors import MmposError
from mmpos.positions.table import PositionTable, of_bytes
from mmpos.positions.table_rows import AXES
from mmpos.schemes import Grids, Scheme
from mmpos.schemes.affine import NotAffineError, Values, linear, text_values, unit_points, values
from mmpos.segments.kinds import GRID
from mmpos.segments.table import SegmentTable
from mmpos.support import native
from mmpos.support.checks import IntArray

__all__ = ["MAX_SHAPES", "Plan", "forget_plans", "place_by_plan", "plan_of"]

MAX_SHAPES = 4096
"""Maximum number of grid shapes in a plan; a plan that would exceed it starts over."""

_SHAPE, _ROW, _PER_AXIS = 4, 8, 8
"""Number of values per shape, per row before its axes, and per axis, as in csrc/plan.c."""
_CLEARED, _PER_NUMBER, _PER_TEXT = 6, 3, 4
"""Indices of three of these columns: the first in a row, the others among the columns of an axis."""

_ANY_CLEARS, _ANY_COUNTS = 1, 2
"""Flags in the row of text: whether any grid keeps ids free before text, and whether any grid counts the text."""

_NONE = np.iinfo(np.int64).min


class Plan:
    """Placements of text and of each known grid shape under a scheme, in a hash table that is replaced, never modified.

    The first row describes text.

    Args:
        scheme: scheme with ``linear_in``.
    """

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self.rules = scheme.frames, scheme.row_separators
        self.table = np.zeros((1 + 2, _ROW + _PER_AXIS * scheme.axes), np.int64)
        self.table[0, _SHAPE:] = _row_of_text(scheme)

    def add(self, shapes: IntArray) -> None:
        """Add shapes that are not in the plan yet.

        Args:
            shapes: (4, shapes) frames, height, width, and whether rows end in a separator; the shapes must be distinct.
        """
        rows = _rows(self.scheme, shapes)
        if not self.scheme.references:
            rows[:, _ROW + _PER_NUMBER] = -_NONE - 1  # a second grid is beyond all limits, so that place refuses it
        text, known = self.table[:1], self.table[1:][self.table[1:, 0] > 0]
        if len(known) + len(rows) <= MAX_SHAPES:
            rows = np.concatenate([known, rows])
        table = np.zeros((1 + (2 << len(rows).bit_length()), rows.shape[1]), np.int64)
        table[0] = text
        if rows[:, _ROW + _PER_TEXT :: _PER_AXIS].any():
            table[0, _CLEARED] |= _ANY_COUNTS
        assert native.core is not None
        native.core.enter(table, rows)
        self.table = table  # atomic, for threads that read the previous table


def plan_of(scheme: Scheme) -> Plan | None:
    """Return the plan of a scheme, shared by equal schemes, or None if the scheme has no plan."""
    if "linear_in" not in vars(type(scheme)) or scheme.linear_in is None:
        return None
    try:
        return _plan_of(scheme)
    except TypeError:  # a user-defined scheme that cannot be hashed
        return None


@lru_cache(maxsize=64)
def _plan_of(scheme: Scheme) -> Plan:
    return Plan(scheme)


def forget_plans() -> None:
    """Drop all plans; results do not change."""
    _plan_of.cache_clear()


def place_by_plan(scheme: Scheme, segments: SegmentTable, start: npt.ArrayLike, strict: bool) -> PositionTable | None:
    """Place a batch with its scheme's plan; return None if the general path must place it or raise the error.

    Args:
        scheme: scheme of the plan.
        segments: segments of the documents.
        start: unchecked start; see ``place``.
        strict: whether grids must not touch.
    """
    core, plan = native.core, plan_of(scheme)
    if core is None:
        native.warn_slow()
        return None
    timed = scheme.timed and segments.seconds_per_frame is not None
    # Even the denominator of a single frame depends on its time, and a plan knows no first frames.
    if segments.first_frame is not None or (timed and scheme.fractional):
        return None
    if plan is None or type(start) not in ((int, np.ndarray) if scheme.resumable else (int,)):
        return None
    for _ in range(2):
        placed = core.place(
            segments.kind, segments.extents, segments.segment_offsets, segments.row_separator, timed, start,
            plan.table, (strict, *plan.rules, scheme.resumable, scheme.audio),
        )  # fmt: skip
        if placed is None:
            return None
        if type(placed) is tuple:
            return of_bytes(placed, AXES + 4 * scheme.axes, scheme.fractional, scheme.label)
        shapes = _new_shapes(segments, plan)
        if shapes.shape[1] > MAX_SHAPES:
            return None
        plan.add(shapes)
    return None  # another thread has restarted the plan


def _new_shapes(segments: SegmentTable, plan: Plan) -> IntArray:
    """Return the (4, shapes) distinct grid shapes of a batch that a plan lacks."""
    grid = segments.kind == GRID
    separator = np.zeros(grid.size, np.int64) if segments.row_separator is None else segments.row_separator
    shapes = np.unique(np.concatenate([segments.extents[:, grid], separator[None, grid]]), axis=1)
    if shapes.shape[1] > MAX_SHAPES:
        return shapes
    known = {tuple(row) for row in plan.table[1:, :_SHAPE].tolist()}
    new = [i for i, shape in enumerate(shapes.T.tolist()) if tuple(shape) not in known]
    # A full plan starts over with all shapes of the batch.
    return shapes if len(known) + len(new) > MAX_SHAPES else shapes[:, new]


def _rows(scheme: Scheme, shapes: IntArray) -> IntArray:
    """Build the rows of shapes from the scheme; a row without a denominator marks a shape that is not affine."""
    rows = np.zeros((shapes.shape[1], _ROW + _PER_AXIS * scheme.axes), np.int64)
    rows[:, :_SHAPE] = shapes.T
    try:
        rows[:, _SHAPE:] = _numbers(scheme, shapes)
    except (MmposError, NotAffineError):
        if len(rows) > 1:  # find the shape that failed
            return np.concatenate([_rows(scheme, shapes[:, i : i + 1]) for i in range(len(rows))])
    return rows


def _row_of_text(scheme: Scheme) -> IntArray:
    """Compute the row of text without its shape; return all 0 if the general path must place text."""
    grids = Grids(np.ones((3, 1), np.int64), *np.zeros((2, 1), np.int64))
    try:
        axes = _axes(scheme, text_values(scheme, unit_points(_TEXT)), _TEXT)[0]
        clears = scheme.cleared(grids) is not None
    except (MmposError, NotAffineError):
        return np.zeros(_ROW - _SHAPE + _PER_AXIS * scheme.axes, np.int64)
    return np.concatenate([[1, _NONE, clears], axes])


def _numbers(scheme: Scheme, shapes: IntArray) -> IntArray:
    """Compute the (shapes, values) rows of shapes, without the shapes themselves.

    Raises:
        NotAffineError: the grid is split, or values are not integers.
        MmposError: the scheme refuses a shape.
    """
    assert scheme.linear_in is not None
    asked = values(scheme, shapes, unit_points(scheme.linear_in))
    lowest = np.full(shapes.shape[1], _NONE)
    if asked.lowest is not None:
        lowest, slopes = linear(asked.lowest, scheme.linear_in)
        if (slopes != [1, 0, 0, 0]).any():
            raise NotAffineError
    consumed, cleared = _constant(asked, "advance"), _constant(asked, "cleared")
    if (consumed < 0).any():  # place raises the error
        raise NotAffineError
    return np.column_stack([consumed, lowest, cleared, _axes(scheme, asked, scheme.linear_in)])


_TEXT = ("cursor", "start")
"""What the ids of text depend on."""


def _axes(scheme: Scheme, asked: Values, names: tuple[str, ...]) -> IntArray:
    """Build the columns of a plan, starting with the denominator."""
    denominator = _constant(asked, "denominator")
    if not scheme.fractional and (denominator != 1).any():
        raise NotAffineError
    columns = [denominator]
    for axis, origin in enumerate(asked.origins):
        zero, slopes = linear(origin, names)
        steps = [_constant(asked, f"step_{of}[{axis}]") for of in ("frame", "row", "col")]
        columns += [zero, *slopes.T, *steps]
    return np.stack(columns, axis=1)


def _constant(asked: Values, name: str) -> IntArray:
    """Return the (shapes,) values of this name, which must be the same at every point."""
    array = asked.fixed[name]
    if (array != array[:, :1]).any():
        raise NotAffineError
    return array[:, 0]
