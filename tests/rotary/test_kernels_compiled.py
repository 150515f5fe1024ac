"""Kernels compile ahead of time, without a GPU, to wide, exact code without register spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[1] / "helpers/aot_compile.py"
QUICK = "norm, sm_90"
WIDE = [
    "rotate, sm_90", "rotate fractional, sm_100", "rotate dense adjacent, sm_80", "rotate dense-fixed, sm_90",
    "rotate head_dim-80 adjacent, sm_100", "rotate few-tokens, sm_80", "rotate by-head fractional adjacent, sm_90",
    "rotate cached-bfloat16 adjacent, sm_100",
    "norm fractional, sm_80", "norm after head_dim-80, sm_90", "norm of-q, few-tokens, sm_100",
    "backward, sm_80", "backward after adjacent, sm_90", "backward by-head fractional, sm_100",
    "store, sm_80", "store norm adjacent, return-k, sm_90", "store other-values, few-tokens, sm_100",
    "rotate own-frequencies, sm_90", "norm own-frequencies adjacent, sm_80", "backward own-frequencies, sm_100",
    "rerotate own-frequencies, sm_90",
    "rerotate, sm_90", "rerotate fractional from-ids, sm_80",
]  # fmt: skip
"""Cases whose 16-bit heads are loaded and stored exclusively in pieces of 16 bytes."""

NARROW = [
    "rotate partial, one-token, sm_90", "norm partial adjacent, sm_80", "backward partial, sm_100",
    "store partial, sm_90", "rerotate partial, sm_100",
]  # fmt: skip
FUSED = "rotate fused, sm_80"
AMD = ["backward after, gfx942", "store norm, gfx942", "rerotate, gfx942"]

REGISTERS = {"rotate": 72, "norm": 80, "backward": 128, "store": 96, "rerotate": 96}
"""Register limits of wide kernels; Triton 3.9 uses 64, 72, 128, 89 and 96."""

Facts = dict[str, dict[str, int]]


def compiled(names: list[str], cache: Path) -> Facts:
    """Compile cases in a process without the interpreter, and return the instruction counts of each case."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command, options = [sys.executable, str(SCRIPT), *names], {**environment, "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=options, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts: Facts = json.loads(done.stdout)
    assert list(facts) == names
    return facts


def assert_exact(case: str, counts: dict[str, int]) -> None:
    """Assert that products and sums are rounded separately, that nothing uses float64, and that no register spills."""
    assert counts["fma"] == 0, case
    assert counts["float64"] == 0, case
    assert (counts["divisions_64"] > 0) == ("fractional" in case or "one-token" in case), case  # only fractions divide
    assert counts["spills"] == counts["stack"] == counts["local"] == 0, case


def assert_wide(case: str, counts: dict[str, int]) -> None:
    assert_exact(case, counts)
    kernel = case.replace(",", "").split()[0]
    assert counts["loads_128"] >= (2 if kernel == "rerotate" else 4), case
    assert counts["stores_128"] >= (2 if kernel == "rerotate" else 4), case
    # Only the stores of the weight gradients' sums are narrower, once per program.
    assert counts["narrow_stores"] <= (4 if kernel == "backward" else 0), case
    # The threads of a single warp compute the mean of a row.
    assert counts["heads_shared"] == 0 or kernel not in ("norm", "backward"), case
    assert counts["registers"] <= REGISTERS[kernel], case


def test_kernels_compile_to_wide_exact_code_without_spills(tmp_path: Path) -> None:
    assert_wide(QUICK, compiled([QUICK], tmp_path)[QUICK])


@pytest.mark.slow
def test_kernels_of_all_shapes_and_for_amd_gpus_compile_to_exact_code_without_spills(tmp_path: Path) -> None:
    facts = compiled([*WIDE, *NARROW, FUSED, *AMD], tmp_path)
    for case in WIDE:
        assert_wide(case, facts[case])
    for case in NARROW:
        assert_exact(case, facts[case])
    assert facts[FUSED]["fma"] > 0  # so the count would show fused instructions
    assert {case: facts[case] for case in AMD} == {case: {"spills": 0} for case in AMD}
