"""Bounds hold between kernels that sum in different orders, and wrong results lie far outside the bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hf_models import CONFIGS, as_ids, patched, tokens, two_rows
from tolerance import assert_within, cos_sin, gamma, printed, rotations, rounded, rounding, unit
from torch import Tensor

from mmpos.rotary import Rotary, apply_rotary


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_one_wrong_id_exceeds_the_rounding_bound_of_a_model_a_hundredfold(name: str) -> None:
    model, input_ids, ids = patched(name), tokens(2, 24), as_ids(two_rows())
    wrong = ids.clone()
    wrong[0, 1, 5] += 1

    def logits(ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        scores: Tensor = model.to(dtype)(input_ids, mm_position_ids=ids).logits
        return scores

    with torch.no_grad():
        (bound,) = rounding(lambda: logits(ids), model.parameters())
        right, moved, exact = logits(ids), logits(wrong), logits(ids, torch.float64)
    assert_within(right, exact.float(), bound)
    assert (moved - right).abs().max() > 100 * bound


def test_sums_in_other_orders_are_within_the_bound_but_a_sum_without_one_term_is_not() -> None:
    random = np.random.default_rng(0)
    a, b = (torch.from_numpy(random.standard_normal(shape)).float() for shape in ((8, 300), (300, 8)))

    def in_order() -> Tensor:
        total = torch.zeros(8, 8)
        for i in range(300):
            total += a[:, i, None] * b[i]
        return total

    bound = rounding(lambda: a @ b, (a, b))
    assert_within(in_order(), a @ b, bound)
    with pytest.raises(AssertionError, match="64 of 64 are wrong, the first at"):
        assert_within(in_order() - a[:, 299, None] * b[299], a @ b, bound)


def test_independently_computed_rotations_are_within_the_bound_and_rotations_by_the_next_id_are_not() -> None:
    rotary, x = Rotary(64, axes=1), torch.randn(9, 2, 64, generator=torch.Generator().manual_seed(0))
    angle = torch.arange(9)[:, None] * torch.tensor(rotary.inv_freq_array)

    def rotate_by(angle: Tensor) -> Tensor:
        first, second = x.double().chunk(2, dim=-1)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).float()

    rotated = apply_rotary(x, None, torch.arange(9)[None], rotary)[0]
    bound = rotations(rotated, cos_sin())
    assert_within(rotated, rotate_by(angle), bound)
    next_id = rotate_by(angle + torch.tensor(rotary.inv_freq_array))
    assert ((rotated - next_id).abs() > bound).double().mean() > 0.9  # share of the channels, including the slowest
    assert_within(rotated.bfloat16(), rotate_by(angle).bfloat16(), rounded(rotated.bfloat16(), bound))


def test_units_follow_ieee_754_and_printed_values_allow_half_a_digit() -> None:
    dtypes: list[Any] = [torch.bfloat16, torch.float16, torch.float32, np.float32, torch.float64, np.float64]
    assert [unit(dtype) for dtype in dtypes] == [2.0**-8, 2.0**-11, 2.0**-24, 2.0**-24, 2.0**-53, 2.0**-53]
    assert gamma(2, torch.float16) == 2.0**-10 / (1 - 2.0**-10)
    assert [number == printed("1.20e-3") for number in (1.194e-3, 1.196e-3, 1.204e-3, 1.206e-3)] == [
        False, True, True, False,
    ]  # fmt: skip


def test_numbers_are_compared_one_by_one_and_nan_is_wrong() -> None:
    assert_within([torch.zeros(2), np.ones(1)], [torch.zeros(2), [1.5]], [0, 0.5])
    assert_within(torch.tensor([1j]), np.array([1j + 3e-8]), 1e-7)
    for result, expected, bound in (
        (torch.tensor([0.0, torch.nan]), torch.zeros(2), 1.0),
        (np.array([0.0, 2.0]), np.zeros(2), np.array([0.0, 1.0])),
        (np.zeros((2, 1)), np.zeros(2), 1.0),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), 1.0),
    ):
        with pytest.raises(AssertionError):
            assert_within(result, expected, bound)
    with pytest.raises(ValueError, match="zip"):
        assert_within([torch.zeros(2)], [torch.zeros(2)] * 2, 0)
