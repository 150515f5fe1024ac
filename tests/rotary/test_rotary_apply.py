"""apply_rotary on a CPU: every allocation, dtype, layout and table is compared with an oracle element by element."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import placed, settled
from rotary_oracle import (
    BY_AXES,
    DTYPES,
    INT32_MAX,
    INT32_MIN,
    ROTARIES,
    SCHEMES,
    VIEWS,
    assert_rotated,
    heads,
    packed,
    rotated,
    table_of,
)
from tolerance import ARITHMETIC, EXACT, FREQUENCY, assert_within, cos_sin
from torch import Tensor

import mmpos
from mmpos import Placeholders, PositionTable, SegmentTable, Text, UnsupportedError, place
from mmpos.rotary import DevicePositions, Rotary, YaRN, apply_rotary

PAIRINGS = ("half", "adjacent")


def both(q: Tensor, k: Tensor, positions: Any, rotary: Rotary, **options: Any) -> tuple[Tensor, Tensor]:
    """Return rotated q and k."""
    q_out, k_out = apply_rotary(q, k, positions, rotary, **options)
    assert k_out is not None
    return q_out, k_out


def one(x: Tensor, positions: Any, rotary: Rotary, **options: Any) -> Tensor:
    """Return the rotated q of a call without k."""
    out, none = apply_rotary(x, None, positions, rotary, **options)
    assert none is None
    return out


def bits(x: Tensor) -> list[Any]:
    """Return the bits of every element, which distinguish 0 and −0."""
    integers: list[Any] = x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16).tolist()
    return integers


def dense(positions: PositionTable) -> Tensor:
    return torch.from_numpy(positions.dense())


# Allocations, tables and ids.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("name", ROTARIES)
@pytest.mark.usefixtures("way")
def test_every_allocation_agrees_with_the_oracle(name: str, pairing: Any, dtype: torch.dtype) -> None:
    rotary = replace(ROTARIES[name], pairing=pairing)
    table = packed(BY_AXES[rotary.axes])
    q, k = heads(32, 3, rotary.head_dim, dtype), heads(32, 1, rotary.head_dim, dtype, seed=1)
    q_out, k_out = both(q, k, table, rotary)
    assert_rotated(q_out, q, table, rotary)
    assert_rotated(k_out, k, table, rotary)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.usefixtures("way")
def test_every_table_agrees_with_the_oracle(scheme: str, view: str) -> None:
    rotary = Rotary(16, axes=SCHEMES[scheme])
    table = VIEWS[view](packed(scheme, 9_000_000))
    q = heads(table.num_tokens, 2, 16)
    assert_rotated(one(q, table, rotary), q, table, rotary)


@settled
@given(
    ids=st.lists(
        st.one_of(
            st.integers(INT32_MIN, INT32_MAX),
            st.builds(
                lambda whole, part, denominator: whole + Fraction(part % denominator, denominator),
                st.integers(INT32_MIN, INT32_MAX - 1),
                st.integers(0, INT32_MAX),
                st.integers(1, INT32_MAX),
            ),
        ),
        min_size=1,
        max_size=5,
    ),
    pairs=st.integers(1, 9),
    rest=st.integers(0, 3),
    pairing=st.sampled_from(PAIRINGS),
    dtype=st.sampled_from(DTYPES),
)
def test_any_ids_agree_with_the_oracle(
    ids: list[Fraction | int], pairs: int, rest: int, pairing: Any, dtype: torch.dtype
) -> None:
    rotary = Rotary(2 * (pairs + rest), rotary_dim=2 * pairs, axes=1, pairing=pairing)
    table = table_of([[value] for value in ids])
    q = heads(len(ids), 1, rotary.head_dim, dtype)
    assert_rotated(one(q, table, rotary), q, table, rotary)


def test_worked_examples_of_both_pairings() -> None:
    position = torch.tensor([[1]])
    adjacent = one(torch.tensor([[[1.0, 0, 1, 0]]]), position, Rotary(4, axes=1, pairing="adjacent"))
    assert_within(adjacent, [[[0.540302, 0.841471, 0.99995, 0.01]]], 5e-7 + EXACT)  # half a unit of the last digit
    half = one(torch.tensor([[[1.0, 1, 0, 0]]]), position, Rotary(4, axes=1))
    assert_within(half, [[[0.540302, 0.99995, 0.841471, 0.01]]], 5e-7 + EXACT)


def test_partial_rotation_keeps_the_other_channels() -> None:
    table = packed("rope-tie")
    q = heads(32, 2, 20, torch.bfloat16)
    q[0, 0, 12:14] = torch.tensor([torch.inf, torch.nan])
    out = one(q, table, Rotary(20, rotary_dim=12))
    assert bits(out[..., 12:]) == bits(q[..., 12:])
    rotated_part = one(q[..., :12], table, Rotary(12))
    assert bits(out[..., :12]) == bits(rotated_part)


@pytest.mark.parametrize("axes", [1, 2, 3, 4])
def test_hf_precision_rotates_by_float32_angles(axes: int) -> None:
    rotary = Rotary(24, axes=axes, precision="hf")
    table = packed(BY_AXES[axes])
    q = heads(32, 2, 24)
    assert table.dense().max() < 20
    slack = ARITHMETIC + cos_sin(20.0, FREQUENCY + 1)
    assert_rotated(one(q, table, rotary), q, table, replace(rotary, precision="exact"), slack=slack)


# Text and inverse rotations.

ONE_LADDER = [name for name in ROTARIES if not any(word in name for word in ("axial", "pixtral", "theta", "HoPE"))]


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("name", ONE_LADDER)
def test_text_is_rotated_bit_for_bit_as_by_rope_1d(name: str, pairing: Any) -> None:
    rotary = replace(ROTARIES[name], pairing=pairing)
    scheme = BY_AXES[rotary.axes]
    flat = replace(rotary, axes=1, allocation="interleaved", mrope_section=None)
    q = heads(40, 2, rotary.head_dim)
    text = placed([Text(40)], scheme, 5_000_000)
    rope_1d = torch.arange(5_000_000, 5_000_040)[None]
    assert bits(one(q, text, rotary)) == bits(one(q, rope_1d, flat))


# Layouts, views and sizes.


def test_layout_none_depends_on_the_number_of_dimensions() -> None:
    rotary, table = Rotary(8), packed("rope-tie").pad(13)
    q = heads(39, 2, 8)
    flat = one(q, table, rotary)
    assert bits(one(q.view(3, 13, 2, 8), table, rotary)) == bits(flat.view(3, 13, 2, 8))
    assert bits(one(q, table, rotary, layout="thd")) == bits(flat)
    square = q.view(3, 13, 2, 8).repeat(1, 1, 7, 1)[:, :, :13]  # as many heads as tokens
    over_heads = one(square.transpose(1, 2), table, rotary, layout="bhsd").transpose(1, 2)
    assert bits(over_heads) == bits(one(square, table, rotary))


def test_inputs_longer_than_a_block_agree_with_the_oracle() -> None:
    rotary = Rotary(64, axes=1)
    ids = torch.arange(1100, dtype=torch.int32).repeat(4).view(1, 4, 1100)
    q = heads((4, 1100), 6, 64, torch.bfloat16)
    out = one(q, ids, rotary)
    for tokens in (slice(0, 5), slice(255, 258), slice(680, 690), slice(1090, 1100)):
        assert_rotated(out[:, tokens], q[:, tokens], ids[:, :, tokens], rotary)
    assert torch.equal(out, torch.cat([one(row[None], ids[:, :1], rotary) for row in q]))


# The positions.


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("scheme", ["rope-tie", "rope-tie-v2"])
def test_padded_tables_rotate_batches(scheme: str, side: Any) -> None:
    rotary = Rotary(8)
    table = packed(scheme).pad(13, side)
    ids = dense(table)
    q = heads((3, 13), 2, 8)
    want = one(q.view(39, 2, 8), table, rotary)
    for positions in (table, ids, ids.view(2, 3, 13)):
        assert bits(one(q, positions, rotary)) == bits(want.view(3, 13, 2, 8))
        over_heads = one(q.transpose(1, 2), positions, rotary, layout="bhsd")
        assert bits(over_heads.transpose(1, 2)) == bits(want.view(3, 13, 2, 8))
    padding = torch.from_numpy(packed(scheme).padded(13, side)[1] == 0)
    assert bits(want.view(3, 13, 2, 8)[padding]) == bits(q[padding])


# Gradients.


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.usefixtures("way")
def test_gradients_are_rotated_back(conjugate: bool, pairing: Any, dtype: torch.dtype) -> None:
    rotary = Rotary(20, rotary_dim=12, pairing=pairing, scaling=YaRN(4.0, 32768))
    table = packed("rope-tie-fractional")
    q, k = leaf(heads(32, 3, 20, dtype)), leaf(heads(32, 1, 20, dtype, seed=1))
    q_grad, k_grad = heads(32, 3, 20, dtype, seed=2), heads(32, 1, 20, dtype, seed=3)
    torch.autograd.backward(both(q, k, table, rotary, conjugate=conjugate), (q_grad, k_grad))
    assert_rotated(q.grad, q_grad, table, rotary, conjugate=not conjugate)
    assert_rotated(k.grad, k_grad, table, rotary, conjugate=not conjugate)


def test_only_tensors_that_require_gradients_receive_gradients() -> None:
    rotary, table = Rotary(8), packed("rope-tie")
    grad = heads(32, 2, 8, seed=5)
    q, k = leaf(heads(32, 2, 8)), heads(32, 1, 8)
    both(q, k, table, rotary)[0].backward(grad)
    assert_rotated(q.grad, grad, table, rotary, conjugate=True)
    assert k.grad is None
    q_alone = leaf(q.detach())
    one(q_alone, table, rotary).backward(grad)
    assert q_alone.grad is not None
    assert q.grad is not None
    assert bits(q_alone.grad) == bits(q.grad)
    k = leaf(k)
    both(q.detach(), k, table, rotary)[1].backward(grad[:, :1])
    assert_rotated(k.grad, grad[:, :1], table, rotary, conjugate=True)


def test_second_derivatives_are_rotated_forward() -> None:
    rotary, table = Rotary(8), packed("rope-tie")
    q, grad = leaf(heads(32, 2, 8)), leaf(heads(32, 2, 8, seed=5))
    (first,) = torch.autograd.grad(one(q, table, rotary), q, grad, create_graph=True)
    weights = heads(32, 2, 8, seed=6)
    (second,) = torch.autograd.grad(first, grad, weights)
    assert_rotated(second, weights, table, rotary)


def test_a_table_refreshed_before_the_backward_pass_is_refused() -> None:
    rotary, table = Rotary(8), packed("rope-tie")
    q, grad = leaf(heads(32, 2, 8)), heads(32, 2, 8, seed=5)
    positions = DevicePositions.from_table(table)
    out = one(q, positions, rotary)
    positions.refresh(packed("rope-tie", 500))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(grad)
    one(q, positions, rotary).backward(grad)
    assert_rotated(q.grad, grad, packed("rope-tie", 500), rotary, conjugate=True)


def test_the_oracle_applies_the_rotation_matrix() -> None:
    cos, sin = 0.8775825618903728, 0.479425538604203
    truth = rotated(np.array([[[3.0, 4.0]]]), [[Fraction(1, 2)]], Rotary(2, axes=1))
    assert_within(truth, [[[3 * cos - 4 * sin, 3 * sin + 4 * cos]]], 5 * cos_sin(dtype=np.float64))


def test_autograd_detects_tensors_rotated_in_place() -> None:
    q = heads(32, 2, 8).requires_grad_() * 1
    saved = q.sin()
    with torch.no_grad():
        apply_rotary(q, None, packed("rope-tie"), Rotary(8), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_inference_tensors_are_rotated_in_place() -> None:
    with torch.inference_mode():
        q = heads(32, 2, 8)
        want = one(q, packed("rope-tie"), Rotary(8))
        apply_rotary(q, None, packed("rope-tie"), Rotary(8), inplace=True)
        assert bits(q) == bits(want)


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_the_values_of_a_negative_view_are_rotated(implementation: Any) -> None:
    whole = heads(32, 2, 16)
    negative = torch.view_as_complex(torch.stack((whole, whole), -1)).conj().imag
    assert negative.is_neg()
    want = one(-whole, packed("rope-tie"), Rotary(16))
    assert torch.equal(one(negative, packed("rope-tie"), Rotary(16), implementation=implementation), want)
    with pytest.raises(UnsupportedError, match="q: got a negative view, want inplace=False"):
        apply_rotary(negative, None, packed("rope-tie"), Rotary(16), inplace=True, implementation=implementation)


def functions_run_by(call: Callable[[], object]) -> int:
    """Count the distinct mmpos functions that a warm call runs."""
    seen, house = set(), str(Path(mmpos.__file__).parent)
    for _ in range(3):
        call()
    sys.setprofile(lambda frame, event, _: seen.add(frame.f_code) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sum(code.co_filename.startswith(house) for code in seen)


def test_a_warm_call_runs_few_functions() -> None:
    """The bounds are a tenth above the measured counts."""
    input_ids, q, k, rotary = np.array([1, 2, 9, 9, 9, 9, 3]), heads(7, 4, 16), heads(7, 2, 16), Rotary(16)

    def table() -> PositionTable:
        return place(SegmentTable.from_input_ids(input_ids, Placeholders(image=9), [[1, 2, 2]]), "rope-tie")

    placed_once = table()
    assert functions_run_by(lambda: apply_rotary(q, k, placed_once, rotary)) <= 11
    assert functions_run_by(lambda: apply_rotary(q, k, table(), rotary)) <= 51
