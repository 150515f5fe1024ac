"""Scheme, the base of all schemes: how many ids text and grids consume, and where their tokens lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mmpos.errors import LimitExceededError
from mmpos.segments.spans import segment_tokens
from mmpos.support.cached import cached_property
from mmpos.support.checks import IntArray

Steps = Sequence[IntArray | int]


@dataclass(frozen=True)
class Grids:
    """The grids of a batch, arrays of one entry per grid.

    Args:
        extents: (3, grids) frames, height, width, without row separators.
        start: (grids,) first id of the grid's document.
        document: (grids,) index of the grid's document, ascending.
        row_separator: (grids,) whether every row ends in one more token; None if none does.
        seconds_per_frame: (2, grids) numerator and denominator, (0, 1) where not given; None if none is.
        kind: (grids,) GRID, or CLIP, THUMBNAIL and TILE, which hold markers; None if all are plain grids.
        extra_tokens: (grids,) audio of a clip, tokens after a thumbnail or a tile; None where kind is.
        unit: (grids,) denominator of the cursor, the same for all grids of a document; None where cursors are whole.
        text_tokens: (grids,) tokens of text and audio in the grid's document; None where grids are asked for alone.
    """

    extents: IntArray
    start: IntArray
    document: IntArray
    row_separator: npt.NDArray[np.bool_] | None = None
    seconds_per_frame: IntArray | None = None
    kind: npt.NDArray[np.uint8] | None = None
    extra_tokens: IntArray | None = None
    unit: IntArray | None = None
    text_tokens: IntArray | None = None

    @property
    def frames(self) -> IntArray:
        """(grids,) frames."""
        return self.extents[0]

    @property
    def height(self) -> IntArray:
        """(grids,) rows of patches."""
        return self.extents[1]

    @property
    def width(self) -> IntArray:
        """(grids,) columns of patches, without separators."""
        return self.extents[2]

    @property
    def row_tokens(self) -> IntArray:
        """(grids,) tokens of one row, its separator included."""
        return self.width if self.row_separator is None else self.width + self.row_separator

    @property
    def tokens(self) -> IntArray:
        """(grids,) tokens: patches, separators, and what grids of other kinds hold beside."""
        if self.kind is None:
            return self.frames * self.height * self.row_tokens
        return segment_tokens(self.kind, self.extents, self.row_separator, self.extra_tokens)

    @property
    def number(self) -> IntArray:
        """(grids,) grids before each in its document."""
        return np.arange(self.document.size) - self.document.searchsorted(self.document)

    @property
    def seconds(self) -> IntArray:
        """(2, grids) numerator and denominator of the seconds per frame, one second where not given."""
        if self.seconds_per_frame is None:
            return np.ones((2, self.frames.size), np.int64)
        return np.where(self.seconds_per_frame[0] > 0, self.seconds_per_frame, 1)


@dataclass(frozen=True)
class TextRuns:
    """The text segments of a batch, runs of audio among them; adjacent ones form a line, as typographic schemes need.

    Args:
        lengths: (runs,) tokens.
        segment: (runs,) index of the segment in the table.
        documents: (segments,) document of every segment of the table.
        starts: (documents,) first id of every document.
        units: (documents,) denominators of cursors; None where they are whole.
    """

    lengths: IntArray
    segment: IntArray
    documents: IntArray
    starts: IntArray
    units: IntArray | None = None

    @property
    def document(self) -> IntArray:
        """(runs,) index of the run's document."""
        return self.documents[self.segment]

    @property
    def start(self) -> IntArray:
        """(runs,) first id of the run's document."""
        return self.starts[self.document]

    @cached_property
    def continues(self) -> npt.NDArray[np.bool_]:
        """(runs,) whether the run goes on in the line of the run before it."""
        joined = (np.diff(self.segment) == 1) & (np.diff(self.document) == 0)
        return np.concatenate([np.zeros(min(1, joined.size + 1), np.bool_), joined])[: self.lengths.size]

    @cached_property
    def ends_line(self) -> npt.NDArray[np.bool_]:
        """(runs,) whether the run is the last of its line."""
        return ~np.append(self.continues[1:], np.False_)[: self.lengths.size]

    @cached_property
    def column(self) -> IntArray:
        """(runs,) tokens before the run in its line."""
        before = np.cumsum(self.lengths) - self.lengths
        first = np.maximum.accumulate(np.where(self.continues, 0, np.arange(before.size)))
        return before - before[first]


@dataclass(frozen=True)
class Placement:
    """The ids of tokens: id = (origin + frame·step_frame + row·step_row + col·step_col) / denominator.

    Args:
        origin: one (grids,) array or integer per axis.
        step_frame: likewise; None is 0 on every axis.
        step_row: likewise.
        step_col: likewise.
        denominator: (grids,) or one integer.
        pieces: set by schemes that cut a grid into several affine pieces; every array above then has
            one entry per piece.
    """

    origin: Steps
    step_frame: Steps | None = None
    step_row: Steps | None = None
    step_col: Steps | None = None
    denominator: IntArray | int = 1
    pieces: Pieces | None = None


@dataclass(frozen=True)
class Pieces:
    """Grids cut into pieces, in token order.

    Args:
        owner: (pieces,) index of the grid, ascending.
        tokens: (pieces,) tokens of each piece.
        skip: (pieces,) raster index of the piece's first token in the height and width below.
        height: (pieces,) rows to count in.
        width: (pieces,) columns to count in.
    """

    owner: IntArray
    tokens: IntArray
    skip: IntArray
    height: IntArray
    width: IntArray


RATIONAL_PARAMETERS = frozenset({"tokens_per_second", "seconds_per_chunk", "frame_step", "row_step", "col_step"})
"""Parameters of schemes that are exact numbers, whole or Fractions."""


class Scheme(ABC):
    """A placement of text and grids; subclass it as a frozen dataclass to add your own.

    Ids must be affine in frame, row and column, exact (integers over a denominator), and
    translation-equivariant in the cursor, the id that the next text token would get.
    """

    name: ClassVar[str]
    axes: int
    fractional: bool = False
    """Whether ids may be fractions; dense ids are then float64."""
    strict: bool = False
    """Whether two grids must have text between them, by default."""
    frames: bool = True
    """Whether grids may have more than one frame."""
    text: bool = True
    """Whether documents may hold text."""
    audio: bool = True
    """Whether documents may hold audio, whose ids are those of text."""
    timed: bool = True
    """Whether ids may follow the times of frames."""
    row_separators: bool = False
    """Whether the rows of a grid may end in a separator token."""
    kinds: frozenset[int] = frozenset()
    """Kinds of segments with markers that documents may hold and ``place`` counts: CLIP, or THUMBNAIL and TILE."""
    by_shape: ClassVar[bool] = False
    """Whether ids follow from the shape of the grid, the cursor, the first id of the document, the number of grids
    before in it and its tokens of text alone, unless frames have times that they follow: ``place`` then asks the scheme
    once per shape, if ids are linear in these. Each class must set it itself; equal instances must place alike, and
    text must follow from cursor and first id alone."""
    kept: ClassVar[bool] = False
    """Whether ``place`` keeps the tables of small batches that no plan places, since requests repeat sizes. Each class
    must set it itself; equal instances must place alike."""
    resumable: bool = True
    """Whether one integer, the cursor, is the whole state: next positions and decoding exist."""

    @cached_property
    def label(self) -> str:
        """Its name, with the parameters that are not the defaults: rope-tie-v2(axes=3, rounding=floor)."""
        return label(self)

    @abstractmethod
    def advance(self, grids: Grids) -> IntArray:
        """Count the ids that each grid consumes, (grids,): how far it moves the cursor."""

    @abstractmethod
    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        """Place the tokens of each grid, before which the cursor (grids,) stands."""

    def unit(self, grids: Grids) -> IntArray | None:
        """Give the denominator of the ids that each grid consumes, (grids,); None where all consume whole ids.

        Fractional schemes are asked for it. Where there is one, ``advance`` gives numerators over it; ``place``,
        ``place_text`` and ``next_after`` get cursors over the common denominator of their document, and give next
        positions over it.
        """
        return None

    def cleared(self, grids: Grids) -> IntArray | None:
        """Count the ids that each grid keeps free before all text of its document, (grids,); the most of them count.

        None where text follows the cursor alone. Schemes with ``unit`` have none.
        """
        return None

    def advance_text(self, runs: TextRuns) -> IntArray:
        """Count the ids that text consumes, (runs,): one per token."""
        return runs.lengths

    def place_text(self, runs: TextRuns, cursor: IntArray) -> Placement:
        """Place text: the same id on every axis, one more per token."""
        unit = 1 if runs.units is None else runs.units[runs.document]
        return Placement(origin=[cursor] * self.axes, step_col=[unit] * self.axes, denominator=unit)

    def next_after(self, grids: Grids, cursor: IntArray) -> IntArray | None:
        """Give the lowest next position that each grid demands, (grids,), where the cursor does not say it."""
        return None


def changed_parameters(named: object) -> dict[str, Any]:
    """List the parameters of a scheme or an encoding that are not the defaults, by name; weights are none."""
    known = [field for field in fields(named) if field.init] if is_dataclass(named) else []
    values = {field.name: (getattr(named, field.name), field.default) for field in known}
    return {
        name: value
        for name, (value, default) in values.items()
        if not hasattr(value, "shape") and (default is MISSING or value != default)
    }


def label(named: Any) -> str:
    """Label a scheme or an encoding: its name, with the parameters that are not the defaults.

    >>> from mmpos.encodings import Rope1D
    >>> label(Rope1D(theta=500.0)), label(Rope1D())
    ('rope-1d(theta=500.0)', 'rope-1d')
    """
    parameters = ", ".join(f"{name}={value}" for name, value in changed_parameters(named).items())
    return f"{named.name}({parameters})" if parameters else str(named.name)


MAX_PIECES = 2**20
"""Pieces that the grids of one batch may be cut into."""


def check_pieces(scheme: Scheme, count: int) -> None:
    """Raise before a scheme that cuts grids into pieces would make too many of them."""
    if count > MAX_PIECES:
        raise LimitExceededError(f"scheme {scheme.name!r}: got grids of {count} pieces, want at most {MAX_PIECES}")
