"""Fixtures shared by several test folders."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from server_program import Program, Start

from mmpos.support import native

# No deadline: how long an example takes depends on the machine's load. The examples are the same in every run; they
# would otherwise contain constants of the modules that this process has imported, which depend on the tests before.
settings.register_profile("any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
providers._get_local_constants = lambda: providers._local_constants


def pytest_configure(config: pytest.Config) -> None:
    """Isolate this run from others, both in Ray and in torch.compile's kernel cache, whose key ignores the processor.

    Ray joins any cluster it finds, even one that another test is still stopping. Ctrl-C, which background jobs of a
    script ignore, must interrupt the tests and the programs that they start.
    """
    os.environ |= {"RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder = tempfile.mkdtemp()
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed every test with the same value, whatever ran before it."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_available():  # torch.manual_seed formats a stack trace per device type, even without devices
            torch.cuda.manual_seed_all(0)


@pytest.fixture(params=["C", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test twice: with the C extension, and with numpy."""
    if request.param == "C" and native.core is None:
        pytest.skip("the extension was not built")
    if request.param == "numpy":
        monkeypatch.setattr(native, "core", None)
    return str(request.param)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run torch on one thread: with small matrices, threads spend more time waiting for each other than multiplying."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def batches(pytestconfig: pytest.Config) -> int:
    """Return the number of random batches to test for each model type."""
    return int(pytestconfig.getoption("--batches"))


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """Return a context manager that limits the size in bytes of each file that this process and its children write."""

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
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts servers; after the test, kill these servers."""
    servers: list[Program] = []

    def program(*arguments: str, before: str = "") -> Program:
        log = tmp_path / f"{len(servers)}.log"
        servers.append(Program.launch(log, *arguments, before=before))
        return servers[-1]

    yield program
    for server in servers:
        server.kill()
