"""Schemes of generation models: handwritten ids on every axis, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from oracle import exact, placed
from refusals import assert_refused

from mmpos import Grid, InvalidInputError, LimitExceededError, Scheme, SegmentTable, Text, UnsupportedError, place
from mmpos.positions.place import ids_consumed
from mmpos.schemes import (
    NOT_AFFINE,
    SCHEMES,
    Allegro,
    CogVideoX,
    Cosmos,
    Flux,
    Flux2,
    Flux3,
    Kandinsky,
    Ltx,
    Ltx2,
    Lumina2,
    MiniMaxH3,
    QwenImage,
    get_scheme,
)
from mmpos.segments import Thumbnail, Tile
from mmpos.segments.kinds import Audio, Segment

HALF = Fraction(1, 2)


def test_an_image_in_bagel_consumes_one_id() -> None:
    assert ids_consumed("bagel", [Grid(24, 24), Grid(1, 1)]).tolist() == [1, 1]
    assert placed([Grid(1, 3)], "bagel").is_grid.tolist() == [True]
    pictures: list[list[Segment]] = [[Thumbnail(1, 1, tokens_after=1)], [Thumbnail(1, 1), Tile(1, 1)]]
    for wrong in pictures:
        with pytest.raises(UnsupportedError, match="bagel: got tiles or tokens after a thumbnail"):
            placed(wrong, "bagel")


def test_cogvideox_as_released_has_a_different_step_in_a_region_that_does_not_begin_at_0() -> None:
    # 45 rows cover all 30 rows of the base grid; 30 columns cover 20 of its 45 columns, starting at column 12.
    released, intended = (
        [row[2] for row in exact(placed([Grid(45, 30)], CogVideoX(as_released=as_released)))[:30]]
        for as_released in (True, False)
    )
    assert (released[0], intended[0]) == (12, 12)
    assert {b - a for a, b in pairwise(released)} == {(Fraction(32 * 29, 30) - 12) / 29}
    assert {b - a for a, b in pairwise(intended)} == {Fraction(20, 30)}


NO_REFERENCES = [
    "lumina2", "ovis-image", "ideogram4", "hunyuan-image", "wan", "hunyuan-video", "cogvideox", "allegro", "ltx",
    "ltx2", "cosmos", "kandinsky", MiniMaxH3(),
]  # fmt: skip
"""Layouts in which a second grid would have the ids of the first."""


@pytest.mark.parametrize("scheme", NO_REFERENCES, ids=str)
def test_a_second_grid_is_refused_by_layouts_that_know_no_references(scheme: str | Scheme) -> None:
    grid = Grid(2, 2, seconds_per_frame=Fraction(1, 25))
    alone = placed([grid], scheme).dense(dtype="float64")
    assert np.array_equal(place(SegmentTable.from_documents([[grid]] * 2), scheme).dense(dtype="float64")[:, 4:], alone)
    with pytest.raises(UnsupportedError, match=r"^documents\[1\]\[1\]: got another grid, want one grid per doc"):
        place(SegmentTable.from_documents([[grid], [grid, grid]]), scheme)


@pytest.mark.parametrize(
    "scheme", ["wan", "hunyuan-video", "cogvideox", "allegro", "kandinsky", "cosmos", "cosmos3", Ltx(causal_offset=8)]
)
def test_parts_of_a_video_have_the_ids_of_the_whole(scheme: str | Scheme) -> None:
    video = Grid(2, 3, frames=5, seconds_per_frame=Fraction(1, 30))
    step = 8 if isinstance(scheme, Ltx) else 1  # LTX counts frames of the video
    parts = [replace(video, frames=2, first_frame=0), replace(video, frames=3, first_frame=2 * step)]
    assert exact(placed(parts, scheme)) == exact(placed([video], scheme))


def test_a_first_frame_is_refused_by_layouts_without_one() -> None:
    schemes = [scheme() for scheme in SCHEMES.values() if not scheme.keyframes]
    assert {scheme.name for scheme in schemes} > {"rope-tie", "mrope-qwen2.5", "flux", "qwen-image", "anyflow-far"}
    for scheme in schemes:
        with pytest.raises(UnsupportedError, match=r"^documents\[0\]\[0\]: got a grid with a first_frame, want non"):
            placed([Grid(2, 2, first_frame=0)], scheme)


@pytest.mark.parametrize(
    ("scheme", "grid"),
    [
        (Ltx2(), Grid(1, 1, frames=2, seconds_per_frame=Fraction(1, 2**31 - 1))),
        (Ltx2(), Grid(1, 1, frames=2, seconds_per_frame=2**31 - 1)),
        (Ltx(), Grid(1, 1, frames=2, seconds_per_frame=Fraction(2**31 - 1, 2**31 - 3))),
        (Ltx(), Grid(1, 1, seconds_per_frame=1000, first_frame=2**31 - 1)),
        (Kandinsky(2**31 - 1, Fraction(1, 2**31 - 1)), Grid(1, 1, first_frame=1 - 2**31)),
        (Cosmos(tokens_per_second=2**31 - 1), Grid(1, 1, frames=2, seconds_per_frame=2**31 - 1, first_frame=9)),
        ("cogvideox", Grid(30, 45, first_frame=2**31 - 1, frames=2)),
    ],
    ids=range(7),
)
def test_absurd_times_and_first_frames_are_refused(scheme: str | Scheme, grid: Grid) -> None:
    with pytest.raises(LimitExceededError):
        placed([grid], scheme)


@pytest.mark.parametrize("name", NOT_AFFINE)
def test_layouts_that_are_not_affine_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        get_scheme(name)
    assert str(raised.value) == f"scheme: got {name!r}, which is not supported: {NOT_AFFINE[name]}"


FIRST = "documents[0][0]: got"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: placed([Grid(2, 2, frames=2)], "flux"), UnsupportedError,
         f"{FIRST} a grid with frames, want one grid per frame in scheme"),
        (lambda: placed([Text(1)], "wan"), UnsupportedError, f"{FIRST} text, want grids only in scheme 'wan'"),
        (lambda: placed([Audio(1)], "ltx2"), UnsupportedError, f"{FIRST} audio, want grids only in scheme 'ltx2'"),
        (lambda: placed([Audio(1)], "flux"), UnsupportedError, f"{FIRST} audio, want text and grids only in sch"),
        (lambda: placed([Grid(2, 3)], MiniMaxH3()), UnsupportedError,
         "minimax-h3: got a grid of 2 × 3, whose ids are over √6, want h·w to be a square"),
        (lambda: Flux(first=2), InvalidInputError, "Flux.first: got 2"),
        (lambda: Flux2(reference_step=0), InvalidInputError, "Flux2.reference_step: got 0"),
        (lambda: Flux3(row_step=0.5), InvalidInputError, "Flux3.row_step: got 0.5, want an integer or Fraction > 0"),  # type: ignore[arg-type]
        (lambda: QwenImage(layered=1), InvalidInputError, "QwenImage.layered: got 1"),  # type: ignore[arg-type]
        (lambda: Lumina2(image_at=-1), InvalidInputError, "Lumina2.image_at: got -1"),
        (lambda: CogVideoX(base_width=0), InvalidInputError, "CogVideoX.base_width: got 0"),
        (lambda: Ltx(causal_offset=9), InvalidInputError, "Ltx.causal_offset: got 9"),
        (lambda: Ltx2(axes=2), UnsupportedError, "Ltx2.axes: got 2, want 1 or 3"),
        (lambda: Kandinsky(frame_step=Fraction(1, 2**31)), LimitExceededError, "Kandinsky.frame_step: got 1/21474"),
        (lambda: Kandinsky(Fraction(1, 2**31 - 1), Fraction(1, 2**31 - 3)), LimitExceededError, "Kandinsky: got steps"),
        (lambda: Allegro(1, Fraction(1, 2**31 - 1), Fraction(1, 2**31 - 3)), LimitExceededError, "Allegro: got steps"),
        (lambda: Cosmos(tokens_per_second=0), InvalidInputError, "Cosmos.tokens_per_second: got 0"),
    ],
)  # fmt: skip
def test_unsupported_segments_and_parameters_are_refused(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    assert_refused(message, make, error)
