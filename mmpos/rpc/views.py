"""Steps from one position table to another as data: each is a verb of PositionTable with its arguments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy.typing as npt

from mmpos.positions.table import LAYOUTS, Layout, PositionTable, Side
from mmpos.support.checks import INT32_MAX, host_array, int_array, integer, one_of

__all__ = ["Decode", "Pad", "Shard", "Take", "View", "Window"]


@dataclass(frozen=True, eq=False)
class Take:
    """PositionTable.take as data."""

    starts: npt.ArrayLike
    stops: npt.ArrayLike

    def __post_init__(self) -> None:
        _integers(self, "starts", "stops")

    def view(self, positions: PositionTable) -> PositionTable:
        """The tokens of these ranges."""
        return positions.take(self.starts, self.stops)


@dataclass(frozen=True, eq=False)
class Window:
    """PositionTable.window as data."""

    documents: npt.ArrayLike
    starts: npt.ArrayLike
    lengths: npt.ArrayLike

    def __post_init__(self) -> None:
        _integers(self, "documents", "starts", "lengths")

    def view(self, positions: PositionTable) -> PositionTable:
        """These windows, each a document."""
        return positions.window(self.documents, self.starts, self.lengths)


@dataclass(frozen=True, eq=False)
class Decode:
    """PositionTable.decode as data."""

    steps: npt.ArrayLike = 1

    def __post_init__(self) -> None:
        _one_or_each(self, "steps")

    def view(self, positions: PositionTable) -> PositionTable:
        """The next tokens of every document."""
        return positions.decode(self.steps)


@dataclass(frozen=True, eq=False)
class Shard:
    """PositionTable.shard as data."""

    rank: int
    world_size: int
    layout: Layout = "zigzag"

    def __post_init__(self) -> None:
        one_of("layout", self.layout, LAYOUTS)
        object.__setattr__(self, "world_size", integer("world_size", self.world_size, minimum=1, maximum=INT32_MAX))
        object.__setattr__(self, "rank", integer("rank", self.rank, minimum=0, maximum=self.world_size - 1))

    def view(self, positions: PositionTable) -> PositionTable:
        """The tokens of the rank."""
        return positions.shard(self.rank, self.world_size, self.layout)


@dataclass(frozen=True, eq=False)
class Pad:
    """PositionTable.pad as data."""

    length: npt.ArrayLike | None = None
    side: Side = "right"

    def __post_init__(self) -> None:
        one_of("side", self.side, ("left", "right"))
        if self.length is not None:
            _one_or_each(self, "length")

    def view(self, positions: PositionTable) -> PositionTable:
        """The documents, padded."""
        return positions.pad(self.length, self.side)


View = Take | Window | Decode | Shard | Pad


def _integers(view: object, *names: str) -> None:
    for name in names:
        object.__setattr__(view, name, int_array(name, getattr(view, name), (None,)))


def _one_or_each(view: object, name: str) -> None:
    """Make a field one integer, or an array of one for each document."""
    value = getattr(view, name)
    if isinstance(value, int) or host_array(name, value).ndim == 0:
        object.__setattr__(view, name, integer(name, value, minimum=0, maximum=INT32_MAX))
    else:
        _integers(view, name)
