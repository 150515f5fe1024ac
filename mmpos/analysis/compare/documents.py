"""The documents that schemes are measured on, placed with exact ids, and the trial of a property on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.analysis.compare.matrix import Finding
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.schemes import Scheme
from mmpos.segments.kinds import Grid, Text
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import IntArray, counted

Document = Sequence[Text | Grid]

STARTS = (0, 1, 1000)
"""First ids of documents."""

SHIFTS = (1, 1000)
"""By how much documents are moved."""


def _smallest_first(grid: Grid) -> tuple[int, int, int]:
    return (grid.frames * grid.height * grid.width, grid.frames, grid.height)


STILLS = tuple(sorted((Grid(h, w) for h, w in product(range(1, 13), repeat=2)), key=_smallest_first))
"""Every image of up to 12×12 patches."""

VIDEOS = tuple(
    sorted(
        (
            Grid(h, w, frames=f, seconds_per_frame=seconds)
            for f, h, w in product(range(2, 5), range(1, 5), range(1, 5))
            for seconds in (None, Fraction(1, 4), Fraction(3, 2))
        ),
        key=_smallest_first,
    )
)
"""Every video of 2 to 4 frames of up to 4×4 patches: without times, with four frames a second, and with slow ones."""


def grids(scheme: Scheme) -> tuple[Grid, ...]:
    """Images, then videos where the scheme takes them, the smallest first."""
    return STILLS + VIDEOS if scheme.frames else STILLS


def small_grids(scheme: Scheme) -> tuple[Grid, ...]:
    """Those of at most 16 patches and without times, for what takes longer to measure."""
    return tuple(g for g in grids(scheme) if g.frames * g.height * g.width <= 16 and g.seconds_per_frame is None)


def around(scheme: Scheme, grid: Grid, before: int = 1, after: int = 1) -> Document:
    """The grid between two runs of text, or alone where the scheme takes no text."""
    return [Text(before), grid, Text(after)] if scheme.text else [grid]


def spec(document: Document) -> str:
    """The document as the command line has it.

    >>> spec([Text(1), Grid(2, 3), Text(2)]), spec([Grid(1, 1, frames=2, seconds_per_frame=Fraction(1, 4))])
    ('1,2x3,2', '2x1x1 (1/4 s per frame)')
    """
    times = {part.seconds_per_frame for part in document if isinstance(part, Grid)} - {None}
    return ",".join(map(_part, document)) + "".join(f" ({seconds} s per frame)" for seconds in times)


def _part(part: Text | Grid) -> str:
    if isinstance(part, Text):
        return str(part.length)
    sides = part.extents if part.frames > 1 else part.extents[1:]
    return "x".join(map(str, sides))


Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Batch:
    """A placed batch of documents.

    Args:
        documents: what was placed.
        table: where.
        values: (axes, tokens) whole numbers, ids times denominator; Python integers where int64 is too small.
        denominator: the common one of all ids.
    """

    documents: Sequence[Document]
    table: PositionTable
    values: npt.NDArray[Any]
    denominator: int

    @classmethod
    def placed(cls, scheme: Scheme, documents: Sequence[Document], start: int = 0) -> Batch:
        """Documents under a scheme."""
        table = place(SegmentTable.from_documents([list(document) for document in documents]), scheme, start)
        numerators, denominators = table.rationals()
        common = lcm(*set(table.denominator.tolist()))
        if (int(np.abs(numerators).max()) + SHIFTS[-1]) * common >= 2**62:
            numerators, denominators = numerators.astype(object), denominators.astype(object)
        return cls(documents, table, numerators * (common // denominators), common)

    @property
    def offsets(self) -> IntArray:
        """(documents,) first token of each document."""
        return self.table.cu_seqlens[:-1].astype(np.int64)

    @property
    def owner(self) -> IntArray:
        """(tokens,) document of each token."""
        return np.repeat(np.arange(len(self.documents)), self.table.lengths)

    def astray(self, other: Batch, shift: int = 0) -> Mask:
        """(tokens,) those whose ids in the other batch, of as many tokens, are not just shift more on every axis."""
        here, there = self.values + shift * self.denominator, other.values
        if self.denominator != other.denominator:
            here, there = here.astype(object) * other.denominator, there.astype(object) * self.denominator
        mask: Mask = (here != there).any(axis=0)
        return mask

    def taken(self, begin: int, lengths: IntArray) -> Batch:
        """Of each document the tokens from begin on, as many as told."""
        starts = self.offsets + begin
        tokens = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(int(lengths.sum()))
        return Batch(
            self.documents, self.table.take(starts, starts + lengths), self.values[:, tokens], self.denominator
        )

    def document(self, document: int) -> Batch:
        """One document as it is placed here."""
        return Batch(
            [self.documents[document]],
            self.table.window([document], [0], [self.table.lengths[document]]),
            self.values[:, self.owner == document],
            self.denominator,
        )

    def any_token(self, mask: Mask) -> Mask:
        """(documents,) those with a token in the mask."""
        documents: Mask = np.logical_or.reduceat(mask, self.offsets)
        return documents

    def first_token(self, mask: Mask, document: int) -> int:
        """The first token of the mask in a document, counted from the document's first."""
        return int(mask[self.offsets[document] :].argmax())

    def at(self, document: int, token: int) -> str:
        """The position of a token as people write it."""
        return self.written(self.values[:, self.offsets[document] + token])

    def written(self, values: npt.NDArray[Any]) -> str:
        """A position, or a difference of two: a number, or several in brackets."""
        numbers = [str(Fraction(int(value), self.denominator)) for value in values]
        return numbers[0] if len(numbers) == 1 else f"({', '.join(numbers)})"

    def spec(self, document: int) -> str:
        """A document as the command line has it."""
        return spec(self.documents[document])


_SHAPES: Mapping[str, Callable[[Grid], bool]] = {
    "h = w = 1": lambda g: g.height == g.width == 1,
    "h = w": lambda g: g.height == g.width,
    "h and w odd": lambda g: g.height % 2 == g.width % 2 == 1,
    "h and w both odd or both even": lambda g: g.height % 2 == g.width % 2,
    "h = 1": lambda g: g.height == 1,
    "h = 1 or w = 1": lambda g: g.height == 1 or g.width == 1,
}
"""Properties that images may have in common for which a property of a scheme holds."""


@dataclass
class Trial:
    """Grids that are tried in several ways, the smallest first.

    Args:
        grids: what is tried, in the order of size.
    """

    grids: Sequence[Grid]
    _failed: Mask = field(init=False)
    _first: int = field(init=False)
    _words: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self._failed, self._first = np.zeros(len(self.grids), np.bool_), len(self.grids)

    def note(self, failed: Mask, words: Callable[[int], str]) -> None:
        """Record the grids that failed this time.

        Args:
            failed: (grids,) the flag of each.
            words: describes the failure of the grid with an index; called for the first one only.
        """
        if failed[: self._first].any():
            self._first = int(failed.argmax())
            self._words = words(self._first)
        self._failed |= failed

    def verdict(self) -> Finding:
        """Sum up: all grids passed, or the words for the first that did not, and which images passed."""
        if not self._failed.any():
            return Finding(True)
        images = set(STILLS)
        tried = [(grid, not failed) for grid, failed in zip(self.grids, self._failed, strict=True) if grid in images]
        holds = sum(passed for _, passed in tried)
        if not holds:
            return Finding(False, self._words)
        if holds == len(tried):
            return Finding(False, f"{self._words}; holds for every image")
        shapes = (
            f", those with {name}"
            for name, shape in _SHAPES.items()
            if all(shape(grid) == passed for grid, passed in tried)
        )
        return Finding(False, f"{self._words}; holds for {holds} of {counted(len(tried), 'image')}{next(shapes, '')}")
