"""The kernel that turns stored keys, compiled ahead of time for three GPUs of NVIDIA and one of AMD."""

from __future__ import annotations

import pytest
from aot_facts import facts_of, those

pytest.importorskip("triton")

CASES = [
    "rerotate: plain, sm_90",
    "rerotate: adjacent, sm_80",
    "rerotate: ids to a table, sm_100",
    "rerotate: partial, sm_100",
    "rerotate: few tokens, sm_80",
    "rerotate: by head, sm_90",
]
CASES += [
    "rerotate: fractional, sm_90",
    "rerotate: e4m3, sm_80",
    "rerotate: e4m3, scales of slots, sm_90",
]
CASES += ["rerotate: e4m3 adjacent, scales of slots, sm_80", "rerotate: e5m2 partial, scales of slots, sm_90"]

REGISTERS = {"": 64, "fractional": 96}
"""Most registers: 62 and 96, of two fractional tables, are seen with Triton 3.9."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Facts of all cases."""
    return facts_of(CASES, tmp_path_factory.mktemp("triton"))


@pytest.mark.slow
def test_it_compiles_to_exact_code_without_spills(found: dict[str, dict[str, int]]) -> None:
    for case, facts in found.items():
        # Two tables of fractions divide 64 bits four times each; growth alone is divided by, in fused steps.
        assert facts["divisions_64"] == (8 if "fractional" in case else 0), case
        assert (facts["fma"] > 0) == ("scales" in case), case
        assert facts["float64"] == 0, case
        assert (facts["spills"], facts["stack"], facts["local"]) == (0, 0, 0), case
        assert facts["registers"] <= REGISTERS["fractional" if "fractional" in case else ""], case


@pytest.mark.slow
def test_keys_of_16_bits_are_read_and_written_16_bytes_at_a_time(found: dict[str, dict[str, int]]) -> None:
    for case, facts in those(
        [
            "rerotate: plain",
            "rerotate: adjacent",
            "rerotate: ids to a table",
            "rerotate: few tokens",
            "rerotate: fractional",
        ],
        found,
    ).items():
        assert (facts["loads_128"], facts["stores_128"], facts["machine_stores_128"]) == (2, 2, 2), case
        assert facts["narrow_stores"] == 0, case


@pytest.mark.slow
def test_it_compiles_for_amd(tmp_path_factory: pytest.TempPathFactory) -> None:
    name = "rerotate: e4m3, scales of slots, gfx942"
    assert facts_of([name], tmp_path_factory.mktemp("triton")) == {name: {"spills": 0}}
