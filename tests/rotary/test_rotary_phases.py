"""Phases: cos, sin, turns and angles of int32 ids compared with 60-digit numbers, and Transformers' float32 angles."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from oracle import exact, placed, settled
from rotary_oracle import DIGITS, INT32_MAX, INT32_MIN, SCHEMES, VIEWS, Ids, packed, phases, table_of
from tolerance import EXACT, assert_within, cos_sin, unit

import mmpos.rotary
from mmpos import Grid, PositionTable, Text
from mmpos.rotary import Rotary
from mmpos.rotary.device import frequencies_of, ids_on
from mmpos.rotary.reference import (
    DENSE_FIXED,
    DENSE_INTEGER,
    TABLE_FRACTIONAL,
    TABLE_INTEGER,
    angles_of_turns,
    as_float,
    cos_sin_of_turns,
    fixed_from_float,
    fixed_positions,
    turns,
)

TURN = 2**32
THETAS = (1e4, 5e5, 1e6)

EDGES: list[int] = [
    0, 1, -1, 2, 4095, 2**16, 2**24 - 1, 2**24, 2**24 + 1, -(2**24) - 1, 2**30, INT32_MAX - 1, INT32_MAX,
    INT32_MIN, INT32_MIN + 1,
]  # fmt: skip
FRACTIONS: list[Fraction] = [
    Fraction(1, 3), Fraction(-1, 3), Fraction(1, 2), Fraction(-1, 2), Fraction(INT32_MAX - 1, INT32_MAX),
    Fraction(-1, INT32_MAX), Fraction(1, INT32_MAX), INT32_MAX - 1 + Fraction(1, 3), INT32_MIN + Fraction(2, 3),
    10**5 + Fraction(355, 626), 10**7 - Fraction(1, 2),
]  # fmt: skip


def random_ids(count: int, seed: int) -> list[int]:
    """Return ids of all magnitudes and both signs."""
    draw = random.Random(seed)
    return [draw.randint(-(2**bits), 2**bits - 1) for bits in draw.choices(range(1, 32), k=count)]


def random_fractions(count: int, seed: int) -> list[Fraction]:
    draw = random.Random(seed)
    denominators = [draw.randint(2, 2 ** draw.randint(1, 31) + 1) % INT32_MAX + 2 for _ in range(count)]
    wholes = [min(value, INT32_MAX - 1) for value in random_ids(count, seed + 1)]
    return [w + Fraction(draw.randrange(d), d) for w, d in zip(wholes, denominators, strict=True)]


def column(values: Sequence[Fraction | int]) -> Ids:
    """Return the values as ids on one axis."""
    return [[value] for value in values]


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("kind", ["integers", "fractions", "float64"])
def test_exact_cos_and_sin_are_within_2e_7_for_every_id(theta: float, kind: str) -> None:
    rotary, seed = Rotary(128, theta=theta, axes=1), int(theta)
    if kind == "fractions":
        ids = column([*FRACTIONS, *random_fractions(120, seed)])
        cos, sin = (table[0] for table in mmpos.rotary.cos_sin(rotary, table_of(ids)))  # one document, a batch of one
    else:
        halves = [Fraction(n % 4, 4) if kind == "float64" else 0 for n in range(120)]
        ids = column([*EDGES, *(sum(pair) for pair in zip(random_ids(120, seed), halves, strict=True))])
        dtype = torch.float64 if kind == "float64" else torch.int32
        positions = torch.tensor([[float(value) for [value] in ids]], dtype=torch.float64).to(dtype)
        cos, sin = mmpos.rotary.cos_sin(rotary, positions)
    assert (cos.dtype, sin.dtype, cos.shape) == (torch.float32, torch.float32, (len(ids), 64))
    truth = phases(ids, rotary)
    assert_within((cos, sin), (np.cos(truth), np.sin(truth)), EXACT)


@settled
@given(
    numerator=st.integers(INT32_MIN * INT32_MAX, INT32_MAX * INT32_MAX),
    denominator=st.integers(1, INT32_MAX),
    inv_freq=st.floats(-40_000.0, 40_000.0),
)
@example(INT32_MIN, 1, 1.0)
@example(INT32_MIN * INT32_MAX + 1, INT32_MAX, 1.0)
@example(-1, INT32_MAX, -1.0)
@example(-1, 2, 5e-324)
@example(1, 2, 7.0)
@example(1, 3, -2.0 * math.pi)
@example(1, 3, 2 * 15_708.0)
@example(1, INT32_MAX, 2.0**32)
def test_turns_of_any_id_and_frequency_are_within_their_bound(
    numerator: int, denominator: int, inv_freq: float
) -> None:
    position = Fraction(numerator, denominator)
    if not INT32_MIN <= position <= INT32_MAX:
        position %= INT32_MAX
    rotary = Rotary(2, axes=1, inv_freq=[inv_freq])
    words, pair_axis = frequencies_of(rotary)
    table = ids_on(table_of([[position]]), rotary, torch.device("cpu")).tensor
    computed = int(turns(fixed_positions(table, TABLE_FRACTIONAL, 1), pair_axis.to(torch.int64), words))
    with mpmath.workdps(2 * DIGITS):
        frequency = int(mpmath.nint(mpmath.mpf(inv_freq) / (2 * mpmath.pi) * 2**200))  # in units of 2⁻²⁰⁰ turn
    error = (computed - position * frequency / 2**168 + TURN // 2) % TURN - TURN // 2
    assert 0 <= computed < TURN
    # Rounding the fraction down loses up to one unit, and the frequency multiplies this error.
    assert abs(error) <= 3.25 + abs(inv_freq) / (2 * math.pi)


def test_the_polynomials_are_within_1_2e_7_in_every_octant_and_at_the_borders() -> None:
    near = [eighth * 2**29 + step for eighth in range(8) for step in (-3, -2, -1, 0, 1, 2, 3)]
    draw = random.Random(5)
    turn = [value % TURN for value in near] + [draw.randrange(TURN) for _ in range(20_000)]
    cos, sin = cos_sin_of_turns(torch.tensor(turn))
    angle = np.array(turn, np.float64) * (2 * math.pi / TURN)
    assert_within((cos, sin), (np.cos(angle), np.sin(angle)), 1.2e-7)
    assert cos.abs().max() <= 1
    assert sin.abs().max() <= 1


def test_quarters_of_a_turn_are_exact() -> None:
    cos, sin = cos_sin_of_turns(torch.arange(4) << 30)
    assert cos.tolist() == [1, 0, -1, 0]
    assert sin.tolist() == [0, 1, 0, -1]


def test_angles_are_wrapped_and_exact() -> None:
    rotary = Rotary(32, axes=1)
    ids = column([*FRACTIONS, *EDGES, *random_fractions(60, 6)])
    angles = mmpos.rotary.angles(rotary, table_of(ids))
    assert angles.shape == (len(ids), 1, 1, 32)
    values = angles[:, 0, 0].double().numpy()
    assert np.array_equal(values[:, :16], values[:, 16:])
    assert np.abs(values).max() <= np.float32(np.pi)
    error = (values[:, :16] - phases(ids, rotary) + np.pi) % (2 * np.pi) - np.pi
    # Numbers between 2 and π are rounded, and the turn has an error.
    assert np.abs(error).max() < 2 * unit(torch.float32) + 5e-9


def test_half_a_turn_is_minus_pi() -> None:
    turns_ = torch.tensor([0, 1 << 31, (1 << 31) - 1, TURN - 1])
    want = np.array([0, -np.pi, np.pi, -2 * np.pi / TURN], np.float32)
    assert angles_of_turns(turns_).tolist() == want.tolist()


def floors(ids: Ids) -> list[list[int]]:
    """Return ⌊id · 2³²⌋ for every id, axis by axis."""
    return [[math.floor(Fraction(value) * TURN) for value in axis] for axis in zip(*ids, strict=True)]


@pytest.mark.parametrize(
    "table",
    [view(packed(scheme, 1_000_003)) for scheme in SCHEMES for view in VIEWS.values()]
    + [placed([Grid(2, 3, frames=3), Text(1)], scheme, 7).slice(8, 18) for scheme in ("mrope", "videorope", "vrope")]
    + [table_of(column([*EDGES, *FRACTIONS, *random_fractions(300, 7)]))],
    ids=lambda table: f"{table.scheme}-{table.num_tokens}",
)
def test_tables_expand_to_the_floors_of_their_rational_ids(table: PositionTable) -> None:
    ids = ids_on(table, Rotary(16, axes=table.axes), torch.device("cpu"))
    assert ids.mode == (TABLE_FRACTIONAL if table.fractional else TABLE_INTEGER)
    assert fixed_positions(ids.tensor, ids.mode, table.num_tokens).tolist() == floors(exact(table))


def test_dense_ids_are_converted_to_fixed_point() -> None:
    for dtype in (torch.int32, torch.int64):
        whole = torch.tensor([EDGES], dtype=dtype)
        assert fixed_positions(whole, DENSE_INTEGER, 0).tolist() == floors(column(EDGES))
    values = [*map(float, EDGES), 0.5, -0.5, 1 / 3, -1 / 3, -1e-20, 1e-20, INT32_MAX + 0.75, 2.0**-33, -(2.0**-33)]
    fixed = fixed_from_float(torch.tensor([values], dtype=torch.float64))
    # Just below zero, ids − ⌊ids⌋ rounds to 1, so −1e-20 becomes 0 instead of −2⁻³².
    want = [math.floor(Fraction(value) * TURN) if value != -1e-20 else 0 for value in values]
    assert fixed.tolist() == [want]
    assert fixed_positions(fixed, DENSE_FIXED, 0) is fixed


@pytest.mark.parametrize("theta", THETAS)
def test_angles_with_hf_precision_are_bit_equal_to_those_of_transformers(theta: float) -> None:
    rotary = Rotary(128, theta=theta, axes=1, precision="hf")
    inv_freq = 1.0 / (theta ** (torch.arange(0, 128, 2, dtype=torch.int64).float() / 128))
    assert torch.equal(frequencies_of(rotary)[0], inv_freq)
    ids = torch.tensor([*EDGES, *random_ids(200, 8)])
    angles = (inv_freq[None, :, None] @ ids[None, None, :].float()).transpose(1, 2)[0]  # as Transformers does
    assert torch.equal(as_float(ids << 32)[:, None] * inv_freq, angles)
    cos, sin = mmpos.rotary.cos_sin(rotary, ids[None])
    # torch's float32 cos and sin differ between vectorized elements and the remainder.
    assert_within((cos, sin), (angles.cos(), angles.sin()), cos_sin())


@pytest.mark.parametrize(("last", "published"), [(32_768, 1.9e-3), (131_072, 7.8e-3), (10**6, 6.1e-2), (10**7, 0.77)])
def test_float32_angles_have_the_published_errors_and_turns_are_exact(last: int, published: float) -> None:
    rotary = Rotary(128, axes=1)
    ids = torch.arange(last, max(0, last - 20_000), -7)
    truth = ids.double()[:, None] * torch.tensor(rotary.inv_freq_array)  # within 1e-9
    worst = float((ids.float()[:, None] * torch.tensor(rotary.inv_freq_array).float() - truth).abs().max())
    assert worst == pytest.approx(published, rel=0.2)
    cos, sin = mmpos.rotary.cos_sin(rotary, ids[None])
    error = torch.atan2(sin.double(), cos.double()) - truth
    exact_worst = float((error - (error / (2 * math.pi)).round() * (2 * math.pi)).abs().max())
    assert exact_worst < math.sqrt(2) * EXACT  # √2, since the errors of cos and sin are orthogonal
