"""Test a server on a unix socket: the socket's permissions, files already at its path, and its removal."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from server_program import Start

from mmpos import SegmentTable, Text, place
from mmpos.client import Client
from mmpos.errors import InvalidInputError
from mmpos_server.listening import Listen, bind_uds
from mmpos_server.testing import running

SEGMENTS = SegmentTable.from_documents([[Text(3)]])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


def mistake(uds: Path) -> str:
    with pytest.raises(InvalidInputError) as raised, running(listen=Listen(tcp=False, uds=uds)):
        pass
    return str(raised.value).replace(str(uds), "PATH")


def test_only_this_user_may_connect_to_a_socket_from_the_moment_it_exists_and_it_is_removed_at_exit(path: Path) -> None:
    before = os.umask(0)
    with running(listen=Listen(uds=path)) as port:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert mistake(path) == "--listen: got unix:PATH (in use), want a path to listen on"
        for address in (port, f"unix:{path}"):
            with Client(address) as client:
                assert (client.place(SEGMENTS).dense() == place(SEGMENTS).dense()).all()
    assert not path.exists()
    seen = []
    with socket.socket(socket.AF_UNIX) as server:

        def add(address: str) -> None:
            server.bind(address.removeprefix("unix:"))
            seen.append(stat.S_IMODE(path.stat().st_mode))

        bind_uds(path, add)
    assert (seen, os.umask(before)) == ([0o600], 0)


def test_a_socket_is_replaced_only_if_nobody_listens_on_it(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with running(listen=Listen(tcp=False, uds=path)) as address, Client(address) as client:
        assert client.healthy()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        assert mistake(path) == "--listen: got unix:PATH (in use), want a path to listen on"
        assert path.is_socket()


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("elsewhere")])
def test_any_other_file_at_the_path_is_left_unchanged(path: Path, make: Callable[[Path], None]) -> None:
    make(path)
    before = path.lstat()
    assert mistake(path) == "--listen: got unix:PATH (not a socket), want a path to listen on"
    assert path.lstat() == before
    for wrong in (path.parent / "none" / "socket", path.parent / ("x" * 200)):
        assert mistake(wrong).startswith("--listen: got unix:PATH (")


def test_the_program_prints_its_addresses_and_removes_its_socket(start: Start, path: Path) -> None:
    server = start("--listen", "127.0.0.1:0", "--listen", f"unix:{path}")
    assert server.process.stdout is not None
    assert server.process.stdout.readline() == f"mmpos_server listening on unix:{path}\n"
    with Client(f"unix:{path}") as client:
        assert client.healthy()
    server.process.terminate()
    assert server.end()[0] == 0
    assert not path.exists()
