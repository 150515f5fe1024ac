"""Rows of the placed table and of its documents: their names, checks on them, and how columns are cut and assembled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.support import native
from mmpos.support.checks import INT32_MAX, INT32_MIN, IntArray, first_bad

OFFSET, SKIP, HEIGHT, WIDTH, DENOMINATOR, AXES = range(6)
"""Rows of the table; from AXES on, every axis has four rows: origin, step_frame, step_row, step_col."""

FIRST_SEGMENT, FIRST_TOKEN, NEXT_POSITION, DELTA = range(4)
"""Rows of the documents."""

TAKE, SHARD, WINDOW, DECODE, LENGTHEN = range(5)
"""Rules by which C cuts a table from another; see csrc/cut.c."""

NO_POSITION = int(np.iinfo(np.int64).min)
"""Value of the next position and the delta under schemes that do not define them."""

MAX_AXES = 16
"""Maximum number of axes in a table built from arrays."""

MAX_NUMERATOR = 2.0**62
"""Largest numerator that is expanded without wrapping around."""

_AXIS_NAMES = {1: ("id",), 2: ("row", "col"), 3: ("frame", "row", "col")}


def axis_names(axes: int) -> tuple[str, ...]:
    """Return the names of a position's axes: row and col, with frame before them for three axes, else numbers.

    >>> axis_names(2), axis_names(4)
    (('row', 'col'), ('axis 0', 'axis 1', 'axis 2', 'axis 3'))
    """
    return _AXIS_NAMES.get(axes) or tuple(f"axis {axis}" for axis in range(axes))


def padding_column(axes: int) -> IntArray:
    """Return a (5 + 4·axes,) column of padding, with id 0 on every axis."""
    column = np.zeros(AXES + 4 * axes, np.int64)
    column[[HEIGHT, WIDTH, DENOMINATOR]] = 1
    return column


class CutColumns:
    """Columns of a table that is cut from another, added one by one; C does the same in one pass.

    Args:
        table: (5 + 4·axes, segments) table to cut from.
        num_tokens: number of tokens in that table.
    """

    def __init__(self, table: IntArray, num_tokens: int) -> None:
        self.table, self.ends = table, np.append(table[OFFSET, 1:], num_tokens)
        self.columns: list[IntArray] = []
        self.document: list[int] = []

    def put_range(self, document: int, start: int, stop: int) -> None:
        """Add the segments of a document, cut to tokens start to stop of the table."""
        offset = self.table[OFFSET]
        first = int(offset.searchsorted(start, side="right")) - 1
        for s in range(first, int(offset.searchsorted(stop)) if start < stop else first):
            begin, end = max(start, int(offset[s])), min(stop, int(self.ends[s]))
            column = self.table[:, s].copy()
            column[SKIP] += begin - offset[s]
            column[OFFSET] = end - begin
            self._put(document, column)

    def put_run(self, document: int, tokens: int, first_id: int | None = None) -> None:
        """Add text that starts at this id, or padding if the id is None; add nothing if there are no tokens."""
        column = padding_column((len(self.table) - AXES) // 4)
        column[OFFSET] = column[WIDTH] = tokens
        if first_id is not None:
            column[AXES::4], column[AXES + 3 :: 4] = first_id, 1
        if tokens:
            self._put(document, column)

    def assemble(self, header: IntArray) -> tuple[IntArray, IntArray, int]:
        """Assemble the arrays of the table, given its (2, documents) next positions and deltas."""
        columns = np.stack(self.columns, axis=1) if self.columns else self.table[:, :0].copy()
        return assemble(columns, np.array(self.document, np.int64), header)

    def _put(self, document: int, column: IntArray) -> None:
        self.columns.append(column)
        self.document.append(document)


def assemble(columns: IntArray, document: IntArray, header: IntArray) -> tuple[IntArray, IntArray, int]:
    """Assemble the arrays of a table from its pieces.

    Args:
        columns: (5 + 4·axes, pieces) with lengths in the OFFSET row; used as the table without being copied.
        document: (pieces,) ascending document of each piece.
        header: (2, documents) next position and delta.

    Returns:
        the table, its documents and its number of tokens: the first fields of a PositionTable.
    """
    total = columns[OFFSET].cumsum()
    columns[OFFSET] = total - columns[OFFSET]
    firsts = np.append(columns[OFFSET], total[-1:] if total.size else 0)
    documents = np.empty((4, header.shape[1]), np.int64)
    documents[FIRST_SEGMENT] = document.searchsorted(np.arange(header.shape[1]))
    documents[FIRST_TOKEN] = firsts[documents[FIRST_SEGMENT]]
    documents[NEXT_POSITION:] = header
    return columns, documents, int(firsts[-1])


def check_table(table: IntArray, documents: IntArray, num_tokens: int, fractional: bool) -> None:
    """Raise an error for the first inconsistency in these arrays, in O(segments); expansion relies on this check."""
    if native.core is not None and native.core.placed(table, documents, num_tokens, fractional):
        return
    rows, segments = table.shape
    if (rows - AXES) % 4 or not 1 <= (rows - AXES) // 4 <= MAX_AXES:
        raise InvalidInputError(f"table: got {rows} rows, want 5 + 4·axes for 1 to {MAX_AXES} axes")
    lengths = _checked_lengths(table, num_tokens)
    first_bad("table.segment_lengths", lengths, maximum=INT32_MAX + 1)  # so that no sum with them wraps around
    first_bad("table.skip", table[SKIP], minimum=0, maximum=INT32_MAX)
    for name, row in (("height", HEIGHT), ("width", WIDTH), ("denominator", DENOMINATOR)):
        first_bad(f"table.{name}", table[row], minimum=1, maximum=INT32_MAX)
    if not fractional:
        first_bad("table.denominator", table[DENOMINATOR], maximum=1)
    first_bad("table.skip + tokens - 1", table[SKIP] + lengths - 1, maximum=INT32_MAX)
    if segments:
        _check_ids(table, lengths)
    _check_documents(table, documents, num_tokens)


def check_next(next_positions: IntArray) -> None:
    """Raise an error for the first next position that is neither NO_POSITION, nor an id, nor one past the last id."""
    beyond = (next_positions < INT32_MIN) & (next_positions != NO_POSITION) | (next_positions > INT32_MAX + 1)
    if beyond.any():
        d = int(beyond.argmax())
        raise LimitExceededError(
            f"documents[{d}]: got next position {next_positions[d]}, want a value from -2**31 to 2**31"
        )


class IdBounds(NamedTuple):
    """Bounds of the ids of every segment, as floats because integers could wrap around.

    Args:
        origin: (axes, segments) numerators at frame, row and column 0.
        moves: (axes, 3, segments) changes of the numerators up to the last frame, row and column.
        denominator: (segments,).
    """

    origin: npt.NDArray[np.float64]
    moves: npt.NDArray[np.float64]
    denominator: IntArray

    @property
    def numerator(self) -> npt.NDArray[np.float64]:
        """(axes, segments) bound of the absolute value of every numerator."""
        return np.abs(self.origin) + np.abs(self.moves).sum(axis=1)

    @property
    def lowest(self) -> npt.NDArray[np.float64]:
        """(axes, segments) lowest id."""
        return (self.origin + np.minimum(self.moves, 0).sum(axis=1)) / self.denominator

    @property
    def highest(self) -> npt.NDArray[np.float64]:
        """(axes, segments) highest id."""
        return (self.origin + np.maximum(self.moves, 0).sum(axis=1)) / self.denominator

    @property
    def beyond_int32(self) -> npt.NDArray[np.bool_]:
        """(segments,) whether any id is outside int32."""
        if (self.numerator / self.denominator).max(initial=0) <= INT32_MAX:  # the usual case, at half the cost
            return np.zeros(self.denominator.shape, np.bool_)
        return np.logical_or.reduce((self.lowest < INT32_MIN) | (self.highest > INT32_MAX), axis=0)


def id_bounds(columns: IntArray, lengths: IntArray) -> IdBounds:
    """Return bounds of the ids of segments.

    Args:
        columns: (5 + 4·axes, segments); the OFFSET row is not read.
        lengths: (segments,) number of tokens in each segment.
    """
    height, width = columns[HEIGHT], columns[WIDTH]
    last = columns[SKIP] + lengths - 1
    most = np.empty((3, last.size))
    np.floor_divide(last, height.astype(np.float64) * width, out=most[0])
    np.minimum(height - 1, last // width, out=most[1])
    np.subtract(width, 1, out=most[2])
    terms = columns[AXES:].reshape((len(columns) - AXES) // 4, 4, last.size).astype(np.float64)
    return IdBounds(terms[:, 0], terms[:, 1:] * most, columns[DENOMINATOR])


def _checked_lengths(table: IntArray, num_tokens: int) -> IntArray:
    ends = np.append(table[OFFSET], num_tokens)
    # With offsets within bounds, differences cannot wrap around.
    first_bad("table.offset", table[OFFSET], minimum=0, maximum=num_tokens)
    if ends[0] != 0:
        raise InvalidInputError(f"table.offset[0]: got {ends[0]}, want 0, the first token")
    lengths = np.diff(ends)
    if (lengths < 1).any():
        s = int((lengths < 1).argmax())
        raise InvalidInputError(f"table.offset[{s}]: got {ends[s]} before {ends[s + 1]}, want at least one token")
    return lengths


def _check_ids(table: IntArray, lengths: IntArray) -> None:
    bounds = id_bounds(table, lengths)
    if bounds.numerator.max() > MAX_NUMERATOR:
        s = int(bounds.numerator.max(axis=0).argmax())
        got = f"{bounds.numerator.max():.3g}"
        raise LimitExceededError(f"table[:, {s}]: got numerators up to {got}, want at most 2**62")
    beyond = bounds.beyond_int32
    if beyond.any():
        s = int(beyond.argmax())
        got = f"{bounds.lowest[:, s].min():.0f} to {bounds.highest[:, s].max():.0f}"
        raise LimitExceededError(f"table[:, {s}]: got ids from {got}, want ids within int32")


def _check_documents(table: IntArray, documents: IntArray, num_tokens: int) -> None:
    segments = table.shape[1]
    if documents.shape[0] != 4:
        raise InvalidInputError(f"documents: got shape {documents.shape}, want (4, n)")
    first = documents[FIRST_SEGMENT]
    first_bad("documents.first_segment", first, minimum=0, maximum=segments)
    if not first.size:
        if segments:
            raise InvalidInputError(f"documents: got none, want the documents of {segments} segments")
        return
    if first[0] != 0 or (np.diff(first) < 0).any():
        raise InvalidInputError("documents.first_segment must ascend from 0")
    tokens = np.append(table[OFFSET], num_tokens)[first]
    wrong = documents[FIRST_TOKEN] != tokens
    if wrong.any():
        d = int(wrong.argmax())
        got = documents[FIRST_TOKEN, d]
        raise InvalidInputError(f"documents.first_token[{d}]: got {got}, want {tokens[d]}, the offset of its segment")
    _check_deltas(documents)
    check_next(documents[NEXT_POSITION])


def _check_deltas(documents: IntArray) -> None:
    delta, none = documents[DELTA], documents[NEXT_POSITION:] == NO_POSITION
    apart = none[0] != none[1]
    if apart.any():
        d = int(apart.argmax())
        got = f"{documents[NEXT_POSITION, d]} with delta {delta[d]}"
        raise InvalidInputError(f"documents.next_position[{d}]: got {got}, want {NO_POSITION} for both or neither")
    beyond = ~none[1] & (np.abs(delta.astype(np.float64)) > MAX_NUMERATOR)
    if beyond.any():
        d = int(beyond.argmax())
        raise LimitExceededError(f"documents.delta[{d}]: got {delta[d]}, want at most 2**62 in magnitude")
