"""Ids of schemes equal handwritten ids on every axis."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from oracle import exact, placed

from mmpos import Grid, SegmentTable, Text, place
from mmpos.schemes import Cosmos, Grid2D, Kandinsky, Ltx2, Lumina2, MRopeQwen25, QwenImage, Wan, XDRope
from mmpos.segments import Thumbnail, Tile
from mmpos.segments.kinds import Segment

HALF, ALMOST = Fraction(1, 2), Fraction(2**31 - 1, 2**31 - 2)

# One line per axis.
LAYOUTS: dict[str, tuple[Any, ...]] = {
    "lumina2 of ERNIE-Image from 1":
        (Lumina2(first=1, image_first=True), [Grid(2, 1), Text(3)], ["4 4 | 1 2 3", "0 1 | 0 0 0", "0 0 0 0 0"]),
    "wan with keyframes": (
        "wan", [Grid(1, 2, frames=3), Grid(2, 1, first_frame=0), Grid(1, 1, frames=2, first_frame=2)],
        ["0 0 1 1 2 2 | 0 0 | 2 3", "0 0 0 0 0 0 | 0 1 | 0 0", "0 1 0 1 0 1 | 0 0 | 0 0"],
    ),
    "wan of ChronoEdit": (
        Wan(skip_length=8), [Grid(1, 1, frames=2), Grid(1, 1, frames=3, first_frame=4)],
        ["0 7 | 4 5 6", "0 0 0 0 0", "0 0 0 0 0"],
    ),
    "qwen-image, layered": (  # the last image is the condition, and text begins at the number of the others
        QwenImage(layered=True), [Text(1), Grid(1, 3), *[Grid(1, 1)] * 3],
        ["3 | 0 0 0 | 1 | 2 | -1", "3 | -1 -1 -1 | -1 | -1 | -1", "3 | -2 -1 0 | -1 | -1 | -1"],
    ),
    "anyflow-far with clean frames": (
        "anyflow-far", [Grid(1, 1, frames=2), Grid(2, 2), Grid(2, 2)],
        ["0 1 | 2 2 2 2 | 2 2 2 2", "1/2 1/2 | 0 0 1 1 | 0 0 1 1", "1/2 1/2 | 0 1 0 1 | 0 1 0 1"],
    ),
    "ltx with a keyframe at 80 before the video": (
        "ltx",
        [
            Grid(1, 1, frames=2, seconds_per_frame=Fraction(1, 25), first_frame=80),
            Grid(1, 2, seconds_per_frame=Fraction(1, 25)),
        ],
        ["-17/25 -169/250 | -1 -1", "-1 " * 4, "-1 -1 | -1 -31/32"],
    ),
    "ltx2 for audio": (
        Ltx2(axes=1, frames_per_latent=4), [Grid(1, 1, frames=3, seconds_per_frame=Fraction(1, 100))],
        ["-1999/2000 -997/1000 -993/1000"],
    ),
    "ltx2 with wider columns": (
        Ltx2(col_step=Fraction(1, 8)), [Grid(1, 2, seconds_per_frame=1)],
        ["-19/20 -19/20", "-63/64 -63/64", "-15/16 -13/16"],
    ),
    "ltx2 with taller rows": (
        Ltx2(row_step=Fraction(3, 8)), [Grid(2, 1, seconds_per_frame=1)],
        ["-19/20 -19/20", "-13/16 -7/16", "-63/64 -63/64"],
    ),
    "cosmos of images": (
        Cosmos(tokens_per_second=3),
        [
            Grid(2, 1, frames=2, seconds_per_frame=Fraction(1, 3)),
            Grid(1, 1, frames=2, seconds_per_frame=1, first_frame=2),
        ],
        ["0 0 1 1 | 6 9", "0 1 0 1 0 0", "0 " * 6],
    ),
    "kandinsky with a last frame": (
        Kandinsky(frame_step=HALF), [Grid(1, 1, frames=2), Grid(1, 1, first_frame=5), Grid(1, 1, first_frame=-1)],
        ["0 1/2 | 5/2 | -1/2", "0 " * 4, "0 " * 4],
    ),
    "grid-2d, class tokens at the start": (
        Grid2D("merged", 1, first=1), [Text(1), Text(1), Grid(2, 2), Grid(1, 2), Text(1)],
        ["0 | 0 | 1 1 2 2 | 1 1 | 0", "0 | 0 | 1 2 1 2 | 1 2 | 0"],
    ),
    "mrope-qwen2.5 just before a second":
        ("mrope-qwen2.5", [Grid(1, 1, frames=2, seconds_per_frame=1 - Fraction(1, 10**9))], ["0 1", "0 0", "0 0"], 2),
    "mrope-qwen2.5 with a rate that cancels": (  # before limits are checked
        MRopeQwen25(tokens_per_second=1 / ALMOST),
        [Grid(1, 1, frames=9, seconds_per_frame=ALMOST)],
        ["0 1 2 3 4 5 6 7 8", "0 " * 9, "0 " * 9], 9,
    ),
    "mrope-qwen3, the example of Hy4's get_rope_index": (  # separators are one more column
        "mrope-qwen3",
        [Grid(2, 2, row_separator=True), Grid(2, 2, row_separator=True), Text(1)],
        ["0 0 0 0 0 0 | 3 3 3 3 3 3 | 6", "0 0 0 1 1 1 | 3 3 3 4 4 4 | 6", "0 1 2 0 1 2 | 3 4 5 3 4 5 | 6"], 7,
    ),
    "xd-rope of 5 axes from image 4": (  # a separator is in the next column
        XDRope(axes=5, first_image=4),
        [Grid(1, 2, row_separator=True), Text(1), Grid(2, 1)],
        ["0 1 2 | 3 | 4 5", "0 1 2 | 3 | 4 5", "0 1 2 | 3 | 0 0", "0 0 0 | 3 | 0 1", "4 4 4 | 3 | 5 5"], 6,
    ),
    # The canvas is 2×4 and begins at 2; columns 0 and 1 of the thumbnail are columns 0 and 3 of the canvas.
    "mrope-canvas, a thumbnail over two tiles": (
        "mrope-canvas",
        [Text(2), Thumbnail(2, 2), Tile(2, 2), Tile(2, 2, tokens_after=1), Text(1)],
        [
            "0 1 | 2 2 2 2 2 2 | 2 2 2 2 2 2 | 2 2 2 2 2 2 2 | 7",
            "0 1 | 1 2 2 3 3 4 | 2 2 2 3 3 3 | 2 2 2 3 3 3 2 | 7",
            "0 1 | 1 2 5 2 5 6 | 2 2 3 2 3 3 | 4 4 5 4 5 5 2 | 7",
        ], 8,
    ),
    # The canvas is 2×2 and begins at 0, so the marker before the thumbnail cannot be at -1.
    "mrope-canvas, tokens that end a row": (
        "mrope-canvas", [Thumbnail(1, 1, tokens_after=2), Tile(1, 2, tokens_after=1), Tile(1, 2)],
        ["0 0 0 0 0 | 0 0 0 0 0 | 0 0 0 0", "0 0 2 0 0 | 0 0 0 0 0 | 1 1 1 1", "0 0 2 0 0 | 0 0 1 1 2 | 0 0 1 1"], 3,
    ),
    # A 1×2 thumbnail begins at 5 and consumes max(1, 2) + 1 ids; a grid has no markers and begins at 8.
    "mrope-canvas without tiles": (
        "mrope-canvas",
        [Text(5), Thumbnail(1, 2, tokens_after=1), Grid(1, 2), Thumbnail(2, 1), Text(1)],
        [
            "0 1 2 3 4 | 5 5 5 5 5 | 8 8 | 11 11 11 11 | 14",
            "0 1 2 3 4 | 4 5 5 6 5 | 8 8 | 10 11 12 13 | 14",
            "0 1 2 3 4 | 4 5 6 7 5 | 8 9 | 10 11 11 12 | 14",
        ], 15,
    ),
    # A row of two tiles and a row of one tile become a row of three; its end token is in column 3.
    "mrope-canvas, rows of unequal lengths": (
        "mrope-canvas", [Thumbnail(1, 1), Tile(1, 1), Tile(1, 1, tokens_after=1), Tile(1, 1)],
        ["0 0 0 | 0 0 0 | 0 0 0 0 | 0 0 0", "0 0 1 | 0 0 0 | 0 0 0 0 | 0 0 0", "0 0 3 | 0 0 0 | 1 1 1 3 | 2 2 2"], 4,
    ),
    # Such a tile moves only the next position.
    "mrope-canvas, a tile beyond the canvas": (
        "mrope-canvas", [Thumbnail(1, 1), Tile(1, 1), Tile(5, 1), Text(1)],
        ["0 0 0 | 0 0 0 | 0 0 0 0 0 0 0 | 3", "0 0 1 | 0 0 0 | 0 0 1 2 3 4 4 | 3", "0 0 2 | 0 0 0 | 1 1 1 1 1 1 1 | 3"],
        5,
    ),
    "mrope-canvas, a tile just beyond the canvas": (
        "mrope-canvas", [Thumbnail(1, 1), Tile(1, 1), Tile(2, 1), Text(1)],
        ["0 0 0 | 0 0 0 | 0 0 0 0 | 3", "0 0 1 | 0 0 0 | 0 0 1 1 | 3", "0 0 2 | 0 0 0 | 1 1 1 1 | 3"], 4,
    ),
}  # fmt: skip
"""Settings, roles and segments that neither diffusers' classes nor the conformance cases have: a scheme, a document,
its ids, and the next position if there is one.
"""


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("case", LAYOUTS)
def test_ids_equal_handwritten_ids_and_documents_of_a_batch_are_independent(case: str) -> None:
    scheme, document, axes, *following = LAYOUTS[case]
    want = [*zip(*(map(Fraction, line.replace("|", " ").split()) for line in axes), strict=True)]
    positions = place(SegmentTable.from_documents([document, document[:1], document]), scheme)
    assert exact(positions.slice(0, len(want))) == exact(positions)[-len(want) :] == want
    assert positions.resumable.all() == bool(following)
    if following:
        assert positions.next_positions[::2].tolist() == following * 2
    else:
        assert exact(placed(document, scheme, 5)) == [tuple(value + 5 for value in position) for position in want]


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
