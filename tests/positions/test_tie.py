"""The Tie family: its symmetries under transposition, its strides and its numbers.

tests/schemes/test_scheme_properties.py measures that reversed grids mirror their ids and that ids are distinct.
"""

from __future__ import annotations

from itertools import product
from math import gcd

import pytest
from oracle import Id, exact, placed

from mmpos import Grid, Text

SIDES = tuple(product(range(1, 13), repeat=2))


@pytest.mark.parametrize("name", ["rope-tie", "rope-tie-fractional", "rope-tie-lcm", "rope-tie-v2"])
def test_t10_transposing_the_image_swaps_the_axes_and_ids_are_strictly_inside(name: str) -> None:
    for height, width in SIDES:
        ids, transposed = (
            exact(placed([Grid(*sides), Text(1)], name, 4)) for sides in ((height, width), (width, height))
        )
        for (i, j), (row, column) in zip(product(range(height), range(width)), ids, strict=False):
            assert transposed[j * height + i] == (column, row)
            assert 3 < row < ids[-1][0]


def test_t8_unit_strides_are_symmetric_only_for_squares() -> None:
    symmetric = set()
    for height, width in SIDES:
        positions = placed([Text(4), Grid(height, width), Text(1)], "naive-2d")
        ids = exact(positions)
        first, final, following = ids[4], ids[-2], ids[-1]
        if [a - 3 for a in first] == [k - b for k, b in zip(following, final, strict=True)]:
            symmetric.add((height, width))
    assert symmetric == {(n, n) for n in range(1, 13)}


def test_t9_the_integer_strides_are_multiples_of_the_smallest() -> None:
    """The strides satisfy (h+1)·s = (w+1)·t; rope-tie uses gcd(h+1, w+1) times the smallest solution (rope-tie-lcm)."""
    for height, width in SIDES:
        common = gcd(height + 1, width + 1)
        smallest = ((width + 1) // common, (height + 1) // common)
        solutions = [(s, t) for s, t in product(range(1, 40), repeat=2) if (height + 1) * s == (width + 1) * t]
        assert solutions == [(k * smallest[0], k * smallest[1]) for k in range(1, len(solutions) + 1)]
        assert _strides("rope-tie-lcm", height, width) == smallest
        assert _strides("rope-tie", height, width) == (common * smallest[0], common * smallest[1])


def _strides(name: str, height: int, width: int) -> Id:
    """Return the distance between the first patch and L = 0, which is one stride in these two schemes."""
    return exact(placed([Grid(height, width)], name, 1))[0]
