"""Plans: cached placements of each grid shape under a scheme, so that one C pass places a batch by lookup."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mmpos.errors import MmposError
from mmpos.positions.table import PositionTable, of_bytes
from mmpos.positions.table_rows import AXES
from mmpos.schemes import Grids, Placement, Scheme, TextRuns
from mmpos.segments.kinds import GRID
from mmpos.segments.table import SegmentTable
from mmpos.support import native
from mmpos.support.checks import IntArray

__all__ = ["MAX_SHAPES", "Plan", "forget_plans", "place_by_plan", "plan_of"]

MAX_SHAPES = 4096
"""Maximum number of grid shapes in a plan; a plan that would exceed it starts over."""

_SHAPE, _ROW, _PER_AXIS = 4, 8, 8
"""Number of values per shape, per row before its axes, and per axis, as in csrc/plan.c."""
_CLEARED, _PER_TEXT = 6, 4
"""Indices of two of these columns: the first in a row, the second among the columns of an axis."""

_CURSOR, _START, _NUMBER, _TEXT = range(4)
_ASKED = np.array(
    [(0, 0, 0, 0), (0, 0, 1, 0), (0, 0, 2, 0), (0, 0, 3, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 1),
     (4099, 1009, 0, 257), (4099, 1009, 1, 257)],
    np.int64,
)  # fmt: skip
"""Probe values of the cursor, the document's first id, the number of earlier grids in the document, and the number of
its text tokens: some determine the slopes of the ids, and the others verify that the ids are linear.
"""
_DOCUMENT = np.array([0, 0, 0, 0, 1, 2, 3, 4, 4])
"""Document of each probe."""
_UNITS = np.array([4, 5, 1, 6])
"""Probes in which one of the four values is 1 and the others are 0."""
_ANY_CLEARS, _ANY_COUNTS = 1, 2
"""Flags in the row of text: whether any grid keeps ids free before text, and whether any grid counts the text."""

_NONE = np.iinfo(np.int64).min


class Plan:
    """Placements of text and of each known grid shape under a scheme, in a hash table that is replaced, never modified.

    The first row describes text.

    Args:
        scheme: scheme with ``by_shape``.
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
    if not vars(type(scheme)).get("by_shape"):
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
    timed = scheme.timed and segments.seconds_per_frame is not None
    if timed and scheme.fractional:  # even the denominator of a single frame depends on its time
        return None
    if core is None or plan is None or type(start) not in ((int, np.ndarray) if scheme.resumable else (int,)):
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
    except (MmposError, _NotAffineError):
        if len(rows) > 1:  # find the shape that failed
            return np.concatenate([_rows(scheme, shapes[:, i : i + 1]) for i in range(len(rows))])
    return rows


class _NotAffineError(Exception):
    """The ids of these grids are not affine, so the general path must place them."""


def _row_of_text(scheme: Scheme) -> IntArray:
    """Compute the row of text without its shape; return all 0 if the general path must place text."""
    grids = Grids(np.ones((3, 1), np.int64), *np.zeros((2, 1), np.int64))
    count = len(_ASKED)
    runs = TextRuns(np.arange(count), np.arange(count), _DOCUMENT, _ASKED[[0, 4, 5, 6, 7], _START])
    try:
        if not scheme.text:
            raise _NotAffineError
        if (scheme.advance_text(runs) != runs.lengths).any():
            raise _NotAffineError
        axes = _axes(scheme, scheme.place_text(runs, _ASKED[:, _CURSOR]))[0]
        clears = scheme.cleared(grids) is not None
    except (MmposError, _NotAffineError):
        return np.zeros(_ROW - _SHAPE + _PER_AXIS * scheme.axes, np.int64)
    return np.concatenate([[1, _NONE, clears], axes])


def _numbers(scheme: Scheme, shapes: IntArray) -> IntArray:
    """Compute the (shapes, values) rows of shapes, without the shapes themselves.

    Raises:
        _NotAffineError: the ids are not linear in the probed values, the grid is split, or values are not integers.
        MmposError: the scheme refuses a shape.
    """
    count, asked = shapes.shape[1], len(_ASKED)
    of_shape = np.repeat(shapes, asked, axis=1)
    document = (_DOCUMENT + (_DOCUMENT[-1] + 1) * np.arange(count)[:, None]).reshape(-1)
    cursor, start = np.tile(_ASKED[:, _CURSOR], count), np.tile(_ASKED[:, _START], count)
    separator = of_shape[3] > 0 if shapes[3].any() else None
    grids = Grids(of_shape[:3], start, document, separator, text_tokens=np.tile(_ASKED[:, _TEXT], count))
    if scheme.unit(grids) is not None:
        raise _NotAffineError
    placement, demanded, cleared = scheme.place(grids, cursor), scheme.next_after(grids, cursor), scheme.cleared(grids)
    if placement.pieces is not None and placement.pieces.tokens.size != document.size:
        raise _NotAffineError
    consumed = _constant(scheme.advance(grids), count)
    lowest = np.full(count, _NONE)
    if demanded is not None:
        lowest, slopes = _linear(demanded, count)
        if (slopes != [[1], [0], [0], [0]]).any():
            raise _NotAffineError
    free = _constant(0 if cleared is None else cleared, count)
    return np.column_stack([consumed, lowest, free, _axes(scheme, placement, count)])


def _axes(scheme: Scheme, placement: Placement, count: int = 1) -> IntArray:
    """Build the columns of a plan, starting with the denominator."""
    denominator = _constant(placement.denominator, count)
    if not scheme.fractional and (denominator != 1).any():
        raise _NotAffineError
    columns = [denominator]
    for axis in range(scheme.axes):
        zero, slopes = _linear(_of_axis(scheme, placement, "origin", axis), count)
        steps = [_constant(_of_axis(scheme, placement, f"step_{of}", axis), count) for of in ("frame", "row", "col")]
        columns += [zero, *slopes, *steps]
    return np.stack(columns, axis=1)


def _of_axis(scheme: Scheme, placement: Placement, name: str, axis: int) -> IntArray | int:
    per_axis = getattr(placement, name)
    if per_axis is None:
        return 0
    if len(per_axis) != scheme.axes:
        raise _NotAffineError
    values: IntArray | int = per_axis[axis]
    return values


def _constant(values: IntArray | int, count: int) -> IntArray:
    """Return the (count,) values, which must not depend on the probes."""
    zero, slopes = _linear(values, count)
    if slopes.any():
        raise _NotAffineError
    return zero


def _linear(values: IntArray | int, count: int) -> tuple[IntArray, IntArray]:
    """Return the (count,) values where all probed inputs are 0, and their (4, count) slopes in these inputs."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise _NotAffineError
    at = np.broadcast_to(array.astype(np.int64), count * len(_ASKED)).reshape(count, len(_ASKED))
    zero = at[:, 0]
    slopes = at[:, _UNITS] - zero[:, None]
    if (at != zero[:, None] + slopes @ _ASKED.T).any():
        raise _NotAffineError
    return zero, slopes.T
