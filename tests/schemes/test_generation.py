"""Schemes of generation models: handwritten ids, refusals, and the ids of diffusers' pipelines for random documents.

tests/integrations/test_diffusers_settings.py compares the rotations of every transformer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from oracle import exact, placed
from refusals import assert_refused
from tolerance import gamma

from mmpos import Grid, InvalidInputError, LimitExceededError, Scheme, SegmentTable, Text, UnsupportedError, place
from mmpos.positions.place import ids_consumed
from mmpos.schemes import (
    NOT_AFFINE,
    SCHEMES,
    Allegro,
    CogVideoX,
    Cosmos,
    Cosmos3,
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


# Ids of diffusers.

Ids = npt.NDArray[np.float64]


class Drawn(NamedTuple):
    """A scheme, a random document, and its (axes, tokens) ids in diffusers."""

    scheme: str | Scheme
    document: Sequence[Segment]
    ids: Ids


def pipeline(name: str) -> Any:
    return import_module(f"diffusers.pipelines.{name}")


def ids(*parts: Any) -> Ids:
    """Concatenate ids of shape (tokens, axes) and return them as (axes, tokens)."""
    return np.concatenate([np.asarray(part, np.float64) for part in parts]).T


def sizes(draw: random.Random, most: int = 24) -> tuple[int, int]:
    return draw.randint(1, most), draw.randint(1, most)


def several(draw: random.Random, most: int = 3) -> list[Segment]:
    return [Grid(*sizes(draw)) for _ in range(draw.randint(1, most))]


def flux(draw: random.Random) -> Drawn:
    grids, text = several(draw), draw.randint(1, 40)
    prepare = pipeline("flux.pipeline_flux").FluxPipeline._prepare_latent_image_ids
    parts = [prepare(1, *grid.extents[1:], None, torch.float32) for grid in grids]
    for k, part in enumerate(parts):
        part[:, 0] = k  # FluxKontextPipeline writes 1; BriaFiboEditPipeline writes the number of the reference
    return Drawn("flux", [Text(text), *grids], ids(torch.zeros(text, 3), *parts))


def visualcloze(draw: random.Random) -> Drawn:
    grids = several(draw)
    of = pipeline("visualcloze.pipeline_visualcloze_generation").VisualClozeGenerationPipeline
    images = [torch.zeros(1, 3, 16 * grid.extents[1], 16 * grid.extents[2]) for grid in grids]
    return Drawn(Flux(first=1), grids, ids(of._prepare_latent_image_ids(images, 8, None, torch.float32)))


def flux3(draw: random.Random) -> Drawn:
    grids, text = several(draw), draw.randint(1, 40)
    of = import_module("diffusers.modular_pipelines.flux3.before_denoise")
    scale = of.Flux3PrepareLatentsStep().image_rope_scale
    parts = [of._prepare_image_ids(*grid.extents[1:], scale, -k) for k, grid in enumerate(grids)]
    words = of.Flux3TextRoPEInputsStep._prepare_text_ids(torch.zeros(1, text, 2))
    return Drawn("flux3", [Text(text), *grids], ids(words, *parts))


def longcat_image(draw: random.Random) -> Drawn:
    prepare = pipeline("longcat_image.pipeline_longcat_image_edit").prepare_pos_ids
    grids, text = several(draw, 2), draw.randint(1, 40)
    parts = [
        prepare(1 + k, "image", (text, text), height=grid.extents[1], width=grid.extents[2])
        for k, grid in enumerate(grids)
    ]
    return Drawn("longcat-image", [Text(text), *grids], ids(prepare(0, "text", (0, 0), num_token=text), *parts))


def ovis_image(draw: random.Random) -> Drawn:
    (h, w) = sizes(draw)
    of = pipeline("ovis_image.pipeline_ovis_image").OvisImagePipeline
    return Drawn("ovis-image", [Grid(h, w)], ids(of._prepare_latent_image_ids(1, h, w, None, torch.float32)))


def ideogram4(draw: random.Random) -> Drawn:
    (h, w), text = sizes(draw), draw.randint(1, 40)
    of = pipeline("ideogram4.pipeline_ideogram4").Ideogram4Pipeline
    position_ids = of._prepare_ids([text], h, w, text + 3, "cpu")[0]
    return Drawn("ideogram4", [Text(text), Grid(h, w)], ids(position_ids[0, 3:]))


def video(draw: random.Random) -> tuple[int, int, int]:
    return draw.randint(1, 8), *sizes(draw, 16)


def ltx(draw: random.Random) -> Drawn:
    f, h, w = video(draw)
    fps = draw.choice([24, 25, 30, 12.5])
    grid = Grid(h, w, frames=f, seconds_per_frame=1 / Fraction(fps))
    if draw.random() < 0.5:
        rope_of = import_module("diffusers.models.transformers.transformer_ltx").LTXVideoRotaryPosEmbed(64)
        places = rope_of._prepare_video_coords(1, f, h, w, (8 / fps, 32, 32), torch.device("cpu"))[0]
        return Drawn(Ltx(causal_offset=8), [grid], ids(places * 2 - 1))
    of = pipeline("ltx.pipeline_ltx_condition").LTXConditionPipeline
    first = draw.choice([0, draw.randint(1, 99)])  # that of a condition
    coords = of._scale_video_ids(of._prepare_video_ids(1, f, h, w), 32, 8, first)[0].double()
    coords[0] /= fps
    return Drawn(
        "ltx", [replace(grid, first_frame=first)], ids((2 * coords / torch.tensor([[20.0], [2048.0], [2048.0]]) - 1).T)
    )


def ltx2_keyframe(draw: random.Random) -> Drawn:
    f, h, w = video(draw)
    fps, first = draw.choice([24, 25, 30, 12.5]), draw.randint(1, 99)
    of = pipeline("ltx2.pipeline_ltx2_condition").LTX2ConditionPipeline
    sizes_of = SimpleNamespace(
        transformer_spatial_patch_size=1,
        transformer_temporal_patch_size=1,
        vae_temporal_compression_ratio=8,
        vae_spatial_compression_ratio=32,
    )
    bounds = of._prepare_keyframe_coords(sizes_of, f, h, w, first, 8 * f - 7, fps, torch.device("cpu"))
    grid = Grid(h, w, frames=f, seconds_per_frame=1 / Fraction(fps), first_frame=first)
    base = torch.tensor([[20.0], [2048.0], [2048.0]])
    return Drawn("ltx2", [grid], ids((2 * bounds[0].double().mean(-1) / base - 1).T))


def cosmos3(draw: random.Random) -> Drawn:
    of, text, (f, h, w) = pipeline("cosmos.pipeline_cosmos3_omni"), draw.randint(1, 40), video(draw)
    fps, sound, action = draw.choice([None, 16, 24, 30]), draw.randint(2, 9), draw.randint(2, 9)
    words, following = of.get_3d_mrope_ids_text_tokens(text, 0)
    first = following + 15000
    video_ids, _ = of.get_3d_mrope_ids_vae_tokens(f, h, w, first, True, fps)
    sound_ids, _ = of.get_3d_mrope_ids_vae_tokens(sound, 1, 1, first, True, 25, 24.0, 1)
    grids = [
        Grid(h, w, frames=f, seconds_per_frame=Fraction(1, fps or 24)),
        Grid(1, 1, frames=sound, seconds_per_frame=Fraction(1, 25)),
        Grid(1, 1, frames=action, seconds_per_frame=Fraction(1, 40), first_frame=1),
    ]
    actions, _ = of.get_3d_mrope_ids_vae_tokens(action, 1, 1, first, True, 10, 24.0, 1, 4, start_frame_offset=1)
    return Drawn(Cosmos3(), [Text(text), *grids], ids(words.T, video_ids.T, sound_ids.T, actions.T))


LAYOUTS: list[Callable[[random.Random], Drawn]] = [
    flux, visualcloze, flux3, longcat_image, ovis_image, ideogram4, ltx, ltx2_keyframe, cosmos3,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_ids_of_many_sizes_equal_those_of_diffusers(layout: Callable[[random.Random], Drawn]) -> None:
    pytest.importorskip("diffusers")
    draw = random.Random(f"{layout.__name__}, slow")
    for _ in range(100):
        drawn = layout(draw)
        positions = placed(drawn.document, drawn.scheme)
        got = positions.dense().astype(np.float64)
        assert got.shape == drawn.ids.shape
        # diffusers computes fractional ids in float32.
        bound = 0 if not positions.fractional else gamma(8) * (np.abs(got) + 2)
        assert (np.abs(got - drawn.ids) <= bound).all()
