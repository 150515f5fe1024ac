"""Canvas M-RoPE: hand-computed ids of thumbnails, tiles and markers, and the rounding of torch.linspace."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmpos import Grid, PositionTable, SegmentTable, Text, place
from mmpos.segments import Thumbnail, Tile
from mmpos.segments.kinds import Segment


def placed(*document: Segment, start: int = 0) -> PositionTable:
    return place(SegmentTable.from_documents([document]), "mrope-canvas", start)


def ids(positions: PositionTable) -> list[tuple[int, ...]]:
    return [tuple(column) for column in positions.dense().T.tolist()]


@pytest.mark.usefixtures("way")
def test_a_thumbnail_is_stretched_over_the_tiles_of_a_row() -> None:
    # The canvas is 2×4 and begins at 2; columns 0 and 1 of the thumbnail are columns 0 and 3 of the canvas.
    positions = placed(Text(2), Thumbnail(2, 2), Tile(2, 2), Tile(2, 2, tokens_after=1), Text(1))
    assert ids(positions) == [
        *[(0, 0, 0), (1, 1, 1)],
        *[(2, 1, 1), (2, 2, 2), (2, 2, 5), (2, 3, 2), (2, 3, 5), (2, 4, 6)],
        *[(2, 2, 2), (2, 2, 2), (2, 2, 3), (2, 3, 2), (2, 3, 3), (2, 3, 3)],
        *[(2, 2, 4), (2, 2, 4), (2, 2, 5), (2, 3, 4), (2, 3, 5), (2, 3, 5), (2, 2, 2)],
        (7, 7, 7),
    ]
    assert (positions.next_positions.tolist(), positions.deltas.tolist()) == ([8], [-14])


@pytest.mark.usefixtures("way")
def test_tokens_between_tiles_end_a_row() -> None:
    # The canvas is 2×2 and begins at 0, so the marker before the thumbnail cannot be at -1.
    positions = placed(Thumbnail(1, 1, tokens_after=2), Tile(1, 2, tokens_after=2), Tile(1, 2))
    assert ids(positions) == [
        *[(0, 0, 0), (0, 0, 0), (0, 2, 2), (0, 0, 0), (0, 0, 0)],
        *[(0, 0, 0), (0, 0, 0), (0, 0, 1), (0, 0, 1), (0, 0, 2), (0, 0, 2)],
        *[(0, 1, 0), (0, 1, 0), (0, 1, 1), (0, 1, 1)],
    ]
    assert positions.next_positions.tolist() == [3]


@pytest.mark.usefixtures("way")
def test_a_picture_without_tiles_is_its_own_canvas() -> None:
    # A 1×2 thumbnail begins at 5 and consumes max(1, 2) + 1 ids. A grid, which has no markers, begins at 8, and a 2×1
    # thumbnail at 11.
    positions = placed(Thumbnail(1, 2, tokens_after=1), Grid(1, 2), Thumbnail(2, 1), Text(1), start=5)
    assert ids(positions) == [
        *[(5, 4, 4), (5, 5, 5), (5, 5, 6), (5, 6, 7), (5, 5, 5)],
        *[(8, 8, 8), (8, 8, 9)],
        *[(11, 10, 10), (11, 11, 11), (11, 12, 11), (11, 13, 12)],
        (14, 14, 14),
    ]


def test_rows_of_unequal_lengths_become_one_row() -> None:
    # A row of two tiles and a row of one tile become a row of three, with H = 1 and W = 3; its end token is in column
    # 3.
    positions = placed(Thumbnail(1, 1), Tile(1, 1), Tile(1, 1, tokens_after=1), Tile(1, 1))
    assert ids(positions)[3:] == [*[(0, 0, 0)] * 3, *[(0, 0, 1)] * 3, (0, 0, 3), *[(0, 0, 2)] * 3]
    assert positions.next_positions.tolist() == [4]


def test_a_tile_beyond_the_canvas_moves_only_the_next_position() -> None:
    positions = placed(Thumbnail(1, 1), Tile(1, 1), Tile(5, 1), Text(1))
    assert ids(positions)[-2:] == [(0, 4, 1), (3, 3, 3)]
    assert positions.next_positions.tolist() == [5]
    assert placed(Thumbnail(1, 1), Tile(1, 1), Tile(2, 1), Text(1)).next_positions.tolist() == [4]


@pytest.mark.usefixtures("way")
def test_thumbnail_ids_are_rounded_as_in_linspace() -> None:
    # Every canvas of up to 120 rows, with every thumbnail of up to 24 rows, including halves that round to odd numbers.
    sizes = [(canvas, rows) for rows in range(1, 25) for canvas in range(1, 121)]
    documents: list[list[Segment]] = [[Thumbnail(rows, 1), Tile(canvas, 1)] for canvas, rows in sizes]
    positions = place(SegmentTable.from_documents(documents), "mrope-canvas")
    dense, first = positions.dense()[1], positions.cu_seqlens[:-1] + 1
    got = [dense[at : at + rows] for at, (_, rows) in zip(first.tolist(), sizes, strict=True)]
    want = [torch.linspace(0, canvas - 1, rows).round().long().numpy() for canvas, rows in sizes]
    np.testing.assert_array_equal(np.concatenate(got), np.concatenate(want))
    assert got[sizes.index((14, 23))][11] == 7
    assert got[sizes.index((8, 7))].tolist() == [0, 1, 2, 4, 5, 6, 7]
