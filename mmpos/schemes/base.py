"""Scheme, the base class of all schemes, and the data that schemes receive and return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.segments.spans import segment_tokens
from mmpos.support.cached import cached_property
from mmpos.support.checks import IntArray, counted

Steps = Sequence[IntArray | int]


@dataclass(frozen=True)
class Grids:
    """The grids of a batch, as arrays with one entry per grid.

    Args:
        extents: (3, grids) frames, height, width, without row separators.
        start: (grids,) first id of the grid's document.
        document: (grids,) index of the grid's document, ascending.
        row_separator: (grids,) whether every row ends in a separator token; None if no grid has separators.
        seconds_per_frame: (2, grids) numerator and denominator, (0, 1) for grids without a time; None if no grid has
            a time.
        kind: (grids,) GRID, or CLIP, THUMBNAIL and TILE, which include marker tokens; None if all are plain grids.
        extra_tokens: (grids,) audio tokens of a clip, or tokens after a thumbnail or a tile; None if ``kind`` is None.
        unit: (grids,) denominator of the cursor, the same for all grids of a document; None if cursors are integers.
        text_tokens: (grids,) tokens of text and audio in the grid's document; None if the grids have no documents.
        segment: (grids,) index of the grid's segment in its document; None if the grids have no documents.
        first_frame: (grids,) frame at which each grid begins; 0 if all begin at frame 0.
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
    segment: IntArray | None = None
    first_frame: IntArray | int = 0

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
        """(grids,) tokens of one row, including its separator."""
        return self.width if self.row_separator is None else self.width + self.row_separator

    @property
    def tokens(self) -> IntArray:
        """(grids,) tokens: patches and row separators, and the markers and extra tokens of other kinds."""
        if self.kind is None:
            return self.frames * self.height * self.row_tokens
        return segment_tokens(self.kind, self.extents, self.row_separator, self.extra_tokens)

    @property
    def number(self) -> IntArray:
        """(grids,) number of grids before each grid in its document."""
        return np.arange(self.document.size) - self.document.searchsorted(self.document)

    def seconds(self, needed_from: int = 2) -> IntArray:
        """Return the (2, grids) numerator and denominator of the seconds per frame, 1 and 1 where none is needed.

        Several frames and a first frame other than 0 need a time.

        Args:
            needed_from: smallest number of frames that needs a time; 1 if the id of a single frame depends on it.

        Raises:
            InvalidInputError: a grid needs a time and has none.
        """
        known = np.zeros((2, self.frames.size), np.int64) if self.seconds_per_frame is None else self.seconds_per_frame
        missing = (known[0] == 0) & ((self.frames >= needed_from) | (np.asarray(self.first_frame) != 0))
        if missing.any():
            i = int(missing.argmax())
            name = f"grids[{i}]" if self.segment is None else f"documents[{self.document[i]}][{self.segment[i]}]"
            raise InvalidInputError(
                f"{name}: got {counted(int(self.frames[i]), 'frame')} without a time, want seconds_per_frame of the "
                "grid or video, such as 1/fps, because ids of this scheme depend on it"
            )
        return np.where(known[0] > 0, known, 1)


@dataclass(frozen=True)
class TextRuns:
    """The text and audio segments of a batch; typographic schemes join adjacent segments into lines.

    Args:
        lengths: (runs,) number of tokens.
        segment: (runs,) index of the segment in the table.
        documents: (segments,) document of every segment of the table.
        starts: (documents,) first id of every document.
        units: (documents,) denominators of the cursors; None if cursors are integers.
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
        """(runs,) whether the run continues the line of the previous run."""
        joined = (np.diff(self.segment) == 1) & (np.diff(self.document) == 0)
        return np.concatenate([np.zeros(min(1, joined.size + 1), np.bool_), joined])[: self.lengths.size]

    @cached_property
    def ends_line(self) -> npt.NDArray[np.bool_]:
        """(runs,) whether the run is the last in its line."""
        return ~np.append(self.continues[1:], np.False_)[: self.lengths.size]

    @cached_property
    def column(self) -> IntArray:
        """(runs,) number of tokens before the run in its line."""
        before = np.cumsum(self.lengths) - self.lengths
        first = np.maximum.accumulate(np.where(self.continues, 0, np.arange(before.size)))
        return before - before[first]


@dataclass(frozen=True)
class Placement:
    """Affine position ids: id = (origin + frame·step_frame + row·step_row + col·step_col) / denominator.

    Args:
        origin: id of the first token times the denominator, one (grids,) array or integer per axis.
        step_frame: step between frames, in the same form; None means 0 on every axis.
        step_row: step between rows, in the same form.
        step_col: step between columns, in the same form.
        denominator: (grids,) array or one integer.
        pieces: set by schemes that cut a grid into several affine pieces; the arrays above then have one entry per
            piece.
    """

    origin: Steps
    step_frame: Steps | None = None
    step_row: Steps | None = None
    step_col: Steps | None = None
    denominator: IntArray | int = 1
    pieces: Pieces | None = None


@dataclass(frozen=True)
class Pieces:
    """Grids cut into affine pieces, in token order.

    Args:
        owner: (pieces,) index of the piece's grid, ascending.
        tokens: (pieces,) number of tokens.
        skip: (pieces,) raster index of the piece's first token in a raster of ``height`` and ``width``.
        height: (pieces,) rows of the raster.
        width: (pieces,) columns of the raster.
    """

    owner: IntArray
    tokens: IntArray
    skip: IntArray
    height: IntArray
    width: IntArray


RATIONAL_PARAMETERS = frozenset({"tokens_per_second", "seconds_per_chunk", "frame_step", "row_step", "col_step"})
"""Scheme parameters whose values are exact: integers or Fractions."""


class Scheme(ABC):
    """Base class of placement schemes; subclass it as a frozen dataclass to add a scheme.

    Ids must be affine in frame, row and column, exact (integers over a denominator), and
    translation-equivariant in the cursor, the id that the next text token would get.
    """

    name: ClassVar[str]
    axes: int
    fractional: bool = False
    """Whether ids may be fractions; dense ids are then float64."""
    strict: bool = False
    """Whether ``place`` requires text between two grids by default."""
    frames: bool = True
    """Whether grids may have more than one frame."""
    text: bool = True
    """Whether documents may hold text."""
    audio: bool = True
    """Whether documents may hold audio, which is placed like text."""
    timed: bool = True
    """Whether ids may depend on the times of frames."""
    keyframes: bool = False
    """Whether grids may name the frame at which they begin."""
    references: bool = True
    """Whether documents may hold several grids that name no first frame."""
    row_separators: bool = False
    """Whether the rows of a grid may end in a separator token."""
    kinds: frozenset[int] = frozenset()
    """Segment kinds with markers that the scheme can place: CLIP, or THUMBNAIL and TILE."""
    linear_in: tuple[str, ...] | None = None
    """What the ids of a grid without times depend on besides its shape: names among ``cursor``, ``start`` (the first id
    of its document), ``number`` (of earlier grids in its document) and ``text_tokens`` (of its document), if ids are
    linear in them; ids of text must then be linear in cursor and start. ``place`` calls such a scheme once per shape.
    None makes ``place`` call it for every batch. A class must set this attribute itself, equal instances must place
    grids equally, and ``mmpos.schemes.check`` checks the declaration.
    """
    resumable: bool = True
    """Whether the cursor, one integer, is the whole state, so that next positions are defined and decoding is
    possible.
    """

    @cached_property
    def label(self) -> str:
        """Name of the scheme and its non-default parameters: rope-tie-v2(axes=3, rounding=floor)."""
        parameters = ", ".join(f"{name}={value}" for name, value in changed_parameters(self).items())
        return f"{self.name}({parameters})" if parameters else self.name

    @abstractmethod
    def advance(self, grids: Grids) -> IntArray:
        """Return the number of ids that each grid consumes, (grids,): how far each grid moves the cursor."""

    @abstractmethod
    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        """Return the placement of each grid, given the cursor before it, (grids,)."""

    def unit(self, grids: Grids) -> IntArray | None:
        """Return the denominator of the ids that each grid consumes, (grids,); None if all consume integers.

        Fractional schemes override this method. If the unit is not None, ``advance`` returns numerators over it;
        ``place``, ``place_text`` and ``next_after`` receive cursors over the common denominator of their document, and
        next positions have the same denominator.
        """
        return None

    def cleared(self, grids: Grids) -> IntArray | None:
        """Return the number of ids that each grid reserves before all the text in its document, (grids,).

        Each document uses the largest of its grids' numbers. None means that text depends on the cursor alone. Schemes
        with ``unit`` reserve none.
        """
        return None

    def advance_text(self, runs: TextRuns) -> IntArray:
        """Return the number of ids that each run of text consumes, (runs,): one per token."""
        return runs.lengths

    def place_text(self, runs: TextRuns, cursor: IntArray) -> Placement:
        """Return the placement of text: the same id on every axis, increasing by one per token."""
        unit = 1 if runs.units is None else runs.units[runs.document]
        return Placement(origin=[cursor] * self.axes, step_col=[unit] * self.axes, denominator=unit)

    def next_after(self, grids: Grids, cursor: IntArray) -> IntArray | None:
        """Return the smallest next position that each grid permits, (grids,); None if only the cursor matters."""
        return None


def changed_parameters(named: object) -> dict[str, Any]:
    """Return the non-default parameters of a scheme or an encoding by name, without weights."""
    known = [field for field in fields(named) if field.init] if is_dataclass(named) else []
    values = {field.name: (getattr(named, field.name), field.default) for field in known}
    return {
        name: value
        for name, (value, default) in values.items()
        if not hasattr(value, "shape") and (default is MISSING or value != default)
    }


MAX_PIECES = 2**20
"""Maximum number of pieces into which a scheme may cut the grids of a batch."""


def check_pieces(scheme: Scheme, count: int) -> None:
    """Raise LimitExceededError if a scheme would cut the grids of a batch into too many pieces."""
    if count > MAX_PIECES:
        raise LimitExceededError(
            f"scheme {scheme.name!r}: got grids cut into {count} pieces, want at most {MAX_PIECES}"
        )
