"""Token ranges of a placed table: a table is closed under them, since a segment keeps its grid and skips tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mmpos.positions.columns import (
    AXES,
    DENOMINATOR,
    FIRST_SEGMENT,
    FIRST_TOKEN,
    HEIGHT,
    NEXT_POSITION,
    OFFSET,
    SKIP,
    WIDTH,
)
from mmpos.support.checks import IntArray


def cut(table: IntArray, tokens: int, starts: IntArray, stops: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The pieces of segments inside token ranges, in the order of the ranges.

    Args:
        table: (5 + 4·axes, segments).
        tokens: tokens of the table.
        starts: (ranges,) first token, within the table.
        stops: (ranges,) one past the last token, never before its start.

    Returns:
        (5 + 4·axes, pieces) columns whose OFFSET row holds their lengths, (pieces,) the segment of each,
        and (pieces,) the range of each.
    """
    offset = table[OFFSET]
    ends = np.append(offset[1:], tokens)
    first = np.searchsorted(offset, starts, side="right") - 1
    last = np.searchsorted(offset, stops, side="left")
    count = np.where(stops > starts, last - first, 0)
    owner = np.repeat(np.arange(starts.size), count)
    segment = np.arange(owner.size) - (np.cumsum(count) - count - first)[owner]
    begin = np.maximum(offset[segment], starts[owner])
    columns = table.take(segment, axis=1)
    columns[SKIP] += begin - offset[segment]
    columns[OFFSET] = np.minimum(ends[segment], stops[owner]) - begin
    return columns, segment, owner


def runs(mask: npt.NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
    """First and one past the last of each run of True, as ranges of tokens."""
    edges = np.diff(mask.view(np.int8), prepend=0, append=0).nonzero()[0]
    return edges[::2], edges[1::2]


def text(axes: int, first: IntArray, lengths: IntArray) -> IntArray:
    """(5 + 4·axes, runs) columns of text from id ``first`` on every axis; the OFFSET row holds lengths."""
    columns = np.zeros((AXES + 4 * axes, first.size), np.int64)
    columns[OFFSET] = columns[WIDTH] = lengths
    columns[[HEIGHT, DENOMINATOR]] = 1
    columns[AXES::4] = first
    columns[AXES + 3 :: 4] = 1
    return columns


def padding(axes: int) -> IntArray:
    """(5 + 4·axes,) a padding column: id 0 on every axis."""
    column = np.zeros(AXES + 4 * axes, np.int64)
    column[[HEIGHT, WIDTH, DENOMINATOR]] = 1
    return column


def assemble(columns: IntArray, document: IntArray, header: IntArray) -> tuple[IntArray, IntArray, int]:
    """The arrays of a table from its pieces.

    Args:
        columns: (5 + 4·axes, pieces) with lengths in the OFFSET row; becomes the table, not copied.
        document: (pieces,) ascending document of each piece.
        header: (2, documents) next position and delta.

    Returns:
        the table, its documents and its number of tokens: the first fields of Columns.
    """
    tokens = _lengths_to_offsets(columns)
    documents = np.empty((4, header.shape[1]), np.int64)
    documents[FIRST_SEGMENT] = document.searchsorted(np.arange(header.shape[1]))
    firsts = np.empty(document.size + 1, np.int64)
    firsts[:-1], firsts[-1] = columns[OFFSET], tokens
    documents[FIRST_TOKEN] = firsts[documents[FIRST_SEGMENT]]
    documents[NEXT_POSITION:] = header
    return columns, documents, tokens


def _lengths_to_offsets(columns: IntArray) -> int:
    """Turn the lengths in the OFFSET row into offsets, in place; returns the number of tokens."""
    total = columns[OFFSET].cumsum()
    columns[OFFSET] = total - columns[OFFSET]
    return int(total[-1]) if total.size else 0
