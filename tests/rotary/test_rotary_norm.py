"""Norm and rotation in one launch, in either order: outputs and gradients are compared with float64 formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from rotary_oracle import BY_AXES, DTYPES, heads, ids_of, lengths, packed, rotated, thd
from tolerance import ARITHMETIC, assert_within, gamma, rounded, rounding
from torch import Tensor
from torch.nn.functional import rms_norm

from mmpos import PositionTable
from mmpos.rotary import Cache, Norm, Rotary, YaRN, apply_rotary, rotate_and_store

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAIRINGS = ("half", "adjacent")
WAYS = ("reference", "auto", "triton")
ORDERS = pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
EPS = 1e-5

pytestmark = pytest.mark.usefixtures("few_programs", "poison")

RELATIVE = ARITHMETIC + gamma(sqrt(128) + 5)
"""Float32 error relative to the length of a pair: a sum of 128 squares, a root, a quotient and two products."""


def weight(head_dim: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> Tensor:
    """Return weights of both signs with a mean of one half."""
    return (0.5 + torch.randn(head_dim, generator=torch.Generator().manual_seed(seed))).to(dtype).to(DEVICE)


def device_heads(*args: Any, **options: Any) -> Tensor:
    return heads(*args, **options).to(DEVICE)


def normalised(value: Any) -> Any:
    """Normalise heads in float64, without weights."""
    return value / np.sqrt((value**2).mean(axis=-1, keepdims=True) + EPS)


def assert_true(
    got: Tensor | None, x: Tensor, w: Tensor | None, norm: Norm, table: PositionTable, rotary: Rotary, **options: Any
) -> None:
    """Assert that every element is the exact value, up to the float32 error and one rounding to its dtype."""
    assert got is not None
    assert (got.shape, got.dtype) == (x.shape, x.dtype)
    layout = options.pop("layout", None)
    value, scale = thd(x, layout), np.ones(x.shape[-1])
    if w is not None:
        scale = w.detach().double().cpu().numpy() + norm.offset
    after = norm.after and w is not None
    if after:
        value = normalised(rotated(value, ids_of(table), rotary, **options))
        truth, largest = value * scale, np.abs(value).max(axis=-1, keepdims=True) * np.abs(scale)
    else:
        value = value if w is None else normalised(value) * scale
        truth = rotated(value, ids_of(table), rotary, **options)
        largest = np.abs(value).max(axis=-1, keepdims=True) * rotary.attention_factor
    # The error of both channels is relative to the length of the pair, which is at most √2 times the largest channel.
    bound = torch.from_numpy(RELATIVE * 2**0.5 * largest)
    result, want = torch.from_numpy(thd(got, layout)), torch.from_numpy(truth)
    low, high = ((want + sign * bound).to(x.dtype).double() for sign in (-1, 1))
    if x.dtype == torch.bfloat16 and DEVICE.type == "cpu":  # the interpreter truncates
        step = 2.0**-7 * want.abs()
        low, high = low - step, high + step
    wrong = ~((result >= low) & (result <= high))
    assert not wrong.any(), f"{wrong.sum()} wrong, first {wrong.nonzero()[0]}"


CASES = {
    "head_dim 80": Rotary(80, axes=1),
    "head_dim 96, sections": Rotary(96, axes=3, allocation="sections", mrope_section=[16, 16, 16]),
    "head_dim 128": Rotary(128),
    "partial": Rotary(20, rotary_dim=12),
    "partial, scaled": Rotary(40, rotary_dim=8, scaling=YaRN(4.0, 32768)),
    "one pair": Rotary(2, axes=1),
}
INTERPRETED = ("partial",)
"""Cases that are not marked ``slow`` in the interpreter."""


@ORDERS
@pytest.mark.parametrize(
    ("case", "pairing", "way"),
    [
        pytest.param(case, pairing, way, marks=[pytest.mark.slow] * (way == "triton" and case not in INTERPRETED))
        for case in CASES
        for pairing in PAIRINGS
        for way in WAYS
    ],
)
def test_every_implementation_agrees_with_the_formula(case: str, pairing: Any, way: Any, after: bool) -> None:
    # An attention factor scales only the rotated channels, so the order of norm and rotation matters.
    rotary = replace(CASES[case], pairing=pairing)
    table = packed(BY_AXES[rotary.axes], 70_000).slice(0, 13)
    q, k = device_heads(13, 3, rotary.head_dim), device_heads(13, 1, rotary.head_dim, seed=1)
    first, second = weight(rotary.head_dim), weight(rotary.head_dim, seed=4)
    for q_weight, k_weight in ((first, second), (first, None), (None, second))[: 3 if case == "partial" else 1]:
        norm = Norm(q_weight, k_weight, EPS, 1.0, after)
        for conjugate in (False, True)[: 1 + (q_weight is first and case == "partial")]:
            out = apply_rotary(q, k, table, rotary, norm=norm, conjugate=conjugate, implementation=way)
            assert_true(out[0], q, q_weight, norm, table, rotary, conjugate=conjugate)
            assert_true(out[1], k, k_weight, norm, table, rotary, conjugate=conjugate)


@ORDERS
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("weight_dtype", "dtype"), [*zip(DTYPES, DTYPES, strict=True), (DTYPES[0], DTYPES[1])])
def test_every_dtype_of_heads_and_weights_is_rounded_once_in_outputs_and_caches(
    weight_dtype: Any, dtype: Any, way: Any, after: bool
) -> None:
    rotary, table = Rotary(24, rotary_dim=16), packed("rope-tie-v2").slice(0, 13)
    q, norm = device_heads(13, 2, 24, dtype), Norm(weight(24, weight_dtype), None, EPS, 1.0, after)
    out, none = apply_rotary(q, None, table, rotary, norm=norm, implementation=way)
    assert none is None
    assert_true(out, q, norm.q_weight, norm, table, rotary)
    keys, values = torch.zeros(2, 32, 2, 24, dtype=dtype, device=DEVICE)
    cache = Cache(keys, values, torch.arange(13, device=DEVICE))
    k_norm = norm._replace(q_weight=None, k_weight=norm.q_weight)
    rotate_and_store(q, q.clone(), q, table, rotary, cache, norm=k_norm, implementation=way)
    assert torch.equal(keys[:13], out)


@pytest.mark.parametrize(
    ("layout", "pairing", "way"),
    [
        pytest.param(layout, pairing, way, marks=[pytest.mark.slow] * ((way, layout) == ("triton", "bhsd")))
        for layout, pairing in (("thd", "half"), ("bshd", "adjacent"), ("bhsd", "half"))
        for way in WAYS
    ],
)
def test_views_in_every_layout_agree_with_the_formula(layout: Any, pairing: Any, way: Any, tile: Any) -> None:
    tile(64, 2 if layout == "thd" else 1)
    rotary, table = Rotary(12, rotary_dim=8, pairing=pairing), packed("rope-tie").pad(13)
    fused = device_heads(39, 8, 12)
    copy = fused.clone()
    views = []
    for buffer in (fused, copy):
        shaped = buffer if layout == "thd" else buffer.view(3, 13, 8, 12)
        q_and_k = shaped[..., :4, :], shaped[..., 4:6, :]
        views.append([x.transpose(1, 2) if layout == "bhsd" else x for x in q_and_k])
    w = weight(24)[::2]  # not contiguous
    options: Any = {"layout": layout, "norm": Norm(w, w, EPS), "implementation": way}
    out = apply_rotary(views[0][0], views[0][1], table, rotary, **options)
    for got, x in zip(out, views[0], strict=True):
        assert_true(got, x, w, options["norm"], table, rotary, layout=layout)
    in_place = apply_rotary(views[1][0], views[1][1], table, rotary, inplace=True, **options)
    for got, x, want in zip(in_place, views[1], out, strict=True):
        assert got is x
        assert want is not None
        assert torch.equal(x, want)
    assert torch.equal(copy[:, 6:], fused[:, 6:])


# Triton's interpreter truncates to bfloat16 instead of rounding, so bfloat16 is not measured in the interpreter.
@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        ("reference", torch.float32),
        ("reference", torch.bfloat16),
        ("auto", torch.float32),
        ("auto", torch.bfloat16),
        pytest.param("triton", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_the_error_is_as_documented(way: Any, dtype: torch.dtype, tile: Any) -> None:
    tile(32, 1)
    rotary, table = Rotary(128), packed("rope-tie")
    q, w = device_heads(32, 32, 128, dtype), weight(128, dtype)

    def error(out: Tensor) -> float:
        value = normalised(thd(q, None)) * w.double().cpu().numpy()
        difference = np.abs(thd(out, None) - rotated(value, ids_of(table), rotary))
        return float((difference / lengths(value, rotary)).max())

    fused = error(apply_rotary(q, None, table, rotary, norm=Norm(w, eps=EPS), implementation=way)[0])
    separate = error(apply_rotary(rms_norm(q, (128,), w, EPS), None, table, rotary, implementation="reference")[0])
    print(f"{way}, {dtype}: {fused:.2e}, separate operations {separate:.2e}")
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


QUICK = {("qkab", "qk", "adjacent"), ("b", "k", "half")}
"""Kernel cases not marked ``slow``: wanted gradients (q, k, weights a and b), normalised heads, and pairing."""


@ORDERS
@pytest.mark.parametrize(
    ("wanted", "normed", "pairing", "way"),
    [
        pytest.param(*case, way, marks=[pytest.mark.slow] * (way == "triton" and case not in QUICK))
        for case in [
            *(("qkab", "qk", pairing) for pairing in PAIRINGS),
            *(("ab", "qk", "half"), ("q", "qk", "adjacent"), ("b", "qk", "half"), ("qka", "q", "adjacent")),
            *(("a", "q", "half"), ("k", "q", "adjacent"), ("qkb", "k", "half"), ("q", "k", "adjacent")),
            ("b", "k", "half"),
        ]
        for way in ("reference", "triton")
    ],
)
def test_gradients_agree_with_separate_operations_in_float64(
    wanted: str, normed: str, pairing: Any, way: Any, after: bool, tile: Any
) -> None:
    tile(16, 2 if wanted == "qkab" else 1)  # several blocks, and heads split among programs
    table = packed("rope-tie").slice(0, 19)
    rotary = Rotary(20, rotary_dim=12, pairing=pairing, scaling=YaRN(4.0, 32768) if after else None)
    q, k = device_heads(19, 3, 20), device_heads(19, 1, 20, seed=1)
    grads = [device_heads(19, n, 20, seed=9) for n in (3, 1)]
    norm = Norm(weight(20) if "q" in normed else None, weight(20, seed=4) if "k" in normed else None, EPS, 1.0, after)
    named = {"q": q, "k": k, "a": norm.q_weight, "b": norm.k_weight}
    inputs = [x.requires_grad_() for name, x in named.items() if name in wanted and x is not None]
    assert len(inputs) == len(wanted)

    def gradients(out: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        needed = [
            (x, grad.to(x.dtype)) for x, grad in zip(out, grads, strict=True) if x is not None and x.requires_grad
        ]
        return torch.autograd.grad([x for x, _ in needed], inputs, [grad for _, grad in needed])

    def ours(implementation: Any) -> tuple[Tensor, ...]:
        return gradients(apply_rotary(q, k, table, rotary, norm=norm, implementation=implementation))

    truth = [separate(x, w, norm, table, rotary) for x, w in ((q, norm.q_weight), (k, norm.k_weight))]
    bounds = rounding(lambda: ours("reference"), [*inputs, *grads], 19 * 3)  # sums over tokens and heads
    assert_within(ours(way), gradients(truth), bounds)


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


@pytest.mark.parametrize("way", ["auto", "triton"])
def test_weight_gradients_are_deterministic(way: Any) -> None:
    rotary, table = Rotary(16), packed("rope-tie").slice(0, 19)
    q, k, w = device_heads(19, 3, 16), device_heads(19, 2, 16, seed=1), weight(16).requires_grad_()
    out = apply_rotary(q, k, table, rotary, norm=Norm(w, w), implementation=way)
    assert out[1] is not None
    total = out[0].sin().sum() + out[1].cos().sum()
    first, second = (torch.autograd.grad(total, w, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


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


# Norms of models.


def norm_module(name: str) -> Any:
    """Return a model's own norm for 32 channels."""
    if name == "torch":
        return torch.nn.RMSNorm(32, EPS)
    if name == "Gemma 3":
        return pytest.importorskip("transformers.models.gemma3.modeling_gemma3").Gemma3RMSNorm(32, EPS)
    return pytest.importorskip("transformers.models.qwen3.modeling_qwen3").Qwen3RMSNorm(32, EPS)


# Importing Transformers takes seconds.
@pytest.mark.parametrize("name", ["torch", *(pytest.param(x, marks=pytest.mark.slow) for x in ("Qwen3", "Gemma 3"))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_rotation_agree_with_model_norms_up_to_rounding(dtype: Any, name: str) -> None:
    modeling = norm_module(name).to(dtype).to(DEVICE)
    with torch.no_grad():
        modeling.weight.copy_(weight(32))
    rotary, table = Rotary(32), packed("rope-tie")
    q = device_heads(32, 4, 32, dtype)
    with torch.no_grad():
        want, _ = apply_rotary(modeling(q), None, table, rotary)
        norm = Norm(modeling.weight, eps=EPS, offset=float(name == "Gemma 3"))
        got, _ = apply_rotary(q, None, table, rotary, norm=norm)
    # mmpos rounds once; the models may round after the norm, the product with the weight, and the rotation.
    lengths = want.float().reshape(32, 4, 2, 16).norm(dim=2).repeat(1, 1, 2)
    assert_within(got, want, (2 * RELATIVE + gamma(4, dtype)) * lengths)
    if dtype == torch.bfloat16:
        assert not torch.equal(got, want)
