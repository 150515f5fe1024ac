"""The kernel as GPUs run it, compiled ahead of time for three: wide loads and stores, exact arithmetic, no spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

QUICK = [
    "table integer half",
    "table integer adjacent",
    "table fractional half",
    "dense integer half",
    "head_dim 80 half",
]
REST = [
    "table fractional adjacent",
    "dense integer adjacent",
    "dense fixed half",
    "head_dim 80 adjacent",
    "table integer half, few tokens",
    "table fractional adjacent, few tokens",
]

REGISTERS = {"integer": 64, "fractional": 72}
"""Most registers: 56 and 64 are seen with Triton 3.9; at 64, eight programs of 128 threads share a multiprocessor."""


def facts_of(names: list[str], cache: Path, script: str = "aot_compile.py") -> dict[str, dict[str, int]]:
    """What a script counts, by case and architecture."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, str(Path(__file__).with_name(script)), *names]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    facts: dict[str, dict[str, int]] = json.loads(found.stdout)
    assert len(facts) == 3 * len(names)
    return facts


@pytest.mark.parametrize("names", [QUICK, pytest.param(REST, marks=pytest.mark.slow)], ids=["quick", "rest"])
def test_the_kernel_compiles_to_wide_exact_code_without_spills(names: list[str], tmp_path: Path) -> None:
    for case, facts in facts_of(names, tmp_path).items():
        fractional = "fractional" in case
        # Two halves of q and of k, or both vectors of a row of adjacent pairs: 16 bytes at a time.
        assert (facts["loads_128"], facts["stores_128"], facts["machine_stores_128"]) == (4, 4, 4), case
        assert facts["machine_loads_128"] >= 4, case  # the frequencies too, where a thread has several
        # Nothing that is stored, is stored in smaller pieces.
        assert facts["narrow_stores"] == 0, case
        # Products and sums are rounded one by one, as in the reference; nothing is computed in float64.
        assert (facts["fma"], facts["float64"]) == (0, 0), case
        # Only fractions divide 64 bits: twice on each of two axes.
        assert facts["divisions_64"] == (4 if fractional else 0), case
        assert (facts["spills"], facts["stack"], facts["local"]) == (0, 0, 0), case
        assert facts["registers"] <= REGISTERS["fractional" if fractional else "integer"], case


@pytest.mark.slow
def test_with_fusion_the_count_of_fused_instructions_is_not_zero(tmp_path: Path) -> None:
    for case, facts in facts_of(["table integer half, fused"], tmp_path).items():
        assert facts["fma"] > 0, case


@pytest.mark.slow
def test_arguments_that_are_one_compile_too(tmp_path: Path) -> None:
    names = ["table integer half, one token", "table fractional half, one token", "dense fixed half, one head"]
    for case, facts in facts_of(names, tmp_path).items():
        assert (facts["spills"], facts["stack"], facts["local"]) == (0, 0, 0), case
