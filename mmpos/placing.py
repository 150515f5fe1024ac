"""From segments and a scheme to the placed table: one cumulative sum over segments, and no loop."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmpos.checks import INT32_MAX, INT32_MIN, IntArray, boolean, per_document
from mmpos.columns import AXES, DENOMINATOR, HEIGHT, NO_POSITION, OFFSET, SKIP, WIDTH
from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.positions import PositionTable, assemble
from mmpos.schemes import Grids, Placement, Scheme, TextRuns, get_scheme
from mmpos.segments import GRID, TEXT, SegmentTable

__all__ = ["place"]


def place(
    segments: SegmentTable,
    scheme: str | Scheme = "rope-tie",
    start: npt.ArrayLike = 0,
    strict: bool | None = None,
) -> PositionTable:
    """Place every segment of a batch in O(segments), exactly.

    >>> from mmpos.segments import Grid, SegmentTable, Text
    >>> place(SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)]])).dense().tolist()
    [[0, 1, 2, 6, 6, 6, 10, 10, 10, 14, 15], [0, 1, 2, 5, 8, 11, 5, 8, 11, 14, 15]]

    Args:
        segments: the documents.
        scheme: a name from mmpos.SCHEMES or a scheme object.
        start: id of each document's first token, one integer or (documents,); to go on with a document,
            the next position of its earlier part.
        strict: whether two grids without text between are an error; None asks the scheme.

    Returns:
        a PositionTable.

    Raises:
        InvalidInputError: unknown scheme, wrong start, or touching grids where the scheme forbids them.
        UnsupportedError: the scheme has no place for frames, text or row separators that are there.
        LimitExceededError: an id outside int32, or a denominator of 2**31 or more.
    """
    scheme = get_scheme(scheme)
    if not isinstance(segments, SegmentTable):
        raise InvalidInputError(f"segments: got {type(segments).__name__}, want a SegmentTable")
    parts = _parts(segments, _start(scheme, start, segments.num_documents))
    _check_scheme(scheme, segments, parts, scheme.strict if strict is None else boolean("strict", strict))
    cursor, end = _cursors(scheme, segments, parts)
    columns, document = _columns(scheme, segments, parts, cursor)
    _check_columns(columns, document, int((segments.kind > GRID).sum()), scheme)
    header = np.full((2, segments.num_documents), NO_POSITION, np.int64)
    if scheme.resumable:
        demanded = scheme.next_after(parts.grids, cursor[parts.grid])
        if demanded is not None:
            np.maximum.at(end, parts.document[parts.grid], demanded)
        header[0] = end
        header[1] = end - parts.start - _real_tokens(segments, parts)
    return assemble(columns, document, header, scheme.fractional, scheme.name)


class _Parts(NamedTuple):
    """Which segments are text and grids.

    Args:
        start: (documents,) first id.
        document: (segments,) document of each segment.
        text: indices of the text segments.
        runs: the same as a scheme sees them.
        grid: indices of the grids.
        grids: the same as a scheme sees them.
        lengths: (segments,) tokens.
    """

    start: IntArray
    document: IntArray
    text: IntArray
    runs: TextRuns
    grid: IntArray
    grids: Grids
    lengths: IntArray


def _parts(segments: SegmentTable, start: IntArray) -> _Parts:
    offsets = segments.segment_offsets
    document = np.arange(start.size).repeat(offsets[1:] - offsets[:-1])
    (text,), (grid,) = (segments.kind == TEXT).nonzero(), (segments.kind == GRID).nonzero()
    runs = TextRuns(segments.extents[2, text], text, document, start)
    separators, seconds = segments.row_separator, segments.seconds_per_frame
    grids = Grids(
        segments.extents[:, grid],
        start[document[grid]],
        None if separators is None else separators[grid],
        None if seconds is None else seconds[:, grid],
    )
    return _Parts(start, document, text, runs, grid, grids, segments.lengths)


def _cursors(scheme: Scheme, segments: SegmentTable, parts: _Parts) -> tuple[IntArray, IntArray]:
    """(segments,) the cursor before each segment and (documents,) after the last."""
    advance = np.zeros(segments.kind.size, np.int64)
    advance[parts.text] = scheme.advance_text(parts.runs)
    if parts.grid.size:
        advance[parts.grid] = _whole(scheme, "advance", scheme.advance(parts.grids))
    after = advance.cumsum()
    before = after - advance
    base = parts.start - before[segments.segment_offsets[:-1]]
    cursor = before + base[parts.document]
    # Beyond int32 the error is certain, and _check_columns raises it; products must not wrap around before.
    bounded = np.maximum(np.minimum(cursor, INT32_MAX + 1), INT32_MIN - 1)
    return bounded, after[segments.segment_offsets[1:] - 1] + base


def _columns(scheme: Scheme, segments: SegmentTable, parts: _Parts, cursor: IntArray) -> tuple[IntArray, IntArray]:
    """The table's columns, with lengths in the OFFSET row, and the document of each."""
    columns = np.zeros((AXES + 4 * scheme.axes, cursor.size), np.int64)
    columns[HEIGHT] = columns[DENOMINATOR] = 1
    columns[OFFSET] = columns[WIDTH] = parts.lengths
    _put(columns, scheme, parts.text, scheme.place_text(parts.runs, cursor[parts.text]))
    if not parts.grid.size:
        return columns, parts.document
    placement = scheme.place(parts.grids, cursor[parts.grid])
    document, grid, height, width = parts.document, parts.grid, parts.grids.height, parts.grids.row_tokens
    if placement.pieces is not None:
        pieces = placement.pieces
        count = np.ones(cursor.size, np.int64)
        count[grid] = np.bincount(pieces.owner, minlength=grid.size)
        owner = np.repeat(np.arange(cursor.size), count)
        columns, document = columns[:, owner], document[owner]
        grid, height, width = np.flatnonzero(segments.kind[owner] == GRID), pieces.height, pieces.width
        columns[OFFSET, grid], columns[SKIP, grid] = pieces.tokens, pieces.skip
    columns[HEIGHT, grid], columns[WIDTH, grid] = height, width
    _put(columns, scheme, grid, placement)
    return columns, document


def _put(columns: IntArray, scheme: Scheme, where: IntArray, placement: Placement) -> None:
    """Write a placement into columns whose steps are 0 and whose denominator is 1."""
    if scheme.fractional:
        columns[DENOMINATOR, where] = _whole(scheme, "denominator", placement.denominator)
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
                columns[AXES + 4 * axis + i, where] = _whole(scheme, name, values)


def _whole(scheme: Scheme, name: str, values: IntArray | int) -> IntArray | int:
    """What a scheme gave, if it is integers."""
    if isinstance(values, int) or (isinstance(values, np.ndarray) and values.dtype.kind in "iu"):
        return values
    got = values.dtype if isinstance(values, np.ndarray) else repr(values)
    raise InvalidInputError(f"scheme {scheme.name!r}: got {name} {got}, want integers")


def _real_tokens(segments: SegmentTable, parts: _Parts) -> IntArray:
    """(documents,) tokens without padding."""
    return np.add.reduceat(parts.lengths * (segments.kind <= GRID), segments.segment_offsets[:-1])


def _start(scheme: Scheme, start: npt.ArrayLike, num_documents: int) -> IntArray:
    array = per_document("start", start, num_documents, minimum=INT32_MIN)
    if np.ndim(start) and not scheme.resumable:
        raise UnsupportedError(f"start: got one per document, want one integer: {scheme.name} cannot be resumed")
    return array


def _check_scheme(scheme: Scheme, segments: SegmentTable, parts: _Parts, strict: bool) -> None:
    """Raise for the first segment that the scheme has no place for."""
    if not scheme.text:
        _refuse(scheme, segments, segments.kind == TEXT, "text", "grids only")
    if not parts.grid.size:
        return
    if strict and (parts.grid[1:] - parts.grid[:-1] == 1).any():
        _check_touching(scheme, segments)
    if not scheme.frames and parts.grids.frames.max() > 1:
        # Where the axes are a parameter, three of them take frames.
        want = "one grid per frame, or axes=3" if "axes" in vars(scheme) else "one grid per frame"
        _refuse(scheme, segments, segments.extents[0] > 1, "a grid with frames", want)
    if not scheme.row_separators and segments.row_separator is not None:
        _refuse(scheme, segments, segments.row_separator, "a grid with row separators", "none")


def _check_touching(scheme: Scheme, segments: SegmentTable) -> None:
    touch = (segments.kind[1:] == GRID) & (segments.kind[:-1] == GRID)
    touch[segments.segment_offsets[1:-1] - 1] = False
    if touch.any():
        d, i = _place_of(segments, int(touch.argmax()) + 1)
        raise InvalidInputError(
            f"documents[{d}][{i}]: got a grid right after a grid, want text between them in {scheme.name} "
            "(markers such as [IMG] and [/IMG] do), or strict=False"
        )


def _refuse(scheme: Scheme, segments: SegmentTable, where: npt.NDArray[np.bool_], got: str, want: str) -> None:
    if where.any():
        d, i = _place_of(segments, int(where.argmax()))
        raise UnsupportedError(f"documents[{d}][{i}]: got {got}, want {want} in scheme {scheme.name!r}")


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


def _place_of(segments: SegmentTable, segment: int) -> tuple[int, int]:
    d = int(np.searchsorted(segments.segment_offsets, segment, side="right")) - 1
    return d, segment - int(segments.segment_offsets[d])
