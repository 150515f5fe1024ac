"""The host time of rotations, which needs no GPU: in a process without Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = "from mmpos_bench.host import main; main(8, 2, 1)"


def test_every_call_is_timed_as_it_is_and_by_triton() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    times = dict(re.split(r" {2,}", line, maxsplit=1) for line in found.stdout.splitlines())
    calls = "into new tensors: mmpos, table", "in place: mmpos, table", "norm, rotation and store: without a norm"
    beside = "a table to the device", "a table refreshed"
    assert list(times) == [*calls, *(f"{call}, by Triton" for call in calls), *beside]
    assert all(re.fullmatch(r"[\d.,]+ \w+  \([\d.,]+ \w+ to [\d.,]+ \w+\)", time) for time in times.values())
