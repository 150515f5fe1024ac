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
            for seconds in (Fraction(1), Fraction(1, 4), Fraction(3, 2), Fraction(1, 30))
        ),
        key=_smallest_first,
    )
)
"""Every video of 2 to 4 frames of up to 4×4 patches: at 1, 4 and 30 frames per second, and at 1.5 seconds per
frame."""


def grids(scheme: Scheme) -> tuple[Grid, ...]:
    """Return the images, then the videos if the scheme supports frames, each from smallest to largest."""
    return STILLS + VIDEOS if scheme.frames else STILLS


def around(scheme: Scheme, grid: Grid, before: int = 1, after: int = 1) -> Document:
    """Return the grid between two runs of text, or alone if the scheme does not support text."""
    return [Text(before), grid, Text(after)] if scheme.text else [grid]


@dataclass(frozen=True, eq=False)
class PlacedDocument:
    """A document with the exact ids of its tokens.

    Args:
        document: the segments that were placed.
        values: (axes, tokens) ids times denominator, as Python integers if ids may be fractions.
        denominator: the common denominator of all ids.
        delta: the decode delta; 0 if the document ends between two ids.
    """

    document: Document
    values: npt.NDArray[Any]
    denominator: int
    delta: int

    @property
    def spec(self) -> str:
        """The document in command-line syntax, with the seconds per frame of its videos."""
        parts = []
        for part in self.document:
            sides = [part.length] if isinstance(part, Text) else part.extents[1 if part.frames == 1 else 0 :]
            parts.append("x".join(map(str, sides)))
        times = {part.seconds_per_frame for part in self.document if isinstance(part, Grid)} - {None}
        return ",".join(parts) + "".join(f" ({seconds} s per frame)" for seconds in times)

    def at(self, token: int) -> str:
        """Format the position of a token."""
        return self.written(self.values[:, token])

    def written(self, values: npt.NDArray[Any]) -> str:
        """Format a position, or the difference between two, as a number or as several in parentheses."""
        numbers = [str(Fraction(int(value), self.denominator)) for value in values]
        return numbers[0] if len(numbers) == 1 else f"({', '.join(numbers)})"


def placed(scheme: Scheme, documents: Sequence[Document], start: int = 0) -> list[PlacedDocument]:
    """Place documents as one batch."""
    table = place(SegmentTable.from_documents([list(document) for document in documents]), scheme, start)
    numerators, denominators = table.rationals()
    if table.fractional:
        numerators, denominators = numerators.astype(object), denominators.astype(object)
    deltas = np.where(table.resumable, table.documents[DELTA], 0).tolist()
    results = []
    for document, delta, (begin, stop) in zip(documents, deltas, pairwise(table.cu_seqlens.tolist()), strict=True):
        values, common = numerators[:, begin:stop], 1
        if table.fractional:
            common = lcm(*set(denominators[begin:stop]))
            values = values * (common // denominators[begin:stop])
        results.append(PlacedDocument(document, values, common, delta))
    return results


def first_token(mask: npt.NDArray[np.bool_]) -> int | None:
    """Return the first token that the (axes, tokens) mask marks on any axis, or None."""
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
"""Conditions on the sides of an image that may describe all images for which a property of a scheme holds."""


def verdict(failures: Iterable[tuple[int, str]]) -> PropertyValue:
    """Return True if nothing failed; otherwise, why the smallest failed grid failed and which images passed.

    Args:
        failures: the index in ``grids`` of each failed grid, and the reason; a grid that was tried several times may
            recur.
    """
    failed: dict[int, str] = {}
    for i, reason in failures:
        failed.setdefault(i, reason)
    if not failed:
        return PropertyValue(True)
    reason = failed[min(failed)]
    passed = [i not in failed for i in range(len(STILLS))]
    if not any(passed):
        return PropertyValue(False, reason)
    if all(passed):
        return PropertyValue(False, f"{reason}; holds for every image")
    matching = (name for name, shape in _SHAPES.items() if [shape(grid) for grid in STILLS] == passed)
    shapes = "".join(f", those with {name}" for name in matching)
    return PropertyValue(False, f"{reason}; holds for {sum(passed)} of {counted(len(STILLS), 'image')}{shapes}")
