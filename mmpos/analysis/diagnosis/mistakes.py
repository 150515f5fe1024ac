"""Mistakes in placing, as schemes: each is another scheme with one thing wrong about its grids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from mmpos.schemes import Grids, Placement, Scheme, TextRuns
from mmpos.support.checks import IntArray


@dataclass(frozen=True)
class Mistaken(Scheme):
    """A scheme as it is, to be made wrong by subclasses.

    Args:
        right: the scheme without the mistake.
    """

    name: ClassVar[str] = "mistaken"
    right: Scheme

    def __post_init__(self) -> None:
        for name in ("axes", "fractional", "frames", "text", "row_separators", "resumable"):
            object.__setattr__(self, name, getattr(self.right, name))

    def advance(self, grids: Grids) -> IntArray:
        return self.right.advance(grids)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        return self.right.place(grids, cursor)

    def advance_text(self, runs: TextRuns) -> IntArray:
        return self.right.advance_text(runs)

    def place_text(self, runs: TextRuns, cursor: IntArray) -> Placement:
        return self.right.place_text(runs, cursor)


class AdvancesByTokens(Mistaken):
    """Grids take as many ids as tokens."""

    def advance(self, grids: Grids) -> IntArray:
        return grids.tokens


class AdvancesBySide(Mistaken):
    """Grids take as many ids as their longest side, as in M-RoPE."""

    def advance(self, grids: Grids) -> IntArray:
        return grids.extents.max(axis=0)


class AdvancesByOne(Mistaken):
    """Grids take one id."""

    def advance(self, grids: Grids) -> IntArray:
        return np.ones_like(grids.frames)


class AdvancesToMaximum(Mistaken):
    """Text goes on at the maximum of all ids plus one."""

    def advance(self, grids: Grids) -> IntArray:
        placement = self.right.place(grids, np.zeros_like(grids.frames))
        if placement.pieces is not None:
            return self.right.advance(grids)
        last = grids.extents - 1
        highest = np.stack([np.broadcast_to(origin, grids.frames.shape) for origin in placement.origin])
        for steps, moves in zip((placement.step_frame, placement.step_row, placement.step_col), last, strict=True):
            for axis, step in enumerate(steps or ()):
                highest[axis] += np.maximum(step, 0) * moves
        return highest.max(axis=0) // placement.denominator + 1


@dataclass(frozen=True)
class Unmerged(Mistaken):
    """Grids placed as if their patches had not been merged.

    Args:
        spatial_merge_size: side of the blocks that were merged.
        whole: whether strides are those of the unmerged grid, too, and not only the ids that it takes.
    """

    spatial_merge_size: int = 2
    whole: bool = False

    def advance(self, grids: Grids) -> IntArray:
        return self.right.advance(self._before(grids))

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        return self.right.place(self._before(grids) if self.whole else grids, cursor)

    def _before(self, grids: Grids) -> Grids:
        side = self.spatial_merge_size
        return replace(grids, extents=grids.extents * np.array([[1], [side], [side]]))


class ColumnMajor(Mistaken):
    """Patches column after column, for documents whose grids have height and width exchanged."""

    def advance(self, grids: Grids) -> IntArray:
        return self.right.advance(_exchanged(grids))

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        found = self.right.place(_exchanged(grids), cursor)
        pieces = found.pieces
        if pieces is not None:
            pieces = replace(pieces, height=pieces.width, width=pieces.height)
        return replace(found, step_row=found.step_col, step_col=found.step_row, pieces=pieces)


def _exchanged(grids: Grids) -> Grids:
    return replace(grids, extents=grids.extents[[0, 2, 1]])
