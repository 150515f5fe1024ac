"""The trial of one property: which grids of the family fail, the words for the first of them, and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mmpos.analysis.compare.batch import Mask
from mmpos.analysis.compare.family import STILLS
from mmpos.analysis.compare.finding import Finding
from mmpos.segments.kinds import Grid
from mmpos.support.checks import counted

__all__ = ["Trial"]

_SHAPES: Mapping[str, Callable[[Grid], bool]] = {
    "h = w = 1": lambda g: g.height == g.width == 1,
    "h = w": lambda g: g.height == g.width,
    "h and w odd": lambda g: g.height % 2 == g.width % 2 == 1,
    "h and w both odd or both even": lambda g: g.height % 2 == g.width % 2,
    "h = 1": lambda g: g.height == 1,
    "h = 1 or w = 1": lambda g: g.height == 1 or g.width == 1,
}
"""What images may have in common for which a property holds."""


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
        """Keep what failed this time.

        Args:
            failed: (grids,) those that did.
            words: what to say of the grid with an index; asked for the first one only.
        """
        if failed[: self._first].any():
            self._first = int(failed.argmax())
            self._words = words(self._first)
        self._failed |= failed

    def verdict(self) -> Finding:
        """Whether all grids passed; if not, what the first one did, and which images passed."""
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
