"""Rotations of models that make images and videos, against diffusers' own classes: factors of each axis, ids of 0."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from rotary_oracle import heads
from store_oracle import DEVICE, assert_same_bits
from tolerance import FREQUENCY, assert_within, cos_sin

from mmpos import Grid, SegmentTable, Text, place
from mmpos.rotary import NTK, Linspace, Rotary, apply_rotary
from mmpos.rotary import cos_sin as tables_of

pytestmark = pytest.mark.usefixtures("few_programs", "poison")

INTERPRETED = pytest.param("triton", marks=pytest.mark.slow)
WAYS = ("reference", "auto", INTERPRETED)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", ["exact", "hf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_segment_at_id_0_keeps_its_bits_and_those_beside_it_turn(dtype: Any, precision: Any, way: Any) -> None:
    table = place(SegmentTable.from_documents([[Text(5), Grid(2, 3)]]), "flux")
    rotary = Rotary(16, allocation="axial", axes_dim=[4, 6, 6], pairing="adjacent", precision=precision)
    q, k = (heads(11, count, 16, dtype, seed=count).to(DEVICE) for count in (4, 2))
    for x, out in zip((q, k), apply_rotary(q, k, table, rotary, implementation=way), strict=True):
        assert out is not None
        assert_same_bits(out[:6], x[:6])  # the first patch lies at id 0 too
        assert (out[6:] != x[6:]).flatten(1).any(1).all()


@pytest.mark.parametrize("scales", [(2.0, 1.0, 1.0), (1.0, 3.0, 3.0), (20 / 24, 2.0, 2.0)])
def test_cosmos_has_an_ntk_factor_for_each_axis(scales: tuple[float, float, float]) -> None:
    cosmos = pytest.importorskip("diffusers.models.transformers.transformer_cosmos")
    frames, rows, columns, fps = 5, 7, 9, 16
    rotary = Rotary(128, allocation="axial", axes_dim=[44, 42, 42], scaling=[NTK(scale) for scale in scales])
    latents = torch.empty(1, 1, frames, 2 * rows, 2 * columns)
    cos, sin = cosmos.CosmosRotaryPosEmbed(128, rope_scale=scales)(latents, fps=fps)
    grids = np.meshgrid(np.arange(frames) * 24 / fps, np.arange(rows), np.arange(columns), indexing="ij")
    ids = torch.from_numpy(np.stack([axis.ravel() for axis in grids]))
    angle = rotary.pair_ids(ids.numpy()).T * rotary.inv_freq_array
    bound = cos_sin(angle, FREQUENCY + 2)  # and two of the ids
    for found, theirs in zip(tables_of(rotary, ids), (cos, sin), strict=True):
        assert_within(found, theirs[:, :64], bound)
    q = heads(ids.shape[1], 2, 128)
    turned = apply_rotary(q, None, ids, rotary)[0]
    again = [
        Rotary(dim, scaling=NTK(scale), axes=1).inv_freq_array for dim, scale in zip((44, 42, 42), scales, strict=True)
    ]
    one_by_one = Rotary(128, axes=3, allocation=[0] * 22 + [1] * 21 + [2] * 21, inv_freq=np.concatenate(again).tolist())
    assert_same_bits(turned, apply_rotary(q, None, ids, one_by_one)[0])


def ltx_tables(monkeypatch: pytest.MonkeyPatch, channels: int, dtype: Any = torch.float64) -> tuple[Any, ...]:
    """Ids (axes, tokens) of a clip, and diffusers' own cos and sin of them, made in a dtype."""
    ltx = pytest.importorskip("diffusers.models.transformers.transformer_ltx")
    size, scale = (3, 5, 7), (8 / 25, 32, 32)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "float32", dtype)  # which the class asks for by name
        video = ltx.LTXVideoRotaryPosEmbed(channels)
        grid = video._prepare_video_coords(1, *size, scale, "cpu")
        cos, sin = video(torch.empty(1, 1), *size, scale)
    assert cos.dtype == dtype
    return (2 * grid[0] - 1).T, cos[0, :, ::2].numpy(), sin[0, :, ::2].numpy()


def exact_bound(rotary: Rotary) -> Any:
    """Bound of exact cos and sin: the polynomial's, and that of the turns."""
    return 1.2e-7 + (3.25 + rotary.inv_freq_array / (2 * math.pi)) * 2 * math.pi * 2.0**-32


def ltx(channels: int) -> Rotary:
    rungs = channels // 6
    axis = [-1] * (channels % 6 // 2) + [0, 1, 2] * rungs
    return Rotary(
        channels, allocation=axis, axes_dim=[2 * rungs] * 3, scaling=Linspace(math.pi / 2), pairing="adjacent"
    )


@pytest.mark.parametrize("channels", [72, 128, 2048])
def test_ltx_turns_by_up_to_15_708_rad_per_id_within_the_bound(channels: int, monkeypatch: Any) -> None:
    rotary = ltx(channels)
    ids, *theirs = ltx_tables(monkeypatch, channels)
    assert rotary.inv_freq_array.max() == pytest.approx(1e4 * math.pi / 2, rel=1e-15)
    assert_within([x.numpy() for x in tables_of(rotary, ids)], theirs, exact_bound(rotary))
