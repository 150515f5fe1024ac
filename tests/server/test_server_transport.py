"""Test clients that break gRPC's rules or keep the server waiting: their calls end, and no other client has to wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from grpc_calls import Stream, ending
from grpc_health.v1 import health_pb2, health_pb2_grpc
from http2 import Connection, closed_at_once, message
from serving import CHECK, LARGE, PLACE, REFLECTION, SERVICE, STREAM, WATCH, KeptLogs, Serve, query, status_of
from waiting import eventually

from mmpos_server import listening, transit
from mmpos_server.testing import running

REQUEST, LARGE_REQUEST, WAIT = (message(query(name)) for name in ("echo 1", "large", "wait"))
REFLECTIONS = (REFLECTION, REFLECTION.replace("v1alpha", "v1"))


# Malformed calls


def test_a_path_that_is_not_utf8_does_not_stop_the_server(serve: Serve) -> None:
    address = serve().address
    with Connection(address) as connection:
        paths: list[bytes | str] = [b"/\xff", f"{SERVICE}/None", b"/" + b"\xff" * 300, PLACE.encode() + b"\xc3"]
        assert [status_of(connection, path, REQUEST) for path in paths] == ["UNIMPLEMENTED"] * 4
        assert status_of(connection, b"", REQUEST) == "CANCELLED"  # gRPC ends the call before Python sees it
        assert status_of(connection, PLACE, REQUEST) == "OK"


def test_malformed_and_missing_messages_are_invalid_arguments(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    logs = KeptLogs()
    with Connection(serve(options={"logs": logs}).address) as connection:
        for path in (CHECK, WATCH, *REFLECTIONS, PLACE, STREAM):
            for raw in (b"\xff\xff", b"\xff" * 3000):
                assert status_of(connection, path, message(raw)) == "INVALID_ARGUMENT", path
        assert [status_of(connection, path, b"") for path in (PLACE, CHECK)] == ["INVALID_ARGUMENT"] * 2
    assert {line["event"] for line in logs.lines()} <= {"request", "stream"}
    assert caplog.records == []


def test_reflection_answers_under_both_its_names(serve: Serve) -> None:
    with Connection(serve().address) as connection:
        for path in REFLECTIONS:
            stream = connection.call(path)
            connection.send(stream, message(b"\x3a\x00"))  # list_services
            assert b"grpc.health.v1.Health" in connection.ended(stream)[1]


def test_the_log_does_not_contain_values_sent_by_callers(serve: Serve, capfd: pytest.CaptureFixture[str]) -> None:
    logs = KeptLogs()
    with Connection(serve(options={"logs": logs}).address) as connection:
        for _ in range(3):
            assert status_of(connection, PLACE, REQUEST, (b"authorization", b"Bearer secret\xff")) == "OK"
            assert status_of(connection, b"/secret\xff", REQUEST, (b"secret", b"secret\xff")) == "UNIMPLEMENTED"
    out, err = capfd.readouterr()
    assert "secret" not in f"{out}{err}{logs.lines()}"


@pytest.mark.parametrize(
    ("encoding", "status", "details"),
    [
        (b"gzip", "UNIMPLEMENTED", b"Compression algorithm 'gzip' is disabled."),
        (b"deflate", "UNIMPLEMENTED", b"Compression algorithm 'deflate' is disabled."),
        # gRPC does not know these encodings, and reports INTERNAL.
        (b"snappy", "INTERNAL", b""),
        (b"zstd", "INTERNAL", b""),
    ],
)
def test_compressed_requests_are_refused(serve: Serve, encoding: bytes, status: str, details: bytes) -> None:
    server = serve()
    with Connection(server.address) as connection:
        stream = connection.call(PLACE, (b"grpc-encoding", encoding))
        connection.send(stream, message(bytes(1000), compressed=True))
        code, error = connection.ended(stream)
    assert (code, details in error) == (status, True)
    assert server.fake.names == []


def test_headers_beyond_the_limit_are_refused_and_reach_no_method(serve: Serve) -> None:
    server = serve()
    many, few = ([("x-odd", "a" * size)] for size in (20_000, 8_000))
    details = "received metadata size exceeds hard limit (value length 20000 vs. 16384)"
    assert ending(lambda: server.place(query("echo 1"), metadata=many)) == ("RESOURCE_EXHAUSTED", details)
    assert ending(lambda: server.place(query("echo 1"), metadata=few)) == ("OK", "")
    assert server.fake.names == ["echo 1"]


# Messages that do not arrive


def test_a_request_that_does_not_arrive_in_time_is_ended_and_logged(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transit, "RECEIVE_SECONDS", 0.2)
    logs = KeptLogs()
    server = serve(options={"logs": logs})
    with Connection(server.address) as connection:
        for path in (PLACE, STREAM, CHECK, WATCH, REFLECTION):
            stream = connection.call(path)
            connection.send(stream, message(b"half", 1000), end=False)
            code, error = connection.ended(stream)
            assert code == ("DEADLINE_EXCEEDED" if path == STREAM else "CANCELLED"), path
            assert path != STREAM or b"request: only part of it arrived in time" in error
        assert status_of(connection, PLACE, REQUEST) == "OK"
    assert eventually(lambda: not server.taken() and server.metric("in_flight") == 0)
    time.sleep(0.1)  # a call is logged after its answer is sent
    written = logs.lines()
    assert sorted(line["status"] for line in written if line["event"] == "request") == ["CANCELLED", "OK"]
    assert any(line["event"] == "request did not arrive in time" for line in written)


def test_a_stopping_server_does_not_wait_for_half_a_request() -> None:
    with running(grace=600) as address:
        connection = Connection(address)
        stream = connection.call(PLACE)
        connection.send(stream, message(b"half", 1000), end=False)
        assert status_of(connection, CHECK, message(b"")) == "OK"
        # The server stops without using its grace period of ten minutes, although the client does not even answer
        # GOAWAY.
    with connection:
        assert connection.ended(stream)[0] in ("CANCELLED", "UNAVAILABLE")


@pytest.mark.parametrize("half", [b"", message(b"half", 1000)])
@pytest.mark.parametrize(("path", "gate", "share"), [(PLACE, "max_in_flight", 2), (CHECK, "max_checks", 32)])
def test_half_requests_hold_at_most_the_client_share(
    serve: Serve, half: bytes, path: str, gate: str, share: int
) -> None:
    server = serve(concurrency={"max_in_flight": 4})
    with Connection(server.address) as connection, Connection(server.address, source="127.0.0.2") as other:
        streams = [connection.call(path) for _ in range(share)]
        for stream in streams:
            connection.send(stream, half, end=False)
        assert eventually(lambda: server.taken() == {gate: share})
        code, error = connection.ended(connection.call(path))
        assert code == "RESOURCE_EXHAUSTED"
        assert f"clients.max_share of {gate} for '127.0.0.1': got {share} of {share} in use".encode() in error
        assert status_of(other, path, message(b"") if path == CHECK else REQUEST) == "OK"
    assert eventually(lambda: not server.taken())
    if path == PLACE:
        assert server.metric("refused_total", method="Place", reason="clients.max_share") == 1


# Answers that are not read


def test_unread_answers_hold_their_bytes_until_they_are_read(serve: Serve) -> None:
    server = serve(concurrency={"max_in_flight_bytes": 5 * LARGE})
    with Connection(server.address, window=0) as connection:
        streams = [connection.call(PLACE) for _ in range(3)]
        for number, stream in enumerate(streams, 1):
            connection.send(stream, LARGE_REQUEST)
            expected = min(number, 2) * LARGE
            assert eventually(
                partial(lambda expected: server.taken().get("max_in_flight_bytes", 0) >= expected, expected)
            )
        code, error = connection.ended(streams[2])
        assert code == "RESOURCE_EXHAUSTED"
        assert b"clients.max_share of max_in_flight_bytes for '127.0.0.1': got " in error
        connection.open(streams[0], 2 * LARGE)
        assert connection.ended(streams[0])[0] == "OK"
    assert eventually(lambda: not server.taken())


@pytest.mark.parametrize("path", [PLACE, STREAM])
def test_a_client_that_does_not_read_an_answer_in_time_loses_its_call(
    serve: Serve, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transit, "SEND_SECONDS", 0.2)
    logs = KeptLogs("warning")
    server = serve(options={"logs": logs})
    with Connection(server.address, window=0) as connection:
        stream = connection.call(path)
        connection.send(stream, LARGE_REQUEST if path == PLACE else message(b"\x12" + LARGE_REQUEST[6:]))
        assert connection.ended(stream)[0] in ("CANCELLED", "reset")
    assert eventually(lambda: not server.taken())
    assert [line["event"] for line in logs.lines()] == ["client does not read answers"]


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_stream_with_a_malformed_first_item_frees_the_memory_of_the_other_items(serve: Serve) -> None:
    item = message(b"\xff") + message(bytes(50_000))

    def send_malformed(connection: Connection, count: int) -> None:
        for _ in range(count):
            stream = connection.call(STREAM)
            connection.send(stream, item, end=False)
            assert connection.ended(stream)[0] == "INVALID_ARGUMENT"

    server = serve()
    with Connection(server.address) as connection:
        send_malformed(connection, 100)
        before = resident()
        send_malformed(connection, 1000)
        assert resident() - before < 25_000_000  # half of the bytes sent
    assert eventually(lambda: not server.taken())


# Floods


def reset(connection: Connection, chance: Iterator[bool]) -> None:
    """Begin a call, with or without its request, and reset its stream."""
    stream = connection.call(PLACE)
    if next(chance):
        connection.send(stream, REQUEST, wait=False)
    connection.h2.reset_stream(stream)


def trailed(connection: Connection, chance: Iterator[bool]) -> None:
    """Send a request that ends with headers."""
    stream = connection.call(PLACE)
    connection.send(stream, REQUEST, end=False, wait=False)
    connection.h2.send_headers(stream, [(b"x-trailer", b"1")], end_stream=True)


def doubled(connection: Connection, chance: Iterator[bool]) -> None:
    """Begin a call with two paths."""
    connection.call(PLACE, (b":path", PLACE.encode()))


def silent(connection: Connection, chance: Iterator[bool]) -> None:
    """Begin a call and send nothing more."""
    connection.call(PLACE)


@pytest.mark.parametrize("attack", [reset, trailed, doubled, silent])
def test_a_flood_from_one_client_fails_no_call_from_another_and_leaves_no_slot_taken(
    serve: Serve, attack: Callable[[Connection, Iterator[bool]], None]
) -> None:
    server, done = serve(), threading.Event()

    def flood() -> None:
        chance = iter(lambda: time.monotonic_ns() % 2 == 0, None)
        while not done.is_set():
            try:
                with Connection(server.address, source="127.0.0.2") as connection:
                    for _ in range(200):
                        attack(connection, chance)
                    connection.flush()
                    connection.statuses(1, 0.05)
            except (OSError, ConnectionError):
                pass

    floods = [threading.Thread(target=flood) for _ in range(2)]
    for thread in floods:
        thread.start()
    health = health_pb2_grpc.HealthStub(server.channel)
    results = []
    for _ in range(2):
        results.append(ending(lambda: server.place(query("echo 1"), timeout=60)))
        results.append(ending(lambda: health.Check(health_pb2.HealthCheckRequest(), timeout=60)))
    done.set()
    for thread in floods:
        thread.join()
    assert set(results) == {("OK", "")}
    assert eventually(lambda: not server.taken()), server.taken()


def test_health_is_answered_while_every_slot_is_taken(serve: Serve) -> None:
    server = serve(concurrency={"max_in_flight": 4, "max_streams": 2}, clients={"max_share": 1})
    with Connection(server.address) as connection:
        for path, count in ((PLACE, 4), (STREAM, 2)):
            for _ in range(count):
                connection.send(connection.call(path), REQUEST[:3], end=False)
        assert eventually(lambda: server.taken() == {"max_in_flight": 4, "max_streams": 2})
        health = health_pb2_grpc.HealthStub(server.channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=60).status == 1
        assert ending(lambda: server.place(query("echo 1")))[1] == "max_in_flight: got 4 of 4 in use"


def test_open_health_and_reflection_streams_are_limited(serve: Serve) -> None:
    server = serve()
    health = health_pb2_grpc.HealthStub(server.channel)
    watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(32)]
    assert [next(watch).status for watch in watches] == [1] * 32
    reflect: Stream = server.channel.stream_stream(REFLECTION)
    for call in (health.Watch(health_pb2.HealthCheckRequest()), reflect(iter([b""]))):
        details = "clients.max_share of max_watches for '127.0.0.1': got 32 of 32 in use"
        assert (call.code().name, call.details()) == ("RESOURCE_EXHAUSTED", details)
    assert health.Check(health_pb2.HealthCheckRequest()).status == 1
    watches[0].cancel()
    assert eventually(lambda: server.taken() == {"max_watches": 31})
    assert next(health.Watch(health_pb2.HealthCheckRequest())).status == 1


# Connections


def test_connections_beyond_the_limit_are_closed(serve: Serve) -> None:
    address = serve(concurrency={"max_connections": 3}).address
    with Connection(address) as first, Connection(address) as second, Connection(address) as third:
        assert [status_of(connection, PLACE, REQUEST) for connection in (first, second, third)] == ["OK"] * 3
        assert closed_at_once(address)
        assert status_of(first, PLACE, REQUEST) == "OK"


def test_an_idle_connection_is_closed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "IDLE_SECONDS", 0.2)
    with Connection(serve().address) as connection:
        assert status_of(connection, PLACE, REQUEST) == "OK"
        assert connection.closed()


def test_an_old_connection_is_closed_after_a_grace_period(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGE_SECONDS", "GRACE_SECONDS"):
        monkeypatch.setattr(listening, name, 0.2)
    with Connection(serve().address) as connection:
        stream = connection.call(STREAM)
        connection.send(stream, REQUEST, end=False)
        assert connection.closed()


def test_a_call_cancelled_before_it_is_read_frees_its_slot(serve: Serve) -> None:
    server, ended = serve(), SimpleQueue[Any]()
    calls = [server.place.future(query("wait image")) for _ in range(20)]
    for call in calls:
        call.add_done_callback(ended.put)
        call.cancel()
    assert {ended.get(timeout=60).code() for _ in calls} == {grpc.StatusCode.CANCELLED}
    assert eventually(lambda: not server.taken())
