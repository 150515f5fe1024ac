"""Tests of a group run in one worker, so that they share an expensive fixture or do not share the machine."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os
from pathlib import Path

import pytest

@pytest.mark.xdist_group("group")
@pytest.mark.parametrize("number", range(8))
def test_one(number):
    with open(Path(__file__).with_name("workers"), "a") as file:
        print(os.environ["PYTEST_XDIST_WORKER"], file=file)
"""


@pytest.mark.slow
def test_the_tests_of_a_group_run_in_one_worker(tmp_path: Path) -> None:
    (tmp_path / "test_of_a_group.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadgroup"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    workers = (tmp_path / "workers").read_text().split()
    assert len(workers) == 8
    assert len(set(workers)) == 1
