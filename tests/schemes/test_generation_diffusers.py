"""Ids of generation schemes equal those of diffusers' pipelines for random image sizes and text lengths.

tests/integrations/test_diffusers_settings.py compares the rotations of every transformer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from oracle import placed
from tolerance import gamma

from mmpos import Grid, Scheme, Text
from mmpos.schemes import Cosmos3, Flux, Ltx
from mmpos.segments.kinds import Segment

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

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
    draw = random.Random(f"{layout.__name__}, slow")
    for _ in range(100):
        drawn = layout(draw)
        positions = placed(drawn.document, drawn.scheme)
        got = positions.dense().astype(np.float64)
        assert got.shape == drawn.ids.shape
        # diffusers computes fractional ids in float32.
        bound = 0 if not positions.fractional else gamma(8) * (np.abs(got) + 2)
        assert (np.abs(got - drawn.ids) <= bound).all()
