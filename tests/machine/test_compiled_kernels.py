"""Compiled kernels, without a GPU: wide, exact code without register spills, whose PTX gives the reference's results.

Launches of every kind run on the machine through Triton's launcher and a stand-in for libcuda.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

FOLDERS = [str(Path(__file__).parents[1] / name) for name in ("machine", "gpu", "helpers", "oracles")]


def run(program: str, *arguments: object, **variables: str) -> Any:
    """Run a program of this folder in a process without the interpreter, and return what it prints."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | variables
    environment["PYTHONPATH"] = os.pathsep.join([*FOLDERS, environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(Path(__file__).with_name(program)), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


REGISTERS = {"rotate": 72, "cached": 72, "norm": 80, "backward": 128, "store": 96, "rerotate": 96}
"""Register limits of wide kernels; Triton 3.9 uses 62, 48, 71, 128, 76 and 86."""


def assert_exact(counts: dict[str, Any]) -> None:
    """Assert that products and sums are rounded separately, that nothing uses float64, and that no register spills."""
    assert counts["fma"] == 0, counts
    assert counts["float64"] == 0, counts
    assert (counts["divisions_64"] > 0) == ("form=fractions" in counts["case"]), counts  # only fractions divide
    assert counts["spills"] == counts["stack"] == counts["local"] == 0, counts


def assert_wide(counts: dict[str, Any]) -> None:
    assert_exact(counts)
    kernel = counts["kernel"]
    assert counts["loads_128"] >= (2 if kernel == "rerotate" else 4), counts
    assert counts["stores_128"] >= (2 if kernel == "rerotate" else 4), counts
    # Only the stores of the weight gradients' sums are narrower, once per program.
    assert counts["narrow_stores"] <= (4 if kernel == "backward" else 0), counts
    # The threads of a single warp compute the mean of a row.
    assert counts["heads_shared"] == 0 or kernel not in ("norm", "backward"), counts
    assert counts["registers"] <= REGISTERS[kernel], counts


def test_kernels_compile_to_wide_exact_code_without_spills(tmp_path: Path) -> None:
    (counts,) = run("aot_compile.py", "one", TRITON_CACHE_DIR=str(tmp_path))["one"]
    assert_wide(counts)


@pytest.mark.slow
def test_kernels_of_all_shapes_and_for_amd_gpus_compile_to_exact_code_without_spills(tmp_path: Path) -> None:
    facts = run("aot_compile.py", "wide", "narrow", "fused", "amd", TRITON_CACHE_DIR=str(tmp_path))
    for counts in facts["wide"]:
        assert_wide(counts)
    for counts in facts["narrow"]:
        assert_exact(counts)
    assert [counts["fma"] > 0 for counts in facts["fused"]] == [True]  # so the count would show fused instructions
    assert [counts["spills"] for counts in facts["amd"]] == [0, 0, 0]


# Launches on the machine.

NUMBER = 51
"""Number of forms of launches of each architecture, which together take less than three minutes of one core."""


def sampled(*arguments: object) -> Any:
    pytest.importorskip("triton", "3.9", "the stand-in of libcuda was tested with Triton 3.9")
    return run("sample.py", *arguments)


def test_each_kernel_runs() -> None:
    ran = sampled("sm_90", 1, 5)
    assert ran["wrong"] == {}
    assert ran["kernels"].keys() == {"rotary_kernel", "backward_kernel", "rerotate_kernel", "dense_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_launches_of_every_kind_agree_with_the_reference(architecture: str) -> None:
    ran = sampled(architecture, int(architecture[3:]), NUMBER)
    assert ran["wrong"] == {}
    assert sum(ran["kernels"].values()) >= NUMBER


@pytest.mark.slow
def test_faults_that_are_planted_in_a_compiled_kernel_are_found() -> None:
    planted = sampled("sm_90")
    assert {name: len(verdicts) for name, verdicts in planted.items()} == {
        "barrier": 8, "address": 7, "target": 6, "no mask": 6, "no store": 6,
    }  # fmt: skip
    assert all(all(verdicts) for verdicts in planted.values()), planted
    assert all(verdict.startswith("race: a warp") for verdict in planted["barrier"])
