"""Place segments by a scheme, with one cumulative sum over segments and no loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.positions.plan import place_by_plan
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import (
    AXES,
    DENOMINATOR,
    HEIGHT,
    MAX_NUMERATOR,
    NO_POSITION,
    OFFSET,
    SKIP,
    WIDTH,
    assemble,
    check_next,
    id_bounds,
)
from mmpos.schemes import Grids, Placement, Scheme, TextRuns, get_scheme
from mmpos.segments.kinds import AUDIO, CLIP, GRID, NO_FRAME, NOUNS, PAD, TEXT, THUMBNAIL, Grid, Text
from mmpos.segments.table import SegmentTable
from mmpos.support import native
from mmpos.support.checks import INT32_MAX, INT32_MIN, IntArray, boolean, per_document

__all__ = ["ids_consumed", "place"]

_STEP_FRAME, _STEP_COL = AXES + 1, AXES + 3
"""Rows of the table: steps of the first axis."""


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
        segments: segments of the documents.
        scheme: name from mmpos.SCHEMES or a scheme object.
        start: id of each document's first token, an integer or (documents,); to continue a document, pass the next
            position of its earlier part.
        strict: whether to raise an error for two grids without text between them; None lets the scheme decide.

    Returns:
        A PositionTable.

    Raises:
        InvalidInputError: the scheme or the start is invalid, grids touch against the scheme's rule, or a grid lacks
            the seconds_per_frame on which the scheme's ids depend.
        UnsupportedError: the scheme does not support a segment or a part of it, such as frames, row separators,
            first frames or several grids in a document.
        LimitExceededError: an id or a next position is outside int32, or a denominator is 2**31 or more.
    """
    scheme = scheme if isinstance(scheme, Scheme) else get_scheme(scheme)
    if not isinstance(segments, SegmentTable):
        raise InvalidInputError(f"segments: got {type(segments).__name__}, want a SegmentTable")
    strict = scheme.strict if strict is None else boolean("strict", strict)
    placed = place_by_plan(scheme, segments, start, strict)
    if placed is not None:
        return placed
    return _place(segments, scheme, start, strict)


def _place(segments: SegmentTable, scheme: Scheme, start: npt.ArrayLike, strict: bool) -> PositionTable:
    """Place segments by the general path, without a plan."""
    starts = per_document("start", start, segments.segment_offsets.size - 1, minimum=INT32_MIN)
    if not scheme.resumable and np.ndim(start):
        raise UnsupportedError(f"start: got one per document, want one integer: {scheme.name} cannot be resumed")
    split = _split(segments, starts)
    _check_scheme(scheme, segments, split, strict)
    if scheme.fractional and split.grid.size:
        split = _with_units(scheme, split)
    return _placed(scheme, segments, split, *_cursors(scheme, segments, split))


def _check_scheme(scheme: Scheme, segments: SegmentTable, split: TextsAndGrids, strict: bool) -> None:
    """Raise an error for the first segment that the scheme does not support."""
    if not scheme.text:
        _refuse(scheme, segments, segments.kind == TEXT, "text", "grids only")
    if not (scheme.text and scheme.audio):
        want = "text and grids only" if scheme.text else "grids only"
        _refuse(scheme, segments, segments.kind == AUDIO, "audio", want)
    if not split.grid.size:
        return
    if strict:
        _check_touching(scheme, segments)
    if split.grids.kind is not None:
        for kind, want in ((CLIP, "its video and its audio apart"), (THUMBNAIL, "a grid between texts")):
            if kind not in scheme.kinds:
                _refuse(scheme, segments, segments.kind == kind, f"a {NOUNS[kind]}", want)
    if not scheme.frames:
        # If axes is a parameter, axes=3 supports frames.
        want = "one grid per frame, or axes=3" if vars(scheme).get("axes") == 2 else "one grid per frame"
        _refuse(scheme, segments, segments.extents[0] > 1, "a grid with frames", want)
    if not scheme.row_separators and segments.row_separator is not None:
        _refuse(scheme, segments, segments.row_separator, "a grid with row separators", "none")
    _check_first_frames(scheme, segments, split.document)


def _check_first_frames(scheme: Scheme, segments: SegmentTable, document: IntArray) -> None:
    """Raise an error for the first grid that may not name its first frame, or that must name it."""
    silent = segments.kind == GRID
    if segments.first_frame is not None:
        silent &= segments.first_frame == NO_FRAME
        if not scheme.keyframes:
            _refuse(scheme, segments, segments.first_frame != NO_FRAME, "a grid with a first_frame", "none")
    if not scheme.references:
        before = silent.cumsum() - silent
        second = silent & (before > before[segments.segment_offsets[document]])
        want = "one grid per document" + ", or first_frame for the others" * scheme.keyframes
        _refuse(scheme, segments, second, "another grid", want)


def _check_touching(scheme: Scheme, segments: SegmentTable) -> None:
    touch = (segments.kind[1:] == GRID) & (segments.kind[:-1] == GRID)
    touch[segments.segment_offsets[1:-1] - 1] = False
    if touch.any():
        d, i = _document_index(segments, int(touch.argmax()) + 1)
        raise InvalidInputError(
            f"documents[{d}][{i}]: got a grid right after a grid, want text between them in {scheme.name} "
            "(such as the markers [IMG] and [/IMG]), or strict=False"
        )


def _refuse(scheme: Scheme, segments: SegmentTable, where: npt.NDArray[np.bool_], got: str, want: str) -> None:
    if where.any():
        d, i = _document_index(segments, int(where.argmax()))
        raise UnsupportedError(f"documents[{d}][{i}]: got {got}, want {want} in scheme {scheme.name!r}")


def _document_index(segments: SegmentTable, segment: int) -> tuple[int, int]:
    d = int(np.searchsorted(segments.segment_offsets, segment, side="right")) - 1
    return d, segment - int(segments.segment_offsets[d])


class TextsAndGrids(NamedTuple):
    """A batch split into text segments, including audio, and grids, including all segments with patches.

    Args:
        start: (documents,) first id.
        document: (segments,) document of each segment.
        lengths: (segments,) number of tokens.
        text: indices of the text segments.
        runs: the text segments, for schemes.
        grid: indices of the grids.
        grids: the grids, for schemes.
        units: (documents,) denominators of cursors, or None if they are integers.
    """

    start: IntArray
    document: IntArray
    lengths: IntArray
    text: IntArray
    runs: TextRuns
    grid: IntArray
    grids: Grids
    units: IntArray | None = None


def _split(segments: SegmentTable, start: IntArray) -> TextsAndGrids:
    """Split a batch into its texts and its grids."""
    kind, extents, offsets = segments.kind, segments.extents, segments.segment_offsets
    document = np.arange(start.size).repeat(offsets[1:] - offsets[:-1])
    is_text = (kind == TEXT) | (kind == AUDIO)
    (text,), (grid,) = is_text.nonzero(), (~is_text & (kind != PAD)).nonzero()
    lengths = extents[2, text]
    text_tokens = np.bincount(document[text], lengths, minlength=start.size).astype(np.int64)
    of_grids = _grids(extents[:, grid], start, document, segments, grid, text_tokens)
    runs = TextRuns(lengths, text, document, start)
    return TextsAndGrids(start, document, segments.lengths, text, runs, grid, of_grids)


def _with_units(scheme: Scheme, split: TextsAndGrids) -> TextsAndGrids:
    """Return the common denominator of the ids that each document's grids consume, or None if all are integers."""
    unit = scheme.unit(split.grids)
    if unit is None or unit.max() <= 1:
        return split
    units, owner = np.ones(split.start.size, np.int64), split.document[split.grid]
    np.lcm.at(units, owner, unit)
    # An overflowed result is not a common multiple; a result below 2**31 cannot have overflowed.
    beyond = (units < 1) | (units > INT32_MAX)
    np.logical_or.at(beyond, owner, units[owner] % unit != 0)
    if beyond.any():
        d = int(beyond.argmax())
        raise LimitExceededError(
            f"documents[{d}]: got times without a common denominator below 2**31, want times with one"
        )
    runs, grids = replace(split.runs, units=units), replace(split.grids, unit=units[owner])
    return split._replace(runs=runs, grids=grids, units=units)


def _cursors(scheme: Scheme, segments: SegmentTable, split: TextsAndGrids) -> tuple[IntArray, IntArray, IntArray]:
    """Sum the steps by which the scheme's segments move the cursor.

    Returns:
        The cursor before each text, before each grid, and after each document, in units of their documents.
    """
    offsets, start, units = segments.segment_offsets, split.start, split.units
    of_text = scheme.advance_text(split.runs)
    of_grids = scheme.advance(split.grids) if split.grid.size else split.grid
    advance = np.zeros(split.lengths.size, np.int64)
    advance[split.text], advance[split.grid] = of_text, _integers(scheme, "advance", of_grids)
    if advance.size and advance.min() < 0:
        s = int(advance.argmin())
        d, i = _document_index(segments, s)
        raise InvalidInputError(f"scheme {scheme.name!r}: got advance {advance[s]} for documents[{d}][{i}], want >= 0")
    if units is not None:
        own, scale = scheme.unit(split.grids), units[split.document]
        assert own is not None
        scale[split.grid] //= own
        if np.abs(advance.astype(np.float64) * scale).sum() > MAX_NUMERATOR / 2:
            raise LimitExceededError(
                f"scheme {scheme.name!r}: got ids beyond 2**61 in units of their times, want smaller ids"
            )
        advance, start = advance * scale, start * units
    after = advance.cumsum()
    base = start - (after - advance)[offsets[:-1]]
    before = after - advance + base[split.document]
    if units is None:
        # Ids beyond int32 raise an error when the columns are built; until then, products must not overflow.
        before = before.clip(INT32_MIN - 1, INT32_MAX + 1)
    before_text = before[split.text]
    cleared = scheme.cleared(split.grids) if split.grid.size else None
    if cleared is not None:
        most = np.zeros(start.size, np.int64)
        np.maximum.at(most, split.grids.document, _integers(scheme, "cleared", cleared))
        before_text += most[split.runs.document]
    return before_text, before[split.grid], after[offsets[1:] - 1] + base


def _integers(scheme: Scheme, name: str, values: IntArray | int) -> IntArray | int:
    """Check that a scheme returned integers."""
    if isinstance(values, int) or (isinstance(values, np.ndarray) and values.dtype.kind in "iu"):
        return values
    got = values.dtype if isinstance(values, np.ndarray) else repr(values)
    raise InvalidInputError(f"scheme {scheme.name!r}: got {name} {got}, want integers")


def _grids(
    extents: IntArray, start: IntArray, document: IntArray, segments: SegmentTable, grid: IntArray, text: IntArray
) -> Grids:
    """Select the grids for schemes; start and text are the (documents,) first ids and numbers of text tokens."""
    separators, seconds, extra = segments.row_separator, segments.seconds_per_frame, segments.extra_tokens
    separator = None if separators is None else separators[grid]
    named = None if segments.first_frame is None else segments.first_frame[grid]
    first = 0 if named is None else np.where(named == NO_FRAME, 0, named)
    time = None if seconds is None else seconds[:, grid]
    owner, kind = document[grid], segments.kind[grid]
    number = grid - segments.segment_offsets[owner]
    grids = Grids(
        extents, start[owner], owner, separator, time, text_tokens=text[owner], segment=number, first_frame=first
    )
    if kind.max(initial=GRID) == GRID:
        return grids
    extra = np.zeros(grid.size, np.int64) if extra is None else extra[grid]
    return replace(grids, kind=kind, extra_tokens=extra)


def _placed(
    scheme: Scheme, segments: SegmentTable, split: TextsAndGrids, before_text: IntArray, before_grid: IntArray,
    end: IntArray,
) -> PositionTable:  # fmt: skip
    """Build the table from the scheme's placements of texts and grids."""
    of_text = scheme.place_text(split.runs, before_text)
    of_grids = scheme.place(split.grids, before_grid) if split.grid.size else None
    if scheme.resumable and of_grids is not None:
        demanded = scheme.next_after(split.grids, before_grid)
        if demanded is not None:
            np.maximum.at(end, split.document[split.grid], demanded)
    columns, document = _columns(scheme, segments, split, of_text, of_grids)
    header = np.full((2, segments.num_documents), NO_POSITION, np.int64)
    if scheme.resumable:
        whole = np.ones(end.size, np.bool_)
        if split.units is not None:
            # A next position is an integer, so a document that ends at a fraction has none.
            end, rest = np.divmod(end, split.units)
            whole = rest == 0
        header[0, whole] = end[whole]
        tokens = np.add.reduceat(split.lengths * (segments.kind != PAD), segments.segment_offsets[:-1])
        header[1, whole] = (end - split.start - tokens)[whole]
    made = assemble(columns, document, header)
    if native.core is None or not native.core.placed(*made, scheme.fractional):
        _check_columns(columns, np.diff(columns[OFFSET], append=made[2]), document, scheme)
        check_next(header[0])
    return PositionTable(*made, scheme.fractional, scheme.label)


def _columns(
    scheme: Scheme, segments: SegmentTable, split: TextsAndGrids, of_text: Placement, of_grids: Placement | None
) -> tuple[IntArray, IntArray]:
    """Build the columns of the table, with lengths in the OFFSET row, and the document of each column."""
    columns = np.zeros((AXES + 4 * scheme.axes, split.document.size), np.int64)
    columns[HEIGHT] = columns[DENOMINATOR] = 1
    columns[OFFSET] = columns[WIDTH] = split.lengths
    _put(columns, scheme, split.text, of_text)
    # Only padding has origin and steps 0: other constant segments get a step that no token uses.
    still = split.text[~columns[AXES:, split.text].any(axis=0)]
    columns[WIDTH, still] = columns[_STEP_COL, still] = 1
    if of_grids is None:
        return columns, split.document
    document, grid, height, width = split.document, split.grid, split.grids.height, split.grids.row_tokens
    if of_grids.pieces is not None:
        pieces = of_grids.pieces
        count = np.ones(document.size, np.int64)
        count[grid] = np.bincount(pieces.owner, minlength=grid.size)
        owner = np.repeat(np.arange(document.size), count)
        columns, document = columns.take(owner, axis=1), document[owner]
        in_grid = np.zeros(split.document.size, np.bool_)
        in_grid[split.grid] = True
        grid, height, width = np.flatnonzero(in_grid[owner]), pieces.height, pieces.width
        columns[OFFSET, grid], columns[SKIP, grid] = pieces.tokens, pieces.skip
    columns[HEIGHT, grid], columns[WIDTH, grid] = height, width
    _put(columns, scheme, grid, of_grids)
    still = grid[~columns[AXES:].reshape(scheme.axes, 4, -1)[:, 1:, grid].any(axis=(0, 1))]
    columns[HEIGHT, still] = -(-(columns[SKIP, still] + columns[OFFSET, still]) // columns[WIDTH, still])
    columns[_STEP_FRAME, still] = 1
    return columns, document


def _put(columns: IntArray, scheme: Scheme, where: IntArray, placement: Placement) -> None:
    """Write a placement into columns whose steps are 0 and whose denominator is 1."""
    if scheme.fractional:
        columns[DENOMINATOR, where] = _integers(scheme, "denominator", placement.denominator)
    elif not isinstance(placement.denominator, int) or placement.denominator != 1:
        raise InvalidInputError(f"scheme {scheme.name!r}: got a denominator, want none unless fractional = True")
    for i, name in enumerate(("origin", "step_frame", "step_row", "step_col")):
        per_axis = getattr(placement, name)
        if per_axis is not None and len(per_axis) != scheme.axes:
            raise InvalidInputError(
                f"scheme {scheme.name!r}: got {len(per_axis)} {name}s, want {scheme.axes}, one per axis"
            )
        for axis, values in enumerate(per_axis or ()):
            if not isinstance(values, int) or values != 0:
                columns[AXES + 4 * axis + i, where] = _integers(scheme, name, values)


def _check_columns(columns: IntArray, lengths: IntArray, document: IntArray, scheme: Scheme) -> None:
    """Raise an error for the first denominator or id beyond its limit; use floats, since integers could overflow."""
    denominator = columns[DENOMINATOR]
    if scheme.fractional and denominator.max(initial=1) > INT32_MAX:
        s = int(denominator.argmax())
        tokens = _tokens_of(document, lengths, s)
        raise LimitExceededError(f"{tokens}: got denominator {denominator[s]}, want below 2**31")
    if scheme.fractional and denominator.min(initial=1) < 1:
        raise InvalidInputError(f"scheme {scheme.name!r}: got denominator {denominator.min()}, want >= 1")
    bounds = id_bounds(columns, lengths)
    beyond = bounds.beyond_int32
    if beyond.any():
        s = int(beyond.argmax())
        low, high = bounds.lowest[:, s].min(), bounds.highest[:, s].max()
        got = f"up to {high:.0f}" if high > INT32_MAX else f"down to {low:.0f}"
        raise LimitExceededError(f"{_tokens_of(document, lengths, s)}: got ids {got}, want ids within int32")


def _tokens_of(document: IntArray, lengths: IntArray, segment: int) -> str:
    """Describe the document of a segment and the segment's tokens in it."""
    d = document[segment]
    first = lengths[:segment][document[:segment] == d].sum()
    return f"documents[{d}], tokens {first} to {first + lengths[segment] - 1}"


def ids_consumed(scheme: str | Scheme, grids: Iterable[Grid]) -> IntArray:
    """Count the ids that each grid consumes under a scheme, that is, how far the grid moves the text after it.

    >>> from mmpos.segments.kinds import Grid
    >>> ids_consumed("rope-tie", [Grid(24, 24), Grid(1, 576)]).tolist()
    [624, 1153]

    Args:
        scheme: name from mmpos.SCHEMES or a scheme object.
        grids: grids, each placed alone in a document, between two text tokens if the scheme supports text.

    Returns:
        A new (grids,) int64 array.

    Raises:
        UnsupportedError: the scheme has no next position, or a grid has frames that the scheme does not support.
    """
    scheme = get_scheme(scheme)
    text = [Text(1)] if scheme.text else []
    documents: list[list[Text | Grid]] = [[*text, grid, *text] for grid in grids]
    return place(SegmentTable.from_documents(documents), scheme).next_positions - 2 * len(text)
