"""Rows of token ids with one placeholder per image, to rows with all tokens of the images and where these lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from mmpos.checks import IntArray, counted
from mmpos.errors import InvalidInputError
from mmpos.segments import SegmentTable
from mmpos.separators import separator_tokens

__all__ = ["Rows", "expand"]


@dataclass(frozen=True)
class Rows:
    """The token ids of several documents, one after the other, and the images in them.

    Args:
        input_ids: (tokens,) of all rows.
        lengths: (rows,) tokens of each row.
        source: (tokens,) the token, before expansion, that each one comes of.
        first: (images,) first token of each image, a marker before it included.
        stop: (images,) one past its last token, likewise.
        document: (images,) the row of each image.
        marked: whether markers stand around the patches of an image.
        grid_thw: (images, 3) frames, height and width after merging.
        row_separator: whether the rows of an image end in one more token.
    """

    input_ids: IntArray
    lengths: IntArray
    source: IntArray
    first: IntArray
    stop: IntArray
    document: IntArray
    marked: bool
    grid_thw: IntArray
    row_separator: bool

    def segments(self) -> SegmentTable:
        """What stands where; no token is read."""
        starts = self.lengths.cumsum() - self.lengths
        offsets = self.first + self.marked - starts[self.document]
        return SegmentTable.from_spans(
            self.lengths, offsets, self.grid_thw, self.document, row_separator=self.row_separator
        )

    def cut(self, length: int, side: str) -> Rows:
        """Every row cut to at most so many tokens, on the right or on the left, which may cut no image.

        Raises:
            InvalidInputError: an image would be cut, or cut off: its pixels would have no place.
        """
        stops = self.lengths.cumsum()
        starts = stops - self.lengths
        kept = np.minimum(self.lengths, length)
        begin, end = (starts, starts + kept) if side == "right" else (stops - kept, stops)
        lost = (self.first < begin[self.document]) | (self.stop > end[self.document])
        if lost.any():
            i = int(lost.argmax())
            row = int(self.document[i])
            raise InvalidInputError(
                f"max_length: got {length}, which cuts image {i} off text[{row}] of {self.lengths[row]} tokens, "
                "want more, or truncation=False"
            )
        shift = (begin - (kept.cumsum() - kept))[self.document]
        inside = np.arange(kept.sum()) + np.repeat(begin - (kept.cumsum() - kept), kept)
        return replace(
            self,
            input_ids=self.input_ids[inside],
            lengths=kept,
            source=self.source[inside],
            first=self.first - shift,
            stop=self.stop - shift,
        )


def expand(
    texts: Sequence[Sequence[int]],
    grid_thw: IntArray,
    given: IntArray | None,
    marker_ids: tuple[int, ...],
    *,
    marked: bool,
) -> Rows:
    """Put the tokens of images in the place of their placeholders.

    Args:
        texts: token ids of each row, with one placeholder per image.
        grid_thw: (images, 3) frames, height and width after merging, in the order of the placeholders.
        given: (rows,) images given for each row; None where they are given for all together.
        marker_ids: of begin, end and patch, and of row if there is one.
        marked: whether to put begin and end around the patches.

    Raises:
        InvalidInputError: a row without tokens, or other placeholders than images.
    """
    begin, end, patch, *row = marker_ids
    before = np.fromiter(accumulate(map(len, texts), initial=0), np.int64, len(texts) + 1)
    lengths = np.diff(before)
    if not lengths.all():
        raise InvalidInputError(f"text[{int(lengths.argmin())}]: got no tokens, want at least one")
    ids = np.concatenate([np.asarray(text, np.int64) for text in texts])
    (at,) = (ids == patch).nonzero()
    document = np.searchsorted(before, at, side="right") - 1
    _check_counts(np.bincount(document, minlength=lengths.size), len(grid_thw), given)
    frames, height, width = grid_thw.T
    tokens = frames * height * (width + len(row)) + 2 * marked
    counts = np.ones(ids.size, np.int64)
    counts[at] = tokens
    source = np.arange(ids.size).repeat(counts)
    stop = counts.cumsum()[at]
    longer = np.bincount(document, tokens - 1, lengths.size).astype(np.int64)  # exact: below 2**53
    rows = Rows(
        ids[source], lengths + longer, source, stop - tokens, stop, document, marked, grid_thw, row_separator=bool(row)
    )
    if marked:
        rows.input_ids[rows.first], rows.input_ids[stop - 1] = begin, end
    if row:
        rows.input_ids[separator_tokens(rows.segments())] = row[0]
    return rows


def _check_counts(found: IntArray, images: int, given: IntArray | None) -> None:
    if given is not None:
        wrong = found != given
        if wrong.any():
            i = int(wrong.argmax())
            raise InvalidInputError(
                f"images[{i}]: got {counted(given[i], 'image')}, want {found[i]}, the placeholders of text[{i}]"
            )
    elif found.sum() != images:
        raise InvalidInputError(f"images: got {counted(images, 'image')}, want {found.sum()}, the placeholders of text")
