"""Fixtures that several rooms of tests share."""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from server_program import Program, Refused, Start
from waiting import without_torch

from mmpos.support import native

# How long an example takes is decided by whatever else the machine does; the examples are the same in every run.
settings.register_profile("any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Keep this run apart from others: its kernels of torch.compile, whose key leaves out the processor, and its Ray.

    Ray joins a cluster that it finds, even that of another test that is still stopping.
    """
    os.environ |= {"RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder = tempfile.mkdtemp()
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin every test with the same random numbers, whatever ran before it."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(params=["C", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of doing the same."""
    if request.param == "C" and native.core is None:
        pytest.skip("the extension was not built")
    if request.param == "numpy":
        monkeypatch.setattr(native, "core", None)
    return str(request.param)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch on one thread: where matrices are small, threads wait for each other longer than they multiply."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def batches(pytestconfig: pytest.Config) -> int:
    """Random batches of a model type, beside those of `make test`."""
    return int(pytestconfig.getoption("--batches"))


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """A disk with room for so many bytes of each file, as far as this process and its children can tell."""

    @contextmanager
    def limited(room: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


@pytest.fixture
def torchless(tmp_path: Path) -> dict[str, str]:
    """The environment of programs that start in a moment."""
    return without_torch(tmp_path)


@pytest.fixture
def start(tmp_path: Path, torchless: dict[str, str]) -> Iterator[Start]:
    """Start servers; they are killed in the end."""
    processes: list[subprocess.Popen[str]] = []

    def program(*arguments: str) -> Program:
        # A file: a pipe that nobody reads would stop a server that logs.
        log = tmp_path / f"{len(processes)}.log"
        with log.open("w") as err:
            command = [sys.executable, "-m", "mmpos_server", "--port", "0", *arguments]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True, env=torchless)
        processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert re.fullmatch(r"mmpos_server listening on 127\.0\.0\.1:\d+\n", line), log.read_text()
        return Program(process, line.split()[-1], log)

    yield program
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def refused(torchless: dict[str, str]) -> Refused:
    """Gives what a server says that does not start."""

    def program(*arguments: str) -> str:
        command = [sys.executable, "-m", "mmpos_server", *arguments]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=torchless)
        assert (found.returncode, found.stdout) == (2, "")
        assert re.fullmatch(r"mmpos_server: error: [^\n]+\n", found.stderr), found.stderr
        return found.stderr.removeprefix("mmpos_server: error: ").rstrip("\n")

    return program
