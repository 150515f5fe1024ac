"""The host time of rotations, which needs no GPU: in a process without Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import json
from mmpos_bench.host import host_times
from mmpos_bench.timing import Budget
print(json.dumps({name: timing.median for name, timing in host_times(8, Budget(0.0, 2)).items()}))
"""


def test_every_call_is_timed_as_it_is_and_by_triton() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    times = json.loads(found.stdout)
    calls = ["apply_rotary", "apply_rotary in place", "rotate_and_store"]
    assert list(times) == [*calls, *(f"{call}, by Triton" for call in calls)]
    assert min(times.values()) > 0
