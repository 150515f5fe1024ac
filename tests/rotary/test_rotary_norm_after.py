"""The norm after the rotation: the formula in float64, gradients, gradients of gradients, and the order's door."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rotary_oracle import DTYPES, heads, ids_of, packed, rotated, thd
from test_rotary_norm import (
    DEVICE,
    EPS,
    PAIRINGS,
    RELATIVE,
    WAYS,
    assert_gradients,
    assert_gradients_rounded_once,
    device_heads,
    normalised,
    weight,
)
from tolerance import assert_within, rounding
from torch import Tensor
from torch.nn.functional import rms_norm

from mmpos import InvalidInputError, PositionTable
from mmpos.rotary import DevicePositions, Rotary, RotaryEmbedding, YaRN, apply_rotary, operators, rotate_and_store
from mmpos.rotary.device import constants, position_ids
from mmpos.rotary.reference import AUTO

pytestmark = pytest.mark.usefixtures("few_programs", "poison")

TABLE = packed("rope-tie").slice(0, 19)


def assert_true(
    got: Tensor | None, x: Tensor, w: Tensor, table: PositionTable, rotary: Rotary, offset: float, **options: Any
) -> None:
    """Every element is the truth, moved by float32 arithmetic at most, rounded once to its dtype."""
    assert got is not None
    assert (got.shape, got.dtype) == (x.shape, x.dtype)
    one = torch.ones_like(w)
    value = normalised(rotated(thd(x, None), ids_of(table), rotary, **options), one)
    scale = w.double().cpu() + offset
    truth = torch.from_numpy(value) * scale
    # Both channels of a pair err by its length, which no pair has more of than √2 times the largest channel.
    room = RELATIVE * 2**0.5 * torch.from_numpy(np.abs(value).max(axis=-1, keepdims=True)) * scale.abs()
    found = torch.from_numpy(thd(got, None))
    low, high = ((truth + sign * room).to(x.dtype).double() for sign in (-1, 1))
    if x.dtype == torch.bfloat16 and DEVICE.type == "cpu":  # the interpreter truncates
        step = 2.0**-7 * truth.abs()
        low, high = low - step, high + step
    wrong = ~((found >= low) & (found <= high))
    assert not wrong.any(), f"{wrong.sum()} wrong, first {wrong.nonzero()[0]}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("scaled", [False, True])
def test_rotated_heads_are_normalised_as_they_are_once_rotated(scaled: bool, pairing: Any, way: Any) -> None:
    # A factor on cos and sin makes heads longer, and only those channels that turn.
    scaling = YaRN(4.0, 32768) if scaled else None
    rotary = Rotary(20, rotary_dim=12, pairing=pairing, scaling=scaling)
    assert (rotary.attention_factor != 1.0) == scaled
    q, k, of_q, of_k = device_heads(19, 3, 20), device_heads(19, 1, 20, seed=1), weight(20), weight(20, seed=4)
    options: Any = {"norm_eps": EPS, "norm_order": "after", "implementation": way, "norm_weight_offset": 1.0}
    for conjugate in (False, True):
        out = apply_rotary(q, k, TABLE, rotary, q_norm_weight=of_q, k_norm_weight=of_k, conjugate=conjugate, **options)
        assert_true(out[0], q, of_q, TABLE, rotary, 1.0, conjugate=conjugate)
        assert_true(out[1], k, of_k, TABLE, rotary, 1.0, conjugate=conjugate)


@pytest.mark.parametrize("way", WAYS)
def test_what_has_no_weight_is_rotated_alone(way: Any) -> None:
    rotary, q, k = Rotary(20, rotary_dim=12), device_heads(19, 3, 20), device_heads(19, 1, 20, seed=1)
    want = apply_rotary(q, k, TABLE, rotary, implementation="reference")
    options: Any = {"norm_order": "after", "implementation": way}
    plain = apply_rotary(q, k, TABLE, rotary, **options)
    _, turned = apply_rotary(q, k, TABLE, rotary, q_norm_weight=weight(20), **options)
    for got, expected in ((plain[0], want[0]), (plain[1], want[1]), (turned, want[1])):
        assert got is not None
        assert expected is not None
        assert torch.equal(got, expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_rounded_once_also_in_place_in_a_module_and_in_a_cache(dtype: Any, way: Any) -> None:
    rotary, q, w = Rotary(16), device_heads(19, 2, 16, dtype), weight(16, dtype)
    options: Any = {"norm_eps": EPS, "norm_order": "after", "implementation": way}
    out, none = apply_rotary(q, None, TABLE, rotary, q_norm_weight=w, **options)
    assert none is None
    assert_true(out, q, w, TABLE, rotary, 0.0)
    mine = q.clone()
    RotaryEmbedding(rotary).to(DEVICE)(mine, None, TABLE, q_norm_weight=w, inplace=True, **options)
    assert torch.equal(mine, out)
    keys, values = torch.zeros(2, 32, 2, 16, dtype=dtype, device=DEVICE)
    slots = torch.arange(19, device=DEVICE)
    rotate_and_store(q, q.clone(), q, TABLE, rotary, keys, values, slots, k_norm_weight=w, **options)
    assert torch.equal(keys[:19], out)


# Gradients.


def separate(x: Tensor, w: Tensor | None, rotary: Rotary, offset: float) -> Tensor:
    """A rotation in float64 by complex numbers and the norm of torch, which autograd goes back through."""
    basis = np.eye(rotary.head_dim)[None].repeat(x.shape[0], 0)
    turn = torch.from_numpy(rotated(basis, ids_of(TABLE.slice(0, x.shape[0])), rotary)).to(x.device)
    y = torch.einsum("thc,tcd->thd", x.double(), turn)
    return y if w is None else rms_norm(y, y.shape[-1:], w.double() + offset, EPS)


QUICK = {("qkab", "qk", "half"), ("qkab", "qk", "adjacent"), ("b", "k", "half")}
"""Which gradients of q, k, their weights a and b are wanted, and what is normalised; in the kernel without ``slow``."""


@pytest.mark.parametrize(
    ("wanted", "normed", "pairing", "way"),
    [
        pytest.param(*case, way, marks=[pytest.mark.slow] * (way == "triton" and case not in QUICK))
        for case in sorted(
            (wanted, normed, pairing)
            for wanted, normed in (("qkab", "qk"), ("ab", "qk"), ("q", "qk"), ("qka", "q"), ("k", "q"), ("b", "k"))
            for pairing in PAIRINGS
        )
        for way in ("reference", "auto", "triton")
    ],
)
def test_gradients_are_those_of_separate_operations_in_float64(
    wanted: str, normed: str, pairing: Any, way: Any, tile: Any
) -> None:
    tile(16, 2 if wanted == "qkab" else 1)  # several blocks, and heads that programs share
    rotary = Rotary(20, rotary_dim=12, pairing=pairing, scaling=YaRN(4.0, 32768))
    assert_gradients(wanted, normed, rotary, TABLE, separate, norm_order="after", implementation=way)


@pytest.mark.parametrize("way", ["reference", "triton"])
def test_gradients_of_half_precision_are_rounded_once(way: Any) -> None:
    table = TABLE.slice(0, 13)
    assert_gradients_rounded_once(torch.float16, table, separate, norm_order="after", implementation=way)


def test_gradients_have_gradients() -> None:
    rotary, table = Rotary(8, rotary_dim=4), TABLE.slice(0, 5)
    q, k, w = device_heads(5, 2, 8), device_heads(5, 1, 8, seed=1), weight(8)
    inputs = [x.requires_grad_() for x in (q, k, w)]

    def second(by: Any) -> tuple[Tensor, ...]:
        first = torch.autograd.grad([x.sin().sum() for x in by()], inputs, create_graph=True)
        return torch.autograd.grad([x.square().sum() for x in first], inputs)

    def ours() -> tuple[Tensor, ...]:
        options: Any = {"q_norm_weight": w, "norm_eps": EPS, "norm_order": "after"}
        return second(lambda: apply_rotary(q, k, table, rotary, **options))

    want = second(lambda: (separate(q, w, rotary, 0.0), separate(k, None, rotary, 0.0)))
    assert_within(ours(), want, rounding(ours, inputs))


# Doors.


def test_an_unknown_order_is_refused_with_weights_and_without() -> None:
    q = heads(19, 2, 16)
    for options in ({}, {"q_norm_weight": weight(16)}):
        with pytest.raises(InvalidInputError, match="norm_order: got 'behind', want one of 'before', 'after'"):
            apply_rotary(q, None, TABLE, Rotary(16), norm_order="behind", **options)  # type: ignore[arg-type]


def test_whole_graphs_with_gradients() -> None:
    torch._dynamo.reset()
    positions, rotary = DevicePositions.from_table(TABLE, DEVICE), Rotary(16)

    def attention_input(q: Tensor, w: Tensor) -> Tensor:
        return apply_rotary(q * 2, None, positions, rotary, q_norm_weight=w, norm_order="after")[0] + 1

    q, w = device_heads(19, 3, 16).requires_grad_(), weight(16).requires_grad_()
    compiled = torch.compile(attention_input, fullgraph=True, backend="aot_eager")
    found, want = (call(q, w) for call in (compiled, attention_input))
    assert torch.equal(found, want)
    pairs = zip(*(torch.autograd.grad(x.pow(3).sum(), (q, w)) for x in (found, want)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_operator_passes_torchs_own_checks() -> None:
    made, rotary = position_ids(DevicePositions.from_table(TABLE, DEVICE), DEVICE), Rotary(16)
    q, k = (device_heads((1, 19), n, 16).requires_grad_() for n in (3, 1))
    of_norm = weight(16).requires_grad_(), None, 1e-6, 1.0, True
    numbers = made.mode, False, 1.0, False, AUTO
    torch.library.opcheck(operators.norm_rotate, (q, k, *of_norm, made.tensor, *constants(rotary, DEVICE), *numbers))
