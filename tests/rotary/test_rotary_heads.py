"""Rotations with one axis per head, as in MHRoPE: every operator in every implementation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rotary_oracle import BY_HEAD, DTYPES, assert_rotated, by_kv_head, heads, ids_of, packed, phases
from store_oracle import DEVICE, assert_same_bits
from tolerance import assert_within, cos_sin, printed, truncation
from torch import Tensor

from mmpos import UnsupportedError
from mmpos.rotary import (
    Rotary,
    angles,
    apply_rotary,
)
from mmpos.rotary import cos_sin as tables_of
from mmpos.rotary.device import frequencies_of
from mmpos.rotary.kernel import tiling

WAYS = ("reference", "auto", pytest.param("triton", marks=pytest.mark.slow))
PAIRINGS = ("half", "adjacent")

pytestmark = pytest.mark.usefixtures("few_programs", "poison")

ROTARY = BY_HEAD["out of order, partial"]
TABLE = packed("videorope", 70_000).slice(5, 14)
TOKENS = TABLE.num_tokens


def heads_of(rotary: Rotary, shared: int = 2, tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return q, which has ``shared`` heads per kv head, and k."""
    assert rotary.head_axes is not None
    count, head_dim = len(rotary.head_axes), rotary.head_dim
    q, k = heads(tokens, shared * count, head_dim, dtype), heads(tokens, count, head_dim, dtype, seed=1)
    return [q.to(DEVICE), k.to(DEVICE)]


def test_a_kv_head_and_its_q_heads_are_rotated_by_one_axis() -> None:
    rotary = Rotary(4, theta=100.0, allocation="heads", head_axes=[0, 2, 1])
    q = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(1, 6, 4)
    got = apply_rotary(q, q[:, :3], torch.tensor([[1], [2], [3]]), rotary)
    rotated = {  # cos and sin of the id and of a tenth of the id
        1: ["0.54030", "0.99500", "0.84147", "0.09983"],
        2: ["-0.41615", "0.98007", "0.90930", "0.19867"],
        3: ["-0.98999", "0.95534", "0.14112", "0.29552"],
    }
    for out, ids in zip(got, ([1, 1, 3, 3, 2, 2], [1, 3, 2]), strict=True):
        assert out is not None
        for head, id_ in zip(out[0].tolist(), ids, strict=True):
            assert head == [printed(number) for number in rotated[id_]]


@pytest.mark.parametrize("way", ["reference", "auto"])
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("name", BY_HEAD)
def test_every_allocation_of_heads_agrees_with_the_oracle(name: str, pairing: Any, way: Any) -> None:
    rotary = replace(BY_HEAD[name], pairing=pairing)
    q, k = heads_of(rotary)
    for x, out in zip((q, k), apply_rotary(q, k, TABLE, rotary, implementation=way), strict=True):
        assert_rotated(out, x, TABLE, rotary)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("shared", "dtype"), [*zip((1, 4, 7), DTYPES, strict=True)])
def test_any_number_of_q_heads_may_share_a_kv_head(shared: int, dtype: torch.dtype, way: Any) -> None:
    q, k = heads_of(ROTARY, shared, dtype=dtype)
    want = apply_rotary(q, k, TABLE, ROTARY, implementation="reference")
    for x, out in zip((q, k), want, strict=True):
        assert_rotated(out, x, TABLE, ROTARY)
    for out, expected in zip(apply_rotary(q, k, TABLE, ROTARY, implementation=way), want, strict=True):
        assert_same_bits(out, expected, truncation(way, dtype))


@pytest.mark.parametrize("way", WAYS)
def test_unrotated_heads_and_pairs_and_their_gradients_stay_unchanged(way: Any) -> None:
    by_head = Rotary(12, axes=3, allocation="heads", head_axes=[1, -1, 2])
    by_pair = Rotary(12, axes=3, allocation=[1, 2, -1, 0, -1, -1])  # HoPE with an additional axis 0
    for base, still in ((by_head, (slice(1, 2), slice(None))), (by_pair, (slice(None), [2, 4, 5, 8, 10, 11]))):
        for precision in ("exact", "hf"):
            k = heads(TOKENS, 3, 12).to(DEVICE).requires_grad_()
            rotary = replace(base, precision=precision)
            out, _ = apply_rotary(k, None, TABLE, rotary, implementation=way)
            gradient = heads(TOKENS, 3, 12, seed=5).to(DEVICE)
            torch.autograd.backward(out, gradient)
            assert k.grad is not None
            assert_same_bits(out.detach()[:, *still], k.detach()[:, *still])
            assert_same_bits(k.grad[:, *still], gradient[:, *still])
            changed = (out != k).any(0)
            changed[still] = True
            assert changed.all()


def test_groups_have_equal_numbers_of_programs_and_consist_of_consecutive_equal_heads() -> None:
    assert [tiling.shares_of(shares, groups) for shares, groups in ((5, 0), (1, 8), (8, 8), (9, 8))] == [5, 8, 8, 16]
    rows = {
        (0, 0, 1, 1, 2, 2): [0, 1, 2],
        (0, 0, 1, 1, 1, 2): [0, 0, 1, 1, 1, 2],
        (0, 0, 0, 0, 1, 1): [0, 0, 1],
        (2, 2): [2],
    }
    for axes, want in rows.items():
        _, pair_axis = frequencies_of(Rotary(6, axes=3, allocation="heads", head_axes=axes))
        assert pair_axis.tolist() == [[axis] * 3 for axis in want]


@pytest.mark.parametrize("way", WAYS)
def test_each_head_reads_an_engines_cache_of_cos_and_sin_by_its_own_axis(way: Any) -> None:
    table = packed("mrope").slice(5, 14)
    rotary = Rotary(14, rotary_dim=10, axes=3, allocation="heads", head_axes=[2, 0, -1, 1])
    flat = Rotary(14, rotary_dim=10, axes=1)
    rows = torch.cat([*tables_of(flat, torch.arange(100)[None])], -1).to(DEVICE)
    q, k = heads_of(rotary)
    got = apply_rotary(q, k, table, rotary, cos_sin=rows, implementation=way)
    for out, want in zip(got, apply_rotary(q, k, table, rotary, implementation="reference"), strict=True):
        assert_same_bits(out, want)


@pytest.mark.parametrize("name", ["two heads per axis", "an unrotated head", "scaled"])
def test_tables_of_cos_and_sin_have_a_kv_head_dimension(name: str) -> None:
    rotary = BY_HEAD[name]
    want = np.stack([phases(ids_of(TABLE), one) for one in by_kv_head(rotary)], 1)  # (tokens, kv_heads, pairs)
    cos, sin = tables_of(rotary, TABLE)
    factor = rotary.attention_factor
    assert_within((cos, sin), tuple(factor * torch.from_numpy(f(want)).float() for f in (np.cos, np.sin)), cos_sin())
    wide = tables_of(rotary, TABLE, "transformers")
    for table, narrow in zip(wide, (cos, sin), strict=True):
        assert torch.equal(table, torch.cat((narrow, narrow), -1).transpose(0, 1)[None])
    batch = torch.arange(3 * 8).view(1, 2, 12).expand(3, 2, 12)
    assert [x.shape for x in tables_of(rotary, batch, "transformers")] == [
        (2, len(rotary.head_axes or ()), 12, rotary.rotary_dim)
    ] * 2
    assert tables_of(rotary, batch)[0].shape == (2, 12, *cos.shape[1:])


def test_tables_without_a_head_dimension_refuse_an_axis_for_each_head() -> None:
    message = "got a rotary with head_axes, want one whose heads all rotate alike"
    with pytest.raises(UnsupportedError, match=f"^layout 'torchtitan': {message}$"):
        tables_of(ROTARY, TABLE, "torchtitan")
    with pytest.raises(UnsupportedError, match=f"^angles: {message}$"):
        angles(ROTARY, TABLE)
