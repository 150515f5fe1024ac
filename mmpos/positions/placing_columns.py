"""From what a scheme says of texts and grids to the columns of the placed table: in C, or the same in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.positions import ranges
from mmpos.positions.checks import check_next
from mmpos.positions.columns import AXES, DENOMINATOR, HEIGHT, NO_POSITION, OFFSET, SKIP, WIDTH
from mmpos.positions.placing_parts import Cursors, Parts, whole
from mmpos.positions.table import PositionTable
from mmpos.schemes import Placement, Scheme
from mmpos.segments.table import GRID, SegmentTable
from mmpos.support import native
from mmpos.support.checks import INT32_MAX, INT32_MIN, IntArray


def columns(scheme: Scheme, segments: SegmentTable, parts: Parts, cursors: Cursors) -> PositionTable:
    """The placed table of a batch."""
    of_text = scheme.place_text(parts.runs, cursors.text)
    of_grids = scheme.place(parts.grids, cursors.grid) if parts.grid.size else None
    end = cursors.end
    if scheme.resumable and of_grids is not None:
        demanded = scheme.next_after(parts.grids, cursors.grid)
        if demanded is not None:
            np.maximum.at(end, parts.document[parts.grid], demanded)
    found = _in_c(scheme, segments, parts, of_text, of_grids, end)
    if found is not None:
        return found
    table, document = _columns(scheme, segments, parts, of_text, of_grids)
    _check_columns(table, document, int((segments.kind > GRID).sum()), scheme)
    header = np.full((2, segments.num_documents), NO_POSITION, np.int64)
    if scheme.resumable:
        check_next(end)
        header[0] = end
        header[1] = end - parts.start - _real_tokens(segments, parts)
    return PositionTable(*ranges.assemble(table, document, header), scheme.fractional, scheme.label)


def _in_c(
    scheme: Scheme,
    segments: SegmentTable,
    parts: Parts,
    of_text: Placement,
    of_grids: Placement | None,
    end: IntArray,
) -> PositionTable | None:
    if native.core is None or parts.block is None or (of_grids is not None and of_grids.pieces is not None):
        return None
    kind, offsets = segments.kind, segments.segment_offsets
    table = np.empty((AXES + 4 * scheme.axes, kind.size), np.int64)
    documents = np.empty((4, parts.start.size), np.int64)
    tokens = native.core.columns(
        kind, offsets, parts.start, end if scheme.resumable else None, parts.block, parts.text.size, parts.grid.size,
        _numbers(of_text, scheme.fractional), _numbers(of_grids, scheme.fractional), table, documents,
    )  # fmt: skip
    if tokens is None:
        return None
    table.flags.writeable = documents.flags.writeable = False
    return PositionTable(table, documents, tokens, scheme.fractional, scheme.label)


def _numbers(placement: Placement | None, fractional: bool) -> tuple[Any, ...] | None:
    """A placement as the extension takes it; without the denominator where there must be none."""
    if placement is None:
        return None
    told = placement.denominator
    denominator = told if fractional or (isinstance(told, int) and told == 1) else None
    return denominator, placement.origin, placement.step_frame, placement.step_row, placement.step_col


def _columns(
    scheme: Scheme, segments: SegmentTable, parts: Parts, of_text: Placement, of_grids: Placement | None
) -> tuple[IntArray, IntArray]:
    """The table's columns, with lengths in the OFFSET row, and the document of each."""
    columns = np.zeros((AXES + 4 * scheme.axes, parts.document.size), np.int64)
    columns[HEIGHT] = columns[DENOMINATOR] = 1
    columns[OFFSET] = columns[WIDTH] = parts.lengths
    _put(columns, scheme, parts.text, of_text)
    if of_grids is None:
        return columns, parts.document
    document, grid, height, width = parts.document, parts.grid, parts.grids.height, parts.grids.row_tokens
    if of_grids.pieces is not None:
        pieces = of_grids.pieces
        count = np.ones(document.size, np.int64)
        count[grid] = np.bincount(pieces.owner, minlength=grid.size)
        owner = np.repeat(np.arange(document.size), count)
        columns, document = columns.take(owner, axis=1), document[owner]
        grid, height, width = np.flatnonzero(segments.kind[owner] == GRID), pieces.height, pieces.width
        columns[OFFSET, grid], columns[SKIP, grid] = pieces.tokens, pieces.skip
    columns[HEIGHT, grid], columns[WIDTH, grid] = height, width
    _put(columns, scheme, grid, of_grids)
    return columns, document


def _put(columns: IntArray, scheme: Scheme, where: IntArray, placement: Placement) -> None:
    """Write a placement into columns whose steps are 0 and whose denominator is 1."""
    if scheme.fractional:
        columns[DENOMINATOR, where] = whole(scheme, "denominator", placement.denominator)
    elif not isinstance(placement.denominator, int) or placement.denominator != 1:
        raise InvalidInputError(f"scheme {scheme.name!r}: got a denominator, want fractional = True with it")
    for i, name in enumerate(("origin", "step_frame", "step_row", "step_col")):
        per_axis = getattr(placement, name)
        if per_axis is not None and len(per_axis) != scheme.axes:
            raise InvalidInputError(
                f"scheme {scheme.name!r}: got {len(per_axis)} {name}s, want {scheme.axes}, one per axis"
            )
        for axis, values in enumerate(per_axis or ()):
            if not isinstance(values, int) or values != 0:
                columns[AXES + 4 * axis + i, where] = whole(scheme, name, values)


def _real_tokens(segments: SegmentTable, parts: Parts) -> IntArray:
    """(documents,) tokens without padding."""
    return np.add.reduceat(parts.lengths * (segments.kind <= GRID), segments.segment_offsets[:-1])


def _check_columns(columns: IntArray, document: IntArray, padding: int, scheme: Scheme) -> None:
    """Raise for the first denominator or id beyond its limit, in floats since integers could wrap."""
    denominator = columns[DENOMINATOR]
    if scheme.fractional and denominator.max(initial=1) > INT32_MAX:
        s = int(denominator.argmax())
        where = _where(document, columns[OFFSET], s)
        raise LimitExceededError(f"{where}: got denominator {denominator[s]}, want below 2**31")
    if scheme.fractional and denominator.min(initial=1) < 1:
        raise InvalidInputError(f"scheme {scheme.name!r}: got denominator {denominator.min()}, want >= 1")
    if np.count_nonzero(columns[AXES:].any(axis=0)) != document.size - padding:
        raise UnsupportedError(f"scheme {scheme.name!r}: got a segment with origin and steps 0, which mean padding")
    last = np.empty((3, document.size))
    last[0] = (columns[SKIP] + columns[OFFSET] - 1) // (columns[HEIGHT] * columns[WIDTH]) if scheme.frames else 0
    last[1:] = columns[HEIGHT : WIDTH + 1] - 1
    parts = columns[AXES:].reshape(scheme.axes, 4, -1).astype(np.float64)
    origin, moves = parts[:, 0], parts[:, 1:] * last
    if ((np.abs(origin) + np.abs(moves).sum(axis=1)) / denominator).max(initial=0) <= INT32_MAX:
        return
    lowest = (origin + np.minimum(moves, 0).sum(axis=1)) / denominator
    highest = (origin + np.maximum(moves, 0).sum(axis=1)) / denominator
    bad = ((lowest < INT32_MIN) | (highest > INT32_MAX)).any(axis=0)
    if bad.any():
        s = int(bad.argmax())
        low, high = lowest[:, s].min(), highest[:, s].max()
        got = f"up to {high:.0f}" if high > INT32_MAX else f"down to {low:.0f}"
        raise LimitExceededError(f"{_where(document, columns[OFFSET], s)}: got ids {got}, want ids within int32")


def _where(document: IntArray, lengths: IntArray, segment: int) -> str:
    """The document of a segment, and its tokens there."""
    d = document[segment]
    first = lengths[:segment][document[:segment] == d].sum()
    return f"documents[{d}], tokens {first} to {first + lengths[segment] - 1}"
