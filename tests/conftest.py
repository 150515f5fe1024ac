"""Fixtures of several test folders."""

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

# The load of the machine decides how long an example takes; the examples are the same in every run.
settings.register_profile("any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Isolate this run from others: the kernels of torch.compile, whose key ignores the processor, and Ray.

    Ray joins any cluster that it finds, even the cluster of another test that is still stopping.
    """
    os.environ |= {"RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder = tempfile.mkdtemp()
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed every test alike, whatever ran before it."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(params=["C", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the C extension and with numpy."""
    if request.param == "C" and native.core is None:
        pytest.skip("the extension was not built")
    if request.param == "numpy":
        monkeypatch.setattr(native, "core", None)
    return str(request.param)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run torch on one thread: with small matrices, threads wait longer for each other than they multiply."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def batches(pytestconfig: pytest.Config) -> int:
    """Return the number of random batches of a model type."""
    return int(pytestconfig.getoption("--batches"))


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """Return a context manager that limits each file written by this process and its children to some bytes."""

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
    """Return the environment of programs without torch, which start quickly."""
    return without_torch(tmp_path)


@pytest.fixture
def start(tmp_path: Path, torchless: dict[str, str]) -> Iterator[Start]:
    """Start servers, and kill them at the end."""
    servers: list[Program] = []

    def program(*arguments: str) -> Program:
        servers.append(Program.launch(tmp_path / f"{len(servers)}.log", *arguments, environment=torchless))
        return servers[-1]

    yield program
    for server in servers:
        server.kill()


@pytest.fixture
def refused(torchless: dict[str, str]) -> Refused:
    """Run a server that must not start, and return its error message."""

    def program(*arguments: str) -> str:
        command = [sys.executable, "-m", "mmpos_server", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=torchless)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch(r"mmpos_server: error: [^\n]+\n", done.stderr), done.stderr
        return done.stderr.removeprefix("mmpos_server: error: ").rstrip("\n")

    return program
