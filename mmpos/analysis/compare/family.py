"""The fixed family of documents that schemes are measured on: every small image and video, with text around it."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product

from mmpos.schemes import Scheme
from mmpos.segments.kinds import Grid, Text

__all__ = ["SHIFTS", "STARTS", "STILLS", "Document", "around", "grids", "small_grids", "spec"]

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
