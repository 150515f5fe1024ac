"""The endurance benchmark runs, and the page says what it found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import endurance
import pytest

from mmpos_bench.serving.overload import Overload
from mmpos_bench.serving.soak import Soak, slope

ROOT = Path(__file__).parents[2]


def soaked(first: float, grown: float, error: float) -> Soak:
    return Soak(600.0, 300.0, 1, {}, first, first, first, grown, error)


def test_memory_is_flat_if_it_grows_little_or_no_more_than_the_error_allows() -> None:
    assert soaked(1000, 240, 1).flat  # 20 MiB in five minutes: 2 %
    assert not soaked(1000, 241, 1).flat
    assert soaked(1000, 241, 121).flat
    assert soaked(1000, -9999, 1).flat


def test_a_slope_has_the_error_of_its_tenths() -> None:
    wave = [(float(t), 100.0 + 3 * t + (5 if t // 10 % 2 else -5)) for t in range(100)]
    found, error = slope(wave)
    assert found == round(3 + 25 / 825, 9)
    assert error == round(((250 - 25**2 / 82.5) / 8 / 8250) ** 0.5, 9)


def test_the_ratio_is_that_of_the_99th_percentiles() -> None:
    found = Overload("x", 100, 1000, 1.0, 2.0, 3.0, 5.0, 1.0, {"OK": 0.1, "CANCELLED": 0.9}, 50)
    assert endurance.table(endurance.OVERLOAD, [found])[1:] == [
        ["x", "100", "1,000", "2.0", "3.0", "5.0", "2.5×", "1.0", "OK 10 %, CANCELLED 90 %"]
    ]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_the_script_takes_every_path_on_toy_sizes() -> None:
    words = ["--quick", "--seconds", "0.5", "--times", "1", "--stall", "0.2", "--streams", "1", "--soak", "1"]
    command = [sys.executable, str(ROOT / "benchmarks" / "endurance.py"), *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=200, env={**os.environ, "COLUMNS": "300"}
    )
    assert done.returncode in (0, 1), done.stderr  # memory of two seconds may grow
    for name in ("Place, 1 document", "Place, 2 documents, dense ids", "Build, 1 document with 2 photographs"):
        row = next(line for line in done.stdout.splitlines() if line.startswith(name))
        assert re.search(r"\d+\.\d× ", row)
    assert re.search(r"^streams that are not read .*\n.*\n1 +\d", done.stdout, re.MULTILINE)
    assert re.search(r"± \d+ +(yes|no)$", done.stdout, re.MULTILINE)
