"""The documents that schemes are measured on, and their exact ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, product
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.analysis.compare.matrix import PropertyValue
from mmpos.positions.place import place
from mmpos.positions.table_rows import DELTA
from mmpos.schemes import Scheme
from mmpos.segments.kinds import Grid, Text
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import counted

Document = Sequence[Text | Grid]

STARTS = (0, 1, 1000)
"""First ids of documents."""


def _smallest_first(grid: Grid) -> tuple[int, int, int]:
    return (grid.frames * grid.height * grid.width, grid.frames, grid.height)


STILLS = tuple(sorted((Grid(h, w) for h, w in product(range(1, 13), repeat=2)), key=_smallest_first))
"""Every image of up to 12×12 patches."""

VIDEOS = tuple(
    sorted(
        (
            Grid(h, w, frames=f, seconds_per_frame=seconds)
            for f, h, w in product(range(2, 5), range(1, 5), range(1, 5))
            for seconds in (None, Fraction(1, 4), Fraction(3, 2), Fraction(1, 30))
        ),
        key=_smallest_first,
    )
)
"""Every video of 2 to 4 frames of up to 4×4 patches: without times, with four and thirty frames a second, and with slow
ones."""


def grids(scheme: Scheme) -> tuple[Grid, ...]:
    """Images, then videos where the scheme takes them, the smallest first."""
    return STILLS + VIDEOS if scheme.frames else STILLS


def around(scheme: Scheme, grid: Grid, before: int = 1, after: int = 1) -> Document:
    """The grid between two runs of text, or alone where the scheme takes no text."""
    return [Text(before), grid, Text(after)] if scheme.text else [grid]


@dataclass(frozen=True, eq=False)
class PlacedDocument:
    """A document with the exact ids of its tokens.

    Args:
        document: what was placed.
        values: (axes, tokens) ids times denominator, as Python integers where ids may be fractions.
        denominator: the common one of all ids.
        delta: of decoding; 0 where the document ends between two ids.
    """

    document: Document
    values: npt.NDArray[Any]
    denominator: int
    delta: int

    @property
    def spec(self) -> str:
        """The document as the command line has it, with the times of a video."""
        parts = []
        for part in self.document:
            sides = [part.length] if isinstance(part, Text) else part.extents[1 if part.frames == 1 else 0 :]
            parts.append("x".join(map(str, sides)))
        times = {part.seconds_per_frame for part in self.document if isinstance(part, Grid)} - {None}
        return ",".join(parts) + "".join(f" ({seconds} s per frame)" for seconds in times)

    def at(self, token: int) -> str:
        """The position of a token as people write it."""
        return self.written(self.values[:, token])

    def written(self, values: npt.NDArray[Any]) -> str:
        """A position, or a difference of two: a number, or several in brackets."""
        numbers = [str(Fraction(int(value), self.denominator)) for value in values]
        return numbers[0] if len(numbers) == 1 else f"({', '.join(numbers)})"


def placed(scheme: Scheme, documents: Sequence[Document], start: int = 0) -> list[PlacedDocument]:
    """Place documents as one batch."""
    table = place(SegmentTable.from_documents([list(document) for document in documents]), scheme, start)
    numerators, denominators = table.rationals()
    if table.fractional:
        numerators, denominators = numerators.astype(object), denominators.astype(object)
    deltas = np.where(table.resumable, table.documents[DELTA], 0).tolist()
    whole = []
    for document, delta, (begin, stop) in zip(documents, deltas, pairwise(table.cu_seqlens.tolist()), strict=True):
        values, common = numerators[:, begin:stop], 1
        if table.fractional:
            common = lcm(*set(denominators[begin:stop]))
            values = values * (common // denominators[begin:stop])
        whole.append(PlacedDocument(document, values, common, delta))
    return whole


def first_token(mask: npt.NDArray[np.bool_]) -> int | None:
    """The first of the tokens that are marked on any axis."""
    tokens = mask.any(axis=0)
    return int(tokens.argmax()) if tokens.any() else None


_SHAPES: Mapping[str, Callable[[Grid], bool]] = {
    "h = w = 1": lambda g: g.height == g.width == 1,
    "h = w": lambda g: g.height == g.width,
    "h and w odd": lambda g: g.height % 2 == g.width % 2 == 1,
    "h and w both odd or both even": lambda g: g.height % 2 == g.width % 2,
    "h = 1": lambda g: g.height == 1,
    "h = 1 or w = 1": lambda g: g.height == 1 or g.width == 1,
}
"""Properties that images may have in common for which a property of a scheme holds."""


def verdict(failures: Iterable[tuple[int, str]]) -> PropertyValue:
    """Sum up: all grids passed, or the words for the smallest that did not, and which images passed.

    Args:
        failures: index in ``grids`` of one and words for its failure, of every way in which grids were tried.
    """
    failed: dict[int, str] = {}
    for i, words in failures:
        failed.setdefault(i, words)
    if not failed:
        return PropertyValue(True)
    words = failed[min(failed)]
    passed = [i not in failed for i in range(len(STILLS))]
    if not any(passed):
        return PropertyValue(False, words)
    if all(passed):
        return PropertyValue(False, f"{words}; holds for every image")
    alike = (name for name, shape in _SHAPES.items() if [shape(grid) for grid in STILLS] == passed)
    shapes = "".join(f", those with {name}" for name in alike)
    return PropertyValue(False, f"{words}; holds for {sum(passed)} of {counted(len(STILLS), 'image')}{shapes}")
