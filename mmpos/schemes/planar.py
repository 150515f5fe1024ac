"""Schemes with unscaled row and column numbers: naive, typographic, and for vision encoders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from mmpos.errors import UnsupportedError
from mmpos.schemes.base import Grids, Pieces, Placement, Scheme, TextRuns, check_pieces
from mmpos.support.checks import IntArray, integer, one_of
from mmpos.support.ragged import ragged_arange


@dataclass(frozen=True)
class Naive2D(Scheme):
    """Patch (i, j), counted from one, at (L + i, L + j), where L is the last text id; next text at L + max(h, w) + 1.

    The token that ends row i is at (L + i, L + w + 1), like one more column. The ids are symmetric only for h = w.
    Source: kexue.fm 10040, the form without strides; the processor of NeoMME in Transformers.
    """

    name: ClassVar[str] = "naive-2d"
    linear_in = ("cursor",)
    axes = 2
    frames = False
    row_separators = True

    def advance(self, grids: Grids) -> IntArray:
        return np.maximum(grids.height, grids.width)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        return Placement([cursor, cursor], step_row=[1, 0], step_col=[0, 1])


@dataclass(frozen=True)
class PageRows(Scheme):
    """Lines of a page: adjacent text is one line, a grid is h lines; ids are (line, column).

    Text alone is not RoPE-1D. The state is a line and a column, so there is no next position.
    Source: kexue.fm 10040, the unified two-dimensional form.
    """

    name: ClassVar[str] = "rows"
    axes = 2
    frames = False
    resumable = False

    def advance(self, grids: Grids) -> IntArray:
        return grids.height

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        return Placement([cursor, grids.start], step_row=[1, 0], step_col=[0, 1])

    def advance_text(self, runs: TextRuns) -> IntArray:
        return runs.ends_line.astype(np.int64)

    def place_text(self, runs: TextRuns, cursor: IntArray) -> Placement:
        return Placement([cursor, runs.start + runs.column], step_col=[0, 1])


@dataclass(frozen=True)
class Grid2D(Scheme):
    """Positions of a vision encoder: rows and columns of every grid start at (start, start), the same in every frame.

    Source: the rotary embeddings of the encoders of Pixtral ("raster"), Qwen-VL ("merged"), MiniMax-M3 (three axes) and
    Llama 4 and Inkling 2 (first=1).

    Args:
        order: order of patches: "raster", or "merged" if the patches of a block to be merged are adjacent.
        spatial_merge_size: side of a block; grid sizes are those before merging.
        axes: 2 for rows and columns, or 3 for frames, rows and columns.
        first: offset of the first frame, row and column from start, 0 or 1. With 1, documents may also hold class
            tokens, each a ``Text(1)`` at start on every axis.
    """

    name: ClassVar[str] = "grid-2d"
    text = False
    resumable = False
    order: Literal["raster", "merged"] = "raster"
    spatial_merge_size: int = 1
    axes: int = 2
    first: int = 0

    def __post_init__(self) -> None:
        one_of("Grid2D.order", self.order, ("raster", "merged"))
        side = integer("Grid2D.spatial_merge_size", self.spatial_merge_size, minimum=1)
        object.__setattr__(self, "spatial_merge_size", side)
        object.__setattr__(self, "axes", integer("Grid2D.axes", self.axes, minimum=2, maximum=3))
        object.__setattr__(self, "first", integer("Grid2D.first", self.first, minimum=0, maximum=1))
        object.__setattr__(self, "text", self.first > 0)

    def advance(self, grids: Grids) -> IntArray:
        return np.zeros_like(grids.height)

    def advance_text(self, runs: TextRuns) -> IntArray:
        if runs.lengths.max(initial=1) > 1:
            raise UnsupportedError(
                f"grid-2d: got text of {runs.lengths.max()} tokens, want class tokens, each a Text(1)"
            )
        return np.zeros_like(runs.lengths)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        start = cursor + self.first
        if self.order == "merged":
            return self._place_merged(grids, start)
        n = self.axes
        return Placement([start] * n, [1, 0, 0][-n:], [0, 1, 0][-n:], [0, 0, 1][-n:])

    def _place_merged(self, grids: Grids, start: IntArray) -> Placement:
        """Return one piece per row of blocks, whose frames are blocks and whose rows and columns are inside a block."""
        side = self.spatial_merge_size
        if (grids.extents[1:] % side).any():
            raise UnsupportedError(
                f"grid-2d: got a grid whose sides are not divisible by spatial_merge_size={side}, want whole blocks"
            )
        bands = grids.height // side
        check_pieces(self, int((grids.frames * bands).sum()))
        owner, band = ragged_arange(grids.frames * bands)
        frame, band = np.divmod(band, bands[owner])
        sides = np.full(owner.size, side, np.int64)
        pieces = Pieces(owner, side * grids.width[owner], np.zeros(owner.size, np.int64), sides, sides)
        start = start[owner]
        n, origin = self.axes, [start + frame, start + side * band, start]
        return Placement(origin[-n:], [0, 0, side][-n:], [0, 1, 0][-n:], [0, 0, 1][-n:], pieces=pieces)
