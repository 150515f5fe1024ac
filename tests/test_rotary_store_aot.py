"""The kernel that stores, compiled ahead of time for three GPUs: wide loads and stores, caches included, no spills."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_rotary_aot import facts_of

pytest.importorskip("triton")

NAMES = [
    "plain", "fractional", "norm", "norm adjacent", "head_dim 80", "partial", "few tokens",
    "norm, return k", "other values",
]  # fmt: skip

STORES = {"other values": 5, "partial": 12, "norm, return k": 8}
"""Of 16 bytes by a thread, in a turn of each loop: two of q, of k and of v, where a tile does not hold more or less."""

REGISTERS = {"": 80, "norm": 96}
"""Most registers: 80 and 89 are seen with Triton 3.9; 60 without what is unusual, 79 with a norm."""


@pytest.mark.slow
def test_the_kernel_that_stores_compiles_to_wide_exact_code_without_spills(tmp_path: Path) -> None:
    for case, facts in facts_of(NAMES, tmp_path, "aot_compile_store.py").items():
        name = case.split(", sm_")[0]
        stores = STORES.get(name, 6)
        assert facts["loads_128"] >= stores, case  # the weights of a norm, too
        assert facts["stores_128"] == stores, case
        # The loop of v is unrolled; nothing that is stored, is stored in smaller pieces.
        assert facts["machine_stores_128"] >= stores, case
        assert facts["narrow_stores"] == 0, case
        assert (facts["fma"], facts["float64"]) == (0, 0), case
        # Slots are divided in 32 bits; only fractions divide 64.
        assert facts["divisions_64"] == (4 if name == "fractional" else 0), case
        assert (facts["spills"], facts["stack"], facts["local"]) == (0, 0, 0), case
        assert facts["registers"] <= REGISTERS["norm" if "norm" in name or name == "few tokens" else ""], case


@pytest.mark.slow
def test_arguments_that_are_one_and_heads_that_turn_in_part_compile_without_spills_too(tmp_path: Path) -> None:
    for case, facts in facts_of(["one of each", "norm partial"], tmp_path, "aot_compile_store.py").items():
        assert (facts["spills"], facts["stack"], facts["local"]) == (0, 0, 0), case
