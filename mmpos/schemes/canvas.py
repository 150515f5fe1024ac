"""Canvas M-RoPE of MiniCPM-V 4.7: a thumbnail is stretched over the canvas of its tiles."""

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

    The tiles of a picture form rows and columns on a canvas of H × W patches, sized as if every tile were as large as
    the first; a picture without tiles is its own canvas. Text continues at c + max(H, W) + 1.

    - Patch (i, j) of an h×w thumbnail is at c + round(i·(H−1)/(h−1)) and c + round(j·(W−1)/(w−1)), or at c if h or w
      is 1; these ids are computed in float32, and halves round to even.
    - The marker before a thumbnail is at max(c − 1, 0), the marker after it at (c + H, c + W). The markers of a tile
      are at its first and its last patch.
    - Tokens between two tiles, which end a row of tiles, are at the row of the last patches and at column c + W. All
      other tokens after a marker are at c.

    A Grid is a picture without markers. Source: MiniCPM-V 4.7 in Transformers.
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
        # Tiles larger than the first may extend beyond the canvas.
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
    """Layout of thumbnails and tiles on their canvases.

    Args:
        tile: (grids,) whether the grid is a tile.
        head: (grids,) index of the thumbnail or plain grid to which the grid belongs, possibly itself.
        sides: (2, grids) rows and columns of the canvas.
        corner: (2, grids) row and column of the grid's first patch on the canvas.
        row_end: (2, grids) row and column of the tokens between one tile and the next; 0, 0 for all other grids.
        stretched: (grids,) whether the grid is a thumbnail with tiles.
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
        # The first tile with tokens after it ends the first row. Rows of unequal lengths are treated as one row.
        columns = tiles.copy()
        ends = between & (grids.extra_tokens > 0)
        np.minimum.at(columns, picture[ends], number[ends] + 1)
        columns = np.where(tiles % np.maximum(columns, 1) > 0, tiles, columns)[picture]
        has_tiles = tiles[picture] > 0
        rows = tiles[picture] // np.maximum(columns, 1)
        first = sides[:, np.minimum(heads + 1, count - 1)[picture]]
        cell = np.where(tile, np.stack(np.divmod(number, np.maximum(columns, 1))), 0)
        canvas = np.where(has_tiles, first * np.stack([rows, columns]), sides)
        row_end = np.stack([(cell[0] + 1) * first[0] - 1, canvas[1]])
        return cls(tile, heads[picture], canvas, cell * first, np.where(between, row_end, 0), ~tile & has_tiles)


class _Runs(NamedTuple):
    """Runs of tokens with affine ids.

    Args:
        owner: (runs,) index of the grid.
        part: (runs,) sort key of the run within its grid.
        tokens: (runs,) number of tokens.
        skip: (runs,) raster index of the first token in a raster of ``height`` and ``width``.
        height: (runs,) rows of the raster.
        width: (runs,) columns of the raster.
        ids: (3, runs) ids at row 0 and column 0.
        down: (runs,) step of the second axis between rows.
        along: (runs,) step of the third axis between columns, never 0: ids and steps of 0 are padding.
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
    """Build the runs of the two markers of thumbnails and tiles, and of the tokens after the second marker."""
    assert grids.kind is not None
    assert grids.extra_tokens is not None
    marked = grids.kind >= THUMBNAIL
    opened = np.where(layout.tile, origin + layout.corner, np.maximum(origin - 1, 0))
    closed = origin + np.where(layout.tile, layout.corner + grids.extents[1:] - 1, layout.sides)
    after = origin + layout.row_end
    last = np.iinfo(np.int64).max
    runs = []
    for part, rows_and_columns, tokens in (
        (-1, opened, marked.astype(np.int64)),
        (last - 1, closed, marked.astype(np.int64)),
        (last, after, grids.extra_tokens),
    ):
        (owner,) = tokens.nonzero()
        one = np.ones_like(owner)
        ids = np.stack([origin, *rows_and_columns])[:, owner]
        # The raster is one column wide, so ``along`` changes no id.
        runs.append(_Runs(owner, part * one, tokens[owner], 0 * one, tokens[owner], one, ids, 0 * one, one))
    return runs


def _patches(scheme: Scheme, grids: Grids, layout: _Layout, origin: IntArray) -> list[_Runs]:
    """Build the runs of patches: one per tile and per picture without tiles, several per stretched thumbnail."""
    (whole,) = (~layout.stretched).nonzero()
    height, width = grids.height[whole], grids.width[whole]
    ids = np.stack([origin, *(origin + layout.corner)])[:, whole]
    zero, one = np.zeros_like(whole), np.ones_like(whole)
    affine = _Runs(whole, zero, height * width, zero, height, width, ids, one, one)

    (stretched,) = layout.stretched.nonzero()
    patches = (grids.height * grids.width)[stretched]
    check_pieces(scheme, int(patches.astype(np.float64).sum()))
    thumbnail, patch = ragged_arange(patches)
    owner = stretched[thumbnail]
    row, column = np.divmod(patch, grids.width[owner])
    down = _spread(layout.sides[0, owner], grids.height[owner], row)
    along = _spread(layout.sides[1, owner], grids.width[owner], column)
    # A patch joins the run of the previous patch if its step from that patch is positive and equals the run's step.
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
    """Return element ``index`` of ``torch.linspace(0, side - 1, count)`` in float32, rounded to an integer.

    Like torch, compute the first half from the front and the rest from the back. Since the step is rounded, values that
    would be exact halves may round differently: the middle one of 23 numbers from 0 to 13 becomes 7, not 6.
    """
    last = (side - 1).astype(np.float32)
    step = last / np.maximum(count - 1, 1).astype(np.float32)
    front, back = step * index.astype(np.float32), last - step * (count - 1 - index).astype(np.float32)
    return np.where(count > 1, np.rint(np.where(index < count // 2, front, back)), 0).astype(np.int64)
