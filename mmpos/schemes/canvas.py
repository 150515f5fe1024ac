"""Canvas M-RoPE of MiniCPM-V 4.7: a thumbnail is stretched over the canvas on which its tiles lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from mmpos.schemes.base import Grids, Pieces, Placement, Scheme, check_pieces
from mmpos.segments.kinds import THUMBNAIL, TILE
from mmpos.support.checks import IntArray
from mmpos.support.ragged import ragged_arange


@dataclass(frozen=True)
class MRopeCanvas(Scheme):
    """Canvas M-RoPE: patch (i, j) of a tile at (c, c + y + i, c + x + j), where (y, x) is the corner of the tile.

    Tiles lie in rows and columns on a canvas of H rows and W columns, as large as so many of its first tile; a picture
    without tiles is its own canvas. Text goes on at c + max(H, W) + 1.

    - Patch (i, j) of a thumbnail of h×w is at c + round(i·(H−1)/(h−1)) and c + round(j·(W−1)/(w−1)), and at c where h
      or w is 1; round is that of numbers in float32, halves to the even one.
    - The marker before it is at max(c − 1, 0), the one after it at (c + H, c + W); those around a tile are at its first
      and its last patch.
    - Tokens between two tiles, which end a row of tiles, are at the row of its last patches and at column c + W. All
      other tokens after a marker are at c.

    A grid is a picture alone, without markers. Source: MiniCPM-V 4.7 in Transformers.
    """

    name: ClassVar[str] = "mrope-canvas"
    axes = 3
    frames = False
    kinds = frozenset({THUMBNAIL, TILE})

    def advance(self, grids: Grids) -> IntArray:
        layout = _Layout.of(grids)
        return np.where(layout.tile, 0, layout.sides.max(axis=0) + 1)

    def next_after(self, grids: Grids, cursor: IntArray) -> IntArray | None:
        if grids.kind is None:
            return None
        # Tiles that are larger than the first one may reach over the canvas.
        layout = _Layout.of(grids)
        return np.where(layout.tile, cursor[layout.head] + (layout.corner + grids.extents[1:]).max(axis=0), cursor)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        if grids.kind is None:
            return Placement([cursor] * 3, None, [0, 1, 0], [0, 0, 1])
        layout = _Layout.of(grids)
        origin = cursor[layout.head]
        runs = [*_markers(grids, layout, origin), *_patches(self, grids, layout, origin)]
        together = _Runs(*(np.concatenate(values, axis=-1) for values in zip(*runs, strict=True)))
        order = np.lexsort((together.part, together.owner))
        owner, _, tokens, skip, height, width, ids, down, along = (values[..., order] for values in together)
        check_pieces(self, owner.size)
        pieces = Pieces(owner, tokens, skip, height, width)
        return Placement(list(ids), None, [0, down, 0], [0, 0, along], pieces=pieces)


class _Layout(NamedTuple):
    """Where the thumbnails and tiles of a batch lie on their canvases.

    Args:
        tile: (grids,) whether each is a tile.
        head: (grids,) index of the picture that each is or lies on.
        sides: (2, grids) rows and columns of the canvas.
        corner: (2, grids) row and column of the first patch on it.
        row_end: (2, grids) row and column of the tokens between a tile and the next one; 0, 0 after all else.
        stretched: (grids,) whether it is a thumbnail with tiles.
    """

    tile: npt.NDArray[np.bool_]
    head: IntArray
    sides: IntArray
    corner: IntArray
    row_end: IntArray
    stretched: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, grids: Grids) -> _Layout:
        sides = grids.extents[1:]
        count = grids.height.size
        if grids.kind is None or grids.extra_tokens is None:
            nothing = np.zeros(count, np.bool_)
            return cls(nothing, np.arange(count), sides, 0 * sides, 0 * sides, nothing)
        tile = grids.kind == TILE
        (heads,) = (~tile).nonzero()
        picture = np.cumsum(~tile) - 1
        tiles = np.diff(heads, append=count) - 1
        number = np.arange(count) - heads[picture] - 1
        between = tile & (number + 1 < tiles[picture])
        # The first tile with tokens after it ends the first row; rows of other lengths become one.
        columns = tiles.copy()
        ends = between & (grids.extra_tokens > 0)
        np.minimum.at(columns, picture[ends], number[ends] + 1)
        columns = np.where(tiles % np.maximum(columns, 1) > 0, tiles, columns)[picture]
        many = tiles[picture] > 0
        rows = tiles[picture] // np.maximum(columns, 1)
        first = sides[:, np.minimum(heads + 1, count - 1)[picture]]
        cell = np.where(tile, np.stack(np.divmod(number, np.maximum(columns, 1))), 0)
        canvas = np.where(many, first * np.stack([rows, columns]), sides)
        row_end = np.stack([(cell[0] + 1) * first[0] - 1, canvas[1]])
        return cls(tile, heads[picture], canvas, cell * first, np.where(between, row_end, 0), ~tile & many)


class _Runs(NamedTuple):
    """Runs of tokens with affine ids.

    Args:
        owner: (runs,) index of the grid.
        part: (runs,) the order of runs in a grid.
        tokens: (runs,) how many there are.
        skip: (runs,) raster index of the first of them.
        height: (runs,) rows to count in.
        width: (runs,) columns to count in.
        ids: (3, runs) ids at row 0 and column 0.
        down: (runs,) step of the second axis from row to row.
        along: (runs,) step of the third axis from column to column, never 0: ids and steps of 0 are padding.
    """

    owner: IntArray
    part: IntArray
    tokens: IntArray
    skip: IntArray
    height: IntArray
    width: IntArray
    ids: IntArray
    down: IntArray
    along: IntArray


def _markers(grids: Grids, layout: _Layout, origin: IntArray) -> list[_Runs]:
    """Make the runs before and after the patches of thumbnails and tiles: markers, and the tokens after the second."""
    assert grids.kind is not None
    assert grids.extra_tokens is not None
    marked = grids.kind >= THUMBNAIL
    opened = np.where(layout.tile, origin + layout.corner, np.maximum(origin - 1, 0))
    closed = origin + np.where(layout.tile, layout.corner + grids.extents[1:] - 1, layout.sides)
    after = origin + layout.row_end
    many = np.iinfo(np.int64).max
    runs = []
    for part, rows_and_columns, tokens in (
        (-1, opened, marked.astype(np.int64)),
        (many - 1, closed, marked.astype(np.int64)),
        (many, after, grids.extra_tokens),
    ):
        (owner,) = tokens.nonzero()
        one = np.ones_like(owner)
        ids = np.stack([origin, *rows_and_columns])[:, owner]
        # They stand in a column, on which nothing steps.
        runs.append(_Runs(owner, part * one, tokens[owner], 0 * one, tokens[owner], one, ids, 0 * one, one))
    return runs


def _patches(scheme: Scheme, grids: Grids, layout: _Layout, origin: IntArray) -> list[_Runs]:
    """Make the runs of patches: one of every tile and every picture without tiles, several of stretched thumbnails."""
    (whole,) = (~layout.stretched).nonzero()
    height, width = grids.height[whole], grids.width[whole]
    ids = np.stack([origin, *(origin + layout.corner)])[:, whole]
    zero, one = np.zeros_like(whole), np.ones_like(whole)
    affine = _Runs(whole, zero, height * width, zero, height, width, ids, one, one)

    (stretched,) = layout.stretched.nonzero()
    patches = (grids.height * grids.width)[stretched]
    check_pieces(scheme, int(patches.astype(np.float64).sum()))
    which, patch = ragged_arange(patches)
    owner = stretched[which]
    row, column = np.divmod(patch, grids.width[owner])
    down = _spread(layout.sides[0, owner], grids.height[owner], row)
    along = _spread(layout.sides[1, owner], grids.width[owner], column)
    # A patch goes on in the run of the one before it if it is as far from that as that is from its own, and not at 0.
    step = np.diff(along, prepend=0)
    joins = (column > 0) & (step > 0) & ((column == 1) | (step == np.append(0, step[:-1])))
    (first,) = (~joins).nonzero()
    tokens = np.diff(first, append=patch.size)
    steps = np.where(tokens > 1, step[np.minimum(first + 1, patch.size - 1)], 1)
    owner, skip = owner[first], patch[first]
    at = origin[owner]
    ids = np.stack([at, at + down[first], at + along[first] - column[first] * steps])
    several = _Runs(owner, skip, tokens, skip, grids.height[owner], grids.width[owner], ids, 0 * skip, steps)
    return [affine, several]


def _spread(side: IntArray, count: IntArray, index: IntArray) -> IntArray:
    """Round ``index`` of ``count`` numbers, evenly from 0 to side − 1, as ``torch.linspace`` computes them in float32.

    Up to the middle it counts from the front, then from the back. Half an integer may become another one than by exact
    halves, since the step is rounded, too: the middle one of 23 numbers from 0 to 13 becomes 7, not 6.
    """
    last = (side - 1).astype(np.float32)
    step = last / np.maximum(count - 1, 1).astype(np.float32)
    front, back = step * index.astype(np.float32), last - step * (count - 1 - index).astype(np.float32)
    return np.where(count > 1, np.rint(np.where(index < count // 2, front, back)), 0).astype(np.int64)
