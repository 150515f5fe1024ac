"""Queries about positions as data (documents, scheme, views of the table), to send or to run in process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.positions.place import place
from mmpos.positions.table import Layout, PositionTable, Side
from mmpos.positions.table_rows import DELTA, NEXT_POSITION, NO_POSITION
from mmpos.schemes import Scheme
from mmpos.segments.placeholders import Placeholders
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import IntArray, int_array, naming


class _View:
    """Method of a position table with its arguments; the class has the name of the method."""

    def view(self, positions: PositionTable) -> PositionTable:
        """Call the method."""
        viewed: PositionTable = getattr(positions, type(self).__name__.lower())(**vars(self))
        return viewed


@dataclass(frozen=True, eq=False)
class Take(_View):
    """Token ranges to take; the arguments of PositionTable.take."""

    starts: npt.ArrayLike
    stops: npt.ArrayLike


@dataclass(frozen=True, eq=False)
class Window(_View):
    """Windows of documents, each of which becomes a document; the arguments of PositionTable.window."""

    documents: npt.ArrayLike
    starts: npt.ArrayLike
    lengths: npt.ArrayLike


@dataclass(frozen=True, eq=False)
class Decode(_View):
    """Number of tokens to decode; the argument of PositionTable.decode."""

    steps: npt.ArrayLike = 1


@dataclass(frozen=True, eq=False)
class Shard(_View):
    """Shard of a rank; the arguments of PositionTable.shard."""

    rank: int
    world_size: int
    layout: Layout = "zigzag"


@dataclass(frozen=True, eq=False)
class Pad(_View):
    """Padding of documents; the arguments of PositionTable.pad."""

    length: npt.ArrayLike | None = None
    side: Side = "right"


View = Take | Window | Decode | Shard | Pad
"""Method of a position table with its arguments; field ``views`` of the protocol holds a list of these."""


@dataclass(frozen=True, eq=False)
class Spans:
    """Documents as placeholder spans; the arguments of SegmentTable.from_spans."""

    lengths: npt.ArrayLike
    offsets: npt.ArrayLike
    grid_thw: npt.ArrayLike
    documents: npt.ArrayLike | None = None
    _: KW_ONLY
    seconds_per_frame: Sequence[Fraction | float | None] | None = None
    row_separator: bool = False
    kind: npt.ArrayLike | None = None
    extra_tokens: npt.ArrayLike | None = None


@dataclass(frozen=True, eq=False)
class InputIds:
    """Documents as token ids with placeholders; the arguments of SegmentTable.from_input_ids.

    If the client names a profile, the server takes an unset spatial_merge_size from the profile and, if no image token
    is given, the unset placeholders as well.
    """

    input_ids: npt.ArrayLike
    placeholders: Placeholders = field(default_factory=Placeholders)
    image_grid_thw: npt.ArrayLike | None = None
    video_grid_thw: npt.ArrayLike | None = None
    _: KW_ONLY
    spatial_merge_size: int | None = None
    cu_seqlens: npt.ArrayLike | None = None
    attention_mask: npt.ArrayLike | None = None
    seconds_per_frame: Sequence[Fraction | float | None] | None = None
    frames_apart: bool = False
    audio_lengths: npt.ArrayLike | None = None


@dataclass(frozen=True, eq=False)
class Dense:
    """Ids instead of the table; the arguments of PositionTable.dense."""

    dtype: npt.DTypeLike | None = None
    axes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        try:
            np.dtype(self.dtype)
        except TypeError:
            raise InvalidInputError(f"dtype: got {self.dtype!r}, want int32, int64, float64 or None") from None
        if self.axes is not None:
            object.__setattr__(self, "axes", tuple(int_array("axes", self.axes, (None,)).tolist()))
            if not self.axes:  # a message without axes asks for all axes
                raise InvalidInputError("axes: got no axes, want at least one axis, or None for all")


@dataclass(frozen=True, eq=False)
class PositionsResult:
    """Result of a PositionsQuery.

    Args:
        table: position table, unless the query asks for ids.
        dense: (axes, tokens) ids, if the query asks for them.
        next_positions: (documents,) int64 id of the token after each document; None if the scheme defines none.
        deltas: (documents,) int64 next position − start − tokens without padding; None if the scheme defines none.
        cu_seqlens: (documents + 1,) int32 first token of each document, then the total.
    """

    table: PositionTable | None
    dense: npt.NDArray[Any] | None
    next_positions: IntArray | None
    deltas: IntArray | None
    cu_seqlens: npt.NDArray[np.int32]

    @classmethod
    def of(cls, positions: PositionTable, dense: Dense | None = None) -> PositionsResult:
        """Build the result for a position table.

        Raises:
            LimitExceededError: the table has 2**31 tokens or more.
        """
        next_positions, deltas = positions.documents[NEXT_POSITION], positions.documents[DELTA]
        resumable = not (next_positions == NO_POSITION).any()
        return cls(
            table=positions if dense is None else None,
            dense=None if dense is None else positions.dense(dtype=dense.dtype, axes=dense.axes),
            next_positions=next_positions if resumable else None,
            deltas=deltas if resumable else None,
            cu_seqlens=positions.cu_seqlens,
        )


@dataclass(frozen=True, eq=False)
class PositionsQuery:
    """Query about positions: documents, scheme, views of the table, and whether to return the table or ids.

    >>> PositionsQuery(Spans([11], [3], [[1, 2, 3]]), views=[Decode()]).run().table.dense().tolist()
    [[16], [16]]

    Args:
        source: documents.
        scheme: see ``mmpos.place``; None means the scheme of the server's profile, or "rope-tie" without a profile.
        start: see ``mmpos.place``.
        strict: see ``mmpos.place``.
        views: methods to apply to the placed table, in this order.
        dense: set it to receive ids instead of the table.
    """

    source: SegmentTable | Spans | InputIds
    scheme: str | Scheme | None = None
    start: npt.ArrayLike = 0
    strict: bool | None = None
    views: Sequence[View] = ()
    dense: Dense | None = None

    def __post_init__(self) -> None:
        if type(self.source) not in (SegmentTable, Spans, InputIds):
            raise InvalidInputError(f"source: got {type(self.source).__name__}, want a SegmentTable, Spans or InputIds")
        kinds = [type(view) for view in self.views]
        for i, kind in enumerate(kinds):
            if kind not in get_args(View):
                raise InvalidInputError(f"views[{i}]: got {kind.__name__}, want Take, Window, Decode, Shard or Pad")

    def segments(self) -> SegmentTable:
        """Build the segments of the documents."""
        source = self.source
        if isinstance(source, SegmentTable):
            return source
        if isinstance(source, Spans):
            return SegmentTable.from_spans(**vars(source))
        merge = 1 if source.spatial_merge_size is None else source.spatial_merge_size
        return SegmentTable.from_input_ids(**{**vars(source), "spatial_merge_size": merge})

    def place(self, segments: SegmentTable) -> PositionTable:
        """Place the segments, without applying views."""
        return place(segments, "rope-tie" if self.scheme is None else self.scheme, self.start, self.strict)

    def run(self) -> PositionsResult:
        """Run the query in this process.

        Raises:
            MmposError: any error raised by the calls that the query describes.
        """
        positions = self.place(self.segments())
        for i, view in enumerate(self.views):
            with naming(f"views[{i}]"):
                positions = view.view(positions)
        return PositionsResult.of(positions, self.dense)
