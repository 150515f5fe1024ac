"""PositionTable, the placed table of a packed batch, and everything derived from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.positions import expand
from mmpos.positions.table_rows import (
    AXES,
    DECODE,
    DELTA,
    DENOMINATOR,
    FIRST_SEGMENT,
    FIRST_TOKEN,
    HEIGHT,
    LENGTHEN,
    NEXT_POSITION,
    NO_POSITION,
    OFFSET,
    SHARD,
    SKIP,
    TAKE,
    WIDTH,
    WINDOW,
    CutColumns,
    axis_names,
    check_table,
)
from mmpos.segments.kinds import AUDIO, CLIP, CLIP_MARKERS, CROP_MARKERS, GRID, NOUNS, PAD, TEXT, THUMBNAIL, TILE
from mmpos.segments.table import SegmentTable, token_types
from mmpos.support import html, native
from mmpos.support.checks import (
    INT32_MAX,
    Array,
    IntArray,
    boolean,
    counted,
    first_bad,
    host_array,
    instance,
    int_array,
    integer,
    integers,
    one_of,
    per_document,
    read_only,
)
from mmpos.support.ragged import ragged_arange, true_runs

__all__ = ["LAYOUTS", "Layout", "PositionTable", "Side"]

Side = Literal["left", "right"]

Layout = Literal["zigzag", "contiguous", "zigzag-sequence", "contiguous-sequence"]

LAYOUTS: tuple[Layout, ...] = ("zigzag", "contiguous", "zigzag-sequence", "contiguous-sequence")
"""Layouts of context-parallel shards: the first two split every document; the others split the batch as one
sequence.
"""


@dataclass(frozen=True, eq=False)
class PositionTable:
    """Positions of a packed batch as O(segments) integers, from which every token's id follows exactly.

    Token g lies in the last segment with offset <= g. With i = skip + g − offset, col = i mod width,
    row = i div width mod height and frame = i div width div height, its id on each axis is
    (origin + frame·step_frame + row·step_row + col·step_col) / denominator.

    A table is immutable and its arrays are read-only. Two tables are equal if all their arguments are.

    Args:
        table: (5 + 4·axes, segments) int64 rows: offset, skip, height, width, denominator, then for each
            axis origin, step_frame, step_row, step_col. Only padding has origin and steps 0 on every axis: text whose
            tokens are all at id 0 has width 1 and an unused step_col of 1, and a grid whose tokens share one id has
            its rows in one frame and an unused step_frame of 1.
        documents: (4, documents) int64 rows: first segment, first token, next position, delta.
        num_tokens: number of tokens, including padding.
        fractional: whether ids may be fractions; a property of the scheme, not of the batch.
        scheme: name of the scheme with its parameters, as in ``Scheme.label``; no id depends on it.
    """

    table: IntArray
    documents: IntArray
    num_tokens: int
    fractional: bool
    scheme: str

    def __post_init__(self) -> None:
        if self.table.flags.writeable or self.documents.flags.writeable:
            for name in ("table", "documents"):
                array = getattr(self, name).view()
                array.flags.writeable = False
                object.__setattr__(self, name, array)

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, PositionTable) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        shape = self.table.shape, self.num_tokens, self.fractional, self.scheme
        return *shape, self.table.tobytes(), self.documents.tobytes()

    @classmethod
    def from_arrays(
        cls, table: npt.ArrayLike, documents: npt.ArrayLike, num_tokens: int, *, fractional: bool, scheme: str
    ) -> PositionTable:
        """Build a table from arrays and, unlike the constructor, check them; see the arguments of ``PositionTable``.

        Args:
            table: (5 + 4·axes, segments) integers; kept, not copied, if they are int64.
            documents: (4, documents) integers; kept, not copied, if they are int64.
            num_tokens: number of tokens.
            fractional: whether ids may be fractions.
            scheme: name of the scheme, for display.

        Raises:
            InvalidInputError: a value is inconsistent; the message names its row and its segment or document.
            LimitExceededError: ids or next positions are outside int32, or the magnitude of a numerator or delta
                exceeds 2**62.
        """
        table = int_array("table", table, (None, None))
        documents = int_array("documents", documents, (4, None))
        num_tokens = integer("num_tokens", num_tokens, minimum=0)
        check_table(table, documents, num_tokens, boolean("fractional", fractional))
        if not isinstance(scheme, str):
            raise InvalidInputError(f"scheme: got {scheme!r}, want a name")
        return cls(table, documents, num_tokens, fractional, scheme)

    @classmethod
    def concatenate(cls, tables: Sequence[PositionTable]) -> PositionTable:
        """Concatenate the documents of several tables into one packed batch.

        Args:
            tables: at least one table, all with the same number of axes; ids may be fractions if any table's may.

        Raises:
            InvalidInputError: there are no tables, a value is not a table, or the numbers of axes differ.
        """
        joined = _joined_by_c(tables)
        if joined is not None:
            return joined
        for i, table in enumerate(tables):
            _check_joinable(f"tables[{i}]", table, tables[0])
        if not tables:
            raise InvalidInputError("tables: got none, want at least one")
        columns = np.concatenate([table.table for table in tables], axis=1)
        documents = np.concatenate([table.documents for table in tables], axis=1)
        sizes = np.array([(table.num_segments, table.num_tokens) for table in tables]).T
        before = np.cumsum(sizes, axis=1) - sizes
        columns[OFFSET] += before[1].repeat(sizes[0])
        documents[:NEXT_POSITION] += before.repeat([table.num_documents for table in tables], axis=1)
        return cls(columns, documents, int(sizes[1].sum()), *_sort_of(tables))

    @property
    def axes(self) -> int:
        """Number of ids per token."""
        return (self.table.shape[0] - AXES) // 4

    @property
    def num_segments(self) -> int:
        """Number of segments: columns of the table."""
        return self.table.shape[1]

    @property
    def num_documents(self) -> int:
        """Number of documents, including empty ones."""
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
        """(segments,) number of tokens in each row of the grid."""
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
        return np.logical_not(self.table[AXES:].any(axis=0))

    @property
    def is_grid(self) -> npt.NDArray[np.bool_]:
        """(segments,) whether a segment is all or part of a grid: it has several rows, or a row or frame step."""
        rows = (self.height > 1) | self.step_row.any(axis=0) | self.step_frame.any(axis=0)
        return np.logical_and(rows, ~self.is_padding)

    @property
    def segment_lengths(self) -> IntArray:
        """(segments,) number of tokens in each segment."""
        return _gaps(self.offset, self.num_tokens)

    @property
    def lengths(self) -> IntArray:
        """(documents,) number of tokens in each document, including padding."""
        return _gaps(self.documents[FIRST_TOKEN], self.num_tokens)

    @property
    def real_lengths(self) -> IntArray:
        """(documents,) number of tokens in each document, excluding padding."""
        before = np.zeros(self.num_segments + 1, np.int64)
        np.cumsum(self.segment_lengths * ~self.is_padding, out=before[1:])
        first = before[self.documents[FIRST_SEGMENT]]
        return _gaps(first, int(before[-1]))

    @property
    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """(documents + 1,) int32 first token of each document, then the total, for varlen attention.

        Raises:
            LimitExceededError: the table has 2**31 tokens or more.
        """
        if self.num_tokens > INT32_MAX:
            raise LimitExceededError(f"cu_seqlens: got {self.num_tokens} tokens, want at most 2**31 - 1 for int32")
        cu_seqlens = np.empty(self.documents.shape[1] + 1, np.int32)
        cu_seqlens[:-1], cu_seqlens[-1] = self.documents[FIRST_TOKEN], self.num_tokens
        return read_only(cu_seqlens)

    @property
    def max_seqlen(self) -> int:
        """Number of tokens in the longest document; 0 without documents."""
        lengths = self.lengths
        return int(lengths[lengths.argmax()]) if lengths.size else 0

    @property
    def resumable(self) -> npt.NDArray[np.bool_]:
        """(documents,) whether a document has a next position and can be continued."""
        return np.not_equal(self.documents[NEXT_POSITION], NO_POSITION)

    @property
    def next_positions(self) -> IntArray:
        """(documents,) id, equal on all axes, of the token after each document.

        Raises:
            UnsupportedError: the scheme's state is more than one integer, or a document ends between two ids.
        """
        return self._next_or_delta("next_positions", NEXT_POSITION)

    @property
    def deltas(self) -> IntArray:
        """(documents,) next position − start − tokens, excluding padding; slices and decoding preserve it.

        Raises:
            UnsupportedError: the scheme's state is more than one integer, or a document ends between two ids.
        """
        return self._next_or_delta("deltas", DELTA)

    def dense(
        self,
        out: Array | None = None,
        dtype: npt.DTypeLike | None = None,
        axes: tuple[int, ...] | None = None,
    ) -> Array:
        """Expand the ids of all tokens.

        Args:
            out: (axes, tokens) array to write into, with any strides.
            dtype: int32 (default), int64 or float64; fractional schemes support only float64.
            axes: axes in the order of the rows; repeats are allowed: (0, 0, 1) gives three rows. None gives all axes.

        Returns:
            (axes, tokens) ids, in ``out`` if it is given, else in a new array.

        Raises:
            InvalidInputError: out, dtype or axes do not fit the table.
        """
        # Valid arguments skip the check, which costs more than writing thousands of ids.
        if axes is None and dtype is None:
            core, table, tokens = native.core, self.table, self.num_tokens
            if out is None:
                return expand.dense(table, tokens, self.fractional)
            if core and isinstance(out, np.ndarray) and core.expand(table, tokens, self.fractional, out, None, True):
                return out
        wanted = range(self.axes) if axes is None else self._checked_axes(axes)
        ids = self._checked_out(out, dtype, len(wanted))
        expand.expand(self.table, self.num_tokens, self.fractional, ids, wanted)
        return ids

    def rationals(self) -> tuple[IntArray, IntArray]:
        """Expand the exact ids of all tokens as fractions.

        Returns:
            (axes, tokens) int64 numerators and (tokens,) int64 denominators, new arrays.
        """
        numerators = np.empty((self.axes, self.num_tokens), np.int64)
        expand.expand(self.table, self.num_tokens, False, numerators, range(self.axes))
        return numerators, self.denominator.repeat(self.segment_lengths)

    def token_types(self, segments: SegmentTable) -> npt.NDArray[np.uint8]:
        """Return the (tokens,) type of each token: 1 for patches, 3 for audio, 0 for text, markers and row separators.

        Args:
            segments: segments of the same whole documents; this table determines the order of patches and audio in a
                clip.

        Raises:
            InvalidInputError: the segments belong to other documents.
        """
        self._check_segments(segments)
        clips = (segments.kind == CLIP).any()
        return token_types(segments, self.is_grid.repeat(self.segment_lengths) if clips else None)

    def take(self, starts: npt.ArrayLike, stops: npt.ArrayLike) -> PositionTable:
        """Take the tokens of several ranges in order; all documents remain, and may become empty.

        Args:
            starts: (ranges,) first token of each range.
            stops: (ranges,) one past the last token; equal to the start for an empty range.

        Raises:
            InvalidInputError: a range extends beyond the table, runs backwards, or returns to an earlier document.
        """
        taken = self._cut(TAKE, starts, stops)
        if taken is not None:
            return taken
        starts = int_array("starts", starts, (None,))
        stops = int_array("stops", stops, (starts.size,))
        first_bad("starts", starts, minimum=0, maximum=self.num_tokens)
        first_bad("stops", stops, maximum=self.num_tokens)
        if (stops < starts).any():
            i = int((stops < starts).argmax())
            raise InvalidInputError(f"stops[{i}]: got {stops[i]}, want >= starts[{i}] = {starts[i]}")
        return self._cut(TAKE, starts, stops) or self._take(starts, stops)

    def _take(self, starts: IntArray, stops: IntArray) -> PositionTable:
        columns, last = CutColumns(self.table, self.num_tokens), 0
        first, end = self.documents[FIRST_TOKEN], self.documents[FIRST_TOKEN] + self.lengths
        for i in np.flatnonzero(starts < stops).tolist():
            start, stop = int(starts[i]), int(stops[i])
            document = int(first.searchsorted(start, side="right")) - 1
            if document < last:
                raise InvalidInputError(f"starts[{i}]: got {start}, in an earlier document than the previous range")
            last = int(first.searchsorted(stop)) - 1
            for d in range(document, last + 1):
                columns.put_range(d, max(start, int(first[d])), min(stop, int(end[d])))
        return self._assembled(columns, self.documents[NEXT_POSITION:])

    def keep(self, mask: npt.ArrayLike) -> PositionTable:
        """Keep the tokens of a mask with their ids and prune the others permanently; all documents remain.

        Next positions do not change, so generation continues as if no token were missing. Each delta grows by the
        number of pruned tokens of its document, so that next position = start + delta + tokens still holds. (``take``
        does not change deltas, since its ranges are parts of a sequence that stays whole.)

        Args:
            mask: (tokens,) bool, True for a token to keep; apply it to input_ids and labels as well.

        Raises:
            InvalidInputError: the mask is not one bool per token.
        """
        mask = host_array("mask", mask)
        if (mask.dtype != np.bool_ and mask.size) or mask.shape != (self.num_tokens,):
            got = f"{mask.dtype} {mask.shape}"
            raise InvalidInputError(f"mask: got {got}, want bool ({self.num_tokens},), one per token")
        kept = self.take(*true_runs(mask.astype(np.bool_, copy=False)).T)
        documents = kept.documents.copy()
        lost = self.real_lengths - kept.real_lengths
        documents[DELTA] += np.where(self.resumable, lost, 0)
        return PositionTable(kept.table, documents, kept.num_tokens, self.fractional, self.scheme)

    def slice(self, start: int, stop: int) -> PositionTable:
        """Take the tokens from start to stop; concatenated slices equal the whole, even if they cut an image."""
        start = integer("start", start, minimum=0, maximum=self.num_tokens)
        return self.take([start], [integer("stop", stop, minimum=start, maximum=self.num_tokens)])

    def window(self, documents: npt.ArrayLike, starts: npt.ArrayLike, lengths: npt.ArrayLike) -> PositionTable:
        """Take windows of tokens, each as a separate document, for chunked prefill, decoding and drafts.

        Args:
            documents: (windows,) the document of each window, in any order.
            starts: (windows,) first token, counted from the document's first token.
            lengths: (windows,) number of tokens; tokens past the document's end are text that starts at the document's
                next position.

        Raises:
            UnsupportedError: a window extends past the end of a document without a next position.
        """
        windows = self._cut(WINDOW, documents, starts, lengths)
        if windows is not None:
            return windows
        documents = int_array("documents", documents, (None,))
        first_bad("documents", documents, minimum=0, maximum=self.num_documents - 1)
        starts = int_array("starts", starts, (documents.size,))
        first_bad("starts", starts, minimum=0, maximum=INT32_MAX)
        lengths = int_array("lengths", lengths, (documents.size,))
        first_bad("lengths", lengths, minimum=0, maximum=INT32_MAX)
        return self._cut(WINDOW, documents, starts, lengths) or self._window(documents, starts, lengths)

    def _window(self, documents: IntArray, starts: IntArray, lengths: IntArray) -> PositionTable:
        first, known, stops = self.documents[FIRST_TOKEN, documents], self.lengths[documents], starts + lengths
        header = self.documents[NEXT_POSITION:, documents]
        beyond = np.flatnonzero((stops > known) & (lengths > 0))
        if beyond.size:
            text = np.minimum(lengths, stops - known)[beyond]
            skipped = np.maximum(starts - known, 0)[beyond]
            header[0, beyond] = self._next_or_delta("next_positions", NEXT_POSITION, documents[beyond]) + skipped + text
            _check_last_ids(header[0, beyond] - 1, documents[beyond])
        columns = CutColumns(self.table, self.num_tokens)
        for w, (begin, end) in enumerate(zip(np.minimum(starts, known), np.minimum(stops, known), strict=True)):
            columns.put_range(w, int(first[w] + begin), int(first[w] + end))
            text = int(lengths[w] - (end - begin))
            columns.put_run(w, text, int(header[0, w]) - text)
        return self._assembled(columns, header)

    def updated(
        self,
        *,
        remove: Iterable[int] = (),
        replace: Mapping[int, PositionTable] | None = None,
        add: Sequence[PositionTable] = (),
    ) -> PositionTable:
        """Remove, replace and add documents of a running batch, without concatenating all of its tables again.

        The documents that remain keep their order, and added documents follow them.

        >>> from mmpos import SegmentTable, Text, place
        >>> a, b, c, d = (place(SegmentTable.from_documents([[Text(n)]])) for n in (1, 2, 3, 4))
        >>> PositionTable.concatenate([a, b, c]).updated(remove=[0], replace={2: d}, add=[a, c]).lengths.tolist()
        [2, 4, 1, 3]

        Args:
            remove: documents to remove, in any order.
            replace: for each document to replace, a table of the one document that takes its place.
            add: tables whose documents are added.

        Raises:
            InvalidInputError: there is no such document, a document is removed twice, or removed and replaced, or a
                table has another number of axes or, in ``replace``, of documents.
        """
        replace = {} if replace is None else replace
        if not isinstance(replace, Mapping):
            raise InvalidInputError(f"replace: got {type(replace).__name__}, want a mapping from documents to tables")
        if not isinstance(add, Sequence):
            raise InvalidInputError(f"add: got {type(add).__name__}, want a list of PositionTables")
        tables = [self, *replace.values(), *add]
        updated = _joined_by_c(tables, remove, [*replace])
        if updated is not None:
            return updated
        removed = integers("remove", remove, maximum=self.num_documents - 1)
        replaced = [integer("replace", d, minimum=0, maximum=self.num_documents - 1) for d in replace]
        for i, d in enumerate(removed):
            if d in removed[:i] or d in replaced:
                raise InvalidInputError(
                    f"remove[{i}]: got {d}, which is also in {'replace' if d in replaced else 'remove'}"
                )
        names = [f"replace[{d}]" for d in replaced] + [f"add[{i}]" for i in range(len(add))]
        for i, (name, table) in enumerate(zip(names, tables[1:], strict=True)):
            _check_joinable(name, table, self)
            if i < len(replaced) and table.num_documents != 1:
                raise InvalidInputError(f"{name}: got {counted(table.num_documents, 'document')}, want 1")
        return _joined_by_c(tables, removed, replaced) or self._updated(tables, removed, replaced)

    def _updated(self, tables: list[PositionTable], removed: tuple[int, ...], replaced: list[int]) -> PositionTable:
        joined, known = PositionTable.concatenate(tables), self.num_documents
        order = np.arange(joined.num_documents)
        order[replaced] = order[known : known + len(replaced)]
        order = np.delete(order, [*removed, *range(known, known + len(replaced))])
        return joined.window(order, np.zeros_like(order), joined.lengths[order])

    def decode(self, steps: npt.ArrayLike = 1) -> PositionTable:
        """Place the next text tokens of every document, grouped by document; their ids are equal on all axes.

        Args:
            steps: number of tokens per document: one integer for all documents, or (documents,) integers.

        Raises:
            UnsupportedError: a document with steps > 0 has no next position.
        """
        decoded = self._cut(DECODE, steps)
        if decoded is not None:
            return decoded
        steps = per_document("steps", steps, self.num_documents, minimum=0)
        return self._cut(DECODE, steps) or self._window(np.arange(self.num_documents), self.lengths, steps)

    def shard(self, rank: int, world_size: int, layout: Layout = "zigzag") -> PositionTable:
        """Take the tokens of one context-parallel rank; all documents remain, and may become empty.

        Args:
            rank: 0 to world_size − 1.
            world_size: number of context-parallel ranks, C.
            layout: "zigzag" gives rank r blocks r and 2C−1−r of the 2C blocks of every document, which balances causal
                attention; "contiguous" gives it block r of C. "zigzag-sequence" and "contiguous-sequence" split the
                batch as one sequence instead, regardless of documents.

        Raises:
            InvalidInputError: the length of a document, or of the batch for "…-sequence", is not a multiple of 2C
                (zigzag) or C.
        """
        one_of("layout", layout, LAYOUTS)
        sharded = self._cut(SHARD, rank, world_size, LAYOUTS.index(layout))
        return sharded or self.take(*self.shard_ranges(rank, world_size, layout))

    def shard_ranges(self, rank: int, world_size: int, layout: Layout = "zigzag") -> tuple[IntArray, IntArray]:
        """Return the ascending starts and stops of the token ranges that ``shard`` takes; ranges may be empty."""
        one_of("layout", layout, LAYOUTS)
        world_size = integer("world_size", world_size, minimum=1, maximum=INT32_MAX)
        rank = integer("rank", rank, minimum=0, maximum=world_size - 1)
        # A single rank holds everything, in any layout.
        blocks = [rank, 2 * world_size - 1 - rank] if layout.startswith("zigzag") and world_size > 1 else [rank]
        multiple = world_size * len(blocks)
        whole = layout.endswith("sequence")
        self._check_divisible(multiple, f"for world_size={world_size} and layout={layout!r}", whole)
        first = np.zeros(1, np.int64) if whole else self.documents[FIRST_TOKEN]
        block = (np.array([self.num_tokens]) if whole else self.lengths) // multiple
        starts = (first + np.multiply.outer(blocks, block)).T.ravel()
        return starts, starts + np.repeat(block, len(blocks))

    def shard_indices(self, rank: int, world_size: int, layout: Layout = "zigzag") -> IntArray:
        """Return the (tokens,) int64 columns of ``dense()`` that ``shard`` holds, to index input_ids and labels."""
        starts, stops = self.shard_ranges(rank, world_size, layout)
        return ragged_arange(stops - starts, starts)[1]

    def pad(self, length: npt.ArrayLike | None = None, side: Side = "right") -> PositionTable:
        """Pad every document with id 0; other ids do not change.

        Args:
            length: number of tokens to pad each document to: one integer for all documents, or (documents,) integers;
                None uses the length of the longest document.
            side: "left" or "right".

        Raises:
            InvalidInputError: a document is longer than the length to pad it to.
        """
        one_of("side", side, ("left", "right"))
        on_the_left = int(side == "left")
        padded = self._cut(LENGTHEN, length, on_the_left)
        if padded is not None:
            return padded
        length = self.max_seqlen if length is None else length
        lengths = per_document("length", length, self.num_documents, minimum=0)
        missing = lengths - self.lengths
        if (missing < 0).any():
            d = int((missing < 0).argmax())
            raise InvalidInputError(f"length: got {lengths[d]}, want >= {self.lengths[d]}, the length of document {d}")
        return self._cut(LENGTHEN, lengths, on_the_left) or self._pad(missing, side)

    def _pad(self, missing: IntArray, side: Side) -> PositionTable:
        columns = CutColumns(self.table, self.num_tokens)
        for d, (first, length, pad) in enumerate(zip(self.documents[FIRST_TOKEN], self.lengths, missing, strict=True)):
            columns.put_run(d, int(pad) if side == "left" else 0)
            columns.put_range(d, int(first), int(first + length))
            columns.put_run(d, int(pad) if side == "right" else 0)
        return self._assembled(columns, self.documents[NEXT_POSITION:])

    def padded(
        self, length: int | None = None, side: Side = "right", dtype: npt.DTypeLike | None = None
    ) -> tuple[Array, IntArray]:
        """Expand the ids of a padded batch.

        Args:
            length: number of tokens to pad every document to; None uses the length of the longest document.
            side: "left" or "right".
            dtype: see ``dense``.

        Returns:
            (axes, batch, length) ids and (batch, length) int64 attention_mask, 0 on padding; new arrays.
        """
        length = None if length is None else integer("length", length, minimum=0)
        table, batch = self.pad(length, side), self.num_documents
        shape = batch, table.num_tokens // max(batch, 1) if length is None else length
        mask = np.empty(shape, np.int64)
        core = native.core
        if core is None or not core.mask(table.table, mask.reshape(-1)):
            mask[:] = table.per_token(~table.is_padding).reshape(shape)
        return table.dense(dtype=dtype).reshape(self.axes, *shape), mask

    def explain(self, token: int, segments: SegmentTable | None = None) -> str:
        """Explain in one sentence where a token lies and how its position is computed.

        The table alone only distinguishes text and grids: audio counts as text, and a clip, a thumbnail or a split grid
        consists of several segments. With ``segments``, the sentence also names kinds, markers and frames, and numbers
        segments as in the documents.

        >>> from mmpos import Grid, SegmentTable, Text, place
        >>> place(SegmentTable.from_documents([[Text(3), Grid(2, 3)]])).explain(4)
        'token 4 (documents[0], token 4) is row 0, column 1 of a grid of width 3 (segment 1): \
position (6, 8) = (6, 5) + 0·(4, 0) + 1·(0, 3)'

        Args:
            token: index of the token in the table.
            segments: segments of the documents that this table places, which must be whole; or None.

        Raises:
            InvalidInputError: there is no such token, or the segments belong to other documents.
        """
        at = self._locate(integer("token", token, minimum=0, maximum=self.num_tokens - 1), segments)
        d = int(np.searchsorted(self.documents[FIRST_TOKEN], token, side="right")) - 1
        denominator = int(self.denominator[at.segment])

        def vector(values: IntArray) -> str:
            return "(" + ", ".join(str(Fraction(value, denominator)) for value in values.tolist()) + ")"

        origin = self.origin[:, at.segment]
        moves = [
            (number, steps[:, at.segment])
            for number, steps in ((at.frame, self.step_frame), (at.row, self.step_row), (at.col, self.step_col))
        ]
        position = origin + sum(number * step for number, step in moves)
        sentence = (
            f"token {token} (documents[{d}], token {token - int(self.documents[FIRST_TOKEN, d])}) is {at.words}: "
            f"position {vector(position)}"
        )
        if not at.is_patch:
            return sentence
        terms = [vector(origin)] + [f"{number}·{vector(step)}" for number, step in moves if step.any()]
        return f"{sentence} = {' + '.join(terms)}"

    def describe(self, token: int, segments: SegmentTable | None = None) -> str:
        """Describe where a token lies, as ``explain`` does: "row 0, column 1 of a grid of width 3 (segment 1)"."""
        return self._locate(integer("token", token, minimum=0, maximum=self.num_tokens - 1), segments).words

    def per_token(self, values: Array) -> IntArray:
        """Repeat the number or flag of every segment for each of its tokens; return a new (tokens,) int64 array."""
        return values.astype(np.int64).repeat(self.segment_lengths)

    def __repr__(self) -> str:
        documents, segments = counted(self.num_documents, "document"), counted(self.num_segments, "segment")
        tokens, axes = counted(self.num_tokens, "token"), counted(self.axes, "axis")
        return f"PositionTable({documents}, {segments}, {tokens}, {axes}, scheme={self.scheme!r})"

    def _repr_html_(self) -> str:
        """Show the first segments with their first and last ids in a notebook."""
        shown = min(self.num_segments, _SHOWN_SEGMENTS)
        first = self.offset[:shown]
        last = first + self.segment_lengths[:shown] - 1
        corners = np.stack([first, last], axis=1).ravel()
        numerators, denominators = self.take(corners, corners + 1).rationals()
        ids = [
            ", ".join(str(Fraction(n, int(d))) for n in row)
            for row, d in zip(numerators.T.tolist(), denominators, strict=True)
        ]
        rows = []
        for s in range(shown):
            height, width = int(self.height[s]), int(self.width[s])
            kind = "padding" if self.is_padding[s] else f"grid, {height}×{width}" if self.is_grid[s] else "text"
            document = int(np.searchsorted(self.documents[FIRST_TOKEN], first[s], side="right")) - 1
            rows.append((f"{first[s]} to {last[s]}", document, kind, ids[2 * s], ids[2 * s + 1]))
        hidden = self.num_segments - shown
        more = html.paragraphs([f"{hidden} more segments"]) if hidden else ""
        names = ", ".join(axis_names(self.axes))
        head = ("tokens", "document", "segment", f"first id ({names})", "last id")
        return html.paragraphs([repr(self)]) + html.table(head, rows) + more

    def _cut(self, rule: int, first: object, second: object = None, third: object = None) -> PositionTable | None:
        """Cut a table from this one by a rule in C; return None if Python must do it or raise the error."""
        core = native.core
        cut = core and core.cut(self.table, self.documents, self.num_tokens, rule, first, second, third)
        if cut is None:
            return None
        return of_bytes(cut, len(self.table), self.fractional, self.scheme)

    def _assembled(self, columns: CutColumns, header: IntArray) -> PositionTable:
        return PositionTable(*columns.assemble(header), self.fractional, self.scheme)

    def _next_or_delta(self, name: str, row: int, documents: IntArray | None = None) -> IntArray:
        """Return a row of ``documents``, for the given documents or for all; each of them must have a next position."""
        header = self.documents if documents is None else self.documents[:, documents]
        worst = int(header[NEXT_POSITION].argmin()) if header.size else 0
        if header.size and header[NEXT_POSITION, worst] == NO_POSITION:  # NO_POSITION is the least int64
            d = worst if documents is None else documents[worst]
            got = f"document {d} of {self.scheme}, whose end is not one whole id"
            raise UnsupportedError(f"{name}: got {got}, want a whole id; place it together with the tokens to come")
        return header[row]

    def _check_segments(self, segments: SegmentTable) -> None:
        """Raise an error if the segments cannot belong to this table."""
        instance("segments", segments, SegmentTable, "SegmentTable.from_documents")
        if segments.num_tokens != self.num_tokens:
            raise InvalidInputError(f"segments: got {counted(segments.num_tokens, 'token')}, want {self.num_tokens}")

    def _locate(self, token: int, segments: SegmentTable | None) -> _Location:
        s = int(np.searchsorted(self.offset, token, side="right")) - 1
        index = int(self.skip[s]) + token - int(self.offset[s])
        row, col = divmod(index, int(self.width[s]))
        frame, row = divmod(row, int(self.height[s]))
        is_patch = bool(self.is_grid[s])
        if segments is not None:
            self._check_segments(segments)
            words, is_patch = self._words(segments, token, s, index)
        elif is_patch:
            words = f"row {row}, column {col} of a grid of width {self.width[s]} (segment {s})"
            words = f"frame {frame}, {words}" if self.step_frame[:, s].any() else words
        else:
            words = f"{'padding' if self.is_padding[s] else f'token {index} of a run of text'} (segment {s})"
        return _Location(s, frame, row, col, is_patch, words)

    def _words(self, segments: SegmentTable, token: int, column: int, index: int) -> tuple[str, bool]:
        """Describe a token within its own segment, and return whether it is a patch or ends a row of patches.

        Args:
            segments: segments of the documents.
            token: index of the token in the documents.
            column: index of the token's segment in this table.
            index: raster index of the token in that segment, which numbers the patches and the audio of a clip.
        """
        lengths = segments.lengths
        s = int(lengths.cumsum().searchsorted(token, side="right"))
        kind, where = segments.kind[s], f"(segment {s})"
        first = token - int(lengths[:s].sum())
        if kind in (TEXT, AUDIO, PAD):
            run = f"token {first} of a run of {'audio' if kind == AUDIO else 'text'}"
            return f"{'padding' if kind == PAD else run} {where}", False
        noun, markers = NOUNS[kind], _MARKERS[kind]
        frames, height, width = segments.extents[:, s].tolist()
        separated = segments.row_separator is not None and bool(segments.row_separator[s])
        patches = frames * height * (width + separated)
        audio = int(segments.extra_tokens[s]) if kind == CLIP and segments.extra_tokens is not None else 0
        after = first - markers - patches - audio
        if first < markers:
            return f"marker {first} before a {noun} {where}", False
        if after >= markers > 0:
            return f"token {after - markers} past the marker after a {noun} {where}", False
        if after >= 0:
            return f"marker {after} after a {noun} {where}", False
        if kind == CLIP and not self.is_grid[column]:
            return f"token {index} of the audio of a clip {where}", False
        patch = index if kind == CLIP else first - markers
        if self.width[column] != width + separated:  # a scheme may order patches in blocks
            return f"token {patch} of a {noun} of width {width} {where}", True
        row, col = divmod(patch, width + separated)
        frame, row = divmod(row, height)
        words = f"row {row}, column {col}" if col < width else f"the separator after row {row}"
        moves = frames > 1 or self.step_frame[:, column].any()
        return f"{f'frame {frame}, ' if moves else ''}{words} of a {noun} of width {width} {where}", True

    def _check_divisible(self, multiple: int, asked: str, whole: bool) -> None:
        """Raise an error if the length of a document, or of the whole sequence, is not a multiple of ``multiple``."""
        want = f"want a multiple of {multiple} {asked}"
        odd = self.lengths % multiple
        missing = -self.num_tokens % multiple
        if whole and missing:
            last = int(self.lengths[-1]) + missing
            raise InvalidInputError(
                f"positions: got {self.num_tokens} tokens in all, {want}; "
                f"pad the last document first: positions.pad([*positions.lengths[:-1], {last}]).shard(…)"
            )
        if not whole and odd.any():
            d = int((odd > 0).argmax())
            fit = -(-self.max_seqlen // multiple) * multiple
            raise InvalidInputError(
                f"documents[{d}]: got {self.lengths[d]} tokens, {want}; pad first: positions.pad({fit}).shard(…)"
            )

    def _checked_axes(self, axes: Any) -> tuple[int, ...]:
        listed: list[Any] = list(axes) if isinstance(axes, Sequence) or getattr(axes, "ndim", 0) == 1 else [None]
        if not all(isinstance(a, int | np.integer) and not isinstance(a, bool) and 0 <= a < self.axes for a in listed):
            raise InvalidInputError(f"axes: got {axes}, want integers from 0 to {self.axes - 1}")
        return tuple(map(int, listed))

    def _checked_out(self, out: Array | None, dtype: npt.DTypeLike | None, rows: int) -> Array:
        """Return out if it can hold this many rows of ids, or a new array if out is None."""
        shape = (rows, self.num_tokens)
        if out is None:
            default = expand.dense_dtype(self.fractional)
            return np.empty(shape, default if dtype is None else self._checked_dtype("dtype", dtype))
        if not isinstance(out, np.ndarray) or out.shape != shape:
            got = f"shape {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
            raise InvalidInputError(f"out: got {got}, want an array of shape {shape}")
        if not out.flags.writeable:
            raise InvalidInputError("out: got a read-only array, want a writeable one")
        kind = self._checked_dtype("out", out.dtype)
        if dtype is not None and self._checked_dtype("dtype", dtype) != kind:
            raise InvalidInputError(
                f"dtype: got {np.dtype(dtype)} with out of {kind}, want equal dtypes, or only one of the two"
            )
        return out

    def _checked_dtype(self, name: str, dtype: npt.DTypeLike) -> np.dtype[Any]:
        wanted = (np.float64,) if self.fractional else (np.int32, np.int64, np.float64)
        try:
            kind = np.dtype(dtype)
        except (TypeError, ValueError, SyntaxError):
            kind = None
        if kind is None or kind not in wanted:
            got = repr(dtype) if kind is None else f"dtype {kind}"
            names = ", ".join(t.__name__ for t in wanted)
            raise InvalidInputError(f"{name}: got {got}, want {names} for ids of scheme {self.scheme!r}")
        return kind


class _Location(NamedTuple):
    """A token's segment, its frame, row and column in that segment, whether these are a patch's, and a description."""

    segment: int
    frame: int
    row: int
    col: int
    is_patch: bool
    words: str


_SHOWN_SEGMENTS = 20
"""Maximum number of segments that a notebook shows."""

_MARKERS = {GRID: 0, CLIP: CLIP_MARKERS, THUMBNAIL: CROP_MARKERS // 2, TILE: CROP_MARKERS // 2}
"""Number of markers in a segment before its patches; the same number follows them."""


_READ = ("table", "documents", "num_tokens")  # attributes of a table that the extension reads
_SCHEME, _FRACTIONAL = attrgetter("scheme"), attrgetter("fractional")


def _sort_of(tables: Sequence[PositionTable]) -> tuple[bool, str]:
    """Return whether the ids of concatenated tables may be fractions, and the names of their schemes."""
    schemes = dict.fromkeys(map(_SCHEME, tables))
    if len(schemes) > 1:  # each name once, however often tables have been joined
        schemes = dict.fromkeys(name for scheme in schemes for name in scheme.split(" + "))
    return True in map(_FRACTIONAL, tables), " + ".join(schemes)


def _joined_by_c(tables: Sequence[PositionTable], removed: object = (), replaced: object = ()) -> PositionTable | None:
    """Concatenate tables in C, with changes to the first; return None if Python must do it or raise the error."""
    joined = native.core and native.core.concatenate(tables, PositionTable, _READ, removed, replaced)
    return None if joined is None else of_bytes(joined, len(tables[0].table), *_sort_of(tables))


def _check_joinable(name: str, table: object, first: PositionTable) -> None:
    if not isinstance(table, PositionTable) or table.axes != first.axes:
        got = f"{table.axes} axes" if isinstance(table, PositionTable) else type(table).__name__
        raise InvalidInputError(f"{name}: got {got}, want a PositionTable with as many axes as the first")


def of_bytes(arrays: tuple[bytearray, bytearray, int], rows: int, fractional: bool, scheme: str) -> PositionTable:
    """Create a table with this many rows from what the extension wrote, without copying."""
    table, documents, num_tokens = arrays
    made = object.__new__(PositionTable)
    fields = vars(made)
    # The memory is writable, since torch.compile rejects arrays that cannot be made writable.
    columns = np.ndarray((rows, len(table) // (8 * rows)), native.INT64, table)
    header = np.ndarray((4, len(documents) // 32), native.INT64, documents)
    columns.flags.writeable = header.flags.writeable = False
    fields["table"], fields["documents"], fields["num_tokens"] = columns, header, num_tokens
    fields["fractional"], fields["scheme"] = fractional, scheme
    return made


def _gaps(firsts: IntArray, stop: int) -> IntArray:
    gaps = np.empty(firsts.size, np.int64)
    gaps[:-1], gaps[-1:] = firsts[1:], stop
    gaps -= firsts
    return read_only(gaps)


def _check_last_ids(last: IntArray, documents: IntArray) -> None:
    if last.max() > INT32_MAX:
        i = int(last.argmax())
        raise LimitExceededError(f"documents[{documents[i]}]: got id {last[i]}, want at most 2**31 - 1")
