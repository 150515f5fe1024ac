"""What follows from the placed table: dense ids, token ranges, windows, decoding, shards and padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.positions import expand, ranges, windows
from mmpos.positions.checks import check_table
from mmpos.positions.columns import DELTA, FIRST_SEGMENT, NEXT_POSITION, NO_POSITION, OFFSET, WIDTH, Columns
from mmpos.positions.explain import explain
from mmpos.positions.joining import join
from mmpos.positions.sharding import Layout, shard_ranges
from mmpos.support.checks import (
    IntArray,
    boolean,
    counted,
    first_bad,
    host_array,
    int_array,
    integer,
    one_of,
    per_document,
)
from mmpos.support.ragged import insert_padding

__all__ = ["PositionTable"]

Side = Literal["left", "right"]


class PositionTable(Columns):
    """Positions of a packed batch, and all that follows from them; the fields are those of Columns."""

    @classmethod
    def from_arrays(
        cls, table: npt.ArrayLike, documents: npt.ArrayLike, num_tokens: int, *, fractional: bool, scheme: str
    ) -> PositionTable:
        """The table from arrays as its fields describe them, checked; the constructor itself trusts them.

        Args:
            table: (5 + 4·axes, segments) integers; kept, not copied, if they are int64.
            documents: (4, documents) integers, likewise.
            num_tokens: tokens in all.
            fractional: whether ids may be fractions.
            scheme: name of the scheme, for people.

        Raises:
            InvalidInputError: naming the row and the segment or document that does not fit.
            LimitExceededError: ids or next positions outside int32, numerators or deltas beyond 2**62.
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
        """The documents of several tables, one after the other, as one packed batch.

        Args:
            tables: at least one, all with the same axes; ids may be fractions if any table's may.

        Raises:
            InvalidInputError: no tables, something else, or tables with different axes.
        """
        return cls(*join(tables))

    def dense(
        self,
        out: npt.NDArray[Any] | None = None,
        dtype: npt.DTypeLike | None = None,
        axes: tuple[int, ...] | None = None,
    ) -> npt.NDArray[Any]:
        """Ids of all tokens.

        Args:
            out: (axes, tokens) array to write into, with any strides.
            dtype: int32 (default), int64 or float64; fractional schemes give float64 only.
            axes: which axes, in which order, repeats allowed: (0, 0, 1) gives three rows. Default: all.

        Returns:
            (axes, tokens) ids: ``out`` if given, else a new array.

        Raises:
            InvalidInputError: out, dtype or axes do not fit.
        """
        return expand.dense(self, out, dtype, axes)

    def rationals(self) -> tuple[IntArray, IntArray]:
        """Exact ids of all tokens.

        Returns:
            (axes, tokens) int64 numerators and (tokens,) int64 denominators, new arrays.
        """
        return expand.rationals(self)

    def take(self, starts: npt.ArrayLike, stops: npt.ArrayLike) -> PositionTable:
        """The tokens of several ranges, in the order given; documents stay, and may become empty.

        Args:
            starts: (ranges,) first token of each range.
            stops: (ranges,) one past the last token; equal to the start for an empty range.

        Raises:
            InvalidInputError: a range leaves the table, runs backwards, or returns to an earlier document.
        """
        starts = int_array("starts", starts, (None,))
        stops = int_array("stops", stops, (starts.size,))
        first_bad("starts", starts, minimum=0, maximum=self.num_tokens)
        first_bad("stops", stops, maximum=self.num_tokens)
        if (stops < starts).any():
            i = int((stops < starts).argmax())
            raise InvalidInputError(f"stops[{i}]: got {stops[i]}, want >= starts[{i}] = {starts[i]}")
        columns, segment, owner = ranges.cut(self.table, self.num_tokens, starts, stops)
        document = np.searchsorted(self.documents[FIRST_SEGMENT], segment, side="right") - 1
        back = np.diff(document) < 0
        if back.any():
            i = int(owner[int(back.argmax()) + 1])
            raise InvalidInputError(f"starts[{i}]: got {starts[i]}, in a document before that of the range before it")
        return self._view(columns, document, self.documents[NEXT_POSITION:])

    def keep(self, mask: npt.ArrayLike) -> PositionTable:
        """The tokens of a mask, for good: pruned of the others, with the ids that they had; documents stay.

        Next positions stay, so what is generated goes on as if nothing were missing. Each delta grows by the tokens
        that its document has lost: next position = start + delta + tokens holds for what is left. (``take`` leaves
        deltas, since its pieces are those of a sequence that stays whole.)

        Args:
            mask: (tokens,) bool, True for a token that is kept; it selects from input_ids and labels likewise.

        Raises:
            InvalidInputError: anything else than a bool for every token.
        """
        mask = host_array("mask", mask)
        if (mask.dtype != np.bool_ and mask.size) or mask.shape != (self.num_tokens,):
            got = f"{mask.dtype} {mask.shape}"
            raise InvalidInputError(f"mask: got {got}, want bool ({self.num_tokens},), one per token")
        kept = self.take(*ranges.runs(mask.astype(np.bool_, copy=False)))
        documents = kept.documents.copy()
        lost = self.real_lengths - kept.real_lengths
        documents[DELTA] += np.where(documents[DELTA] == NO_POSITION, 0, lost)
        return PositionTable(kept.table, documents, kept.num_tokens, self.fractional, self.scheme)

    def slice(self, start: int, stop: int) -> PositionTable:
        """Tokens start to stop; slices concatenated equal the whole, also when they cut an image."""
        start = integer("start", start, minimum=0, maximum=self.num_tokens)
        return self.take([start], [integer("stop", stop, minimum=start, maximum=self.num_tokens)])

    def window(self, documents: npt.ArrayLike, starts: npt.ArrayLike, lengths: npt.ArrayLike) -> PositionTable:
        """One window of tokens per entry, as a document of its own: chunked prefill, decoding, drafts.

        Args:
            documents: (windows,) the document of each window, in any order.
            starts: (windows,) first token, counted from the document's first token.
            lengths: (windows,) tokens; those past the document's end are text at its next position.

        Raises:
            UnsupportedError: a window passes the end and the scheme has no next position.
        """
        return self._view(*windows.window(self, documents, starts, lengths))

    def decode(self, steps: npt.ArrayLike = 1) -> PositionTable:
        """The next tokens of every document, grouped per document: all text, ids equal on all axes.

        Args:
            steps: tokens per document, one integer for all or (documents,).
        """
        return self._view(*windows.decode(self, steps))

    def shard(self, rank: int, world_size: int, layout: Layout = "zigzag") -> PositionTable:
        """The tokens of one context-parallel rank; documents stay, and may become empty.

        Args:
            rank: 0 to world_size − 1.
            world_size: context-parallel ranks C.
            layout: "zigzag" gives rank r the blocks r and 2C−1−r of 2C of every document, which balances causal
                attention; "contiguous" gives it block r of C. "zigzag-sequence" and "contiguous-sequence" cut all
                tokens as one sequence instead, wherever documents end.

        Raises:
            InvalidInputError: a document, or all tokens for "…-sequence", are no multiple of 2C (zigzag) or C.
        """
        return self.take(*shard_ranges(self, rank, world_size, layout))

    def shard_indices(self, rank: int, world_size: int, layout: Layout = "zigzag") -> IntArray:
        """(tokens,) int64 columns of ``dense()`` that ``shard`` holds, to index input_ids and labels."""
        starts, stops = shard_ranges(self, rank, world_size, layout)
        lengths = stops - starts
        before = np.cumsum(lengths) - lengths
        return np.repeat(starts - before, lengths) + np.arange(lengths.sum())

    def pad(self, length: npt.ArrayLike | None = None, side: Side = "right") -> PositionTable:
        """Every document padded with id 0, which moves no other id.

        Args:
            length: tokens of every document, or (documents,); None is the longest document.
            side: "left" or "right".

        Raises:
            InvalidInputError: a document is longer than its length.
        """
        one_of("side", side, ("left", "right"))
        length = self.max_seqlen if length is None else length
        lengths = per_document("length", length, self.num_documents, minimum=0)
        missing = lengths - self.lengths
        if (missing < 0).any():
            d = int((missing < 0).argmax())
            raise InvalidInputError(f"length: got {lengths[d]}, want >= {self.lengths[d]}, the length of document {d}")
        none = np.zeros_like(missing)
        columns = self.table.copy()
        columns[OFFSET] = self.segment_lengths
        left, right = (missing, none) if side == "left" else (none, missing)
        offsets = np.append(self.documents[FIRST_SEGMENT], self.num_segments)
        pad = ranges.padding(self.axes)
        columns, offsets = insert_padding(columns, offsets, left, right, pad, length_rows=(OFFSET, WIDTH))
        owner = np.repeat(np.arange(self.num_documents), np.diff(offsets))
        return self._view(columns, owner, self.documents[NEXT_POSITION:])

    def padded(
        self, length: int | None = None, side: Side = "right", dtype: npt.DTypeLike | None = None
    ) -> tuple[npt.NDArray[Any], IntArray]:
        """Dense ids of a padded batch.

        Args:
            length: tokens of every document; None is the longest document.
            side: "left" or "right".
            dtype: as for ``dense``.

        Returns:
            (axes, batch, length) ids and (batch, length) int64 attention_mask, 0 on padding; new arrays.
        """
        length = self.max_seqlen if length is None else integer("length", length, minimum=0)
        table, shape = self.pad(length, side), (self.num_documents, length)
        ids = table.dense(dtype=dtype).reshape(self.axes, *shape)
        return ids, expand.per_token(table, ~table.is_padding).reshape(shape)

    def explain(self, token: int) -> str:
        """One sentence on where a token lies and why its position is what it is."""
        return explain(self, integer("token", token, minimum=0, maximum=self.num_tokens - 1))

    def __repr__(self) -> str:
        documents, segments = counted(self.num_documents, "document"), counted(self.num_segments, "segment")
        tokens, axes = counted(self.num_tokens, "token"), counted(self.axes, "axis")
        return f"PositionTable({documents}, {segments}, {tokens}, {axes}, scheme={self.scheme!r})"

    def _view(self, columns: IntArray, document: IntArray, header: IntArray) -> PositionTable:
        return PositionTable(*ranges.assemble(columns, document, header), self.fractional, self.scheme)
