"""Encodings in attention: forward passes, gradients, casts, and claims of the sources."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import two_dogs
from numpy.testing import assert_array_equal
from tolerance import EXACT, assert_within, cos_sin, rotations, rounding
from torch import Tensor

from mmpos import InvalidInputError
from mmpos.encodings import (
    ENCODINGS,
    Alibi,
    Encoding,
    Integer,
    LearnedAbsolute,
    NoPE,
    Rotation,
    SelfAttention,
    Sinusoidal,
)
from mmpos.rotary import Rotary, YaRN, apply_rotary

LEARNED = ["clipped-relative", "learned-absolute", "t5-buckets"]
ROPE, ROPE_2D = ENCODINGS["rope-1d"](), ENCODINGS["rope-2d"]()


pytestmark = pytest.mark.usefixtures("one_thread")


def block(encoding: Encoding, positions: Any, dtype: torch.dtype = torch.float32, **arguments: Any) -> SelfAttention:
    torch.manual_seed(0)
    attention = SelfAttention(48, 4, encoding, positions, **arguments)
    return attention if dtype == torch.float32 else attention.to(dtype)  # a cast computes all buffers again


def embeddings(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).normal(size=(*shape, 48))).to(dtype)


def by_hand(attention: SelfAttention, x: Tensor, encoding: object, positions: list[int], causal: bool) -> Any:
    """Compute one row of a batch by loops over heads and tokens, with the encoding's own table, bias or rotation."""
    value: Any = x.detach().double().numpy()
    if hasattr(encoding, "table"):
        value = value + encoding.table(positions)
    q, k, v = np.split(value @ attention.qkv.weight.detach().double().numpy().T, 3, axis=-1)
    bias = encoding.bias(positions, positions) if hasattr(encoding, "bias") else np.zeros((4, len(x), len(x)))
    seen = np.empty_like(v)
    for h in range(4):
        part = slice(12 * h, 12 * h + 12)
        qh, kh = q[:, part], k[:, part]
        if isinstance(encoding, Rotation):
            shared = len(encoding.shape) == 1  # otherwise the encoding rotates all four heads, and head h is used
            rows = ((x if shared else np.repeat(x[:, None], 4, axis=1)) for x in (qh, kh))
            qh, kh = (x if shared else x[:, h] for x in (encoding.rotate(row, positions) for row in rows))
        for i in range(len(x)):
            last = i + 1 if causal else len(x)
            weight = np.exp(kh[:last] @ qh[i] / 12**0.5 + bias[h, i, :last])
            seen[i, part] = weight / weight.sum() @ v[:last, part]
    return seen @ attention.out.weight.detach().double().numpy().T


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_with_any_encoding_equals_a_loop(name: str, causal: bool, dtype: torch.dtype) -> None:
    encoding, positions = ENCODINGS[name](), [2, 3, 4, 7, 30]
    attention, x = block(encoding, positions, torch.float64, causal=causal).to(dtype), embeddings(2, 5, dtype=dtype)
    with torch.no_grad():
        if attention.encoding.weights is not None:  # undo the rounding to float32
            attention.encoding.weights.copy_(torch.tensor(encoding.weights))  # type: ignore[attr-defined]
        result, (bound,) = attention(x), rounding(lambda: attention(x), [x, *attention.parameters()])
    assert result.dtype == dtype
    for row in range(2):
        expected = by_hand(attention, x[row], encoding, positions, causal)
        assert_within(result[row], expected, bound)


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_learned_tensors_get_gradients_and_all_others_are_buffers(name: str, dtype: torch.dtype) -> None:
    attention, x = block(ENCODINGS[name](), range(6), dtype), embeddings(2, 6, dtype=dtype).requires_grad_()
    attention(x).square().sum().backward()
    learned = ["encoding.weights"] if name in LEARNED else []
    named = dict(attention.named_parameters())
    assert list(attention.state_dict()) == list(named)
    assert sorted(named) == sorted([*learned, "qkv.weight", "out.weight"])
    for parameter in [*named.values(), x]:
        assert parameter.grad is not None
        assert parameter.grad.dtype == dtype
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().sum() > 0


def test_a_cast_recomputes_tables_and_keeps_the_positions_of_rotations() -> None:
    table = block(Sinusoidal(), [100_000]).to(torch.bfloat16).to(torch.float64)
    assert_array_equal(table.encoding.values, Sinusoidal().table([100_000]))
    bias = block(Alibi(), range(300)).to(torch.bfloat16).double()
    assert_array_equal(bias.encoding.values, Alibi().bias(range(300), range(300)))
    turn = block(ROPE, [0.25, 100_001.5]).to(torch.bfloat16)
    assert turn.encoding.values.view(torch.float64).tolist() == [[0.25, 100_001.5]]
    result = turn(embeddings(1, 2, dtype=torch.bfloat16))
    assert result.dtype == torch.bfloat16


ROTARIES = {
    "rope-1d": Rotary(12, axes=1),
    "rope-1d-adjacent": Rotary(12, axes=1, pairing="adjacent"),
    "rope-2d": Rotary(12, axes=2, allocation="axial", pairing="adjacent"),
    "rope-nd": Rotary(12, axes=3, allocation="axial", pairing="adjacent"),
    "p-rope": Rotary(12, axes=1, inv_freq=[10_000 ** (-pair / 6) * (pair < 3) for pair in range(6)]),
    "hope": Rotary(12, allocation=[1, 2, 1, 2, -1, -1]),  # by rows and columns, and not by time
    "mhrope": Rotary(12, allocation="heads", head_axes=[0, 0, 1, 2]),
    "two axes, unrotated channels, a factor": Rotary(12, rotary_dim=8, scaling=YaRN(4, 32)),
}


@pytest.mark.parametrize("name", ROTARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rotation_equals_apply_rotary(name: str, dtype: torch.dtype) -> None:
    rotary, random = ROTARIES[name], np.random.default_rng(0)
    encoding: Any = ENCODINGS[name]() if name in ENCODINGS else Rotation(rotary)
    positions, q = random.integers(-99, 99, (rotary.axes, 3)), torch.from_numpy(random.normal(size=(3, 4, 12)))
    q = q if rotary.own_heads else q[:, :1]
    expected = apply_rotary(q.float(), None, torch.from_numpy(positions), rotary)[0]
    alone = encoding.rotate(q.view(3, *encoding.shape), positions).reshape(q.shape)
    assert_within(alone, expected, rotations(expected, EXACT))
    for rotated in block(encoding, positions, dtype).encoding.rotate(q[None].to(dtype), q[None].to(dtype)):
        assert_within(rotated[0].float(), expected, rotations(expected, EXACT + cos_sin(dtype=dtype)))


# Claims of the sources


def test_corrected_the_dogs_are_at_positions_1_and_4() -> None:
    assert [place for place, word in enumerate(two_dogs.SENTENCE) if word == "dog"] == [1, 4] == list(two_dogs.DOGS)


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_encoding_but_nope_distinguishes_the_dogs(name: str) -> None:
    result = two_dogs.find(ENCODINGS[name]())
    apart = {key: value > two_dogs.EQUAL for key, value in vars(result).items()}
    knows = name != "nope"
    direction = knows and name != "alibi"  # ALiBi is symmetric
    assert apart == {"dogs": knows, "dogs_causal": True, "order": knows, "direction": direction}


def test_attention_without_positions_sees_no_order_before_a_second_causal_layer() -> None:
    apart = [figure > two_dogs.EQUAL for figure in two_dogs.without_positions().values()]
    assert apart == [False, False, False, True, True]


def test_corrected_rotating_the_embedding_once_is_not_rope() -> None:
    """If x is rotated before W_q and W_k, scores depend on the sentence's start, unlike with rotated q and k."""
    x, encoding = embeddings(1, 5, dtype=torch.float64), Rotation(Rotary(48, axes=1, pairing="adjacent"))

    def rotated_first(start: int) -> Tensor:
        rotated = torch.from_numpy(encoding.rotate(x[0], range(start, start + 5)))[None]
        attention = block(NoPE(), range(5), torch.float64)
        q, k = (attention.qkv(rotated)[0, :, part] for part in (slice(12), slice(48, 60)))
        return q @ k.T

    def rope(start: int) -> Tensor:
        return block(ROPE, range(start, start + 5), torch.float64)(x)

    assert (rotated_first(0) - rotated_first(9)).abs().max() > 1e-2
    attention = block(ROPE, range(5), torch.float64)
    assert_within(rope(0), rope(9), rounding(lambda: attention(x), [x, *attention.parameters()]))


# Errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SelfAttention(50, 4, NoPE(), [0]), "dim: got 50, want a multiple of num_heads=4"),
        (lambda: SelfAttention(48, 0, NoPE(), [0]), "num_heads: got 0, want >= 1"),
        (lambda: SelfAttention(48, 3, NoPE(), [0]), "encoding.num_heads: got 4, want 3 as in the block"),
        (lambda: SelfAttention(48, 3, ROPE, [0]), "encoding.head_dim: got 12, want 16 as in the block"),
        (lambda: SelfAttention(24, 2, ENCODINGS["mhrope"](), [0]), "encoding.num_heads: got 4, want 2 as in the block"),
        (lambda: SelfAttention(48, 4, Integer(3), [0]), "encoding.dim: got 3, want 48 as in the block"),
        (lambda: SelfAttention(48, 4, "rope-1d", [0]), "encoding: got 'rope-1d', want an AdditiveTable, an "),  # type: ignore[arg-type]
        (lambda: SelfAttention(48, 4, NoPE(), [0], causal=1), "causal: got 1, want True or False"),  # type: ignore[arg-type]
        (lambda: block(LearnedAbsolute(), [0, 512]), r"positions\[1\]: got 512, want < 512"),
        (lambda: block(Sinusoidal(), [[0], [1]]), r"positions: got shape \(2, 1\), want \(seq,\)"),
        (lambda: block(NoPE(), 3), r"positions: got shape \(\), want \(seq,\)"),
        (lambda: block(ROPE_2D, [[0], [1], [2]]), r"positions: got shape \(3, 1\), want \(n,\) or \(2, n\)"),
        (lambda: block(ROPE, range(3))(embeddings(1, 2)), r"x: got shape \(1, 2, 48\), want \(batch, 3, 48\)"),
    ],
)
def test_invalid_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        call()
