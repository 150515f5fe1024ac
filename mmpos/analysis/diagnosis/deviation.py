"""Ids that came beside those that a scheme gives, and what mistakes are judged by."""

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
    """Ids of tokens against those of a placed table, padding left out of both.

    Args:
        came: (axes, tokens) ids as they came; one row stands for all axes.
        positions: the table.
        start: (documents,) first id of every document.
        tolerance: how far an id may be from the exact one.
        segments: what was placed; None if only its table is known.
        scheme: how; None likewise.
        mask: (batch, length) which places of a padded batch are tokens; None if the ids were packed.
    """

    came: npt.NDArray[Any]
    positions: PositionTable
    start: IntArray
    tolerance: float = 0.0
    segments: SegmentTable | None = None
    scheme: Scheme | None = None
    mask: Flags | None = None

    @cached_property
    def got(self) -> Ids:
        """(axes, tokens) the ids that came, as floats."""
        return np.broadcast_to(self.came.astype(np.float64), self.want.shape)

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
        """(tokens,) the segment of every token, where segments are known."""
        assert self.segments is not None
        return np.arange(self.segments.lengths.size).repeat(self.segments.lengths)

    @cached_property
    def begin(self) -> IntArray:
        """(tokens,) the first token of every token's document."""
        return self.positions.documents[FIRST_TOKEN][self.document]

    @cached_property
    def index(self) -> IntArray:
        """(tokens,) tokens before every token in its document."""
        return np.arange(self.positions.num_tokens) - self.begin

    @cached_property
    def column(self) -> IntArray | None:
        """(tokens,) place in the padded row; None if the ids were packed."""
        return None if self.mask is None else self.mask.nonzero()[1]

    @cached_property
    def counted(self) -> IntArray:
        """(tokens,) the ids that text alone would have."""
        return self.start[self.document] + self.index

    @cached_property
    def late(self) -> Flags:
        """(tokens,) whether a token or one before it in its document differs."""
        since = np.full(self.positions.num_documents, self.positions.num_tokens)
        documents, where = np.unique(self.document[self.wrong], return_index=True)
        since[documents] = self.wrong.nonzero()[0][where]
        return np.arange(self.positions.num_tokens) >= since[self.document]

    @property
    def deltas(self) -> IntArray | None:
        """(documents,) deltas, where the scheme has them."""
        return self.positions.deltas if self.positions.resumable.all() else None

    @property
    def runs(self) -> int:
        """How many runs of tokens differ, with others between."""
        return int((self.wrong & ~np.concatenate([[False], self.wrong[:-1]])).sum())

    @cached_property
    def offset(self) -> float | None:
        """The amount by which the first token that differs is too large, if the same on all axes."""
        offsets = self.got[:, self.first] - self.want[:, self.first]
        return float(offsets[0]) if np.isfinite(offsets[0]) and (offsets == offsets[0]).all() else None

    @property
    def too_much(self) -> str:
        """This amount in words."""
        assert self.offset is not None
        return f"{abs(self.offset):g} too {'large' if self.offset > 0 else 'small'}"

    def held(self, ids: npt.NDArray[Any]) -> Ids:
        """The ids as the dtype in which they came would hold them."""
        if self.came.dtype.kind == "f":
            with np.errstate(over="ignore"):
                ids = ids.astype(self.came.dtype)
        return ids.astype(np.float64)

    def near(self, ids: Ids, got: Ids) -> Flags:
        """(tokens,) whether ids agree with those that came on every axis."""
        with np.errstate(invalid="ignore"):  # inf - inf
            return ((ids == got) | (np.abs(ids - got) <= self.tolerance)).all(axis=0)

    def placed(
        self,
        scheme: Scheme | None = None,
        segments: SegmentTable | None = None,
        start: npt.ArrayLike | None = None,
        any_length: bool = False,
    ) -> Ids | None:
        """(axes, tokens) ids of these documents placed otherwise; None where that cannot be.

        Of as many tokens as came, but for ``any_length``.
        """
        scheme, segments = scheme or self.scheme, segments or self.segments
        if scheme is None or segments is None or scheme.axes != self.positions.axes:
            return None
        start = self.start if start is None else np.broadcast_to(np.asarray(start), self.start.shape)
        if (start == start[:1]).all() and start.size:
            start = start[0]  # what schemes that cannot be resumed take, too
        try:
            ids = place(segments, scheme, start, strict=False).dense(dtype=np.float64)
        except MmposError:
            return None
        return ids if any_length or ids.shape == self.want.shape else None
