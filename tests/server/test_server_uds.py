"""Test a server on a unix socket: the socket's permissions, files already at its path, and its removal."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmpos import SegmentTable, Text, place
from mmpos.client import Client
from mmpos.errors import InvalidInputError
from mmpos_server.__main__ import main
from mmpos_server.listening import Listen, bind_uds
from mmpos_server.testing import running

SEGMENTS = SegmentTable.from_documents([[Text(3)]])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


@pytest.fixture
def umask_0() -> Iterator[None]:
    """Set the umask to 0 for the duration of the test."""
    before = os.umask(0)
    yield
    os.umask(before)


def mistake(uds: Path) -> str:
    with pytest.raises(InvalidInputError) as raised, running(listen=Listen(tcp=False, uds=uds)):
        pass
    return str(raised.value)


@pytest.mark.usefixtures("umask_0")
def test_only_this_user_may_connect_to_a_socket_and_it_is_removed_at_exit(path: Path) -> None:
    with running(listen=Listen(tcp=False, uds=path)) as address:
        assert address == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with Client(address) as client:
            assert (client.place(SEGMENTS).dense() == place(SEGMENTS).dense()).all()
    assert list(path.parent.iterdir()) == []
    assert os.umask(0) == 0


@pytest.mark.usefixtures("umask_0")
def test_no_other_user_may_connect_to_a_socket_from_the_moment_it_exists(path: Path) -> None:
    seen = []
    with socket.socket(socket.AF_UNIX) as server:

        def add(address: str) -> None:
            server.bind(address.removeprefix("unix:"))
            seen.append(stat.S_IMODE(path.stat().st_mode))

        bind_uds(path, add)
    assert seen == [0o600]


def test_a_port_and_a_socket_are_served_together(path: Path) -> None:
    with running(listen=Listen(uds=path)) as address:
        for target in (address, f"unix:{path}"):
            with Client(target) as client:
                assert client.healthy()


def test_the_path_of_a_live_server_is_reported_as_in_use(path: Path) -> None:
    with running(listen=Listen(tcp=False, uds=path)) as address, Client(address) as client:
        assert mistake(path) == f"uds: {path} is in use, want a free path"
        assert client.healthy()


def test_a_socket_that_does_not_refuse_connections_is_reported_as_in_use(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        assert mistake(path) == f"uds: {path} is in use, want a free path"
        assert path.is_socket()


def test_a_socket_that_nobody_listens_on_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with running(listen=Listen(tcp=False, uds=path)) as address, Client(address) as client:
        assert client.healthy()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_any_other_file_at_the_path_is_left_unchanged(path: Path, kind: str) -> None:
    if kind == "folder":
        path.mkdir()
    elif kind == "file":
        path.write_text("precious")
    else:
        path.symlink_to("elsewhere")
    before = path.lstat()
    assert mistake(path) == f"uds: {path} is not a socket, want a free path"
    assert path.lstat() == before


def test_an_impossible_path_is_refused(path: Path) -> None:
    missing = path.parent / "none" / "socket"
    assert mistake(missing) == f"uds: got {missing}, want a path in a folder that exists"
    longest = path.parent / ("x" * (106 - len(str(path.parent))))
    with running(listen=Listen(tcp=False, uds=longest)) as address, Client(address) as client:
        assert client.healthy()
    long = Path(f"{longest}x")
    assert mistake(long) == f"uds: got a path of 108 bytes, want <= 107: {long}"


def test_a_folder_that_the_server_may_not_read_is_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(Path, "lstat", closed)
    assert mistake(path) == f"uds: got {path} (Permission denied), want a path to listen on"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--uds", "s", "--workers", "2"],
            "--uds cannot be combined with 2 workers: processes cannot share a unix socket",
        ),
        (
            ["--uds", "s", "--tls-cert", "c", "--tls-key", "k"],
            "tls-cert requires --port: a unix socket is never encrypted",
        ),
    ],
)
def test_contradictory_flags_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr() == ("", f"mmpos_server: error: {message}\n")


@pytest.mark.slow
def test_the_program_prints_its_addresses_and_removes_its_socket(path: Path) -> None:
    command = [sys.executable, "-m", "mmpos_server", "--uds", str(path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("mmpos_server listening on 127.0.0.1:")
            assert process.stdout.readline() == f"mmpos_server listening on unix:{path}\n"
            assert path.is_socket()
        finally:
            process.send_signal(signal.SIGTERM)
            rest, _ = process.communicate(timeout=60)
    assert (process.returncode, rest, path.exists()) == (0, "", False)
