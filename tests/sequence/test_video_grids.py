"""Grids with frames under every scheme that supports them: hand-computed ids."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import pytest
from oracle import CASES, Id, exact, placed

from mmpos import Grid, Scheme, Text
from mmpos.schemes import MRopeQwen25, MRopeTransformers, RopeTie, RopeTieFractional, RopeTieLcm, RopeTieV2, get_scheme


class Case1x2(NamedTuple):
    """Frames of one row and two columns, after one text token at id 0 and before another text token."""

    scheme: str | Scheme
    frames: int
    ids: list[Id]
    text: int
    following: int


F = Fraction
BY_HAND = [
    # L = 0, f = 2, h = 1, w = 2; strides 2·3, 3·3, 3·2, K = 3·2·3.
    Case1x2(RopeTie(axes=3), 2, [(6, 9, 6), (6, 9, 12), (12, 9, 6), (12, 9, 12)], 18, 19),
    # E = 4: strides 5/3, 5/2, 5/3.
    Case1x2(
        RopeTieFractional(axes=3),
        2,
        [(F(t, 3), F(5, 2), F(j, 3)) for t in (5, 10) for j in (5, 10)],
        5,
        6,
    ),
    # lcm(3, 2, 3) = 6.
    Case1x2(RopeTieLcm(axes=3), 2, [(2, 3, 2), (2, 3, 4), (4, 3, 2), (4, 3, 4)], 6, 7),
    # The centre is 5/2 on every axis.
    Case1x2(RopeTieV2(axes=3), 2, [(2, F(5, 2), 2), (2, F(5, 2), 3), (3, F(5, 2), 2), (3, F(5, 2), 3)], 5, 6),
    Case1x2(RopeTieV2(axes=3, rounding="floor"), 2, [(2, 2, 2), (2, 2, 3), (3, 2, 2), (3, 2, 3)], 5, 6),
    Case1x2("flatten", 2, [(1,), (2,), (3,), (4,)], 5, 6),
    Case1x2("v2pe", 3, [(F(k, 4),) for k in range(1, 7)], 3, 4),
    Case1x2("mrope", 3, [(t, 1, j) for t in (1, 2, 3) for j in (1, 2)], 4, 5),
    # Text continues at 1 + max(1, 2) = 3; the next position is larger than all ids, including those of frames.
    Case1x2("mrope-transformers", 4, [(t, 1, j) for t in (1, 2, 3, 4) for j in (1, 2)], 3, 5),
    # ⌊t · 2.9 · 2⌋ = 0, 5.
    Case1x2(MRopeTransformers(tokens_per_second=2), 2, [(t, 1, j) for t in (1, 6) for j in (1, 2)], 3, 7),
    # ⌊t · 2.9 · 2⌋ = 0, 5, 11.
    Case1x2("mrope-qwen2.5", 3, [(t, 1, j) for t in (1, 6, 12) for j in (1, 2)], 13, 14),
    # ⌊t · 29/10 · 10/3⌋ = ⌊t · 29/3⌋ = 0, 9, 19, 29; exact at frame 3.
    Case1x2(MRopeQwen25(tokens_per_second=F(10, 3)), 4, [(t, 1, j) for t in (1, 10, 20, 30) for j in (1, 2)], 31, 32),
    Case1x2("mrope-interleave-reset", 3, [(t, 0, j) for t in (1, 2, 3) for j in (0, 1)], 4, 5),
    # ⌊t · 2.9 · 25⌋ = 0, 72, 145.
    Case1x2("tmrope", 3, [(t, 1, j) for t in (1, 73, 146) for j in (1, 2)], 147, 148),
    # t · 2.9 · 13 = t · 37.7, which is a whole number at frame 10.
    Case1x2("tmrope-qwen3", 11, [(1 + F(377, 10) * t, 1, j) for t in range(11) for j in (1, 2)], 379, 380),
    Case1x2("videorope", 2, [(1, 1, 1), (1, 1, 2), (3, 3, 3), (3, 3, 4)], 4, 5),
    Case1x2("vrope", 2, [(1, 2, 1, 2), (2, 1, 2, 1), (3, 4, 3, 4), (4, 3, 4, 3)], 5, 6),
]


@pytest.mark.parametrize("case", BY_HAND, ids=lambda case: str(case.scheme))
def test_ids_of_frames_equal_hand_computed_ids(case: Case1x2) -> None:
    video = Grid(1, 2, frames=case.frames, seconds_per_frame=2.9)
    positions = placed([Text(1), video, Text(1)], case.scheme)
    assert exact(positions) == [(0,) * positions.axes, *case.ids, (case.text,) * positions.axes]
    assert positions.next_positions.tolist() == [case.following]


def test_every_frame_of_grid_2d_restarts_at_the_start() -> None:
    assert exact(placed([Grid(1, 2, frames=2)], "grid-2d", 4)) == [(4, 4), (4, 5)] * 2


def test_every_scheme_with_frames_is_tested() -> None:
    names = {get_scheme(case.scheme).name for case in BY_HAND} | {"grid-2d"}
    assert names == {case.name for case in CASES if case.frames}


SEPARATED = [
    # Separators are column 3 of the same grid, with id K on the column axis, except in v2, whose strides leave a gap.
    (RopeTie(axes=3), [(t, 9, j) for t in (6, 12) for j in (6, 12, 18)], 18),
    (RopeTieFractional(axes=3), [(F(t, 3), F(5, 2), F(j, 3)) for t in (5, 10) for j in (5, 10, 15)], 5),
    (RopeTieLcm(axes=3), [(t, 3, j) for t in (2, 4) for j in (2, 4, 6)], 6),
    (RopeTieV2(axes=3), [(t, F(5, 2), j) for t in (2, 3) for j in (2, 3, 4)], 5),
    ("flatten", [(n,) for n in range(1, 7)], 7),
]


@pytest.mark.parametrize(("scheme", "ids", "text"), SEPARATED, ids=[str(scheme) for scheme, _, _ in SEPARATED])
def test_row_separators_of_frames_have_hand_computed_ids(scheme: str | Scheme, ids: list[Id], text: int) -> None:
    positions = placed([Text(1), Grid(1, 2, frames=2, row_separator=True), Text(1)], scheme)
    assert exact(positions)[1:] == [*ids, (text,) * positions.axes]
