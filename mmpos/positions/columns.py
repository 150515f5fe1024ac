"""The placed table as data: one int64 array of a few rows, and the names of what can be read off it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmpos.errors import LimitExceededError, UnsupportedError
from mmpos.support.checks import INT32_MAX, IntArray

OFFSET, SKIP, HEIGHT, WIDTH, DENOMINATOR, AXES = range(6)
"""Rows of the table; from AXES on, every axis has four: origin, step_frame, step_row, step_col."""

FIRST_SEGMENT, FIRST_TOKEN, NEXT_POSITION, DELTA = range(4)
"""Rows of the documents."""

NO_POSITION = int(np.iinfo(np.int64).min)
"""Stands for the next position and the delta of schemes that have none."""


_AXIS_NAMES = {1: ("id",), 2: ("row", "col"), 3: ("frame", "row", "col")}


def axis_names(axes: int) -> tuple[str, ...]:
    """Names of the axes of a position, numbers where there are so many that they are no frame, row and column."""
    return _AXIS_NAMES.get(axes) or tuple(f"axis {axis}" for axis in range(axes))


@dataclass(frozen=True, eq=False)
class Columns:
    """Positions of a packed batch: O(segments) integers that hold every token's id exactly.

    Token g lies in segment s, the last with offset <= g. With i = skip + g − offset, col = i mod width,
    row = i div width mod height and frame = i div width div height, its id on each axis is
    (origin + frame·step_frame + row·step_row + col·step_col) / denominator.

    Args:
        table: (5 + 4·axes, segments) int64 rows: offset, skip, height, width, denominator, then for each
            axis origin, step_frame, step_row, step_col. Padding has origin and steps 0.
        documents: (4, documents) int64 rows: first segment, first token, next position, delta.
        num_tokens: tokens in all, padding included.
        fractional: whether ids may be fractions; a property of the scheme, not of the batch.
        scheme: name of the scheme with its parameters, as in ``Scheme.label``, for people; nothing depends on it.
    """

    table: IntArray
    documents: IntArray
    num_tokens: int
    fractional: bool
    scheme: str

    def __post_init__(self) -> None:
        for name in ("table", "documents"):
            array = getattr(self, name)
            if array.flags.writeable:
                array = array.view()
                array.flags.writeable = False
                object.__setattr__(self, name, array)

    @property
    def axes(self) -> int:
        """Numbers in a position."""
        return (self.table.shape[0] - AXES) // 4

    @property
    def num_segments(self) -> int:
        """Columns of the table."""
        return self.table.shape[1]

    @property
    def num_documents(self) -> int:
        """Documents, empty ones of a view included."""
        return self.documents.shape[1]

    @property
    def offset(self) -> IntArray:
        """(segments,) first token of each segment."""
        return self.table[OFFSET]

    @property
    def skip(self) -> IntArray:
        """(segments,) raster index of each segment's first token inside its grid."""
        return self.table[SKIP]

    @property
    def height(self) -> IntArray:
        """(segments,) rows of each grid; 1 for text and padding."""
        return self.table[HEIGHT]

    @property
    def width(self) -> IntArray:
        """(segments,) tokens in a row of each grid."""
        return self.table[WIDTH]

    @property
    def denominator(self) -> IntArray:
        """(segments,) denominator of each segment's ids."""
        return self.table[DENOMINATOR]

    @property
    def origin(self) -> IntArray:
        """(axes, segments) numerator at frame, row and column 0."""
        return self.table[AXES::4]

    @property
    def step_frame(self) -> IntArray:
        """(axes, segments) numerator per frame."""
        return self.table[AXES + 1 :: 4]

    @property
    def step_row(self) -> IntArray:
        """(axes, segments) numerator per row."""
        return self.table[AXES + 2 :: 4]

    @property
    def step_col(self) -> IntArray:
        """(axes, segments) numerator per column."""
        return self.table[AXES + 3 :: 4]

    @property
    def is_padding(self) -> npt.NDArray[np.bool_]:
        """(segments,) whether a segment is padding: origin and steps are 0 on every axis."""
        return (self.table[AXES:] == 0).all(axis=0)

    @property
    def is_grid(self) -> npt.NDArray[np.bool_]:
        """(segments,) whether a segment is a grid or a piece of one: it has rows, or steps between rows or frames."""
        rows = (self.height > 1) | self.step_row.any(axis=0) | self.step_frame.any(axis=0)
        found: npt.NDArray[np.bool_] = rows & ~self.is_padding
        return found

    @property
    def segment_lengths(self) -> IntArray:
        """(segments,) tokens of each segment."""
        return _gaps(self.offset, self.num_tokens)

    @property
    def lengths(self) -> IntArray:
        """(documents,) tokens of each document, padding included."""
        return _gaps(self.documents[FIRST_TOKEN], self.num_tokens)

    @property
    def real_lengths(self) -> IntArray:
        """(documents,) tokens of each document, padding not included."""
        before = np.zeros(self.num_segments + 1, np.int64)
        np.cumsum(self.segment_lengths * ~self.is_padding, out=before[1:])
        first = before[self.documents[FIRST_SEGMENT]]
        return _gaps(first, int(before[-1]))

    @property
    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """(documents + 1,) int32 first token of each document, then the total, as varlen attention takes it.

        Raises:
            LimitExceededError: 2**31 tokens or more.
        """
        if self.num_tokens > INT32_MAX:
            raise LimitExceededError(f"cu_seqlens: got {self.num_tokens} tokens, want at most 2**31 - 1 for int32")
        found = np.empty(self.num_documents + 1, np.int32)
        found[:-1], found[-1] = self.documents[FIRST_TOKEN], self.num_tokens
        return found

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest document; 0 without documents."""
        return int(self.lengths.max(initial=0))

    @property
    def next_positions(self) -> IntArray:
        """(documents,) the id, equal on all axes, of the token that comes after each document.

        Raises:
            UnsupportedError: the scheme's state is more than one integer.
        """
        return self._known("next_positions", NEXT_POSITION)

    @property
    def deltas(self) -> IntArray:
        """(documents,) next position − start − tokens without padding; slices and decoding keep it.

        Raises:
            UnsupportedError: the scheme's state is more than one integer.
        """
        return self._known("deltas", DELTA)

    def _known(self, name: str, row: int) -> IntArray:
        values = self.documents[row]
        if (values == NO_POSITION).any():
            raise UnsupportedError(f"{name}: got a table of {self.scheme}, want a scheme with one cursor to go on from")
        return values


def _gaps(firsts: IntArray, stop: int) -> IntArray:
    gaps = np.empty_like(firsts)
    gaps[:-1] = firsts[1:] - firsts[:-1]
    gaps[-1:] = stop - firsts[-1:]
    return gaps
