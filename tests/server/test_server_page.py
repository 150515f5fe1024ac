"""Test a server's HTTP page: metrics, liveness and readiness, and the limits on its connections."""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from contextlib import AbstractContextManager, ExitStack, closing

import pytest
from prometheus_client import CollectorRegistry
from server_program import Start
from waiting import eventually, free_port

from mmpos.errors import InvalidInputError
from mmpos.support.info import version
from mmpos_server import page
from mmpos_server.page import exposed


def answer(port: int, path: str, method: str = "GET", host: str = "127.0.0.1") -> tuple[int, str]:
    with closing(http.client.HTTPConnection(host, port, timeout=60)) as connection:
        connection.request(method, path)
        with connection.getresponse() as response:
            return response.status, response.read().decode()


def status(port: int, path: str, host: str = "127.0.0.1") -> int:
    return answer(port, path, host=host)[0]


def shown(port: int = 0, host: str = "127.0.0.1") -> AbstractContextManager[int]:
    """Serve the page for a server that is live and ready."""
    return exposed(CollectorRegistry(), lambda: True, lambda: True, host, port)


def test_known_paths_are_answered_and_all_others_are_not_found() -> None:
    with shown() as port:
        assert answer(port, "/livez") == (200, "live\n")
        assert answer(port, "/readyz") == (200, "ready\n")
        assert answer(port, "/metrics") == (200, "")
        assert answer(port, "/livez", "HEAD") == (200, "")
        assert [status(port, path) for path in ("/", "/metric", "/livez/", "/readyz?verbose")] == [404, 404, 404, 200]
        assert answer(port, "/metrics", "POST")[0] == 501


def test_a_server_that_has_stopped_working_is_not_live() -> None:
    live = threading.Event()
    with exposed(CollectorRegistry(), live.is_set, lambda: True, "127.0.0.1", 0) as port:
        assert answer(port, "/livez") == (503, "the server has stopped working\n")
        live.set()
        assert answer(port, "/livez") == (200, "live\n")


def test_silent_and_slow_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "SECONDS", 0.2)
    with shown() as port:
        connections = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(50)]
        for connection in connections[25:]:
            connection.sendall(b"GET /livez HTTP/1.1\r\nX")
        assert status(port, "/livez") == 200
        for connection in connections:
            with connection:
                assert ended(connection)


def ended(connection: socket.socket) -> bool:
    """Wait until the other side closes a connection, with or without an answer, and return True."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_the_oldest_connections_are_closed_to_admit_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "SECONDS", 600.0)
    monkeypatch.setattr(page, "MOST_CONNECTIONS", 8)
    with shown() as port, ExitStack() as opened:
        connections = [
            opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(20)
        ]
        assert status(port, "/livez") == 200
        assert all(ended(connection) for connection in connections[:12])


def test_a_port_in_use_and_an_unknown_host_are_reported() -> None:
    other = socket.create_server(("127.0.0.1", 0))
    port = other.getsockname()[1]
    with other, pytest.raises(InvalidInputError) as taken, shown(port):
        pass
    assert str(taken.value) == f"metrics-port: {port} is in use on 127.0.0.1, want a free port"
    with pytest.raises(InvalidInputError) as strange, shown(0, "nowhere.invalid"):
        pass
    assert str(strange.value).startswith("metrics-host: got 'nowhere.invalid' (")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_server_that_is_about_to_stop_is_live_but_not_ready(start: Start, workers: str) -> None:
    port, host, before = free_port(), "127.0.0.2", time.time()
    flags = ["--metrics-host", host, "--metrics-port", str(port), "--notice-seconds", "600", "--workers", workers]
    server = start(*flags)
    assert [status(port, path, host) for path in ("/readyz", "/livez")] == [200, 200]
    _, metrics = answer(port, "/metrics", host=host)
    assert re.search(f'^mmpos_build_info{{.*version="{re.escape(version())}".*}} 1', metrics, re.MULTILINE)
    (started,) = re.findall(r"^mmpos_start_time_seconds (\S+)$", metrics, re.MULTILINE)
    assert before <= float(started) <= time.time()
    with pytest.raises(ConnectionRefusedError):
        status(port, "/livez")
    server.process.terminate()
    assert eventually(lambda: answer(port, "/readyz", host=host) == (503, "not serving\n"))
    assert status(port, "/livez", host) == 200

    # Two signals that arrive before a process handles the first of them count as one.
    assert eventually(lambda: [line["event"] for line in server.lines()].count("draining") == int(workers))
    server.process.terminate()
    assert server.end()[0] == 0
