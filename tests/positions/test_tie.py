"""The Tie family: its defining symmetries (T2 to T10), and its numbers."""

from __future__ import annotations

from functools import cache
from itertools import product
from math import gcd, prod
from typing import NamedTuple

import pytest
from oracle import Document, Id, exact, placed

from mmpos import Grid, SegmentTable, Text, place
from mmpos.schemes import RopeTie, RopeTieFractional, RopeTieLcm, RopeTieV2

FAMILY = {cls.name: cls for cls in (RopeTie, RopeTieFractional, RopeTieLcm, RopeTieV2)}
SIDES = {2: tuple(product(range(1, 13), repeat=2)), 3: tuple(product(range(1, 5), repeat=3))}
MEMBERS = pytest.mark.parametrize(
    ("name", "axes", "last"),
    [(name, axes, last) for name in FAMILY for axes in (2, 3) for last in (-1, 3, 1000)],
)


class Block(NamedTuple):
    """A grid, the last text id L before it, and the first text id K after it."""

    sides: tuple[int, ...]
    last: int
    following: int
    ids: list[Id]


@cache
def blocks(name: str, axes: int, last: int) -> list[Block]:
    """Place grids of every size after the text id L, in one batch."""
    documents: list[Document] = [[Grid.from_thw((1,) * (3 - axes) + sides), Text(1)] for sides in SIDES[axes]]
    positions = place(SegmentTable.from_documents(documents), FAMILY[name](axes=axes), last + 1)
    ids, cuts = exact(positions), positions.cu_seqlens.tolist()
    grids = []
    for sides, begin, end in zip(SIDES[axes], cuts, cuts[1:], strict=False):
        following = ids[end - 1]
        assert following == (following[0],) * axes
        grids.append(Block(sides, last, int(following[0]), ids[begin : end - 1]))
    return grids


@MEMBERS
def test_t4_reversing_the_grid_mirrors_its_ids(name: str, axes: int, last: int) -> None:
    """It follows that the gaps on both sides are equal (T2), and that the mean id is in the middle (T5)."""
    for block in blocks(name, axes, last):
        mirrored = [tuple(last + block.following - value for value in position) for position in reversed(block.ids)]
        assert block.ids == mirrored, block.sides


@MEMBERS
def test_t6_ids_are_distinct_and_strictly_inside(name: str, axes: int, last: int) -> None:
    for block in blocks(name, axes, last):
        assert len(set(block.ids)) == len(block.ids) == prod(block.sides)
        assert all(last < value < block.following for position in block.ids for value in position), block.sides


@pytest.mark.parametrize("name", FAMILY)
def test_t10_transposing_the_image_swaps_the_axes(name: str) -> None:
    by_sides = {block.sides: block for block in blocks(name, 2, 3)}
    for (height, width), block in by_sides.items():
        transposed = by_sides[width, height].ids
        swapped = [
            (transposed[j * height + i][1], transposed[j * height + i][0]) for i in range(height) for j in range(width)
        ]
        assert block.ids == swapped


def test_t8_unit_strides_are_symmetric_only_for_squares() -> None:
    symmetric = set()
    for height, width in SIDES[2]:
        positions = placed([Text(4), Grid(height, width), Text(1)], "naive-2d")
        ids = exact(positions)
        first, final, following = ids[4], ids[-2], ids[-1]
        if [a - 3 for a in first] == [k - b for k, b in zip(following, final, strict=True)]:
            symmetric.add((height, width))
    assert symmetric == {(n, n) for n in range(1, 13)}


def test_t9_the_integer_strides_are_multiples_of_the_smallest() -> None:
    """The strides satisfy (h+1)·s = (w+1)·t; rope-tie uses gcd(h+1, w+1) times the smallest solution (rope-tie-lcm)."""
    for height, width in SIDES[2]:
        common = gcd(height + 1, width + 1)
        smallest = ((width + 1) // common, (height + 1) // common)
        solutions = [(s, t) for s, t in product(range(1, 40), repeat=2) if (height + 1) * s == (width + 1) * t]
        assert solutions == [(k * smallest[0], k * smallest[1]) for k in range(1, len(solutions) + 1)]
        assert _strides("rope-tie-lcm", height, width) == smallest
        assert _strides("rope-tie", height, width) == (common * smallest[0], common * smallest[1])


def _strides(name: str, height: int, width: int) -> Id:
    """Return the distance between the first patch and L = 0, which is one stride in these two schemes."""
    return exact(placed([Grid(height, width)], name, 1))[0]


ADVANCES = {
    (24, 24): (624, 576, 576, 24, 24),
    (64, 64): (4224, 4096, 4096, 64, 64),
    (128, 128): (16640, 16384, 16384, 128, 128),
    (1, 576): (1153, 576, 576, 1153, 576),
    (24, 25): (649, 600, 600, 649, 25),
}


@pytest.mark.parametrize("sides", ADVANCES)
def test_documents_grow_as_stated_in_the_table(sides: tuple[int, int]) -> None:
    names = ("rope-tie", "rope-tie-fractional", "rope-tie-v2", "rope-tie-lcm", "mrope")
    consumed = [int(placed([Grid(*sides)], name).next_positions[0]) for name in names]
    assert tuple(consumed) == ADVANCES[sides]
