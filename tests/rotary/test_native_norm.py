"""The norm in C: its formula in the order it promises, bit by bit, in both widths of vectors; and what it declines.

numpy and the compiler round sums, products, quotients and roots of float32 as IEEE 754 says, one by one, so the bits
are those of every processor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rotary_oracle import heads, packed
from test_native_rotate import VIEWS
from torch import Tensor

from mmpos.rotary import Rotary, apply_rotary, cpu
from mmpos.rotary.device import constants, position_ids
from mmpos.rotary.reference import AUTO, RotationArguments
from mmpos.support import native

if native.core is None:
    pytest.skip("the extension was not built", allow_module_level=True)

CORE = native.core
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
PAIRINGS = ("half", "adjacent")
WIDTHS = pytest.mark.parametrize("wide", [True, False], ids=["wide", "plain"])
EPS = 1e-5


def weight(size: int) -> Tensor:
    return torch.linspace(-0.5, 2, size)


@np.errstate(over="ignore", invalid="ignore")
def normalised(x: Tensor, w: Tensor) -> Tensor:
    """Heads in float32: squares of channel c in the partial sum of c mod 16, then those 8, 4, 2 and 1 apart added."""
    value = x.float().numpy()
    sums = np.zeros((*value.shape[:-1], 16), np.float32)
    for c in range(value.shape[-1]):
        sums[..., c % 16] += value[..., c] * value[..., c]
    for half in (8, 4, 2, 1):
        sums = sums[..., :half] + sums[..., half:]
    scale = np.float32(1) / np.sqrt(sums / np.float32(value.shape[-1]) + np.float32(EPS))
    return torch.from_numpy(value * scale) * w


def wanted(x: Tensor, w: Tensor | None, ids: Tensor, rotary: Rotary, **options: Any) -> Tensor:
    """The norm, and the rotation of the reference, rounded once."""
    value = x if w is None else normalised(x, w)
    return apply_rotary(value, None, ids, rotary, implementation="reference", **options)[0].to(x.dtype)


def in_c(x: Tensor, out: Tensor, w: Tensor, ids: Tensor, rotary: Rotary, wide: bool) -> None:
    """(tokens, heads, head_dim), by the extension alone."""
    made, adjacent = position_ids(ids, CPU), rotary.pairing == "adjacent"
    frequencies, pair_axis = constants(rotary, CPU)
    rotation = RotationArguments(made.tensor, frequencies, pair_axis, made.mode, adjacent, 1.0, False, AUTO)
    angles = cpu.angles_of(rotation, made.tokens)
    assert angles is not None
    tensors = tuple(cpu._bits(tensor.unsqueeze(0)) for tensor in (x, out))
    assert CORE.rotate(tensors, angles, (EPS, w.numpy()), 0, made.tokens, adjacent, False, wide)


def assert_same(got: Tensor | None, want: Tensor) -> None:
    """Equal numbers, signs of zeros included, and NaN where there is NaN."""
    assert got is not None
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert torch.equal(got.isnan(), want.isnan())
    a, b = (x.contiguous().nan_to_num(0.0, torch.inf, -torch.inf).view(torch.uint8) for x in (got, want))
    assert torch.equal(a, b)


# The map.


@WIDTHS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("rotary_dim", [2, 6, 14, 16, 24, 40, 66, 80, 128])
def test_any_number_of_pairs_and_of_other_channels(
    rotary_dim: int, pairing: Any, dtype: torch.dtype, wide: bool
) -> None:
    ids = torch.arange(7)[None] * 1_000_003
    for rest in (0, 2, 6, 30, 64):
        rotary = Rotary(rotary_dim + rest, rotary_dim=rotary_dim, axes=1, pairing=pairing)
        x, w = heads(7, 3, rotary.head_dim, dtype), weight(rotary.head_dim)
        out, same, want = torch.full_like(x, torch.nan), x.clone(), wanted(x, w, ids, rotary)
        in_c(x, out, w, ids, rotary, wide)
        in_c(same, same, w, ids, rotary, wide)
        assert_same(out, want)
        assert_same(same, want)


@WIDTHS
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_bfloat16_is_float32_rounded_once(pairing: Any, wide: bool) -> None:
    rotary, ids = Rotary(90, rotary_dim=52, axes=1, pairing=pairing), torch.arange(9)[None]
    x, w = heads(9, 5, 90, torch.bfloat16), weight(90)
    narrow, exact = torch.empty_like(x), torch.empty_like(x, dtype=torch.float32)
    in_c(x, narrow, w, ids, rotary, wide)
    in_c(x.float(), exact, w, ids, rotary, wide)
    assert_same(narrow, exact.bfloat16())


@WIDTHS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_every_sort_of_number(pairing: Any, dtype: torch.dtype, wide: bool) -> None:
    numbers = torch.tensor([0.0, -0.0, 1e-40, 1e-30, -3.0, 1e18, -3e38, torch.inf, -torch.inf, torch.nan])
    rotary, ids = Rotary(48, rotary_dim=32, axes=1, pairing=pairing), torch.arange(10)[None]
    same, among = numbers[:, None, None].repeat(1, 2, 48), heads(10, 2, 48)
    among[..., 17] = numbers[:, None]
    w = weight(48)
    w[40], w[41] = torch.inf, 0.0
    w[5:7] = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # NaN, of all bits
    for x in (same.to(dtype), among.to(dtype)):
        for each in (weight(48), w):
            out = torch.zeros_like(x)
            in_c(x, out, each, ids, rotary, wide)
            assert_same(out, wanted(x, each, ids, rotary))


def test_no_norm_of_k_or_of_q_leaves_its_bits_to_the_rotation() -> None:
    rotary, ids = Rotary(24, rotary_dim=16, axes=1), torch.arange(13)[None]
    for dtype in DTYPES:
        q, k, w = heads(13, 5, 24, dtype), heads(13, 2, 48, dtype, seed=1)[..., ::2], weight(24)
        for of_q, of_k in ((w, None), (None, w), (w, w + 1)):
            options: Any = {"q_norm_weight": of_q, "k_norm_weight": of_k, "norm_eps": EPS}
            got = apply_rotary(q, k, ids, rotary, **options)
            assert_same(got[0], wanted(q, of_q, ids, rotary))
            assert_same(got[1], wanted(k, of_k, ids, rotary))


# The tensors.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS)
def test_any_strides_in_place_and_out_of_place(view: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmpos.rotary.reference.rotate_normalised", None)  # the extension and nothing else
    whole = heads((3, 26), 35, 24, dtype)
    q = VIEWS[view](whole)
    k, w = q[:, :, :1], weight(q.shape[3])
    ids = torch.arange(q.shape[0] * q.shape[1]).mul(1_000_003).view(1, *q.shape[:2])
    rotary = Rotary(q.shape[3], rotary_dim=10, axes=1)
    options: Any = {"q_norm_weight": w, "k_norm_weight": w - 1, "norm_eps": EPS, "norm_weight_offset": 1.0}
    got, want = apply_rotary(q, k, ids, rotary, **options), wanted(q, w + 1.0, ids, rotary)
    assert_same(got[0], want)
    assert_same(got[1], wanted(k, w - 1 + 1.0, ids, rotary))
    if "for all" in view:
        return
    fresh = whole.clone()
    mine = torch.as_strided(fresh, q.shape, q.stride(), q.storage_offset()) if q._base is not None else fresh
    outside = fresh.clone()
    there = torch.as_strided(outside, q.shape, mine.stride(), mine.storage_offset())
    there.copy_(wanted(mine, w + 1.0, ids, rotary))
    options["k_norm_weight"] = None
    assert apply_rotary(mine, None, ids, rotary, inplace=True, **options)[0] is mine
    assert_same(fresh, outside)


def test_threads_agree_with_one() -> None:
    rotary, ids = Rotary(64, axes=1), torch.arange(1100).repeat(4).view(1, 4, 1100)
    q, w = heads((4, 1100), 9, 64, torch.bfloat16), weight(64)
    want, before = wanted(q, w, ids, rotary), torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert_same(apply_rotary(q, None, ids, rotary, q_norm_weight=w, norm_eps=EPS)[0], want)
    finally:
        torch.set_num_threads(before)


# What it declines.


def test_what_the_extension_declines_the_reference_normalises() -> None:
    q = k = heads(32, 3, 24).half()
    options: Any = {"q_norm_weight": weight(24).half(), "k_norm_weight": weight(24)}
    want = apply_rotary(q, k, packed("rope-tie"), Rotary(24), implementation="reference", **options)
    for got, expected in zip(apply_rotary(q, k, packed("rope-tie"), Rotary(24), **options), want, strict=True):
        assert expected is not None
        assert_same(got, expected)


def test_weights_of_any_dtype_and_strides_and_with_gradients_go_by_the_extension(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, ids, rotary = heads(13, 2, 24), torch.arange(13)[None], Rotary(24, axes=1)
    want = wanted(q, weight(48).bfloat16()[::2].float(), ids, rotary)
    monkeypatch.setattr("mmpos.rotary.reference.rotate_normalised", None)
    for w in (weight(48).bfloat16()[::2], weight(48).bfloat16()[::2].float().requires_grad_()):
        assert_same(apply_rotary(q, None, ids, rotary, q_norm_weight=w, norm_eps=EPS)[0], want)
