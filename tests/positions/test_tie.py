"""The Tie family: the symmetry that defines it (T2 to T10), and its numbers."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from itertools import product
from math import gcd, prod
from typing import NamedTuple

import pytest
from oracle import Document, Id, exact, placed

from mmpos import Grid, Scheme, SegmentTable, Text, place
from mmpos.schemes import RopeTie, RopeTieFractional, RopeTieLcm, RopeTieV2

FAMILY = {cls.name: cls for cls in (RopeTie, RopeTieFractional, RopeTieLcm, RopeTieV2)}
SIDES = {2: tuple(product(range(1, 13), repeat=2)), 3: tuple(product(range(1, 5), repeat=3))}
MEMBERS = pytest.mark.parametrize(
    ("name", "axes", "last"),
    [(name, axes, last) for name in FAMILY for axes in (2, 3) for last in (-1, 3, 1000)],
)


class Block(NamedTuple):
    """A grid between the text ids L before it and K after it."""

    sides: tuple[int, ...]
    last: int
    following: int
    ids: list[Id]


@cache
def blocks(name: str, axes: int, last: int) -> list[Block]:
    """Every size placed after the text id L, as one batch."""
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
def test_t4_turning_the_grid_around_mirrors_its_ids(name: str, axes: int, last: int) -> None:
    """So that the gaps on both sides are equal (T2), and the mean id lies in the middle (T5)."""
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
        turned = by_sides[width, height].ids
        swapped = [(turned[j * height + i][1], turned[j * height + i][0]) for i in range(height) for j in range(width)]
        assert block.ids == swapped


def test_t8_strides_of_one_are_symmetric_for_squares_only() -> None:
    symmetric = set()
    for height, width in SIDES[2]:
        positions = placed([Text(4), Grid(height, width), Text(1)], "naive-2d")
        ids = exact(positions)
        first, final, following = ids[4], ids[-2], ids[-1]
        if [a - 3 for a in first] == [k - b for k, b in zip(following, final, strict=True)]:
            symmetric.add((height, width))
    assert symmetric == {(n, n) for n in range(1, 13)}


def test_t9_the_integer_strides_are_multiples_of_the_smallest() -> None:
    """(h+1)·s = (w+1)·t; rope-tie-lcm takes the smallest solution, rope-tie the gcd-th."""
    for height, width in SIDES[2]:
        common = gcd(height + 1, width + 1)
        smallest = ((width + 1) // common, (height + 1) // common)
        solutions = [(s, t) for s, t in product(range(1, 40), repeat=2) if (height + 1) * s == (width + 1) * t]
        assert solutions == [(k * smallest[0], k * smallest[1]) for k in range(1, len(solutions) + 1)]
        assert _strides("rope-tie-lcm", height, width) == smallest
        assert _strides("rope-tie", height, width) == (common * smallest[0], common * smallest[1])


def _strides(name: str, height: int, width: int) -> Id:
    """Distance of the first patch from L = 0, which is one stride in these two."""
    return exact(placed([Grid(height, width)], name, 1))[0]


@pytest.mark.parametrize(
    ("name", "rows", "cols", "following", "gap"),
    [
        ("rope-tie", (7, 11), (6, 9, 12), 15, (4, 3)),
        ("rope-tie-lcm", (7, 11), (6, 9, 12), 15, (4, 3)),
        (
            "rope-tie-fractional",
            (Fraction(16, 3), Fraction(23, 3)),
            (Fraction(19, 4), Fraction(13, 2), Fraction(33, 4)),
            10,
            (Fraction(7, 3), Fraction(7, 4)),
        ),
        ("rope-tie-v2", (6, 7), (Fraction(11, 2), Fraction(13, 2), Fraction(15, 2)), 10, (3, Fraction(5, 2))),
    ],
)
def test_the_worked_example(name: str, rows: Id, cols: Id, following: int, gap: Id) -> None:
    ids = exact(placed([Text(3), Grid(2, 3), Text(1)], name, 1))
    assert ids == [(1, 1), (2, 2), (3, 3), *product(rows, cols), (following, following)]
    assert tuple(value - 3 for value in ids[3]) == tuple(following - value for value in ids[8]) == gap


def test_floor_is_the_truncation_of_hunyuan_image() -> None:
    document: Document = [Text(3), Grid(2, 3), Text(1)]
    floored = placed(document, RopeTieV2(rounding="floor"), 1)
    assert floored.dense().tolist() == [[1, 2, 3, 6, 6, 6, 7, 7, 7, 10], [1, 2, 3, 5, 6, 7, 5, 6, 7, 10]]
    assert floored.dense().dtype.name == "int32"
    odd = placed(document, RopeTieV2(rounding="floor"), -4)
    assert odd.dense().tolist()[1] == [-4, -3, -2, 0, 1, 2, 0, 1, 2, 5]


ADVANCES = {
    (24, 24): (624, 576, 576, 24, 24),
    (64, 64): (4224, 4096, 4096, 64, 64),
    (128, 128): (16640, 16384, 16384, 128, 128),
    (1, 576): (1153, 576, 576, 1153, 576),
    (24, 25): (649, 600, 600, 649, 25),
}


@pytest.mark.parametrize("sides", ADVANCES)
def test_the_growth_table(sides: tuple[int, int]) -> None:
    names = ("rope-tie", "rope-tie-fractional", "rope-tie-v2", "rope-tie-lcm", "mrope")
    consumed = [int(placed([Grid(*sides)], name).next_positions[0]) for name in names]
    assert tuple(consumed) == ADVANCES[sides]


@pytest.mark.parametrize(("height", "width"), [(24, 24), (2, 3), (1, 9), (7, 4)])
def test_the_largest_id_plus_one_is_not_the_next_position(height: int, width: int) -> None:
    positions = placed([Grid(height, width)], "rope-tie", 1)
    wrong = int(positions.dense().max()) + 1
    assert positions.next_positions[0] - wrong == min(height, width)
    if (height, width) == (24, 24):
        assert (wrong, positions.next_positions.tolist()) == (601, [625])


SEPARATED: list[str | Scheme] = [
    *FAMILY,
    *(cls(axes=3) for cls in FAMILY.values()),
    RopeTieV2(rounding="floor"),
    "naive-2d",
]


@pytest.mark.parametrize("scheme", SEPARATED, ids=str)
def test_row_separators_are_column_w_plus_one_and_move_nothing(scheme: str | Scheme) -> None:
    plain = exact(placed([Text(2), Grid(4, 3), Text(1)], scheme))
    separated = exact(placed([Text(2), Grid(4, 3, row_separator=True), Text(1)], scheme))
    grid = separated[2:-1]
    rows = [grid[i : i + 4] for i in range(0, 16, 4)]
    assert [position for row in rows for position in row[:3]] == plain[2:-1]
    assert separated[-1] == plain[-1]
    for row in rows:
        step = row[1][-1] - row[0][-1]
        assert row[3] == (*row[2][:-1], row[2][-1] + step)
