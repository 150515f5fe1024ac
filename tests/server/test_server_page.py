"""Test a server's HTTP page: metrics, liveness and readiness, and the limits on its connections."""

from __future__ import annotations

import socket
import threading
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from http2 import Connection, message
from prometheus_client import CollectorRegistry
from server_program import Start, answer
from serving import PLACE
from waiting import eventually, free_port

from mmpos.errors import InvalidInputError
from mmpos.rpc.v1.positions_pb2 import Dense, PlaceRequest, PositionsQuery, Spans
from mmpos_server import page
from mmpos_server.page import exposed


def status(port: int, path: str, host: str = "127.0.0.1") -> int:
    return answer(port, path, host=host)[0]


def shown(port: int = 0, host: str = "127.0.0.1") -> AbstractContextManager[int]:
    """Serve the page for a server that is live and ready."""
    return exposed(CollectorRegistry(), lambda: True, lambda: True, host, port)


def test_known_paths_are_answered_and_all_others_are_not_found() -> None:
    live, ready = threading.Event(), threading.Event()
    with exposed(CollectorRegistry(), live.is_set, ready.is_set, "127.0.0.1", 0) as port:
        for event, path in ((live, "/livez"), (ready, "/readyz")):
            assert answer(port, path) == (503, "503 Service Unavailable\n")
            event.set()
            assert answer(port, path) == (200, "200 OK\n")
        assert answer(port, "/metrics") == (200, "")
        assert [status(port, path) for path in ("/", "/metric", "/livez/", "/readyz?verbose")] == [404, 404, 404, 200]
        assert answer(port, "/metrics", "POST")[0] == 405


def ended(connection: socket.socket) -> bool:
    """Wait until the other side closes a connection, with or without an answer, and return True."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize(("seconds", "most"), [(0.5, 64), (600.0, 12)])
def test_slow_and_excess_connections_are_closed_and_start_no_thread(
    monkeypatch: pytest.MonkeyPatch, seconds: float, most: int
) -> None:
    monkeypatch.setattr(page, "SECONDS", seconds)
    monkeypatch.setattr(page, "BUSY_SECONDS", seconds)
    monkeypatch.setattr(page, "MOST_CONNECTIONS", most)
    with shown() as port, ExitStack() as opened:
        before = threading.active_count()
        connections = [opened.enter_context(socket.create_connection(("127.0.0.1", port), 300)) for _ in range(20)]
        for connection in connections[::2]:
            connection.sendall(b"GET /livez HTTP/1.1\r\nX")
        assert all(map(ended, connections[: 20 if seconds < 600 else 8]))
        assert threading.active_count() <= before
        opened.close()
        monkeypatch.undo()
        assert status(port, "/livez") == 200


def test_a_port_in_use_and_an_unknown_host_are_reported() -> None:
    other = socket.create_server(("127.0.0.1", 0))
    port = other.getsockname()[1]
    with other, pytest.raises(InvalidInputError) as taken, shown(port):
        pass
    want = "(Address already in use), want a free port of this machine (0 picks one)"
    assert str(taken.value) == f"--metrics: got 127.0.0.1:{port} {want}"
    with pytest.raises(InvalidInputError, match=r"^--metrics: got nowhere\.invalid:0 \("), shown(0, "nowhere.invalid"):
        pass


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_page_has_its_own_address_and_is_not_ready_during_a_stop(start: Start, workers: str, tmp_path: Path) -> None:
    port, host, tokens = free_port(), "127.0.0.2", tmp_path / "tokens"
    tokens.write_text("alice alice-alice-alice-1\n")
    tokens.chmod(0o644)
    server = start("--metrics", f"{host}:{port}", "--workers", workers, "--token-file", str(tokens))
    assert [status(port, path, host) for path in ("/readyz", "/livez")] == [200, 200]
    with pytest.raises(ConnectionRefusedError):
        status(port, "/livez")
    placed = 'mmpos_requests_total{method="Place",status="OK"} 1.0'
    query = PlaceRequest(query=PositionsQuery(spans=Spans(lengths=[2**17]), dense=Dense()))
    with Connection(server.address, window=0) as connection:  # the server waits until its answer is read
        stream = connection.call(PLACE, (b"authorization", b"Bearer alice-alice-alice-1"))
        connection.send(stream, message(query.SerializeToString()))
        assert eventually(lambda: placed in answer(port, "/metrics", host=host)[1])
        server.process.terminate()
        assert eventually(lambda: status(port, "/readyz", host) == 503)
    code, lines = server.end()
    assert code == 0
    warned = [line["file"] for line in lines if line["event"] == "every user of this machine may read a secret"]
    assert warned == [str(tokens)]  # once for all workers
