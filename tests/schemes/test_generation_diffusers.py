"""Ids of generation schemes equal those of diffusers' pipelines for random image sizes and text lengths.

tests/integrations/test_diffusers_settings.py compares the schemes whose ids a transformer itself computes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from oracle import placed
from tolerance import FREQUENCY, cos_sin, gamma

from mmpos import Grid, Scheme, Text
from mmpos.schemes import CogVideoX, Cosmos3, Flux, Ltx, Ltx2, Lumina2, MiniMaxH3, QwenImage
from mmpos.segments.kinds import Segment

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

Ids = npt.NDArray[np.float64]


class Rotations(NamedTuple):
    """Rotations of tokens as computed by a class in diffusers.

    Args:
        cos: (tokens, pairs).
        sin: (tokens, pairs).
        dims: number of channels on each axis.
        theta: base of the frequencies.
    """

    cos: Ids
    sin: Ids
    dims: Sequence[int]
    theta: float = 1e4


class Drawn(NamedTuple):
    """A random document, and its ids or rotations in diffusers.

    Args:
        scheme: scheme to be compared.
        document: segments in the document.
        ids: (axes, tokens) ids, or the rotations of tokens.
        tokens: tokens that ``ids`` describes.
    """

    scheme: str | Scheme
    document: Sequence[Segment]
    ids: Ids | Rotations
    tokens: slice = slice(None)


def model(name: str) -> Any:
    return import_module(f"diffusers.models.transformers.transformer_{name}")


@cache
def rope(file: str, name: str, *arguments: Any) -> Any:
    """Return a rotary module; it is cached because its tables are large."""
    return getattr(model(file), name)(*arguments)


def pipeline(name: str) -> Any:
    return import_module(f"diffusers.pipelines.{name}")


def blocks(name: str) -> Any:
    return import_module(f"diffusers.modular_pipelines.{name}.before_denoise")


def ids(*parts: Any) -> Ids:
    """Concatenate ids of shape (tokens, axes) and return them as (axes, tokens)."""
    return np.concatenate([np.asarray(part, np.float64) for part in parts]).T


def halves(cos_and_sin: Any, dims: Sequence[int], theta: float = 1e4) -> Rotations:
    """Convert the cos and sin of every channel to rotations whose pairs are channels c and c + channels/2."""
    cos, sin = (part.double().numpy()[:, : part.shape[-1] // 2] for part in cos_and_sin)
    return Rotations(cos, sin, dims, theta)


def complex_(rotations: Any, dims: Sequence[int], theta: float = 1e4) -> Rotations:
    flat = rotations.reshape(-1, rotations.shape[-1])
    return Rotations(flat.real.double().numpy(), flat.imag.double().numpy(), dims, theta)


def sizes(draw: random.Random, most: int = 24) -> tuple[int, int]:
    return draw.randint(1, most), draw.randint(1, most)


def several(draw: random.Random, most: int = 3) -> list[Segment]:
    return [Grid(*sizes(draw)) for _ in range(draw.randint(1, most))]


def latents(*shape: int) -> Any:
    return torch.zeros(shape)


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
    images = [latents(1, 3, 16 * grid.extents[1], 16 * grid.extents[2]) for grid in grids]
    return Drawn(Flux(first=1), grids, ids(of._prepare_latent_image_ids(images, 8, None, torch.float32)))


def flux2(draw: random.Random) -> Drawn:
    first, *others = grids = several(draw, 4)
    text, of = draw.randint(1, 40), pipeline("flux2.pipeline_flux2").Flux2Pipeline
    parts = [of._prepare_text_ids(latents(1, text, 2))[0], of._prepare_latent_ids(latents(1, 2, *first.extents[1:]))[0]]
    if others:
        parts.append(of._prepare_image_ids([latents(1, 2, *grid.extents[1:]) for grid in others])[0])
    return Drawn("flux2", [Text(text), *grids], ids(*parts))


def flux3(draw: random.Random) -> Drawn:
    grids, text, of = several(draw), draw.randint(1, 40), blocks("flux3")
    scale = of.Flux3PrepareLatentsStep().image_rope_scale
    parts = [of._prepare_image_ids(*grid.extents[1:], scale, -k) for k, grid in enumerate(grids)]
    words = of.Flux3TextRoPEInputsStep._prepare_text_ids(latents(1, text, 2))
    return Drawn("flux3", [Text(text), *grids], ids(words, *parts))


def qwen_image(draw: random.Random) -> Drawn:
    grids, text, layered = several(draw, 4), draw.randint(1, 40), draw.random() < 0.5
    name = "QwenEmbedLayer3DRope" if layered else "QwenEmbedRope"
    rope_of = rope("qwenimage", name, 10000, (16, 56, 56), True)
    images, words = rope_of([[grid.extents for grid in grids]], max_txt_seq_len=text, device=torch.device("cpu"))
    rotations = complex_(torch.cat([words, images]), [16, 56, 56])
    return Drawn(QwenImage(layered=layered), [Text(text), *grids], rotations)


def qwen_image_21(draw: random.Random) -> Drawn:
    document: list[Segment] = []
    for grid in several(draw):
        document += [Text(draw.randint(1, 20)), grid]
    document.append(Text(draw.randint(1, 5)))
    mask = torch.tensor([isinstance(part, Grid) for part in document]).repeat_interleave(
        torch.tensor([int(np.prod(part.extents)) for part in document])
    )
    shapes = [part.extents for part in document if isinstance(part, Grid)]
    rotations = rope("qwenimage21", "QwenImage21Rope", 10000, (16, 56, 56))(shapes, mask, "cpu")
    return Drawn("qwen-image-2.1", document, complex_(rotations, [16, 56, 56]))


def z_image(draw: random.Random) -> Drawn:
    of = model("z_image").ZImageTransformer2DModel
    (h, w), f, text = sizes(draw), draw.randint(1, 3), draw.randint(1, 70)
    transformer = of.__new__(of)
    image, words = latents(1, f, 2 * h, 2 * w), latents(text, 4)
    embedded = of.patchify_and_embed(transformer, [image], [words], 2, 1)
    image_ids, text_ids = embedded[3][0], embedded[4][0][: -(-text // 32) * 32]  # the text is padded twice
    padding = [Text(1)] * (len(image_ids) > f * h * w)
    assert not image_ids[f * h * w :].any()  # image padding is not compared
    document: list[Segment] = [Text(len(text_ids)), Grid(h, w, frames=f)]
    return Drawn(
        Lumina2(first=1), [*document, *padding], ids(text_ids, image_ids[: f * h * w]), slice(len(text_ids) + f * h * w)
    )


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


WAN = [44, 42, 42]


def anyflow_far(draw: random.Random) -> Drawn:
    total, (h, w) = draw.randint(2, 6), (2 * draw.randint(1, 6), 2 * draw.randint(1, 6))
    compressed, clean = draw.randint(1, total - 1), draw.choice([None, True])
    rope_of = rope("anyflow_far", "AnyFlowCausalRotaryPosEmbed", 128, (1, 2, 2), (1, 4, 4), 1024)
    far = {
        "total_frames": total,
        "num_compressed_frames": compressed,
        "full_frame_shape": (h, w),
        "compressed_frame_shape": (h // 2, w // 2),
    }
    rotations = complex_(rope_of(far, torch.device("cpu"), clean)["query"], WAN)
    full = Grid(h, w, frames=total - compressed)
    document = [Grid(h // 2, w // 2, frames=compressed), full, *[full] * bool(clean)]
    return Drawn("anyflow-far", document, rotations)


def cogvideox_as_meant(draw: random.Random) -> Drawn:
    """Compute ids with ``np.linspace`` over diffusers' region, without the endpoint."""
    h, w = sizes(draw, 60)
    (top, left), (bottom, right) = pipeline("cogvideo.pipeline_cogvideox").get_resize_crop_region_for_grid(
        (h, w), 45, 30
    )
    rows, columns = np.linspace(top, bottom, h, endpoint=False), np.linspace(left, right, w, endpoint=False)
    grid = np.stack(np.meshgrid([0], rows, columns, indexing="ij"), -1).reshape(-1, 3)
    return Drawn(CogVideoX(as_released=False), [Grid(h, w)], ids(grid))


def ltx(draw: random.Random) -> Drawn:
    f, h, w = video(draw)
    fps, rope_of = draw.choice([24, 25, 30, 12.5]), rope("ltx", "LTXVideoRotaryPosEmbed", 64)
    grid = Grid(h, w, frames=f, seconds_per_frame=1 / Fraction(fps))
    if draw.random() < 0.5:
        places = rope_of._prepare_video_coords(1, f, h, w, (8 / fps, 32, 32), torch.device("cpu"))[0]
        return Drawn(Ltx(causal_offset=8), [grid], ids(places * 2 - 1))
    of = pipeline("ltx.pipeline_ltx_condition").LTXConditionPipeline
    first = draw.choice([0, draw.randint(1, 99)])  # that of a condition
    coords = of._scale_video_ids(of._prepare_video_ids(1, f, h, w), 32, 8, first)[0].double()
    coords[0] /= fps
    return Drawn(
        "ltx", [replace(grid, first_frame=first)], ids((2 * coords / torch.tensor([[20.0], [2048.0], [2048.0]]) - 1).T)
    )


def ltx2(draw: random.Random) -> Drawn:
    f, h, w = video(draw)
    fps, of = draw.choice([24, 25, 30, 12.5]), model("ltx2").LTX2AudioVideoRotaryPosEmbed
    if draw.random() < 0.5:
        middle = (
            of(64, modality="audio", scale_factors=(4,))
            .prepare_audio_coords(1, f, torch.device("cpu"))[0]
            .double()
            .mean(-1)
        )
        grid = Grid(1, 1, frames=f, seconds_per_frame=Fraction(1, 100))
        return Drawn(Ltx2(axes=1, frames_per_latent=4), [grid], ids((2 * middle / 20 - 1).T))
    middle = of(64).prepare_video_coords(1, f, h, w, torch.device("cpu"), fps)[0].double().mean(-1)
    grid = Grid(h, w, frames=f, seconds_per_frame=1 / Fraction(fps))
    return Drawn("ltx2", [grid], ids((2 * middle / torch.tensor([[20.0], [2048.0], [2048.0]]) - 1).T))


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


def cosmos(draw: random.Random) -> Drawn:
    f, h, w = video(draw)
    fps = draw.choice([None, 16, 24, 30])
    rope_of = rope("cosmos", "CosmosRotaryPosEmbed", 96, (128, 240, 240), (1, 2, 2), 24, (1.0, 1.0, 1.0))
    rotations = halves(rope_of(latents(1, 1, f, 2 * h, 2 * w), fps), [32, 32, 32])
    grid = Grid(h, w, frames=f, seconds_per_frame=Fraction(1, fps or 24))  # without fps, frame t is at t
    return Drawn("cosmos", [grid], rotations)


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


def minimax_h3(draw: random.Random) -> Drawn:
    text, f = draw.randint(1, 40), draw.randint(1, 14)
    a, b, common = draw.randint(1, 4), draw.randint(1, 4), draw.randint(1, 3)
    h, w = common * a * a, common * b * b
    step = blocks("minimax_h3").MiniMaxH3PrepareLayoutStep
    position_ids = step.build_packed_sequence(torch.ones(text), f, 2 * h, 2 * w, 3, (1, 2, 2), 2, 2, 0)[0]
    kept = np.r_[:text, text + 6 : len(position_ids)]  # without audio
    return Drawn(MiniMaxH3(), [Text(text), Grid(h, w, frames=f)], ids(position_ids[kept]))


OF_MODELS: list[Callable[[random.Random], Drawn]] = [qwen_image, qwen_image_21, z_image, anyflow_far, ltx2, cosmos]
"""Layouts that require only model modules."""

OF_PIPELINES: list[Callable[[random.Random], Drawn]] = [
    flux, visualcloze, flux2, flux3, longcat_image, ovis_image, ideogram4, cogvideox_as_meant, ltx,
    ltx2_keyframe, cosmos3, minimax_h3,
]  # fmt: skip
"""Layouts that also require pipelines, whose imports are slow."""


def compare(drawn: Drawn) -> None:
    positions = placed(drawn.document, drawn.scheme)
    got = positions.dense().astype(np.float64)[:, drawn.tokens]
    if not isinstance(drawn.ids, Rotations):
        assert got.shape == drawn.ids.shape
        # diffusers computes fractional ids in float32.
        bound = 0 if not positions.fractional else gamma(8) * (np.abs(got) + 2)
        assert (np.abs(got - drawn.ids) <= bound).all()
        return
    cos, sin, dims, theta = drawn.ids
    frequencies = [theta ** (-np.arange(0, dim, 2) / dim) for dim in dims]
    angles = np.concatenate([axis[:, None] * inv_freq for axis, inv_freq in zip(got, frequencies, strict=True)], axis=1)
    assert angles.shape == cos.shape
    # Frequencies, fractional ids and their products are rounded to float32; means of rotations are rounded a few more
    # times.
    bound = cos_sin(angles, FREQUENCY + 8)
    assert (np.abs(np.cos(angles) - cos) <= bound).all()
    assert (np.abs(np.sin(angles) - sin) <= bound).all()


@pytest.mark.parametrize("layout", OF_MODELS, ids=lambda layout: layout.__name__)
def test_ids_equal_those_of_diffusers_models(layout: Callable[[random.Random], Drawn]) -> None:
    draw = random.Random(layout.__name__)
    for _ in range(4):
        compare(layout(draw))


@pytest.mark.slow
@pytest.mark.parametrize("layout", OF_MODELS + OF_PIPELINES, ids=lambda layout: layout.__name__)
def test_ids_of_many_sizes_equal_those_of_diffusers(layout: Callable[[random.Random], Drawn]) -> None:
    draw = random.Random(f"{layout.__name__}, slow")
    for _ in range(100):
        compare(layout(draw))
