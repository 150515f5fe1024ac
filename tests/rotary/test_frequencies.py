"""Frequencies: literals from the specification, exact turns from an mpmath oracle, and float32 from Transformers."""

from __future__ import annotations

import decimal
import importlib
import math
from typing import Any

import numpy as np
import pytest
from tolerance import LIBRARY, gamma, printed

from mmpos.rotary.config import Rotary
from mmpos.rotary.frequencies import Exact
from mmpos.rotary.scaling import NTK, DynamicNTK, Linear, Linspace, Llama3, LongRoPE, PRoPE, Scaling, YaRN

mpmath: Any = pytest.importorskip("mpmath")
mpf = mpmath.mpf

SHORT, LONG = [1.0 + j / 17 for j in range(64)], [1.0 + j * j / 13 for j in range(64)]
SCALINGS: dict[str, Scaling | None] = {
    "none": None,
    "linear": Linear(2.5),
    "ntk": NTK(4),
    "dynamic": DynamicNTK(2, 4096),
    "yarn": YaRN(4, 32768),
    "yarn-untruncated": YaRN(3.3, 4096, beta_fast=16, beta_slow=2, truncate=False),
    "llama3": Llama3(8, 1, 4, 8192),
    "llama4": Llama3(16, 1, 1, 8192),
    "longrope": LongRoPE(SHORT, LONG, 4096, factor=32),
    "p-rope": PRoPE(0.3, 2),
    "linspace": Linspace(math.pi / 2),
}


def plain(theta: Any, dim: int) -> list[Any]:
    return [mpf(theta) ** (-mpf(2 * j) / dim) for j in range(dim // 2)]


def yarn(scaling: YaRN, theta: Any, dim: int) -> list[Any]:
    def pair(turns: float) -> Any:
        return dim * mpmath.log(scaling.original_max_position / (mpf(turns) * 2 * mpmath.pi)) / (2 * mpmath.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = mpmath.floor(low), mpmath.ceil(high)
    low, high = max(low, mpf(0)), min(high, mpf(dim - 1))
    high += mpf(0.001) if low == high else 0
    scaled = []
    for j, value in enumerate(plain(theta, dim)):
        share = min(max((j - low) / (high - low), mpf(0)), mpf(1))
        scaled.append(value / mpf(scaling.factor) * share + value * (1 - share))
    return scaled


def llama3(scaling: Llama3, theta: Any, dim: int) -> list[Any]:
    scaled = []
    for value in plain(theta, dim):
        turns = scaling.original_max_position * value / (2 * mpmath.pi)
        low, high = mpf(scaling.low_freq_factor), mpf(scaling.high_freq_factor)
        share = min(max((turns - low) / (high - low), mpf(0)), mpf(1)) if low < high else mpf(int(turns >= low))
        scaled.append((1 - share) * value / mpf(scaling.factor) + share * value)
    return scaled


def oracle(scaling: Scaling | None, theta: float, dim: int, length: int | None = None) -> list[Any]:
    base = mpf(theta)
    match scaling:
        case None:
            return plain(base, dim)
        case Linear():
            return [value / mpf(scaling.factor) for value in plain(base, dim)]
        case NTK():
            return plain(base * mpf(scaling.factor) ** (mpf(dim) / (dim - 2)), dim)
        case DynamicNTK():
            f, ratio = mpf(scaling.factor), mpf(length or scaling.original_max_position) / scaling.original_max_position
            return plain(base * (f * ratio - f + 1) ** (mpf(dim) / (dim - 2)), dim)
        case YaRN():
            return yarn(scaling, base, dim)
        case Llama3():
            return llama3(scaling, base, dim)
        case LongRoPE():
            divisors = scaling.long_factor if length else scaling.short_factor
            return [value / mpf(divisor) for value, divisor in zip(plain(base, dim), divisors, strict=True)]
        case PRoPE():
            rotated = int(scaling.p * dim) // 2
            return [value / mpf(scaling.factor) * (j < rotated) for j, value in enumerate(plain(base, dim))]
        case Linspace():
            return [base ** (mpf(j) / (dim // 2 - 1)) * mpf(scaling.factor) for j in range(dim // 2)]
    raise AssertionError(scaling)


def fixed(values: list[Any]) -> list[int]:
    return [int(mpmath.nint(value / (2 * mpmath.pi) * 2**64)) % 2**64 for value in values]


@pytest.fixture(autouse=True)
def _many_digits() -> Any:
    with mpmath.workdps(90):
        yield


@pytest.mark.parametrize("theta", [10000.0, 1234567.8])
@pytest.mark.parametrize("name", SCALINGS)
def test_turns_equal_those_of_the_oracle_bit_for_bit(name: str, theta: float) -> None:
    scaling = SCALINGS[name]
    rotary, expected = Rotary(128, theta=theta, scaling=scaling), oracle(scaling, theta, 128)
    assert rotary.turns.tolist() == fixed(expected)
    assert rotary.inv_freq_array.tolist() == [float(value) for value in expected]
    longer = rotary.for_length(10_001)
    assert longer.turns.tolist() == fixed(oracle(scaling, theta, 128, 10_001))
    assert (longer != rotary) == (name in ("dynamic", "longrope"))


@pytest.mark.parametrize("name", [name for name in SCALINGS if name != "longrope"])
def test_each_axis_scales_its_own_ladder(name: str) -> None:
    scaling, thetas = SCALINGS[name], [10000.0, 20000.0, 90000.0, 270000.0]
    for axes in (1, 2, 4):
        axial = Rotary(64, theta=thetas[:axes], axes=axes, allocation="axial", scaling=scaling)
        assert axial.turns.tolist() == fixed([x for base in thetas[:axes] for x in oracle(scaling, base, 64 // axes)])
    first, second = (oracle(scaling, base, 64) for base in thetas[:2])
    two: Any = {"theta": thetas[:2], "scaling": scaling}
    assert Rotary(64, allocation="pixtral", **two).turns.tolist() == fixed(first[0::2] + second[1::2])
    assert Rotary(64, allocation="split", **two).turns.tolist() == fixed(first[:16] + second[16:])


def test_explicit_frequencies_are_exact_modulo_one_turn() -> None:
    values = [0.1, 7.5, -0.25, 0.0, 351.85837720205683, 2.0**32, 5e-324, 1e-9]
    rotary = Rotary(16, inv_freq=values)
    assert rotary.turns.tolist() == fixed([mpf(value) for value in values])
    assert rotary.inv_freq_array.tolist() == values
    assert rotary.inv_freq_as_hf(torch_power).tolist() == np.array(values, np.float32).tolist()


def test_the_callers_decimal_context_is_ignored() -> None:
    expected = Rotary(64, scaling=YaRN(4, 2048)).turns.tolist()
    with decimal.localcontext(decimal.Context(prec=3, rounding=decimal.ROUND_UP)):
        assert Rotary(64, scaling=YaRN(4, 2048)).turns.tolist() == expected


def test_spec_ntk_increases_the_base_to_40889_94() -> None:
    rotary = Rotary(128, scaling=NTK(4))
    assert rotary.inv_freq_array[1] ** -64 == printed("40889.94")
    assert Rotary(128).inv_freq_array[-1] / rotary.inv_freq_array[-1] == pytest.approx(4, rel=gamma(3, np.float64))


def test_spec_yarn_ramp_ratios_and_attention_factor() -> None:
    scaling = YaRN(4, 32768)
    rotary = Rotary(128, theta=1e6, scaling=scaling)
    ratio = rotary.inv_freq_array / Rotary(128, theta=1e6).inv_freq_array
    with Exact().context():
        assert scaling.ramp(Exact(), 1e6, 128) == (23, 40)
    assert ratio[[0, 23, 40, 63]].tolist() == pytest.approx([1, 1, 0.25, 0.25], rel=gamma(3, np.float64))
    assert ratio[[25, 30, 35]].tolist() == [printed("0.9118"), printed("0.6912"), printed("0.4706")]
    assert rotary.attention_factor == printed("1.138629")


def test_spec_llama3_keeps_29_pairs_interpolates_6_and_divides_29() -> None:
    scaling = Llama3(8, 1, 4, 8192)
    ratio = Rotary(128, theta=5e5, scaling=scaling).inv_freq_array / Rotary(128, theta=5e5).inv_freq_array
    assert ratio[:29].tolist() == [1] * 29
    assert (np.diff(ratio[28:36]) < 0).all()
    assert ratio[35:].tolist() == [0.125] * 29


SPEC: list[tuple[Rotary, list[Any]]] = [
    (Rotary(8, axes=1), [1, 0.1, 0.01, 0.001]),
    (Rotary(16, scaling=PRoPE(0.25)), [1, printed("0.316227766016838"), *[0] * 6]),
    (Rotary(16, rotary_dim=4), [1, 0.01]),
    (Rotary(16, scaling=PRoPE(1)), Rotary(16).inv_freq_array.tolist()),
    (Rotary(16, scaling=PRoPE(0)), [0] * 8),
    (Rotary(2, axes=1, scaling=Linear(2)), [0.5]),
]


@pytest.mark.parametrize(("rotary", "expected"), SPEC)
def test_spec_frequencies(rotary: Rotary, expected: list[Any]) -> None:
    assert rotary.inv_freq_array.tolist() == expected


def test_spec_interleaved_axes_share_the_spectrum_and_split_columns_have_only_low_frequencies() -> None:
    (rows, cols), (first, last) = (
        [rotary.inv_freq_array[rotary.pair_axis == axis] for axis in (0, 1)]
        for rotary in (Rotary(128), Rotary(128, allocation="split"))
    )
    assert np.exp(np.log(rows).mean() - np.log(cols).mean()) == printed("1.155")
    assert [first[0], first[-1], last[0], last[-1]] == [1, printed("0.0115"), 0.01, printed("1.2e-4")]


FACTORS: list[tuple[Scaling, Any]] = [
    (YaRN(4, 2048, attention_factor=0.5), 0.5),
    (YaRN(1, 2048), 1),
    (YaRN(40, 4096, mscale=1, mscale_all_dim=1), 1),
    (
        YaRN(40, 4096, mscale=0.707, mscale_all_dim=1),
        pytest.approx((0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1), rel=2 * gamma(LIBRARY + 4, np.float64)),
    ),
    (LongRoPE([1], [1], 4096, factor=32), printed("1.190238")),
    (LongRoPE([1], [1], 4096), 1),
    (LongRoPE([1], [1], 4096, factor=32, attention_factor=1.5), 1.5),
    *((scaling, 1) for scaling in (Linear(2), NTK(2), DynamicNTK(2, 8), PRoPE(0.5))),
]


@pytest.mark.parametrize(("scaling", "factor"), FACTORS)
def test_attention_factors_equal_their_formulas(scaling: Scaling, factor: Any) -> None:
    assert scaling.scaled_attention() == factor


def test_yarn_with_one_pair_in_the_ramp_has_no_singularity() -> None:
    scaling = YaRN(4, 2, beta_fast=1, beta_slow=1, truncate=False)
    assert Rotary(8, scaling=scaling).turns.tolist() == fixed(yarn(scaling, mpf(10000), 8))


# Transformers: bit-equal with torch's power function.

HF: dict[str, tuple[dict[str, Any], Scaling | None]] = {
    "linear": ({"factor": 2.5}, Linear(2.5)),
    "dynamic": ({"factor": 2.0}, DynamicNTK(2, 131072)),
    "yarn": ({"factor": 4.0, "original_max_position_embeddings": 32768}, YaRN(4, 32768)),
    "yarn ": (
        {"factor": 3.3, "original_max_position_embeddings": 4096, "beta_fast": 16.0, "beta_slow": 2.0}
        | {"truncate": False, "mscale": 0.7, "mscale_all_dim": 1.1},
        YaRN(3.3, 4096, 16, 2, None, 0.7, 1.1, False),
    ),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        Llama3(8, 1, 4, 8192),
    ),
    "llama3 ": (  # Llama 4
        {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 8192},
        Llama3(16, 1, 1, 8192),
    ),
    "longrope": (
        {"factor": 32.0, "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 4096},
        LongRoPE(SHORT, LONG, 4096, 32),
    ),
    "proportional": ({"partial_rotary_factor": 0.3}, PRoPE(0.3)),
}


def torch_power(base: float, exponents: Any) -> Any:
    torch = pytest.importorskip("torch")
    return torch.pow(base, torch.from_numpy(exponents)).numpy()


def config(**rope: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 1, "head_dim": 128}
    return transformers.LlamaConfig(**sizes, max_position_embeddings=131072, rope_parameters=rope)


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1e6, 1234567.8])
@pytest.mark.parametrize("length", [None, 200_000])
@pytest.mark.parametrize("name", HF)
def test_float32_frequencies_equal_those_of_transformers(name: str, length: int | None, theta: float) -> None:
    parameters, scaling = HF[name]
    rope_utils = importlib.import_module(pytest.importorskip("transformers").__name__ + ".modeling_rope_utils")
    hf_config = config(rope_type=name.strip(), rope_theta=theta, **parameters)
    expected, factor = rope_utils.ROPE_INIT_FUNCTIONS[name.strip()](hf_config, None, seq_len=length)
    rotary = Rotary(128, theta=theta, scaling=scaling, precision="hf", length=length)
    assert rotary.inv_freq_as_hf(torch_power).tobytes() == expected.numpy().tobytes()
    assert rotary.attention_factor == factor
    assert Rotary.from_hf_config(hf_config, precision="hf", length=length) == rotary
