"""Rotations of image and video generation models: heads that share a layout, and segments whose ids are zero."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from rotary_oracle import heads
from store_oracle import DEVICE, assert_same_bits
from tolerance import assert_within

from mmpos import Grid, SegmentTable, Text, place
from mmpos.rotary import Linspace, Rotary, apply_rotary, rerotate
from mmpos.rotary.device import frequencies_of

pytestmark = pytest.mark.usefixtures("few_programs", "poison")

INTERPRETED = pytest.param("triton", marks=pytest.mark.slow)
WAYS = ("reference", "auto", INTERPRETED)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", ["exact", "hf"])
def test_only_segments_with_a_nonzero_id_are_rotated(precision: Any, way: Any) -> None:
    table = place(SegmentTable.from_documents([[Text(5), Grid(2, 3)]]), "flux")
    rotary = Rotary(16, allocation="axial", axes_dim=[4, 6, 6], pairing="adjacent", precision=precision)
    for dtype in (torch.float32, torch.bfloat16):
        x = heads(11, 4, 16, dtype).to(DEVICE)
        out, _ = apply_rotary(x, None, table, rotary, implementation=way)
        assert_same_bits(out[:6], x[:6])  # the first patch also has id 0
        assert (out[6:] != x[6:]).flatten(1).any(1).all()


def ltx(channels: int) -> Rotary:
    rungs = channels // 6
    layout: Any = {"allocation": [-1] * (channels % 6 // 2) + [0, 1, 2] * rungs, "axes_dim": [2 * rungs] * 3}
    return Rotary(channels, scaling=Linspace(math.pi / 2), pairing="adjacent", **layout)


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
    video = Grid(2, 3, frames=2, seconds_per_frame=Fraction(1, 25))
    table = place(SegmentTable.from_documents([[video], [Grid(3, 2)]]), "ltx")
    ids, long_head = torch.from_numpy(table.dense()), replace(ltx(64), precision=precision)
    judge: Any = way if precision == "hf" else "reference"  # implementations differ in float32 cos and sin
    forms: Any = {("triton", "adjacent"): [table], ("triton", "half"): [ids]}  # the interpreter is slow
    for positions in forms.get((way, pairing), [table, ids]):
        k, q = (heads(18, n, 16, seed=n).to(DEVICE).requires_grad_() for n in (4, 8))
        outs: Any = apply_rotary(q, k, positions, cut(long_head, 4, pairing), implementation=way)
        grads = [heads(18, x.shape[1], 16, seed=9).to(DEVICE) for x in (q, k)]
        back = torch.autograd.grad(outs, (q, k), grads)
        for before, after, conjugate in (
            (q, outs[0], False),
            (k, outs[1], False),
            *zip(grads, back, (True, True), strict=True),
        ):
            for i in range(before.shape[1] // 4):  # two q heads per kv head
                x, y = (as_one_head(z.detach().unflatten(1, (4, -1))[:, :, i], pairing) for z in (before, after))
                options: Any = {"conjugate": conjugate, "implementation": judge}
                assert_same_bits(y, apply_rotary(x, None, positions, long_head, **options)[0])


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
