"""Launches past Triton's binder: those that Triton makes, and its own wherever something is out of the ordinary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
HELPER = Path(__file__).parents[1] / "helpers/straight_launches.py"


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """Findings of a process without the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    found = subprocess.run([sys.executable, HELPER], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    facts: dict[str, Any] = json.loads(found.stdout)
    return facts


def test_launches_of_many_sorts_are_those_of_triton_which_binds_each_sort_once(facts: dict[str, Any]) -> None:
    assert facts["different"] == []
    assert facts["kernels"] <= facts["sorts"] < facts["calls"]
    assert facts["bound again"] == 0


def test_no_kernel_is_compiled_to_fuse_products_and_sums(facts: dict[str, Any]) -> None:
    assert facts["names"] == ["backward_kernel", "dense_kernel", "rerotate_kernel", "rotary_kernel", "store_kernel"]
    assert facts["fused"] == 0


@pytest.mark.parametrize(
    "case",
    ["with a hook of the kernel", "with launch_enter_hook", "with launch_exit_hook", "instrumented", "older", "newer"],
)
def test_triton_launches_where_somebody_watches_or_its_version_is_not_known(facts: dict[str, Any], case: str) -> None:
    assert (facts[case], facts["as before"]) == (1, 0)


def test_arguments_that_travel_together_are_told_apart_as_each_is() -> None:
    from mmpos.rotary.kernel.launching import _sort

    even, odd = torch.zeros(17)[:16], torch.zeros(17)[1:]
    sorts = [(even, 16, 1.0), (odd, 16, 1.0), (even, 17, 1.0), (even, 1, 1.0), (even, 16, None), (even, 16, True)]
    assert len({_sort(x) for x in sorts}) == len(sorts)
    assert _sort((even, 16, 1.0)) == _sort((even.clone(), 32, 2.0))


def test_on_amd_where_sizes_are_specialised_triton_launches(facts: dict[str, Any]) -> None:
    assert not facts["straight on AMD"]
