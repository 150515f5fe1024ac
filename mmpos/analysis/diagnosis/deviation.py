"""The received ids and the ids of a scheme, and the values from which mistakes are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.errors import MmposError
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import FIRST_TOKEN
from mmpos.schemes import Scheme
from mmpos.segments.table import SegmentTable
from mmpos.support.cached import cached_property
from mmpos.support.checks import IntArray

Ids = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Deviation:
    """Received ids and the ids of a placed table, both without padding.

    Args:
        received: (axes, tokens) ids in their own dtype; a single row is used for all axes.
        positions: the table.
        start: (documents,) first id of every document.
        tolerance: how far an id may be from the exact one.
        segments: the segments of the table; None if only the table is known.
        scheme: the scheme of the table; None if only the table is known.
        mask: (batch, length) true for the tokens of a padded batch; None if the ids were packed.
    """

    received: npt.NDArray[Any]
    positions: PositionTable
    start: IntArray
    tolerance: float = 0.0
    segments: SegmentTable | None = None
    scheme: Scheme | None = None
    mask: Flags | None = None

    @cached_property
    def got(self) -> Ids:
        """(axes, tokens) the received ids, as floats."""
        return np.broadcast_to(self.received.astype(np.float64), self.want.shape)

    @cached_property
    def want(self) -> Ids:
        """(axes, tokens) the ids of the scheme."""
        return self.positions.dense(dtype=np.float64)

    @cached_property
    def wrong(self) -> Flags:
        """(tokens,) whether any id of a token differs."""
        return ~self.near(self.want, self.got)

    @cached_property
    def first(self) -> int:
        """The first token that differs."""
        return int(self.wrong.argmax())

    @cached_property
    def document(self) -> IntArray:
        """(tokens,) the document of every token."""
        return np.arange(self.positions.num_documents).repeat(self.positions.lengths)

    @cached_property
    def segment(self) -> IntArray:
        """(tokens,) the segment of every token; requires ``segments``."""
        assert self.segments is not None
        return np.arange(self.segments.lengths.size).repeat(self.segments.lengths)

    @cached_property
    def begin(self) -> IntArray:
        """(tokens,) the first token of every token's document."""
        return self.positions.documents[FIRST_TOKEN][self.document]

    @cached_property
    def index(self) -> IntArray:
        """(tokens,) the index of every token in its document."""
        return np.arange(self.positions.num_tokens) - self.begin

    @cached_property
    def column(self) -> IntArray | None:
        """(tokens,) the index of every token in its padded row; None if the ids were packed."""
        return None if self.mask is None else self.mask.nonzero()[1]

    @cached_property
    def counted(self) -> IntArray:
        """(tokens,) the ids that the tokens would have if all were text."""
        return self.start[self.document] + self.index

    @cached_property
    def late(self) -> Flags:
        """(tokens,) whether a token, or an earlier token of its document, differs."""
        since = np.full(self.positions.num_documents, self.positions.num_tokens)
        documents, where = np.unique(self.document[self.wrong], return_index=True)
        since[documents] = self.wrong.nonzero()[0][where]
        return np.arange(self.positions.num_tokens) >= since[self.document]

    @property
    def deltas(self) -> IntArray | None:
        """(documents,) decode deltas; None if a document has none."""
        return self.positions.deltas if self.positions.resumable.all() else None

    @property
    def runs(self) -> int:
        """The number of runs of tokens that differ."""
        return int((self.wrong & ~np.concatenate([[False], self.wrong[:-1]])).sum())

    @cached_property
    def offset(self) -> float | None:
        """By how much the ids of the first token that differs are too large, if by the same amount on all axes."""
        offsets = self.got[:, self.first] - self.want[:, self.first]
        return float(offsets[0]) if np.isfinite(offsets[0]) and (offsets == offsets[0]).all() else None

    @property
    def offset_in_words(self) -> str:
        """The offset in words, such as "3 too large"."""
        assert self.offset is not None
        return f"{abs(self.offset):g} too {'large' if self.offset > 0 else 'small'}"

    def rounded(self, ids: npt.NDArray[Any]) -> Ids:
        """Round ids to the dtype of the received ids, if that is a float dtype."""
        if self.received.dtype.kind == "f":
            with np.errstate(over="ignore"):
                ids = ids.astype(self.received.dtype)
        return ids.astype(np.float64)

    def near(self, ids: Ids, got: Ids) -> Flags:
        """Return (tokens,) flags: whether the ids of each token agree with ``got`` on every axis."""
        with np.errstate(invalid="ignore"):  # inf - inf is invalid
            return ((ids == got) | (np.abs(ids - got) <= self.tolerance)).all(axis=0)

    def placed(
        self,
        scheme: Scheme | None = None,
        segments: SegmentTable | None = None,
        start: npt.ArrayLike | None = None,
        any_length: bool = False,
    ) -> Ids | None:
        """Place the documents with another scheme, other segments or another start.

        Returns:
            (axes, tokens) ids; None if the documents cannot be placed that way or, without ``any_length``, if the
            number of tokens changes.
        """
        scheme, segments = scheme or self.scheme, segments or self.segments
        if scheme is None or segments is None or scheme.axes != self.positions.axes:
            return None
        start = self.start if start is None else np.broadcast_to(np.asarray(start), self.start.shape)
        if (start == start[:1]).all() and start.size:
            start = start[0]  # a scheme that cannot be resumed accepts one start only
        try:
            ids = place(segments, scheme, start, strict=False).dense(dtype=np.float64)
        except MmposError:
            return None
        return ids if any_length or ids.shape == self.want.shape else None
