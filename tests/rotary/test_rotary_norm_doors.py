"""Doors of norms: what they refuse, what torch.compile makes of them, and torch's own checks of the operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rotary_oracle import heads, packed
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from mmpos import InvalidInputError, UnsupportedError
from mmpos.rotary import DevicePositions, Rotary, RotaryEmbedding, apply_rotary
from mmpos.rotary.device import frequencies_of, position_ids
from mmpos.rotary.operators import norm_rotate, norm_rotate_
from mmpos.rotary.reference import AUTO

ROTARY = Rotary(16, rotary_dim=12)
MODULE = RotaryEmbedding(ROTARY)
TABLE = packed("rope-tie")


def weight(size: int = 16) -> Tensor:
    return torch.linspace(0.5, 2, size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q_norm_weight": weight(12)}, r"q_norm_weight: got shape \(12,\), want \(16,\)"),
        ({"k_norm_weight": weight()[None]}, r"k_norm_weight: got shape \(1, 16\), want \(16,\)"),
        ({"q_norm_weight": weight().double()}, "q_norm_weight: got torch.float64, want a tensor of float32, bf"),
        ({"q_norm_weight": 1.0}, "q_norm_weight: got float, want a tensor of float32, bfloat16 or float16"),
        ({"k_norm_weight": weight().to("meta")}, "k_norm_weight: got a tensor on meta, want cpu as k"),
        ({"q_norm_weight": weight(), "norm_eps": 0.0}, "norm_eps: got 0.0, want an int or float from 2⁻¹²⁶ to 2¹²⁷"),
        (
            {"q_norm_weight": weight(), "norm_eps": 1e-39},
            "norm_eps: got 1e-39, want an int or float from 2⁻¹²⁶ to 2¹²⁷",
        ),
        ({"q_norm_weight": weight(), "norm_eps": float("nan")}, "norm_eps: got nan"),
        ({"q_norm_weight": weight(), "norm_eps": float("inf")}, "norm_eps: got inf"),
        ({"q_norm_weight": weight(), "norm_eps": 1e39}, r"norm_eps: got 1e\+39"),
        ({"q_norm_weight": weight(), "norm_eps": 10**400}, "norm_eps: got 1000000"),
        ({"q_norm_weight": weight(), "norm_eps": "1e-6"}, "norm_eps: got '1e-6'"),
        (
            {"q_norm_weight": weight(), "norm_weight_offset": float("inf")},
            "norm_weight_offset: got inf, want an int or float from -2¹²⁷ to 2¹²⁷",
        ),
        ({"q_norm_weight": weight(), "norm_weight_offset": -1e39}, r"norm_weight_offset: got -1e\+39"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    q, k = heads(32, 2, 16), heads(32, 1, 16)
    with pytest.raises(InvalidInputError, match=message):
        apply_rotary(q, k, TABLE, ROTARY, **options)


def test_a_weight_of_no_k_and_gradients_in_place_are_refused() -> None:
    q, k = heads(32, 2, 16), heads(32, 1, 16)
    with pytest.raises(InvalidInputError, match="k_norm_weight: got a weight without k, want None"):
        apply_rotary(q, None, TABLE, ROTARY, k_norm_weight=weight())
    for name in ("q", "k"):
        options: Any = {f"{name}_norm_weight": weight().requires_grad_(), "inplace": True}
        with pytest.raises(UnsupportedError, match=f"inplace: got {name}_norm_weight that requires gradients"):
            apply_rotary(q, k, TABLE, ROTARY, **options)
        with torch.no_grad():
            apply_rotary(q, k, TABLE, ROTARY, **options)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's own, as forward mode loads its formulas
def test_forward_mode_gradients_of_weights_are_refused() -> None:
    q = heads(32, 2, 16)
    for name in ("q", "k"):
        message = f"{name}_norm_weight: got a forward-mode tangent, want reverse-mode gradients"
        with pytest.raises(UnsupportedError, match=message):
            torch.func.jvp(
                lambda w, name=name: apply_rotary(q, q, TABLE, ROTARY, **{f"{name}_norm_weight": w})[0],
                (weight(),),
                (weight(),),
            )


def test_weights_need_not_be_contiguous() -> None:
    q, strided = heads(32, 2, 16), weight(32)[::2]
    for way in ("reference", "triton"):
        options: Any = {"implementation": way}
        got, _ = apply_rotary(q, None, TABLE, ROTARY, q_norm_weight=strided, **options)
        want, _ = apply_rotary(q, None, TABLE, ROTARY, q_norm_weight=strided.clone(), **options)
        assert torch.equal(got, want)


# torch.compile.


def attention_input(q: Tensor, k: Tensor, w: Tensor, positions: Any) -> tuple[Tensor, Tensor | None]:
    q_out, k_out = MODULE(q * 2, k, positions, q_norm_weight=w, k_norm_weight=w + 1, norm_weight_offset=1.0)
    return q_out + 1, k_out


def everything(call: Any, tokens: int) -> list[Tensor]:
    q, k, w = (x.requires_grad_() for x in (heads(tokens, 3, 16), heads(tokens, 1, 16, seed=1), weight()))
    out = call(q, k, w, DevicePositions.from_table(TABLE.slice(0, tokens)))
    return [*out, *torch.autograd.grad(out[0].pow(2).sum() + out[1].pow(3).sum(), (q, k, w))]


@pytest.mark.parametrize("sizes", [(5,), pytest.param((5, 9, 17, 30, 12), marks=pytest.mark.slow)])
def test_whole_graphs_with_gradients_and_few_of_them(sizes: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention_input, fullgraph=True, backend=counter)
    for tokens in sizes:
        for found, expected in zip(everything(compiled, tokens), everything(attention_input, tokens), strict=True):
            assert torch.equal(found, expected)
    assert counter.frame_count <= min(len(sizes), 2)


def test_in_place_under_compile_writes_into_what_came() -> None:
    torch._dynamo.reset()

    def rotated(q: Tensor, w: Tensor, positions: Any) -> Tensor:
        apply_rotary(q, None, positions, ROTARY, q_norm_weight=w, inplace=True)
        return q + 1

    q, positions = heads(32, 2, 16), DevicePositions.from_table(TABLE)
    want, _ = apply_rotary(q, None, positions, ROTARY, q_norm_weight=weight())
    got = torch.compile(rotated, fullgraph=True, backend="aot_eager")(q, weight(), positions)
    assert torch.equal(q, want)
    assert torch.equal(got, want + 1)


# The operators.


def arguments(*, k_heads: int = 1, both: bool = True, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    made = position_ids(TABLE, torch.device("cpu"))
    q, k = heads((1, 32), 3, 16, dtype), heads((1, 32), k_heads, 16, dtype, seed=1)
    numbers = made.mode, False, 1.0, False, AUTO
    return q, k, weight(), weight() if both else None, 1e-6, 1.0, False, made.tensor, *frequencies_of(ROTARY), *numbers


SAMPLES: dict[str, dict[str, Any]] = {
    "both": {},
    "q alone": {"k_heads": 0, "both": False},
    "bfloat16": {"dtype": torch.bfloat16},
}


# opcheck itself reads the gradients of views of its inputs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("sample", [pytest.param(x, marks=[pytest.mark.slow] * (x != "both")) for x in SAMPLES])
def test_operators_pass_torchs_own_checks(sample: str) -> None:
    q, k, *rest = arguments(**SAMPLES[sample])
    rest[:2] = (None if w is None else w.requires_grad_() for w in rest[:2])
    torch.library.opcheck(norm_rotate, (q.requires_grad_(), k.requires_grad_(), *rest))
    torch.library.opcheck(norm_rotate_, arguments(**SAMPLES[sample]))
