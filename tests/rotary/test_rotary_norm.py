"""Norm and rotation in one launch, in either order: outputs and gradients are compared with float64 formulas."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from rotary_oracle import DTYPES, assert_rounded, device_heads, ids_of, lengths, packed, rotated, thd
from store_oracle import DEVICE
from tolerance import ARITHMETIC, INTERPRETED, assert_within, gamma, rounded, rounding
from torch import Tensor
from torch.nn.functional import rms_norm

from mmpos import PositionTable
from mmpos.rotary import Cache, Norm, Rotary, apply_rotary, rotate_and_store

WAYS = ("reference", "auto", "triton")
ORDERS = pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
EPS = 1e-5

pytestmark = pytest.mark.usefixtures("few_programs", "poison")

RELATIVE = ARITHMETIC + gamma(sqrt(128) + 5)
"""Float32 error relative to the length of a pair: a sum of 128 squares, a root, a quotient and two products."""


def weight(head_dim: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> Tensor:
    """Return weights of both signs with a mean of one half."""
    return (0.5 + torch.randn(head_dim, generator=torch.Generator().manual_seed(seed))).to(dtype).to(DEVICE)


def normalised(value: Any) -> Any:
    """Normalise heads in float64, without weights."""
    return value / np.sqrt((value**2).mean(axis=-1, keepdims=True) + EPS)


def assert_true(got: Tensor, x: Tensor, w: Tensor, norm: Norm, table: PositionTable, rotary: Rotary) -> None:
    """Assert that every element is the exact value, up to the float32 error and one rounding to its dtype."""
    assert (got.shape, got.dtype) == (x.shape, x.dtype)
    value, scale = thd(x, None), w.double().cpu().numpy() + norm.offset
    if norm.after:
        value = normalised(rotated(value, ids_of(table), rotary))
        truth, largest = value * scale, np.abs(value).max(axis=-1, keepdims=True) * np.abs(scale)
    else:
        value = normalised(value) * scale
        truth, largest = rotated(value, ids_of(table), rotary), np.abs(value).max(axis=-1, keepdims=True)
    # The error of both channels is relative to the length of the pair, which is at most √2 times the largest channel.
    bound = torch.from_numpy(RELATIVE * 2**0.5 * largest)
    truncated = 2.0**-7 * (x.dtype == torch.bfloat16 and INTERPRETED)
    assert_rounded(torch.from_numpy(thd(got, None)), torch.from_numpy(truth), bound, x.dtype, truncated)


@ORDERS
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("weight_dtype", "dtype"), [*zip(DTYPES, DTYPES, strict=True), (DTYPES[0], DTYPES[1])])
def test_every_dtype_of_heads_and_weights_is_rounded_once_in_outputs_and_caches(
    weight_dtype: Any, dtype: Any, way: Any, after: bool
) -> None:
    rotary, table = Rotary(24, rotary_dim=16), packed("rope-tie-v2").slice(0, 13)
    q, w = device_heads(13, 2, 24, dtype), weight(48, weight_dtype)[::2]
    norm = Norm(w, None, EPS, 1.0, after)
    out, none = apply_rotary(q, None, table, rotary, norm=norm, implementation=way)
    assert none is None
    assert_true(out, q, w, norm, table, rotary)
    keys, values = torch.zeros(2, 32, 2, 24, dtype=dtype, device=DEVICE)
    cache = Cache(keys, values, torch.arange(13, device=DEVICE))
    k_norm = norm._replace(q_weight=None, k_weight=w)
    rotate_and_store(q, q.clone(), q, table, rotary, cache, norm=k_norm, implementation=way)
    assert torch.equal(keys[:13], out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["reference", "auto"])
def test_the_error_is_as_documented(way: Any, dtype: torch.dtype) -> None:
    rotary, table = Rotary(128), packed("rope-tie")
    q, w = device_heads(32, 32, 128, dtype), weight(128, dtype)

    def error(out: Tensor) -> float:
        value = normalised(thd(q, None)) * w.double().cpu().numpy()
        difference = np.abs(thd(out, None) - rotated(value, ids_of(table), rotary))
        return float((difference / lengths(value, rotary)).max())

    fused = error(apply_rotary(q, None, table, rotary, norm=Norm(w, eps=EPS), implementation=way)[0])
    separate = error(apply_rotary(rms_norm(q, (128,), w, EPS), None, table, rotary, implementation="reference")[0])
    if dtype == torch.float32:
        assert max(fused, separate) <= 3.0 * 2.0**-23
    else:
        assert fused <= 2.0**-8 + 3.0 * 2.0**-23  # a single rounding
        assert 1.5 * fused < separate < 2.0**-7


# Gradients.


def separate(x: Tensor, w: Tensor | None, norm: Norm, table: PositionTable, rotary: Rotary) -> Tensor:
    """Apply torch's norm and a rotation matrix in float64; autograd can differentiate the result."""
    basis = np.eye(rotary.head_dim)[None].repeat(x.shape[0], 0)
    matrix = torch.from_numpy(rotated(basis, ids_of(table), rotary)).to(x.device)  # (tokens, channel, head_dim)

    def normed(y: Tensor) -> Tensor:
        return y if w is None else rms_norm(y, y.shape[-1:], w.double() + norm.offset, EPS)

    y = x.double() if norm.after else normed(x.double())
    y = torch.einsum("thc,tcd->thd", y, matrix)
    return normed(y) if norm.after else y


@ORDERS
@pytest.mark.parametrize("way", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_rounded_once(dtype: torch.dtype, way: Any, after: bool) -> None:
    rotary, table = Rotary(16), packed("rope-tie").slice(0, 13)
    q, w = device_heads(13, 3, 16, dtype).requires_grad_(), weight(16, dtype).requires_grad_()
    grad = device_heads(13, 3, 16, dtype, seed=9)

    def ours(implementation: Any, x: Tensor, x_weight: Tensor) -> tuple[Tensor, ...]:
        norm = Norm(x_weight, None, EPS, after=after)
        out, _ = apply_rotary(x, None, table, rotary, norm=norm, implementation=implementation)
        return torch.autograd.grad(out, (x, x_weight), grad.to(out.dtype))

    truth = separate(q, w, Norm(after=after), table, rotary)
    want = torch.autograd.grad(truth, (q, w), grad.double())
    wide = [x.detach().float().requires_grad_() for x in (q, w)]
    bounds = rounding(lambda: ours("reference", *wide), wide, 13 * 3)  # sums over tokens and heads
    assert_within(ours(way, q, w), want, [rounded(x, bound) for x, bound in zip(want, bounds, strict=True)])


@ORDERS
def test_second_derivatives_agree_with_float64(after: bool) -> None:
    rotary, table = Rotary(8, rotary_dim=4), packed("rope-tie").slice(0, 5)
    q, k, w = device_heads(5, 2, 8), device_heads(5, 1, 8, seed=1), weight(8)
    inputs, norm = [x.requires_grad_() for x in (q, k, w)], Norm(w, None, EPS, 1.0, after)

    def second(outputs: Any) -> tuple[Tensor, ...]:
        first = torch.autograd.grad([x.sin().sum() for x in outputs()], inputs, create_graph=True)
        return torch.autograd.grad([x.square().sum() for x in first], inputs)

    def ours() -> tuple[Tensor, ...]:
        return second(lambda: apply_rotary(q, k, table, rotary, norm=norm))

    want = second(lambda: [separate(x, x_weight, norm, table, rotary) for x, x_weight in ((q, w), (k, None))])
    assert_within(ours(), want, rounding(ours, inputs))


def test_gradients_without_tokens_or_heads_are_zero() -> None:
    rotary, table, w = Rotary(8), packed("rope-tie"), weight(8).requires_grad_()
    for way in WAYS:
        for q, positions in ((device_heads(0, 2, 8), table.slice(4, 4)), (device_heads(32, 0, 8), table)):
            options: Any = {"norm": Norm(w), "implementation": way}
            out, _ = apply_rotary(q.requires_grad_(), None, positions, rotary, **options)
            grads = torch.autograd.grad(out.sum(), (q, w))
            assert out.shape == grads[0].shape == q.shape
            assert torch.equal(grads[1], torch.zeros_like(w))
