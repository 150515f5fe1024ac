"""Test a server's HTTP page: metrics, liveness and readiness, and the limits on its connections."""

from __future__ import annotations

import gc
import os
import re
import socket
import threading
import warnings
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from certificates import make_certificate
from http2 import Connection, message
from prometheus_client import CollectorRegistry, values
from prometheus_client.multiprocess import mark_process_dead
from server_program import Start, answer
from serving import PLACE
from waiting import eventually, free_port

from mmpos.errors import InvalidInputError
from mmpos.rpc.v1.positions_pb2 import Dense, PlaceRequest, PositionsQuery, Spans
from mmpos_server import page
from mmpos_server.access import TlsFiles
from mmpos_server.arrivals import Arrivals, Places
from mmpos_server.config import load
from mmpos_server.metrics import MethodMetrics, Metrics, aggregate
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
    with suppress(ConnectionResetError), connection.makefile("rb") as answered:
        answered.read()
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


# Metrics of one process and of several workers

ROOT = Path(__file__).parents[2]
PLACED = {"method": "Place", "stage": "place"}


def use(metrics: Metrics, calls: int) -> None:
    """Answer some calls, fail one, and leave one running."""
    method = MethodMetrics(metrics, "Place")
    for _ in range(calls):
        method.begin()
        counts = {"documents": 2, "tokens": 30}
        method.end("OK", [("place", 0.01), ("total", 0.02)], counts, request_bytes=10, response_bytes=100)
    method.begin()
    method.end("INTERNAL", [("total", 40.0)], {"documents": 1}, request_bytes=5, response_bytes=0)
    method.begin()
    metrics.refused.labels("Place", "overload").inc()
    metrics.lag.set(calls)


def seen(registry: CollectorRegistry) -> dict[str, float]:
    """Return the values that are not 0, by name and labels, without buckets and times."""
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {
        " ".join([sample.name.removeprefix("mmpos_"), *sample.labels.values()]): sample.value
        for sample in samples
        if sample.value and re.fullmatch(r"mmpos_(?!start|build)\w+(?<!_bucket)(?<!_created)", sample.name)
    }


def expected(calls: int, servers: int = 1, *, running: int, lag: int) -> dict[str, Any]:
    return {
        "requests_total Place OK": calls,
        "requests_total Place INTERNAL": servers,
        "refused_total Place overload": servers,
        "documents_total Place": 2 * calls,
        "tokens_total Place": 30 * calls,
        "request_bytes_total Place": 10 * calls + 5 * servers,
        "response_bytes_total Place": 100 * calls,
        "stage_seconds_count Place place": calls,
        "stage_seconds_sum Place place": pytest.approx(0.01 * calls),
        "stage_seconds_count Place total": calls + servers,
        "stage_seconds_sum Place total": pytest.approx(0.02 * calls + 40 * servers),
        "in_flight": running,
        "lag_seconds": lag,
    }


def test_calls_are_counted_by_method_status_and_stage() -> None:
    registry = (metrics := Metrics()).registry
    use(metrics, 3)
    assert seen(registry) == expected(3, running=1, lag=3)
    buckets = [
        registry.get_sample_value("mmpos_stage_seconds_bucket", {**PLACED, "le": le}) for le in ("0.005", "0.01")
    ]
    assert buckets == [0, 3]
    assert registry.get_sample_value("process_resident_memory_bytes")


def test_a_page_of_workers_has_sums_longest_lag_and_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    for worker, calls in enumerate((3, 2)):
        monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue(lambda number=worker: number))  # type: ignore[no-untyped-call]
        use(Metrics(), calls)
    pids = [os.getpid(), os.getppid(), 2**30]
    registry = aggregate(str(tmp_path), lambda: pids)
    assert seen(registry) == expected(5, servers=2, running=2, lag=3)
    cpu = [registry.get_sample_value("process_cpu_seconds_total", {"pid": str(pid)}) for pid in pids]
    assert [value is None for value in cpu] == [False, False, True]  # the last process does not exist
    assert registry.get_sample_value("mmpos_start_time_seconds")
    mark_process_dead(0, str(tmp_path))  # type: ignore[no-untyped-call]
    assert seen(registry) == expected(5, servers=2, running=1, lag=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # prometheus_client never closes the files of a worker
        monkeypatch.undo()
        gc.collect()


def test_documented_metrics_match_the_server_metrics(tmp_path: Path) -> None:
    metrics = Metrics(TlsFiles(*make_certificate(tmp_path, "server")))
    use(metrics, 1)
    rows = []
    for family in metrics.registry.collect():
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = {f"`{label}`" for sample in family.samples for label in sample.labels if label != "le"}
        if not name.startswith("process_"):  # prometheus_client documents these
            rows.append(f"| `{name}` | {family.type} | {', '.join(sorted(labels))} | {family.documentation} |")
    text = (ROOT / "docs/service-metrics.md").read_text()
    assert re.findall(r"^\| `.*$", text, re.MULTILINE) == rows
    places = [place.name for place in vars(Arrivals(1.0)).values() if isinstance(place, Places)]
    assert len(places) == 5
    assert all(f"`{reason}`" in text for reason in (*places, "late_messages", "overload", "stopping"))


def test_the_alert_of_lag_fires_when_the_server_refuses_calls() -> None:
    alerts = (ROOT / "deploy/alerts.yaml").read_text()
    assert f"expr: max_over_time(mmpos_lag_seconds[1m]) > {load().overload_ms / 1000}\n" in alerts
