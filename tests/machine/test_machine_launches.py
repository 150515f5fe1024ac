"""Launches of every kind run as compiled PTX on the machine, through Triton's launcher and a stand-in for libcuda."""

from __future__ import annotations

import pytest
from programs import run

pytest.importorskip("triton", "3.9", "the stand-in of libcuda was tested with Triton 3.9")

NUMBER = 51
"""Number of forms of launches of each architecture, which together take less than three minutes of one core."""


def test_each_kernel_runs() -> None:
    ran = run("sample.py", "sm_90", 1, 5)
    assert ran["wrong"] == {}
    assert ran["kernels"].keys() == {"rotary_kernel", "backward_kernel", "rerotate_kernel", "dense_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_launches_of_every_kind_agree_with_the_reference(architecture: str) -> None:
    ran = run("sample.py", architecture, int(architecture[3:]), NUMBER)
    assert ran["wrong"] == {}
    assert sum(ran["kernels"].values()) >= NUMBER


@pytest.mark.slow
def test_faults_that_are_planted_in_a_compiled_kernel_are_found() -> None:
    planted = run("sample.py", "sm_90")
    assert {name: len(verdicts) for name, verdicts in planted.items()} == {
        "barrier": 8, "address": 7, "target": 6, "no mask": 6, "no store": 6,
    }  # fmt: skip
    assert all(all(verdicts) for verdicts in planted.values()), planted
    assert all(verdict.startswith("race: a warp") for verdict in planted["barrier"])
