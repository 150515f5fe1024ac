"""Compare the rotations of image and video generation models with the classes in diffusers."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from rotary_oracle import heads
from store_oracle import DEVICE, assert_same_bits
from tolerance import FREQUENCY, assert_within, cos_sin, rotations

from mmpos import Grid, SegmentTable, Text, place
from mmpos.rotary import NTK, Linspace, Rotary, apply_rotary, rerotate
from mmpos.rotary import cos_sin as tables_of
from mmpos.rotary.device import frequencies_of

pytestmark = pytest.mark.usefixtures("few_programs", "poison")

INTERPRETED = pytest.param("triton", marks=pytest.mark.slow)
WAYS = ("reference", "auto", INTERPRETED)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", ["exact", "hf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_segments_with_a_nonzero_id_are_rotated(dtype: Any, precision: Any, way: Any) -> None:
    table = place(SegmentTable.from_documents([[Text(5), Grid(2, 3)]]), "flux")
    rotary = Rotary(16, allocation="axial", axes_dim=[4, 6, 6], pairing="adjacent", precision=precision)
    q, k = (heads(11, count, 16, dtype, seed=count).to(DEVICE) for count in (4, 2))
    for x, out in zip((q, k), apply_rotary(q, k, table, rotary, implementation=way), strict=True):
        assert out is not None
        assert_same_bits(out[:6], x[:6])  # the first patch also has id 0
        assert (out[6:] != x[6:]).flatten(1).any(1).all()


@pytest.mark.parametrize("scales", [(2.0, 1.0, 1.0), (1.0, 3.0, 3.0), (20 / 24, 2.0, 2.0)])
def test_an_ntk_factor_per_axis_agrees_with_cosmos(scales: tuple[float, float, float]) -> None:
    cosmos = pytest.importorskip("diffusers.models.transformers.transformer_cosmos")
    frames, rows, columns, fps = 5, 7, 9, 16
    rotary = Rotary(128, allocation="axial", axes_dim=[44, 42, 42], scaling=[NTK(scale) for scale in scales])
    latents = torch.empty(1, 1, frames, 2 * rows, 2 * columns)
    cos, sin = cosmos.CosmosRotaryPosEmbed(128, rope_scale=scales)(latents, fps=fps)
    grids = np.meshgrid(np.arange(frames) * 24 / fps, np.arange(rows), np.arange(columns), indexing="ij")
    ids = torch.from_numpy(np.stack([axis.ravel() for axis in grids]))
    angle = rotary.pair_ids(ids.numpy()).T * rotary.inv_freq_array
    bound = cos_sin(angle, FREQUENCY + 2)  # the ids add two roundings
    for ours, theirs in zip(tables_of(rotary, ids), (cos, sin), strict=True):
        assert_within(ours, theirs[:, :64], bound)
    q = heads(ids.shape[1], 2, 128)
    rotated = apply_rotary(q, None, ids, rotary)[0]
    ladders = [
        Rotary(dim, scaling=NTK(scale), axes=1).inv_freq_array for dim, scale in zip((44, 42, 42), scales, strict=True)
    ]
    allocation, inv_freq = [0] * 22 + [1] * 21 + [2] * 21, np.concatenate(ladders).tolist()
    explicit = Rotary(128, axes=3, allocation=allocation, inv_freq=inv_freq)
    assert_same_bits(rotated, apply_rotary(q, None, ids, explicit)[0])


def ltx_tables(monkeypatch: pytest.MonkeyPatch, channels: int, dtype: Any = torch.float64) -> tuple[Any, ...]:
    """Return the (axes, tokens) ids of a clip, and the cos and sin that diffusers computes for them in a dtype."""
    ltx = pytest.importorskip("diffusers.models.transformers.transformer_ltx")
    size, scale = (3, 5, 7), (8 / 25, 32, 32)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "float32", dtype)  # the class always uses torch.float32
        video = ltx.LTXVideoRotaryPosEmbed(channels)
        grid = video._prepare_video_coords(1, *size, scale, "cpu")
        cos, sin = video(torch.empty(1, 1), *size, scale)
    assert cos.dtype == dtype
    return (2 * grid[0] - 1).T, cos[0, :, ::2].numpy(), sin[0, :, ::2].numpy()


def exact_bound(rotary: Rotary) -> Any:
    """Return the error bound of exact cos and sin: the errors of the polynomials and of the turns."""
    return 1.2e-7 + (3.25 + rotary.inv_freq_array / (2 * math.pi)) * 2 * math.pi * 2.0**-32


def ltx(channels: int) -> Rotary:
    rungs = channels // 6
    axis = [-1] * (channels % 6 // 2) + [0, 1, 2] * rungs
    return Rotary(
        channels, allocation=axis, axes_dim=[2 * rungs] * 3, scaling=Linspace(math.pi / 2), pairing="adjacent"
    )


def cut(rotary: Rotary, heads: int, pairing: Any = "adjacent") -> Rotary:
    """Return the rotation of several heads that share the layout of a long head."""
    channels = rotary.head_dim // heads
    return replace(rotary, head_dim=channels, rotary_dim=channels, kv_heads=heads, pairing=pairing)


def as_one_head(x: Any, pairing: str) -> Any:
    """Reshape (…, heads, head_dim) to a single long head with adjacent pairs."""
    pairs = x.unflatten(-1, (2, -1)).swapaxes(-1, -2) if pairing == "half" else x
    return pairs.flatten(start_dim=x.dim() - 2).unsqueeze(-2)


@pytest.mark.parametrize("way", ["reference", "auto", "triton"])
@pytest.mark.parametrize(("precision", "pairing"), [("exact", "adjacent"), ("exact", "half"), ("hf", "adjacent")])
def test_heads_that_share_a_layout_are_rotated_like_one_long_head(precision: Any, pairing: Any, way: Any) -> None:
    long_head = replace(ltx(64), precision=precision)
    table = place(
        SegmentTable.from_documents([[Grid(2, 3, frames=2, seconds_per_frame=Fraction(1, 25))], [Grid(3, 2)]]), "ltx"
    )
    ids = torch.from_numpy(table.dense())
    rotary = cut(long_head, 4, pairing)
    k, q = (heads(18, count, 16, seed=count).to(DEVICE) for count in (4, 8))
    tensors = [q[:, ::2], q[:, 1::2], k]  # two q heads per kv head
    judge: Any = way if precision == "hf" else "reference"  # implementations differ in float32 cos and sin
    forms: Any = {("triton", "adjacent"): [table], ("triton", "half"): [ids]}  # the interpreter is slow
    for positions in forms.get((way, pairing), [table, ids]):
        leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
        q_out, k_out = apply_rotary(*leaves, positions, rotary, implementation=way)
        assert k_out is not None
        gradients = [heads(18, x.shape[1], 16, seed=9).to(DEVICE) for x in (q, k)]
        torch.autograd.backward((q_out, k_out), gradients)
        incoming = [gradients[0][:, ::2], gradients[0][:, 1::2], gradients[1]]
        outgoing = [leaves[0].grad[:, ::2], leaves[0].grad[:, 1::2], leaves[1].grad]  # type: ignore[index]
        outs = (q_out[:, ::2], q_out[:, 1::2], k_out)
        for x, out, g, grad in zip(tensors, outs, incoming, outgoing, strict=True):
            for before, after, conjugate in ((x, out, False), (g, grad, True)):
                assert after is not None
                want, _ = apply_rotary(
                    as_one_head(before, pairing), None, positions, long_head, conjugate=conjugate, implementation=judge
                )
                assert_same_bits(as_one_head(after.detach(), pairing), want)


@pytest.mark.parametrize("way", WAYS)
def test_cached_keys_of_heads_with_their_own_frequencies_are_rerotated(way: Any) -> None:
    rotary = cut(ltx(64), 4)
    start, stop = (torch.tensor([[7], [1], [0]]) + torch.arange(6) * step for step in (1, 3))
    k = heads(6, 4, 16).to(DEVICE)
    cache = torch.zeros(1, 8, 4, 16, device=DEVICE)
    cache[0, :6] = apply_rotary(k, None, start, rotary)[0]
    rerotate(cache, torch.arange(6, device=DEVICE), start, stop, rotary, implementation=way)
    assert_within(cache[0, :6], apply_rotary(k, None, stop, rotary)[0], 2e-6)


def test_heads_with_different_frequencies_on_one_axis_form_separate_groups() -> None:
    rotary = Rotary(4, axes=1, kv_heads=6, inv_freq=[1.0, 0.5] * 2 + [1.0, 0.25] * 2 + [0.5, 0.25] * 2)
    frequencies, pair_axis = frequencies_of(rotary)
    assert (tuple(frequencies.shape), tuple(pair_axis.shape)) == ((3, 3, 2), (3, 2))
    assert rotary.inv_freq_array[::2].tolist() == [[1.0, 0.5], [1.0, 0.25], [0.5, 0.25]]
    k, ids = heads(5, 6, 4), torch.arange(5)[None]
    rotated = apply_rotary(k, None, ids, rotary)[0]
    for head, inv_freq in enumerate(rotary.inv_freq_array.tolist()):
        of_head = Rotary(4, axes=1, inv_freq=inv_freq)
        assert_same_bits(rotated[:, head], apply_rotary(k[:, [head]], None, ids, of_head)[0][:, 0])


def test_ltx_rotations_agree_with_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("diffusers.models.transformers.transformer_ltx")
    channels, count = 128, 4
    ids, cos, sin = ltx_tables(monkeypatch, channels)
    rotary = cut(ltx(channels), count)
    q = heads(ids.shape[1], count, channels // count)
    tables = tuple(torch.from_numpy(x).repeat_interleave(2, -1)[None] for x in (cos, sin))
    want = module.apply_rotary_emb(q.flatten(1)[None].double(), tables)
    bound = float(exact_bound(rotary).max())
    got = apply_rotary(q, None, ids, rotary)[0]
    assert_within(got.double().numpy(), want[0].view(q.shape).numpy(), rotations(q, bound).numpy())


def test_ernie_image_combines_first_channels_of_one_rotation_with_second_channels_of_another() -> None:
    ernie = pytest.importorskip("diffusers.models.transformers.transformer_ernie_image")
    ids = torch.tensor([[0, 3, 9, 40], [1, 2, 30, 7], [5, 0, 11, 60]])
    angle = ernie.ErnieImageEmbedND3(16, 256, (4, 6, 6))(ids.T[None]).squeeze(0)  # (tokens, 1, head_dim)
    axial = Rotary(16, theta=256.0, allocation="axial", axes_dim=[4, 6, 6])
    axis, inv_freq = axial.pair_axis.repeat(2).tolist(), axial.inv_freq_array.repeat(2).tolist()
    q = heads(4, 3, 16)
    first, second = q.chunk(2, -1)
    want = q * angle.cos() + torch.cat((-second, first), -1) * angle.sin()
    rotated = [
        apply_rotary(q, None, ids, Rotary(16, axes=3, allocation=axis[part], inv_freq=inv_freq[part]))[0]
        for part in (slice(8), slice(8, None))
    ]
    got = torch.cat((rotated[0][..., :8], rotated[1][..., 8:]), -1)
    bound = float(cos_sin(angle.abs().max(), FREQUENCY + 1))
    assert_within(got, want, rotations(q, bound))


@pytest.mark.parametrize("channels", [72, 128, 2048])
def test_ltx_frequencies_up_to_15_708_rad_per_id_are_within_the_bound(channels: int, monkeypatch: Any) -> None:
    rotary = ltx(channels)
    ids, *theirs = ltx_tables(monkeypatch, channels)
    assert rotary.inv_freq_array.max() == pytest.approx(1e4 * math.pi / 2, rel=1e-15)
    assert_within([x.numpy() for x in tables_of(rotary, ids)], theirs, exact_bound(rotary))
