"""Schemes: ids of every scheme equal those of the oracle, and its measured properties follow from its formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from itertools import product
from math import gcd
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import CASES, Case, batches, exact, place_document, placed, settled
from scheme_properties import MARKS, PAGE, Row, every_scheme, is_symmetric, measure, table

from mmpos import Grid, InvalidInputError, Scheme, SegmentTable, Text, diagnose, place
from mmpos.schemes import SCHEMES, LatentScheme, MRopeQwen25, RopeTieV2, XDRope, get_scheme

STARTS = st.integers(-20, 10_000)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
@settled
@given(data=st.data())
def test_ids_of_a_batch_equal_those_of_the_oracle(case: Case, data: st.DataObject) -> None:
    batch = data.draw(batches(case))
    start: int | list[int] = data.draw(STARTS)
    if case.resumable and data.draw(st.booleans()):
        start = data.draw(st.lists(STARTS, min_size=len(batch), max_size=len(batch)))
    starts = start if isinstance(start, list) else [start] * len(batch)
    positions = place(SegmentTable.from_documents(batch), case.scheme, start)
    want = [place_document(one, case.name, at, **case.params) for one, at in zip(batch, starts, strict=True)]
    ids = [position for document in want for position in document.ids]
    lengths = [len(document.ids) for document in want]
    assert exact(positions) == ids
    assert positions.dense().T.tolist() == [[float(value) for value in position] for position in ids]
    assert positions.lengths.tolist() == lengths
    if case.resumable:
        nexts = [document.next_position or 0 for document in want]
        assert positions.next_positions.tolist() == nexts
        assert positions.deltas.tolist() == [n - s - t for n, s, t in zip(nexts, starts, lengths, strict=True)]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("scheme", ["mrope-qwen2.5", "tmrope", "tmrope-qwen3", "ltx", "ltx2", "cosmos", "cosmos3"])
def test_missing_seconds_are_not_guessed(scheme: str) -> None:
    still = Grid(2, 3, seconds_per_frame=1 if scheme == "ltx2" else None)
    segments = SegmentTable.from_documents([[still], [Grid(1, 1, frames=3)]])
    for _ in range(2):  # the second call finds the plan of the first
        with pytest.raises(InvalidInputError) as raised:
            place(segments, scheme)
        assert str(raised.value) == (
            "documents[1][0]: got 3 frames without a time, want seconds_per_frame of the grid or video, such as 1/fps, "
            "because ids of this scheme depend on it"
        )
    assert placed([still], scheme).num_tokens == 6
    if get_scheme(scheme).keyframes:
        with pytest.raises(InvalidInputError, match=r"^documents\[0\]\[0\]: got 1 frame without a time, want sec"):
            placed([Grid(1, 1, first_frame=80)], scheme)


def test_xd_rope_counting_over_the_batch_continues_after_the_number_of_the_last_image() -> None:
    """The last of four one-token documents has ids 0, 0, 0, 3, so its next position is 4."""
    segments = SegmentTable.from_documents([[Grid(1, 1)]] * 4)
    positions = place(segments, XDRope(counting="batch"))
    assert positions.dense().tolist() == [[0] * 4, [0] * 4, [0] * 4, [0, 1, 2, 3]]
    assert positions.next_positions.tolist() == [1, 2, 3, 4]
    assert positions.deltas.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", SCHEMES)
def test_a_name_specifies_a_scheme_with_default_parameters(name: str) -> None:
    assert (get_scheme(name), get_scheme(name).label) == (SCHEMES[name](), name)


@dataclass(frozen=True)
class Wide(RopeTieV2):
    """A scheme with a parameter without a default."""

    name: ClassVar[str] = "wide"
    width: int = field(kw_only=True)


@pytest.mark.parametrize(
    ("scheme", "label"),
    [
        ("rope-tie", "rope-tie"),
        (RopeTieV2(), "rope-tie-v2"),
        (RopeTieV2(rounding="floor"), "rope-tie-v2(rounding=floor)"),
        (RopeTieV2(axes=3, rounding="floor"), "rope-tie-v2(axes=3, rounding=floor)"),
        (MRopeQwen25(tokens_per_second=Fraction(25, 2)), "mrope-qwen2.5(tokens_per_second=25/2)"),
        (Wide(width=3), "wide(width=3)"),
    ],
    ids=str,
)
def test_the_label_of_a_scheme_contains_its_non_default_parameters(scheme: str | Scheme, label: str) -> None:
    segments = SegmentTable.from_documents([[Text(1), Grid(1, 1), Text(1)]])
    assert get_scheme(scheme).label == label
    assert place(segments, scheme).scheme == label
    assert repr(place(segments, scheme)).endswith(f"scheme={label!r})")
    ids = place(segments, scheme).dense()
    assert str(diagnose(ids, segments, scheme)) == f"All 3 tokens of 1 document have the ids of {label}."


# Properties, which docs/compare.md shows.

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
PROPERTIES = """
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
    """Read a row of PROPERTIES."""
    return (
        *(VALUES[mark] for mark in marks),
        *(None if count == "–" else int(count) for count in (square, strip)),
        VALUES[stable],
    )


def test_every_scheme_has_the_properties_that_follow_from_its_formula() -> None:
    rows = {name: by_hand(*row) for name, *row in map(str.split, PROPERTIES.strip().splitlines())}
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
