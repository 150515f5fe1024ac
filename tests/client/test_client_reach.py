"""Test unreachable, restarted and killed servers: clients wait for them, or report why they cannot reach them."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from certificates import make_certificate
from clients import open_client
from server_program import Start
from waiting import eventually, free_port

from mmpos import SegmentTable, Text
from mmpos.client import Client, PositionsQuery, Tls
from mmpos.errors import ServiceUnavailableError
from mmpos_server.access import TlsFiles
from mmpos_server.listening import Listen
from mmpos_server.testing import running

SEGMENTS = SegmentTable.from_documents([[Text(3)]])
WANT = ", want a running server: start one with mmpos serve, or pass another address"
GAP = 2.5
"""Seconds between the end of one server and the start of the next: longer than all attempts of one call take."""


def test_restarting_a_single_server_loses_no_call() -> None:
    listen, done, answered = Listen(port=free_port()), threading.Event(), {"sync": 0, "async": 0}

    def load(kind: str) -> None:
        with open_client(kind, f"127.0.0.1:{listen.port}", timeout=300) as client:
            while not done.is_set():
                client.place(SEGMENTS)
                answered[kind] += 1

    with ThreadPoolExecutor(2) as threads:
        with running(listen=listen):
            loads = [threads.submit(load, kind) for kind in answered]
            assert eventually(lambda: min(answered.values()) > 10)
        time.sleep(GAP)
        before = max(answered.values())
        with running(listen=listen):
            assert eventually(lambda: min(answered.values()) > before + 10)
            done.set()
            assert [load.result() for load in loads] == [None, None]


def cause(address: str, tls: Tls | None = None) -> str:
    """Return a call's error message without gRPC's details, and check that a stream raises the same message."""
    with Client(address, timeout=600, tls=tls, attempts=1) as client:
        with pytest.raises(ServiceUnavailableError) as raised:
            client.place(SEGMENTS)
        with pytest.raises(ServiceUnavailableError) as streamed:
            list(client.stream([PositionsQuery(SEGMENTS)]))
    head, _, _ = str(raised.value).partition(" (failed to connect")
    assert str(streamed.value).startswith(f"queries[0]: {head}")
    return head.removeprefix(f"{address}: got ").removesuffix(WANT)


def test_tls_failures_name_their_cause(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "server")
    other, other_key = make_certificate(tmp_path, "other")
    with running(listen=Listen(tls=TlsFiles(cert, key))) as address:
        untrusted = "tls.root_certificates: cannot verify the server's certificate"
        assert cause(address, Tls(other)) == untrusted
        misnamed = "tls.server_name: the server's certificate is valid only for other names"
        assert cause(address, Tls(cert, server_name="elsewhere")) == misnamed
        assert cause(address) == "Socket closed (a server that requires TLS closes it: tls=Tls(...))"
        assert cause(address, Tls(b"no PEM")) == "tls: the certificates are invalid, want PEM"
    with running(listen=Listen(tls=TlsFiles(cert, key, cert))) as address:
        unidentified = "a server that requires client certificates closes it: Tls(..., certificate, key)"
        assert cause(address, Tls(cert)) == f"Socket closed ({unidentified})"
        unknown = "Socket closed (a server that does not trust tls.certificate closes it)"
        assert cause(address, Tls(cert, other, other_key)) == unknown
        for kind in ("sync", "async"):
            with open_client(kind, address, tls=Tls(cert.read_bytes(), str(cert), key, "server")) as client:
                assert client.place(SEGMENTS).num_tokens == 3
    with running() as address:
        assert cause(address, Tls(cert)) == "tls: the server does not use TLS, want tls=None"


def test_a_client_limited_to_one_attempt_and_a_health_check_do_not_wait() -> None:
    with ExitStack() as clients, ExitStack() as serving:
        address = serving.enter_context(running())
        client = clients.enter_context(Client(address, timeout=600))
        once = clients.enter_context(Client(address, timeout=600, attempts=1))
        assert client.healthy()
        assert once.healthy()
        serving.close()
        assert not client.healthy()
        with pytest.raises(ServiceUnavailableError, match=rf"^{address}: got .*[^)]{WANT}$"):
            once.place(SEGMENTS)


@pytest.mark.parametrize(
    ("kind", "address", "reason"),
    [
        ("sync", "unix:/nowhere/mmpos.sock", "No such file or directory"),
        ("async", "ipv4:127.0.0.1:1,127.0.0.1:2", "Connection refused"),
        ("sync", "localhost:1", r"Connection refused at (127\.0\.0\.1|\[::1\]):1, the last address tried"),
    ],
)
def test_a_client_without_a_server_says_how_to_start_one(kind: str, address: str, reason: str) -> None:
    with open_client(kind, address, timeout=600) as client, pytest.raises(ServiceUnavailableError) as raised:
        client.place(SEGMENTS)
    assert re.fullmatch(rf"{re.escape(address)}: got {reason}{WANT}", str(raised.value))


@pytest.mark.slow
def test_killing_a_replica_loses_no_call(start: Start) -> None:
    servers, killed, ids = [start() for _ in range(3)], threading.Event(), list[int]()
    address = f"ipv4:{','.join(server.address for server in servers)}"

    def called(kind: str) -> None:
        """Make calls in sequence, a third of them before a server is killed."""
        with open_client(kind, address, timeout=300) as client:
            for number in range(600):
                ids.append(int(client.place(SEGMENTS, start=number).dense()[0, 0]))
                assert number < 200 or killed.wait(300)

    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(called, kind) for kind in ("sync", "async") * 2]
        assert eventually(lambda: len(ids) > 400)
        servers[1].process.kill()
        killed.set()
        assert [call.result() for call in calls] == [None] * 4
    assert sorted(ids) == sorted([*range(600)] * 4)
