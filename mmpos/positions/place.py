"""From segments and a scheme to the placed table: one cumulative sum over segments, and no loop."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.positions.placing_columns import columns
from mmpos.positions.placing_parts import Parts, cursors, split
from mmpos.positions.table import PositionTable
from mmpos.schemes import Scheme, get_scheme
from mmpos.segments.table import GRID, TEXT, SegmentTable
from mmpos.support.checks import INT32_MIN, IntArray, boolean, per_document

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
        LimitExceededError: an id or a next position outside int32, or a denominator of 2**31 or more.
    """
    scheme = get_scheme(scheme)
    if not isinstance(segments, SegmentTable):
        raise InvalidInputError(f"segments: got {type(segments).__name__}, want a SegmentTable")
    parts = split(segments, _start(scheme, start, segments.num_documents))
    _check_scheme(scheme, segments, parts, scheme.strict if strict is None else boolean("strict", strict))
    return columns(scheme, segments, parts, cursors(scheme, segments, parts))


def _start(scheme: Scheme, start: npt.ArrayLike, num_documents: int) -> IntArray:
    array = per_document("start", start, num_documents, minimum=INT32_MIN)
    if not scheme.resumable and np.ndim(start):
        raise UnsupportedError(f"start: got one per document, want one integer: {scheme.name} cannot be resumed")
    return array


def _check_scheme(scheme: Scheme, segments: SegmentTable, parts: Parts, strict: bool) -> None:
    """Raise for the first segment that the scheme has no place for."""
    if not scheme.text:
        _refuse(scheme, segments, segments.kind == TEXT, "text", "grids only")
    if not parts.grid.size:
        return
    if strict and parts.touching:
        _check_touching(scheme, segments)
    if not scheme.frames and parts.moving:
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


def _place_of(segments: SegmentTable, segment: int) -> tuple[int, int]:
    d = int(np.searchsorted(segments.segment_offsets, segment, side="right")) - 1
    return d, segment - int(segments.segment_offsets[d])
