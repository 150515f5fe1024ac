"""Properties of schemes: measured ones equal those that follow from the formulas, and docs/compare.md shows them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import product
from math import gcd

import pytest
from oracle import exact, placed
from scheme_properties import MARKS, PAGE, Row, every_scheme, is_symmetric, measure, table

from mmpos import Grid, Text
from mmpos.schemes import LatentScheme, get_scheme

# Derived from the formulas of the schemes, for h×w patches between the text ids L and K:
# symmetric: (L+K)/2 is the middle of the ids on every axis. naive-2d and mrope end where the longer side does; v2pe
#   continues at the next integer; videorope's middle is c for odd sides only; rows of a reset are near 0, as are all
#   axes of xd-rope but one, and the rows of qwen-image-2.1 around 0. In bagel, an image of any size has one id.
# unique: a vision encoder counts every grid from 0, and so does xd-rope without its token axis; ⌊t·¼·2⌋ and ⌊t·25/30⌋
#   of tmrope give two frames one id.
# delta 0: ids consumed minus patches; rows and grid-2d have no next position.
# Ids of h×w: (h+1)(w+1)−1, hw, hw, lcm(h+1, w+1)−1, hw, max(h, w), ⌈hw/4⌉, 1, h+w−1; in three axes with f = 1
#   2(h+1)(w+1)−1, hw, hw, lcm(2, h+1, w+1)−1.
# The last mark, prefix-stable: another frame changes the strides, or the centre, of three-axis ties.
SCHEMES = """
    rope-tie                     ✓✓✓✗✓ 624 1153 ✓
    rope-tie-fractional          ✓✓✓✓✗ 576 576 ✓
    rope-tie-v2                  ✓✓✓✓✗ 576 576 ✓
    rope-tie-lcm                 ✓✓✓✗✓ 24 1153 ✓
    flatten                      ✓✓✓✓✓ 576 576 ✓
    rows                         ✗✗✓–✓ – – ✓
    naive-2d                     ✓✗✓✗✓ 24 576 ✓
    grid-2d                      ––✗–✓ – – ✓
    mrope                        ✓✗✓✗✓ 24 576 ✓
    mrope-transformers           ✓✗✓✗✓ 24 576 ✓
    mrope-qwen2.5                ✓✗✗✗✓ 24 576 ✓
    mrope-qwen3                  ✓✗✓✗✓ 24 576 ✓
    mrope-interleave-reset       ✓✗✓✗✓ 24 576 ✓
    mrope-canvas                 ✓✗✓✗✓ 25 577 ✓
    tmrope                       ✓✗✗✗✓ 24 576 ✓
    tmrope-qwen3                 ✓✗✓✗✗ 24 576 ✓
    v2pe                         ✓✗✓✗✗ 144 144 ✓
    videorope                    ✓✗✓✗✓ 1 1 ✓
    vrope                        ✓✓✓✗✓ 47 576 ✓
    xd-rope                      ✓✗✓✓✓ 576 576 ✓
    qwen-image-2.1               ✓✗✓✗✓ 24 576 ✓
    bagel                        ✓✓✗✗✓ 1 1 ✓
    omnigen2                     ✓✗✓✗✓ 24 576 ✓
    rope-tie(axes=3)             ✓✓✓✗✓ 1249 2307 ✗
    rope-tie-fractional(axes=3)  ✓✓✓✓✗ 576 576 ✗
    rope-tie-v2(axes=3)          ✓✓✓✓✗ 576 576 ✗
    rope-tie-lcm(axes=3)         ✓✓✓✗✓ 49 1153 ✗
    grid-2d(axes=3)              ––✗–✓ – – ✓
    xd-rope(axes=3)              ✓✗✗✓✓ 576 576 ✓
"""
VALUES = {mark: value for value, mark in MARKS.items()}


@cache
def measured() -> Mapping[str, Row]:
    """Measure every scheme."""
    return {scheme.label: measure(scheme) for scheme in every_scheme()}


def by_hand(marks: str, square: str, strip: str, stable: str) -> Row:
    """Read a row of SCHEMES."""
    return (
        *(VALUES[mark] for mark in marks),
        *(None if count == "–" else int(count) for count in (square, strip)),
        VALUES[stable],
    )


def test_every_scheme_has_the_properties_that_follow_from_its_formula() -> None:
    rows = {name: by_hand(*row) for name, *row in map(str.split, SCHEMES.strip().splitlines())}
    assert {scheme.label for scheme in every_scheme() if not isinstance(scheme, LatentScheme)} == set(rows)
    assert {name: measured()[name] for name in rows} == rows


def test_grids_of_generative_models_ignore_the_text_around_them_and_have_stable_ids() -> None:
    rows = {scheme.label: measured()[scheme.label] for scheme in every_scheme() if isinstance(scheme, LatentScheme)}
    assert {(symmetric, delta, stable) for _, symmetric, _, delta, *_, stable in rows.values()} == {
        (False, None, True),
        (None, None, True),
    }


def test_the_page_shows_the_measured_properties() -> None:
    assert f"<!-- properties -->\n{table()}<!-- /properties -->\n" in PAGE.read_text(encoding="utf-8")


# The Tie family: symmetries under transposition, and strides.

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
    symmetric = [sides for sides in SIDES if is_symmetric(get_scheme("naive-2d"), [Grid(*sides)], before=4, start=0)]
    assert symmetric == [(n, n) for n in range(1, 13)]


def test_t9_the_integer_strides_are_multiples_of_the_smallest() -> None:
    """The strides satisfy (h+1)·s = (w+1)·t; rope-tie uses gcd(h+1, w+1) times the smallest solution (rope-tie-lcm)."""
    for height, width in SIDES:
        common = gcd(height + 1, width + 1)
        s, t = (width + 1) // common, (height + 1) // common
        solutions = [(s, t) for s, t in product(range(1, 40), repeat=2) if (height + 1) * s == (width + 1) * t]
        assert solutions == [(k * s, k * t) for k in range(1, len(solutions) + 1)]
        for name, times in (("rope-tie-lcm", 1), ("rope-tie", common)):
            first = exact(placed([Grid(height, width)], name, 1))[0]  # a stride from L = 0 on each axis
            assert first == (times * s, times * t)
