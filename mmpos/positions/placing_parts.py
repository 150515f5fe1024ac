"""What of a batch is text and what are grids, and where cursors stand before and after: in C, or the same in numpy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mmpos.errors import InvalidInputError
from mmpos.schemes import Grids, Scheme, TextRuns
from mmpos.segments.table import GRID, TEXT, SegmentTable
from mmpos.support import native
from mmpos.support.checks import INT32_MAX, INT32_MIN, IntArray

BLOCK_ROWS = 9  # that split of csrc/parts.c fills


class Parts(NamedTuple):
    """Which segments are text and grids.

    Args:
        start: (documents,) first id.
        document: (segments,) document of each segment.
        lengths: (segments,) tokens.
        text: indices of the text segments.
        runs: the same as a scheme sees them.
        grid: indices of the grids.
        grids: the same as a scheme sees them.
        touching: whether a grid follows a grid in a document.
        moving: whether a grid has frames.
        block: the arrays above as the extension keeps them, or None.
    """

    start: IntArray
    document: IntArray
    lengths: IntArray
    text: IntArray
    runs: TextRuns
    grid: IntArray
    grids: Grids
    touching: bool
    moving: bool
    block: IntArray | None


class Cursors(NamedTuple):
    """The cursor before each text and each grid, and after each document."""

    text: IntArray
    grid: IntArray
    end: IntArray


def split(segments: SegmentTable, start: IntArray) -> Parts:
    """Tell text from grids."""
    kind, extents, offsets = segments.kind, segments.extents, segments.segment_offsets
    separator = segments.row_separator
    if native.core is not None:
        block = np.empty((BLOCK_ROWS, kind.size), np.int64)
        found = native.core.split(kind, extents, offsets, separator, start, block)
        if found is not None:
            texts, grids, touching, moving = found
            document, lengths, text, grid = block[0], block[1], block[2, :texts], block[4, :grids]
            runs = TextRuns(block[3, :texts], text, document, start)
            seen = _grids(block[5:8, :grids], block[8, :grids], segments, grid)
            return Parts(start, document, lengths, text, runs, grid, seen, touching, moving, block)
    document = np.arange(start.size).repeat(offsets[1:] - offsets[:-1])
    (text,), (grid,) = (kind == TEXT).nonzero(), (kind == GRID).nonzero()
    runs = TextRuns(extents[2, text], text, document, start)
    seen = _grids(extents[:, grid], start[document[grid]], segments, grid)
    touch = (grid[1:] - grid[:-1] == 1) & (document[grid[1:]] == document[grid[:-1]])
    moving = bool((seen.frames > 1).any())
    return Parts(start, document, segments.lengths, text, runs, grid, seen, bool(touch.any()), moving, None)


def cursors(scheme: Scheme, segments: SegmentTable, parts: Parts) -> Cursors:
    """One cumulative sum over segments: every text and every grid moves the cursor as the scheme says."""
    kind, offsets, start = segments.kind, segments.segment_offsets, parts.start
    of_text = scheme.advance_text(parts.runs)
    of_grids = whole(scheme, "advance", scheme.advance(parts.grids)) if parts.grid.size else parts.grid
    if native.core is not None:
        found, end = np.empty((2, kind.size), np.int64), np.empty(start.size, np.int64)
        if native.core.cursors(kind, offsets, start, of_text, of_grids, found, end):
            return Cursors(found[0, : parts.text.size], found[1, : parts.grid.size], end)
    advance = np.zeros(kind.size, np.int64)
    advance[parts.text], advance[parts.grid] = of_text, of_grids
    after = advance.cumsum()
    before = after - advance
    base = start - before[offsets[:-1]]
    # Beyond int32 the error is certain, and said of the columns; products must not wrap around before.
    before = np.maximum(np.minimum(before + base[parts.document], INT32_MAX + 1), INT32_MIN - 1)
    return Cursors(before[parts.text], before[parts.grid], after[offsets[1:] - 1] + base)


def whole(scheme: Scheme, name: str, values: IntArray | int) -> IntArray | int:
    """What a scheme gave, if it is integers."""
    if isinstance(values, int) or (isinstance(values, np.ndarray) and values.dtype.kind in "iu"):
        return values
    got = values.dtype if isinstance(values, np.ndarray) else repr(values)
    raise InvalidInputError(f"scheme {scheme.name!r}: got {name} {got}, want integers")


def _grids(extents: IntArray, start: IntArray, segments: SegmentTable, grid: IntArray) -> Grids:
    separators, seconds = segments.row_separator, segments.seconds_per_frame
    if separators is None and seconds is None:
        return Grids(extents, start)
    return Grids(
        extents,
        start,
        None if separators is None else separators[grid],
        None if seconds is None else seconds[:, grid],
    )
