"""Encodings, alone and in attention: numbers by hand, loops, properties; ``corrected`` tests correct their sources."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import two_dogs
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from oracle import settled
from tolerance import EXACT, FREQUENCY, LIBRARY, assert_within, cos_sin, gamma, printed, rotations, rounding
from torch import Tensor

from mmpos import InvalidInputError
from mmpos.encodings import (
    ENCODINGS,
    AdditiveTable,
    Alibi,
    AttentionBias,
    Binary,
    ClippedRelative,
    Encoding,
    Integer,
    LearnedAbsolute,
    NoPE,
    Normalised,
    Rotation,
    SelfAttention,
    SingleSinusoid,
    Sinusoidal,
    T5Buckets,
)
from mmpos.rotary import Rotary, YaRN, apply_rotary

pytestmark = pytest.mark.usefixtures("one_thread")

ROTATIONS = ["rope-1d", "rope-1d-adjacent", "rope-2d", "rope-nd", "p-rope", "hope", "mhrope"]
BIASES: list[type[AttentionBias]] = [ClippedRelative, T5Buckets, Alibi, NoPE]
whole = st.integers(-3000, 3000)


def vectors(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def test_every_encoding_returns_the_shapes_of_its_base_class() -> None:
    assert list(ENCODINGS) == [
        *("integer", "normalised", "binary", "single-sinusoid", "sinusoidal", "learned-absolute"),
        *("clipped-relative", "t5-buckets", "alibi", "nope"),
        *ROTATIONS,
    ]
    for name, kind in ENCODINGS.items():
        encoding: Any = kind()
        if isinstance(encoding, AdditiveTable):
            results = [encoding.table(np.arange(6).reshape(2, 3)), encoding.table(4), encoding.table([])]
            assert [table.shape for table in results] == [(2, 3, 48), (48,), (0, 48)]
        elif isinstance(encoding, AttentionBias):
            results = [encoding.bias(range(2), range(3)), encoding.bias([], range(3))]
            assert [bias.shape for bias in results] == [(4, 2, 3), (4, 0, 3)]
        else:
            assert encoding.shape == ((4, 12) if name == "mhrope" else (12,))
            heads, empty = vectors(5, *encoding.shape), np.empty((0, *encoding.shape))
            results = [encoding.rotate(heads, range(5)), encoding.rotate(empty, np.empty((encoding.rotary.axes, 0)))]
            assert [x.shape for x in results] == [heads.shape, empty.shape]
        assert {array.dtype for array in results} == {np.dtype(np.float64)}


def rows(encoding: Any, positions: Any) -> Any:
    """Return a vector for each position: a row of a table, rotated ones, or the biases towards a key at 0."""
    if isinstance(encoding, AdditiveTable):
        return encoding.table(positions[0])
    if isinstance(encoding, AttentionBias):
        return encoding.bias(positions[0], [0])[..., 0].T
    return encoding.rotate(np.ones((positions.shape[1], *encoding.shape)), positions).reshape(positions.shape[1], -1)


@pytest.mark.parametrize(
    ("name", "same"),
    [(name, None) for name in ENCODINGS if name not in ("clipped-relative", "t5-buckets", "nope", "hope")]
    # Clipped and bucketed distances share a bias, NoPE has none, and HoPE does not distinguish times.
    + [("clipped-relative", (16, 17)), ("t5-buckets", (8, 9)), ("nope", (0, 1)), ("hope", (0, 36))],
)
def test_256_positions_are_distinguished_unless_they_are_clipped_bucketed_or_ignored(name: str, same: Any) -> None:
    encoding: Any = ENCODINGS[name]()
    axes = encoding.rotary.axes if isinstance(encoding, Rotation) else 1
    assert axes == {"rope-2d": 2, "rope-nd": 3, "hope": 3, "mhrope": 3}.get(name, 1)
    table = rows(encoding, np.indices((round(256 ** (1 / axes)),) * axes).reshape(axes, -1))
    first: dict[bytes, int] = {}
    pairs = [(first.setdefault(row.tobytes(), i), i) for i, row in enumerate(table.round(9) + 0.0)]
    assert next(((i, j) for i, j in pairs if i < j), None) == same


# Tables


def test_integers_are_unique_unbounded_and_shift_by_k() -> None:
    table = Integer(dim=3).table(np.arange(1000))
    assert_array_equal(table, np.arange(1000)[:, None] * np.ones(3))
    assert_array_equal(table[7:] - table[:-7], np.full((993, 3), 7))


def test_normalised_positions_are_bounded_but_their_step_depends_on_the_length() -> None:
    assert Normalised(dim=2).table([1]).tolist() == [[1, 1]]
    assert Normalised(dim=1).table([0]).tolist() == [[0]]
    assert Normalised(dim=1).table([[0, 1, 2], [0, 2, 8]]).squeeze(-1).tolist() == [[0, 0.5, 1], [0, 0.25, 1]]
    assert [float(np.diff(Normalised(dim=1).table(range(n)), axis=0).max()) for n in (2, 5, 9)] == [1, 0.25, 0.125]


def test_corrected_bit_i_toggles_every_2_to_the_i_positions() -> None:
    assert Binary(dim=63).table(2**63 - 1).sum() == 63
    table = Binary(dim=6).table(np.arange(64 * 2) % 64)
    for bit in range(6):
        toggles = np.flatnonzero(np.diff(table[:, bit])) + 1
        assert set(np.diff(toggles, prepend=0).tolist()) == {2**bit}
        assert_array_equal(table[2 ** (bit + 1) :, bit], table[: -(2 ** (bit + 1)), bit])
        assert (table[2**bit :, bit] != table[: -(2**bit), bit]).any()


def test_corrected_slow_sines_keep_neighbours_close_and_fast_sines_collide() -> None:
    slow = SingleSinusoid(dim=1).table(1e-3 * np.arange(1000)).ravel()  # ω = 10⁻⁴ per step
    assert np.abs(np.diff(slow)).max() <= 1e-4
    assert len(np.unique(slow)) == 1000
    fast = SingleSinusoid(dim=1).table(5 * math.pi * np.arange(1000)).ravel()  # ω = π/2 per step
    off = cos_sin(1000 * math.pi / 2, 4, np.float64)  # 5π, 0.1 and their products are rounded
    assert np.abs(np.diff(fast)).min() == pytest.approx(1, abs=2 * off)
    assert_within(fast[4:], fast[:-4], off)
    assert len(np.unique(fast.round(9) + 0.0)) == 3


def test_sinusoids_equal_the_formula_of_the_paper() -> None:
    result = Sinusoidal(dim=6, theta=100.0).table([[0.5, 7]])[0, 1]
    by_hand = [f(7 / 100 ** (2 * k / 6)) for k in range(3) for f in (math.sin, math.cos)]
    assert_within(result, by_hand, cos_sin(7.0, FREQUENCY + 1, np.float64))


def test_corrected_the_slowest_pair_divides_by_9646_and_positions_never_repeat() -> None:
    encoding, last = Sinusoidal(dim=512), 9646.61619911199
    assert (1 / encoding.frequencies[-1]) == pytest.approx(last, rel=2 * gamma(FREQUENCY, np.float64))
    expected = [math.sin(5000 / last), math.cos(5000 / last)]
    assert_within(encoding.table(5000)[-2:], expected, cos_sin(5000 / last, FREQUENCY + 1, np.float64))
    # Neither 512 positions nor 2π·10,000 = 62,832 are a period.
    assert np.linalg.norm(encoding.table(513) - encoding.table(1)) > 1
    assert np.linalg.norm(encoding.table(62832) - encoding.table(0)) > 1
    # Pair 0 alone distinguishes a million positions: the nearest two are 312,689 = 49,766 · 2π + 2.9e-6 apart.
    difference = Sinusoidal(dim=2).table(np.arange(1, 1_000_000)) - [0, 1]
    assert np.hypot(*difference.T).min() == printed("2.9007e-6")


@settled
@given(p=whole, k=whole, dim=st.sampled_from([2, 4, 10]))
def test_shifting_sinusoids_is_multiplication_by_one_orthogonal_matrix(p: int, k: int, dim: int) -> None:
    encoding = Sinusoidal(dim)
    matrix = encoding.shift(k)
    off = 4 * cos_sin(float(abs(p) + abs(k)), 1, np.float64)  # two products, each of two rounded numbers
    assert_within(matrix @ encoding.table(p), encoding.table(p + k), off)
    assert_within(matrix @ matrix.T, np.eye(dim), off)
    assert_within(encoding.shift(k) @ encoding.shift(p), encoding.shift(k + p), off)
    dots = np.cos(encoding.frequencies * (p - k)).sum()
    assert encoding.table(p) @ encoding.table(k) == pytest.approx(dots, abs=dim / 2 * off)


def test_learned_positions_are_rows_of_the_table() -> None:
    weights = vectors(5, 3)
    encoding = LearnedAbsolute(weights)
    assert encoding.dim == 3
    assert_array_equal(encoding.table([[4, 0]]), weights[[[4, 0]]])
    weights[:] = 0
    assert encoding.table(0).any()
    with pytest.raises(InvalidInputError, match=r"^positions\[1, 0\]: got 5, want < 5$"):
        encoding.table([[4], [5]])
    with pytest.raises(ValueError, match="read-only"):
        encoding.weights[0] = 0


# Biases


def test_clipped_distances_are_constant_beyond_k() -> None:
    encoding = ClippedRelative(np.arange(10.0).reshape(5, 2))
    assert encoding.index([5], range(11)).tolist() == [[0, 0, 0, 0, 1, 2, 3, 4, 4, 4, 4]]
    expected = [[[0, 0, 2, 4, 6, 8, 8]], [[1, 1, 3, 5, 7, 9, 9]]]
    assert encoding.bias([3], range(7)).tolist() == expected
    assert ClippedRelative(np.ones((1, 1))).index([5], range(3)).tolist() == [[0, 0, 0]]


def bucket(distance: int, buckets: int, max_distance: int) -> int:
    """Compute the bucket of a distance in one direction by a loop over exact fractions."""
    exact = buckets // 2
    if distance < exact:
        return distance
    steps, b = buckets - exact, 0
    while b + 1 < steps and Fraction(distance, exact) ** steps >= Fraction(max_distance, exact) ** (b + 1):
        b += 1
    return exact + b


@settled
@given(buckets=st.integers(2, 40), beyond=st.integers(1, 400), distances=st.lists(st.integers(0, 600), max_size=9))
def test_buckets_are_exact_monotonic_and_bounded(buckets: int, beyond: int, distances: list[int]) -> None:
    max_distance = buckets // 2 + beyond
    result = T5Buckets.drawn(buckets, max_distance, bidirectional=False).bucket(-np.array(distances, np.int64))
    assert result.tolist() == [bucket(d, buckets, max_distance) for d in distances]
    all_buckets = T5Buckets.drawn(2 * buckets, max_distance).bucket(-np.arange(700))
    assert (np.diff(all_buckets) >= 0).all()
    assert all_buckets.max() <= buckets - 1


def test_t5_buckets_equal_those_of_transformers_where_float32_logarithms_are_right() -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    theirs: Any = T5Attention._relative_position_bucket
    relative = np.arange(-20_000, 20_001)
    for buckets, max_distance in ((32, 128), (32, 256), (32, 1000), (64, 512), (320, 800)):
        for bidirectional in (True, False):
            ours = T5Buckets.drawn(buckets, max_distance, bidirectional).bucket(relative)
            result = theirs(torch.from_numpy(relative), bidirectional, buckets, max_distance).numpy()
            side = buckets // 2 if bidirectional else buckets
            exact = side // 2
            steps = np.log(np.maximum(abs(relative), 1) / exact) / math.log(max_distance / exact) * (side - exact)
            near = abs(steps - steps.round()) <= 2 * gamma(4 * LIBRARY + 3) * abs(steps)  # near the next bucket
            assert near.sum() < relative.size / 100
            assert_array_equal(ours[~near], result[~near])


def test_t5_buckets_are_exact_where_float32_logarithms_are_wrong() -> None:
    """Transformers 5.24 returns 147 for 22,032, 961 for 36,074 and 451 for 24,692, the last of these cases."""
    assert T5Buckets.drawn(160, 2**16, bidirectional=False).bucket([-22_032, -22_033]).tolist() == [146, 147]
    assert Fraction(22_032, 80) ** 80 < Fraction(2**16, 80) ** 67 <= Fraction(22_033, 80) ** 80
    assert T5Buckets.drawn(1024, 2**16, bidirectional=False).bucket([-36_074, -36_075]).tolist() == [960, 961]
    assert Fraction(36_074, 512) ** 512 < 128**449 <= Fraction(36_075, 512) ** 512
    assert T5Buckets.drawn(1024, 100_000).bucket([-24_691, -24_692]).tolist() == [451, 452]
    assert Fraction(24_691, 256) ** 256 < Fraction(100_000, 256) ** 196 <= Fraction(24_692, 256) ** 256


def test_alibi_decreases_by_a_slope_of_its_head_per_position() -> None:
    assert Alibi(8).slopes.tolist() == [2.0**-h for h in range(1, 9)]
    assert Alibi(3).slopes.tolist() == [2**-4, 2**-8, 2**-2]
    by_distance = [[-2, -1, 0, -1]]
    assert (Alibi(2).bias([2], range(4)) == np.array([by_distance, by_distance]) / [[[16]], [[256]]]).all()
    assert not NoPE(2).bias(range(3), range(4)).any()


def test_distances_between_extreme_positions_do_not_overflow() -> None:
    far = 2**62 - 1
    assert ClippedRelative().index([-far], [far]).tolist() == [[32]]
    assert T5Buckets().index([-far], [far]).tolist() == [[31]]


@settled
@given(c=whole, queries=st.lists(whole, max_size=4), keys=st.lists(whole, max_size=4), kind=st.sampled_from(BIASES))
def test_biases_depend_only_on_distances(
    c: int, queries: list[int], keys: list[int], kind: type[AttentionBias]
) -> None:
    i, j = np.array(queries, np.int64), np.array(keys, np.int64)
    assert_array_equal(kind().bias(i + c, j + c), kind().bias(i, j))


# Rotations

ROPE: Any = ENCODINGS["rope-1d"]()
BY_HEAD: Any = ENCODINGS["mhrope"]()


def test_corrected_a_rotation_has_minus_sine_above_the_diagonal() -> None:
    matrix = Rotation(Rotary(2, axes=1, pairing="adjacent")).rotate(np.eye(2), [2, 2]).T
    assert_within(matrix, [[math.cos(2), -math.sin(2)], [math.sin(2), math.cos(2)]], cos_sin(dtype=np.float64))


@settled
@given(name=st.sampled_from(ROTATIONS), m=whole, n=whole, c=whole)
def test_scores_of_rotated_q_and_k_depend_only_on_distances(name: str, m: int, n: int, c: int) -> None:
    encoding: Any = ENCODINGS[name]()
    q, k = vectors(2, 1, *encoding.shape)
    rotated = encoding.rotate(q, [m])
    length, other = np.linalg.norm(q), np.linalg.norm(k)
    off = q.size * cos_sin(float(abs(m) + abs(n) + abs(c)), 1, np.float64)  # up to four rotations, and sums
    assert np.linalg.norm(rotated) == pytest.approx(length, rel=off)
    score = np.vdot(rotated, encoding.rotate(k, [n]))
    scores = [(q, encoding.rotate(k, [n - m])), (encoding.rotate(q, [m + c]), encoding.rotate(k, [n + c]))]
    assert [np.vdot(*pair) for pair in scores] == pytest.approx([score] * 2, rel=0, abs=off * length * other)


# Attention

LEARNED = ["clipped-relative", "learned-absolute", "t5-buckets"]


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


# Claims of the sources about attention


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
        (lambda: Integer(dim=0), "dim: got 0, want >= 1"),
        (lambda: Integer().table(["a"]), "positions: got dtype <U1, want integers or floats"),
        (lambda: Integer().table([0, np.nan]), r"positions\[1\]: got nan, want a finite number"),
        (lambda: Normalised().table([0.5]), "positions: got dtype float64, want integers"),
        (lambda: Binary(dim=8).table([[3, 256]]), r"positions\[0, 1\]: got 256, want < 256"),
        (lambda: Binary(dim=64), "dim: got 64, want <= 63"),
        (lambda: Sinusoidal(dim=5), "dim: got 5, want an even number"),
        (lambda: Sinusoidal().shift(math.inf), "k: got inf, want a finite number"),
        (lambda: LearnedAbsolute(np.ones(1)), r"weights: got float64 of shape \(1,\), want finite .* \(rows, dim\)"),
        (lambda: ClippedRelative(np.ones((4, 2))), r"weights: got 4 rows, want 2K \+ 1"),
        (lambda: ClippedRelative().bias([[0]], [0]), r"query_positions: got shape \(1, 1\), want 1 dimension"),
        (lambda: T5Buckets(np.ones((7, 2))), "weights: got 7 buckets, want an even number >= 4"),
        (lambda: T5Buckets(max_distance=8), "max_distance: got 8, want >= 9"),
        (lambda: T5Buckets(bidirectional=1), "bidirectional: got 1, want True or False"),  # type: ignore[arg-type]
        (lambda: T5Buckets().bias([-(2**62) - 1], [0]), r"query_positions\[0\]: got -4611686018427387905, want >= "),
        (lambda: T5Buckets().bucket([-(2**63)]), r"relative\[0\]: got -9223372036854775808, want >= "),
        (
            lambda: ClippedRelative().bias([0], np.array([2**63], np.uint64)),
            r"key_positions\[0\]: got 9223372036854775808",
        ),
        (lambda: Alibi(num_heads=2**70), "num_heads: got 1180591620717411303424, want <= 65536"),
        (lambda: NoPE(num_heads=0), "num_heads: got 0, want >= 1"),
        (lambda: Rotation(8), "rotary: got int, want a Rotary"),  # type: ignore[arg-type]
        (lambda: ROPE.rotate(np.ones((2, 12)), np.ones((3, 2))), r"positions: got .*, want \(n,\) or \(1, n\)"),
        (lambda: ROPE.rotate(np.ones((2, 12)), 5), r"positions: got shape \(\), want \(n,\) or \(1, n\)"),
        (lambda: ROPE.rotate(np.ones((2, 12)), [1]), r"x: got shape \(2, 12\), want \(1, 12\)"),
        (lambda: ROPE.rotate(np.ones(12), [1]), r"x: got shape \(12,\), want 2 dimensions"),
        (lambda: BY_HEAD.rotate(np.ones((3, 1, 12)), np.ones((3, 3))), r"x: got shape \(3, 1, 12\), want \(3, 4, 12\)"),
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
        (
            lambda: block(ENCODINGS["rope-2d"](), [[0], [1], [2]]),
            r"positions: got shape \(3, 1\), want \(n,\) or \(2, n\)",
        ),
        (lambda: block(ROPE, range(3))(embeddings(1, 2)), r"x: got shape \(1, 2, 48\), want \(batch, 3, 48\)"),
    ],
)
def test_invalid_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        call()
