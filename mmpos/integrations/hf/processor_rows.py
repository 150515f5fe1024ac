"""Rows of token ids with one placeholder per image, to rows with all tokens of the images and where these lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from mmpos.errors import InvalidInputError
from mmpos.segments.table import SegmentTable, separator_tokens
from mmpos.sequence.tokenizers import MarkerIds
from mmpos.support.checks import IntArray, counted

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
        grid_thw: (images, 3) frames, height and width after merging.
        markers: the tokens that were put around and into the images.
    """

    input_ids: IntArray
    lengths: IntArray
    source: IntArray
    first: IntArray
    stop: IntArray
    document: IntArray
    grid_thw: IntArray
    markers: MarkerIds

    def segments(self) -> SegmentTable:
        """What stands where; no token is read."""
        starts = self.lengths.cumsum() - self.lengths
        offsets = self.first + self.markers.margins[0] - starts[self.document]
        separated = self.markers.row is not None
        return SegmentTable.from_spans(self.lengths, offsets, self.grid_thw, self.document, row_separator=separated)

    def cut(self, length: int, side: str, added: IntArray) -> Rows:
        """Every row cut to at most so many tokens, on the right or on the left, which may cut no image.

        Args:
            length: most tokens of a row.
            side: "right" or "left".
            added: (rows, 2) tokens at the begin and at the end of each row that stay.

        Raises:
            InvalidInputError: an image would be cut, or cut off: its pixels would have no place; or there would be no
                room for what stays.
        """
        long = self.lengths > length
        least = int((added.sum(axis=1) * long).max())
        if least > length:
            raise InvalidInputError(f"max_length: got {length}, want >= {least}, the special tokens of a row")
        # What goes is one run of tokens, before those that stay at the end or behind those at the begin.
        begin = length - added[:, 1] if side == "right" else added[:, 0]
        begin = np.where(long, begin, self.lengths)
        kept = np.minimum(self.lengths, length)
        starts = self.lengths.cumsum() - self.lengths
        begin, end = starts + begin, starts + begin + self.lengths - kept
        lost = (self.stop > begin[self.document]) & (self.first < end[self.document])
        if lost.any():
            i = int(lost.argmax())
            row = int(self.document[i])
            raise InvalidInputError(
                f"max_length: got {length}, which cuts image {i} off text[{row}] of {self.lengths[row]} tokens, "
                "want more, or truncation=False"
            )
        token = np.arange(self.input_ids.size)
        inside = (token < begin.repeat(self.lengths)) | (token >= end.repeat(self.lengths))
        before = inside.cumsum() - inside
        return replace(
            self,
            input_ids=self.input_ids[inside],
            lengths=kept,
            source=self.source[inside],
            first=before[self.first],
            stop=before[self.stop - 1] + 1,
        )


def added_tokens(encoded: Mapping[str, Any]) -> IntArray:
    """(rows, 2) special tokens that a tokenizer has put before and after each text, as its mask of them says."""
    runs = [
        (mask.index(0), mask[::-1].index(0)) if 0 in mask else (len(mask), 0)
        for mask in encoded.get("special_tokens_mask", [[0]] * len(encoded["input_ids"]))
    ]
    return np.array(runs, np.int64)


def expand(
    texts: Sequence[Sequence[int]],
    grid_thw: IntArray,
    given: IntArray | None,
    markers: MarkerIds,
) -> Rows:
    """Put the tokens of images in the place of their placeholders.

    Args:
        texts: token ids of each row, with one placeholder per image.
        grid_thw: (images, 3) frames, height and width after merging, in the order of the placeholders.
        given: (rows,) images given for each row; None where they are given for all together.
        markers: the tokens to put around and into the images.

    Raises:
        InvalidInputError: a row without tokens, or other placeholders than images.
    """
    before = np.fromiter(accumulate(map(len, texts), initial=0), np.int64, len(texts) + 1)
    lengths = np.diff(before)
    if not lengths.all():
        raise InvalidInputError(f"text[{int(lengths.argmin())}]: got no tokens, want at least one")
    ids = np.concatenate([np.asarray(text, np.int64) for text in texts])
    (at,) = (ids == markers.patch).nonzero()
    document = np.searchsorted(before, at, side="right") - 1
    _check_counts(np.bincount(document, minlength=lengths.size), len(grid_thw), given)
    frames, height, width = grid_thw.T
    front, back = markers.margins
    tokens = frames * height * (width + (markers.row is not None)) + front + back
    counts = np.ones(ids.size, np.int64)
    counts[at] = tokens
    source = np.arange(ids.size).repeat(counts)
    stop = counts.cumsum()[at]
    longer = np.bincount(document, tokens - 1, lengths.size).astype(np.int64)  # exact: below 2**53
    rows = Rows(ids[source], lengths + longer, source, stop - tokens, stop, document, grid_thw, markers)
    spans = np.stack([rows.first + front, stop - back], axis=1)
    markers.write(rows.input_ids, spans, separator_tokens(rows.segments()))
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
