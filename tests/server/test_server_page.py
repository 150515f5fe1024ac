"""The page of a server: metrics, liveness and readiness, and that no connection holds it."""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from prometheus_client import CollectorRegistry
from server_program import Start, metrics_of
from waiting import eventually, free_port

from mmpos.errors import InvalidInputError
from mmpos.support.info import version
from mmpos_server import page
from mmpos_server.page import Page, exposed


def answer(port: int, path: str, method: str = "GET", host: str = "127.0.0.1") -> tuple[int, str]:
    with closing(http.client.HTTPConnection(host, port, timeout=60)) as connection:
        connection.request(method, path)
        with connection.getresponse() as response:
            return response.status, response.read().decode()


def status(port: int, path: str, host: str = "127.0.0.1") -> int:
    return answer(port, path, host=host)[0]


@pytest.fixture
def turning() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread, as that of a server."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_paths_are_known_and_all_others_not_found(turning: asyncio.AbstractEventLoop) -> None:
    with exposed(Page(CollectorRegistry(), turning, lambda: True), "127.0.0.1", 0) as port:
        assert answer(port, "/livez") == (200, "live\n")
        assert answer(port, "/readyz") == (200, "ready\n")
        assert answer(port, "/metrics") == (200, "")
        assert answer(port, "/livez", "HEAD") == (200, "")
        assert [status(port, path) for path in ("/", "/metric", "/livez/", "/readyz?verbose")] == [404, 404, 404, 200]
        assert answer(port, "/metrics", "POST")[0] == 405


def test_a_server_whose_event_loop_stands_does_not_live(
    turning: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "SECONDS", 0.2)
    standing = threading.Event()
    with exposed(Page(CollectorRegistry(), turning, lambda: True), "127.0.0.1", 0) as port:
        turning.call_soon_threadsafe(standing.wait, 60)
        assert answer(port, "/livez") == (503, "the event loop has not turned for 0.2 s\n")
        standing.set()
        assert eventually(lambda: status(port, "/livez") == 200)


def test_silent_and_slow_connections_end_and_hold_no_thread(
    turning: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "SECONDS", 0.2)
    with exposed(Page(CollectorRegistry(), turning, lambda: True), "127.0.0.1", 0) as port:
        threads = threading.active_count()
        held = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(50)]
        for connection in held[25:]:
            connection.sendall(b"GET /livez HTTP/1.1\r\nX")
        assert status(port, "/livez") == 200
        assert threading.active_count() == threads
        for connection in held:
            with connection:
                assert ended(connection)


def ended(connection: socket.socket) -> bool:
    """Whether the other side closes it, with an answer or without."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_the_oldest_connections_make_room_for_new_ones(
    turning: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "SECONDS", 600.0)
    monkeypatch.setattr(page, "MOST_CONNECTIONS", 8)
    with exposed(Page(CollectorRegistry(), turning, lambda: True), "127.0.0.1", 0) as port, ExitStack() as opened:
        held = [opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(20)]
        assert status(port, "/livez") == 200
        assert all(ended(connection) for connection in held[:12])


def test_a_taken_port_and_a_strange_host_are_named(turning: asyncio.AbstractEventLoop) -> None:
    shown = Page(CollectorRegistry(), turning, lambda: True)
    other = socket.create_server(("127.0.0.1", 0))
    port = other.getsockname()[1]
    with other, pytest.raises(InvalidInputError) as taken, exposed(shown, "127.0.0.1", port):
        pass
    assert str(taken.value) == f"metrics-port: got {port}, which is taken on 127.0.0.1, want a free one"
    with pytest.raises(InvalidInputError) as strange, exposed(shown, "nowhere.invalid", 0):
        pass
    assert str(strange.value).startswith("metrics-host: got 'nowhere.invalid' (")


def test_a_socket_of_systemd_is_taken(turning: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    handed = socket.create_server(("127.0.0.1", 0))
    port = handed.getsockname()[1]
    monkeypatch.setattr("mmpos_server.listening._FIRST", handed.detach())
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    with exposed(Page(CollectorRegistry(), turning, lambda: True), "192.0.2.1", 1) as found:
        assert found == port
        assert status(port, "/livez") == 200


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_server_is_ready_until_it_says_that_it_stops_and_lives_on(start: Start, workers: str) -> None:
    port, host = free_port(), "127.0.0.2"
    flags = ["--metrics-host", host, "--metrics-port", str(port), "--notice-seconds", "600", "--workers", workers]
    server = start(*flags)
    assert [status(port, path, host) for path in ("/readyz", "/livez")] == [200, 200]
    with pytest.raises(ConnectionRefusedError):
        status(port, "/livez")
    server.process.terminate()
    assert eventually(lambda: answer(port, "/readyz", host=host) == (503, "not serving\n"))
    assert status(port, "/livez", host) == 200

    # Two signals that come before a process looks are one.
    assert eventually(lambda: [line["event"] for line in server.lines()].count("draining") == int(workers))
    server.process.terminate()
    assert server.end()[0] == 0


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_metrics_name_the_build_and_the_start(start: Start, workers: str) -> None:
    port, before = free_port(), time.time()
    start("--metrics-port", str(port), "--workers", workers)
    found = metrics_of(port)
    (build,) = [name for name in found if name.startswith("mmpos_build_info")]
    assert f'version="{version()}"' in build
    assert before <= found["mmpos_start_time_seconds"] <= time.time()


def test_a_server_without_a_page_does_not_import_aiohttp() -> None:
    code = "import sys, mmpos_server.options; sys.exit('aiohttp' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
