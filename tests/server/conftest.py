"""Fixtures: servers with a scripted method, and a server in its own process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from server_program import Program
from serving import Serve, serving
from victim import SETTINGS, Victim

from mmpos_server.call import Threads


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Yield a function that starts servers as ``serving`` does, and stop these servers after the test."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(serving(**options))


@pytest.fixture
def short() -> Iterator[Path]:
    """Create a folder for sockets, whose paths have at most 107 bytes; names of users and runs lengthen tmp_path."""
    with TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def threads() -> Iterator[Threads]:
    """Yield the threads of calls."""
    threads = Threads()
    yield threads
    threads.close()


@pytest.fixture(scope="session")
def hardy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """Yield a server that receives broken, strange and oversized requests."""
    folder = tmp_path_factory.mktemp("hardy")
    (folder / "mmpos.toml").write_text(SETTINGS)
    program = Program.launch(folder / "log", "--config", str(folder / "mmpos.toml"), "--rotations")
    server = Victim(program.process.pid, program.address)
    try:
        yield server
        assert program.process.poll() is None, "the server has died"
        assert server.call("InfoService/GetInfo", b"").status == "OK"
    finally:
        server.channel.close()
        program.kill()
