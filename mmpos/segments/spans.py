"""Segments from placeholder spans; the gaps between a document's spans are the document's text."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.segments.kinds import AUDIO, CLIP, CLIP_MARKERS, CROP_MARKERS, GRID, TEXT
from mmpos.support import native
from mmpos.support.checks import INT32_MAX, IntArray, first_bad

Number = TypeVar("Number", np.int64, np.float64)


class SpanSegments(NamedTuple):
    """Arrays of a segment table, and the segment of each span."""

    kind: npt.NDArray[np.uint8]
    extents: IntArray
    segment_offsets: IntArray
    span_segments: IntArray


def layout(
    lengths: IntArray,
    offsets: IntArray,
    grid_thw: IntArray,
    documents: IntArray | None,
    *,
    separators: int,
    kind: npt.NDArray[np.uint8] | None = None,
    extra_tokens: IntArray | None = None,
) -> SpanSegments:
    """Lay out the segments of documents with these spans; see SegmentTable.from_spans."""
    arrays = None
    if native.core is not None and kind is None:
        arrays = native.core.spans(lengths, offsets, grid_thw, documents, bool(separators))
    if arrays is not None:
        every, *numbers = arrays
        sides, firsts, segments = map(native.int64, numbers)
        return SpanSegments(np.frombuffer(every, np.uint8), sides.reshape(3, -1), firsts, segments)
    first_bad("lengths", lengths, minimum=1, maximum=INT32_MAX)
    first_bad("offsets", offsets, minimum=0, maximum=INT32_MAX)
    first_bad("grid_thw", grid_thw, minimum=1, maximum=INT32_MAX)
    documents = _documents(documents, offsets.size, lengths.size)
    kinds = np.full(offsets.size, GRID, np.uint8) if kind is None else kind
    tokens = span_tokens("grid_thw", grid_thw, separators, kinds, extra_tokens)
    starts, stops = offsets.tolist(), (offsets + tokens).tolist()
    edges = documents.searchsorted(np.arange(lengths.size + 1)).tolist()
    columns: list[tuple[int, ...]] = []  # kind, frames, height and width of every segment
    of_spans, first_segments = [], [0]
    for d, length in enumerate(lengths.tolist()):
        end = 0  # of the previous span
        for i in range(edges[d], edges[d + 1]):
            if starts[i] < end:
                want = f">= {end}, the end of the span before it"
                raise InvalidInputError(f"offsets[{i}]: got {starts[i]} in document {d}, want {want}")
            if stops[i] > length:
                got, want = f"{tokens[i]} tokens ends at {stops[i]}", f"<= {length}, the length of document {d}"
                raise InvalidInputError(f"offsets[{i}]: the span of {got}, want {want}")
            if starts[i] > end:
                columns.append((TEXT, 1, 1, starts[i] - end))
            of_spans.append(len(columns))
            columns.append((int(kinds[i]), *grid_thw[i].tolist()))
            end = stops[i]
        if end < length:
            columns.append((TEXT, 1, 1, length - end))
        first_segments.append(len(columns))
    table = np.array(columns, np.int64).reshape(-1, 4).T
    firsts, index = np.array(first_segments, np.int64), np.array(of_spans, np.int64)
    return SpanSegments(table[0].astype(np.uint8), table[1:], firsts, index)


def span_tokens(
    name: str,
    grid_thw: IntArray,
    separators: int = 0,
    kind: npt.NDArray[np.uint8] | None = None,
    extra_tokens: IntArray | None = None,
) -> IntArray:
    """Count the (spans,) tokens in each span, and check the limit for a segment; without kinds, all spans are grids."""
    frames, height, width = extents = grid_thw.T.astype(np.float64)
    if kind is None:
        exact = frames * height * (width + separators)
    else:
        exact = segment_tokens(kind, extents, separators, extra_tokens)
    if exact.size and exact.max() > INT32_MAX:
        i = int(exact.argmax())
        raise LimitExceededError(f"{name}[{i}]: got {tuple(grid_thw[i].tolist())}, want fewer than 2**31 tokens")
    return exact.astype(np.int64)


def segment_tokens(
    kind: npt.NDArray[np.uint8],
    extents: npt.NDArray[Number],
    row_separator: npt.NDArray[np.bool_] | int | None,
    extra_tokens: IntArray | None,
) -> npt.NDArray[Number]:
    """Count the (segments,) tokens in each segment, in the dtype of extents; floats do not overflow.

    Args:
        kind: (segments,) see SegmentTable.
        extents: (3, segments) see SegmentTable.
        row_separator: (segments,), or one number for all grids.
        extra_tokens: (segments,), or None if all are 0.
    """
    frames, height, width = extents
    ended = width if row_separator is None else width + row_separator * (kind == GRID)
    tokens: npt.NDArray[Number] = frames * height * ended
    if kind.max(initial=0) <= AUDIO:
        return tokens
    tokens += np.where(kind == CLIP, 2 * CLIP_MARKERS, CROP_MARKERS * (kind > CLIP))
    if extra_tokens is not None:
        tokens += extra_tokens
    return tokens


def seconds_columns(segments: int, times: Iterable[tuple[int, Fraction | None]]) -> IntArray:
    """Return the (2, segments) numerators and denominators of times, with (0, 1) for segments without a time."""
    columns = np.array([[0], [1]], np.int64).repeat(segments, axis=1)
    for s, time in times:
        if time is not None:
            columns[:, s] = time.numerator, time.denominator
    return columns


def _documents(documents: IntArray | None, num_spans: int, num_documents: int) -> IntArray:
    if documents is None:
        if num_documents != 1 and num_spans:
            raise InvalidInputError(
                f"documents: got None, want the document of each span, since there are {num_documents} lengths"
            )
        return np.zeros(num_spans, np.int64)
    first_bad("documents", documents, minimum=0, maximum=num_documents - 1)
    if (np.diff(documents) < 0).any():
        i = int((np.diff(documents) < 0).argmax()) + 1
        raise InvalidInputError(f"documents[{i}]: got {documents[i]} after {documents[i - 1]}, want ascending indices")
    return documents
