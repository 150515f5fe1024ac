"""Segment tables and position tables as messages; a position table from outside is checked before it is one."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.positions.rows import AXES, MAX_AXES
from mmpos.positions.table import PositionTable
from mmpos.rpc.fields import integer_lists, path, put_integers
from mmpos.rpc.v1 import table_pb2 as pb
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import INT32_MAX, IntArray, first_bad

_LISTS = ("kind", "frames", "height", "width", "segments_per_document", "row_separator_segments")


def put_segments(message: pb.SegmentTable, segments: SegmentTable) -> None:
    """Fill a message with a segment table."""
    put_integers(message.kind, segments.kind + np.uint8(1))
    frames, height, width = segments.extents
    if (frames != 1).any():
        put_integers(message.frames, frames)
    put_integers(message.height, height)
    put_integers(message.width, width)
    put_integers(message.segments_per_document, np.diff(segments.segment_offsets))
    if segments.seconds_per_frame is not None:
        for numerator, denominator in segments.seconds_per_frame.T.tolist():
            message.seconds_per_frame.add(numerator=numerator, denominator=denominator)
    if segments.row_separator is not None:
        put_integers(message.row_separator_segments, np.flatnonzero(segments.row_separator))


def get_segments(name: str, message: pb.SegmentTable) -> SegmentTable:
    """The segment table of a message.

    Raises:
        InvalidInputError: lists of different lengths, or what SegmentTable refuses.
    """
    kind, *sides, per_document, separators = integer_lists(message, *_LISTS)
    kind = kind - 1
    unknown = kind.view(np.uint64) > 2
    if unknown.any():
        i = int(unknown.argmax())
        want = ", ".join(pb.SegmentKind.keys()[1:])
        raise InvalidInputError(f"{path(name, 'kind')}[{i}]: got {kind[i] + 1}, want one of {want}")
    extents = np.ones((3, kind.size), np.int64)
    for axis, values in enumerate(sides):
        if values.size == kind.size:
            extents[axis] = values
        elif values.size or axis > 0:
            field = path(name, _LISTS[1 + axis])
            raise InvalidInputError(f"{field}: got {values.size} numbers, want {kind.size} like kind")
    offsets = np.zeros(per_document.size + 1, np.int64)
    np.cumsum(per_document, out=offsets[1:])
    return SegmentTable(
        kind.astype(np.uint8),
        extents,
        offsets,
        _seconds(name, message, kind.size),
        _separators(name, separators, kind.size),
    )


def _seconds(name: str, message: pb.SegmentTable, segments: int) -> IntArray | None:
    times = message.seconds_per_frame
    if not times:
        return None
    if len(times) != segments:
        raise InvalidInputError(f"{path(name, 'seconds_per_frame')}: got {len(times)}, want {segments} like kind")
    return np.array([[time.numerator for time in times], [time.denominator for time in times]], np.int64)


def _separators(name: str, where: IntArray, segments: int) -> Any:
    if not where.size:
        return None
    first_bad(path(name, "row_separator_segments"), where, minimum=0, maximum=segments - 1)
    separator = np.zeros(segments, np.bool_)
    separator[where] = True
    return separator


def put_table(message: pb.PositionTable, positions: PositionTable) -> None:
    """Fill a message with a position table."""
    message.table = positions.table.astype("<i8", copy=False).tobytes()
    message.documents = positions.documents.astype("<i8", copy=False).tobytes()
    message.num_tokens = positions.num_tokens
    message.axes = positions.axes
    message.fractional = positions.fractional
    message.scheme = positions.scheme


def get_table(name: str, message: pb.PositionTable) -> PositionTable:
    """The position table of a message; it shares the bytes of the message.

    Raises:
        InvalidInputError: bytes that do not fit the axes, or what PositionTable.from_arrays refuses.
        LimitExceededError: more tokens than cu_seqlens can count, or ids outside int32.
    """
    if not 1 <= message.axes <= MAX_AXES:
        raise InvalidInputError(f"{path(name, 'axes')}: got {message.axes}, want 1 to {MAX_AXES}")
    if message.num_tokens > INT32_MAX:
        raise LimitExceededError(f"{path(name, 'num_tokens')}: got {message.num_tokens}, want at most 2**31 - 1")
    return PositionTable.from_arrays(
        _rows(path(name, "table"), message.table, AXES + 4 * message.axes),
        _rows(path(name, "documents"), message.documents, 4),
        message.num_tokens,
        fractional=message.fractional,
        scheme=message.scheme,
    )


def _rows(name: str, data: bytes, rows: int) -> IntArray:
    if len(data) % (8 * rows):
        raise InvalidInputError(f"{name}: got {len(data)} bytes, want a multiple of {8 * rows}, {rows} rows of int64")
    return np.frombuffer(data, "<i8").astype(np.int64, copy=False).reshape(rows, -1)
