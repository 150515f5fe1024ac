"""The kernels compiled ahead of time for three GPUs: wide loads and stores, exact arithmetic, no spills."""

from __future__ import annotations

import pytest
from aot_facts import each_on_one, facts_of, those

pytest.importorskip("triton")

QUICK = ["table integer half, sm_90", "norm half, sm_90"]
REST = [
    "table fractional half",
    "dense integer adjacent",
    "dense fixed half",
    "head_dim 80 adjacent",
    "table integer half, few tokens",
    "by head fractional adjacent",
    "by head head_dim 80 half",
]
NORMS = ["norm half", "backward half", "norm after half", "backward after half"]
NORM_REST = [
    "norm fractional half",
    "norm half, few tokens",
    "norm of q half",
    "norm after adjacent",
    "norm after head_dim 80 half",
    "norm after cached float32 half",
    "backward after adjacent",
    "backward fractional half",
    "backward half, few tokens",
    "backward of q half",
    "backward head_dim 80 half",
    "backward by head half",
]
NORM_PARTIAL = ["norm partial adjacent", "backward partial half"]
CACHED = [
    "cached float32 half",
    "cached bfloat16 adjacent",
    "cached bfloat16 half, dense",
    "cached float16 half, few tokens",
]
AMD = [
    "backward after half, gfx942",
    "cached bfloat16 adjacent, gfx942",
    "by head half, gfx942",
]
PLAIN_OTHER = [
    "partial half",
    "partial adjacent",
    "table integer half, fused",
    "table fractional half, one token",
    "dense fixed half, one head",
]

REGISTERS = {"integer": 64, "fractional": 72}
"""Most registers: 56 and 64 are seen with Triton 3.9; at 64, eight programs of 128 threads share a multiprocessor."""

NORM_REGISTERS = {"norm": 80, "backward": 128}
"""With norms 72 and 128 are seen: six and four programs of 128 threads share a multiprocessor."""


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Facts that quick tests share."""
    return facts_of(QUICK, tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Facts that slow tests of plain rotations share."""
    names = [*each_on_one(["table integer half", *REST, *PLAIN_OTHER, *CACHED]), *AMD]
    return facts_of(names, tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def norms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Facts that slow tests of norms share."""
    return facts_of(each_on_one(NORMS + NORM_REST + NORM_PARTIAL), tmp_path_factory.mktemp("triton"))


def test_the_kernel_compiles_to_wide_exact_code_without_spills(quick: dict[str, dict[str, int]]) -> None:
    assert_wide_and_exact(those(["table integer half"], quick))


@pytest.mark.slow
def test_it_does_in_every_other_case(rest: dict[str, dict[str, int]]) -> None:
    assert_wide_and_exact(those(["table integer half", *REST], rest))


def assert_wide_and_exact(cases: dict[str, dict[str, int]]) -> None:
    for case, facts in cases.items():
        fractional = "fractional" in case
        # Two halves of q and of k, or both vectors of a row of adjacent pairs: 16 bytes at a time.
        assert (facts["stores_128"], facts["machine_stores_128"]) == (4, 4), case
        assert min(facts["loads_128"], facts["machine_loads_128"]) >= 4, (
            case
        )  # frequencies too, where a thread has several
        # Nothing that is stored, is stored in smaller pieces.
        assert facts["narrow_stores"] == 0, case
        # Products and sums are rounded one by one, as in the reference; nothing is computed in float64.
        assert (facts["fma"], facts["float64"]) == (0, 0), case
        # Only fractions divide 64 bits: twice on each of two axes.
        assert facts["divisions_64"] == (4 if fractional else 0), case
        assert (facts["spills"], facts["stack"], facts["local"]) == (0, 0, 0), case
        assert facts["registers"] <= REGISTERS["fractional" if fractional else "integer"], case


def assert_fused(case: str, facts: dict[str, int]) -> None:
    """Check bounds that hold of norms and their gradients in every shape."""
    # Products and sums are rounded one by one; nothing is computed in float64.
    assert (facts["fma"], facts["float64"]) == (0, 0), case
    assert facts["divisions_64"] == (4 if "fractional" in case else 0), case
    assert (facts["spills"], facts["stack"], facts["local"]) == (0, 0, 0), case


def test_norms_compile_to_wide_code_whose_loops_wait_for_no_other_thread(quick: dict[str, dict[str, int]]) -> None:
    assert_norms(those(["norm half"], quick))


@pytest.mark.slow
def test_so_do_their_gradients_and_norms_of_other_shapes(norms: dict[str, dict[str, int]]) -> None:
    assert_norms(those([*NORMS, *NORM_REST], norms))


def assert_norms(cases: dict[str, dict[str, int]]) -> None:
    for case, facts in cases.items():
        assert_fused(case, facts)
        backward, sums = case.startswith("backward"), 1 if " of q" in case else 2
        # x and, backward, the gradient: two vectors of q and two of k; weights too, where a thread has whole vectors.
        assert facts["machine_loads_128"] >= (4 + 2 * sums if backward else 4), case
        assert (facts["stores_128"], facts["machine_stores_128"]) == (4, 4), case
        # Only the sums of the weights' gradients are smaller, once a program.
        assert facts["narrow_stores"] == (sums * (1 if "adjacent" in case else 2) if backward else 0), case
        # A row's mean is made by threads of one warp.
        assert facts["heads_shared"] == 0, case
        assert facts["registers"] <= NORM_REGISTERS["backward" if backward else "norm"], case


@pytest.mark.slow
def test_norms_of_heads_that_turn_in_part_compile_without_spills(norms: dict[str, dict[str, int]]) -> None:
    for case, facts in those(NORM_PARTIAL, norms).items():
        assert_fused(case, facts)


@pytest.mark.slow
def test_rows_of_an_engines_cache_cost_no_registers_and_leave_heads_wide(rest: dict[str, dict[str, int]]) -> None:
    for case, facts in those(CACHED, rest).items():
        assert facts["machine_loads_128"] >= 4, case
        assert (facts["stores_128"], facts["machine_stores_128"], facts["narrow_stores"]) == (4, 4, 0), case
        assert (facts["fma"], facts["float64"], facts["divisions_64"]) == (0, 0, 0), case
        assert (facts["spills"], facts["stack"], facts["local"]) == (0, 0, 0), case
        assert facts["registers"] <= REGISTERS["integer"], case


@pytest.mark.slow
def test_an_amd_gpu_compiles_them_without_spills(rest: dict[str, dict[str, int]]) -> None:
    for case in AMD:
        assert rest[case]["spills"] == 0, case


@pytest.mark.slow
def test_with_fusion_the_count_of_fused_instructions_is_not_zero(rest: dict[str, dict[str, int]]) -> None:
    for case, facts in those(["table integer half, fused"], rest).items():
        assert facts["fma"] > 0, case


@pytest.mark.slow
def test_arguments_that_are_one_and_heads_that_turn_in_part_compile_without_spills(
    rest: dict[str, dict[str, int]],
) -> None:
    names = [name for name in PLAIN_OTHER if "fused" not in name]
    for case, facts in those(names, rest).items():
        assert (facts["spills"], facts["stack"], facts["local"]) == (0, 0, 0), case
