"""Test clients that break gRPC's rules or keep the server waiting, from which no other suffers; health, reflection."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from http2 import Connection, message
from serving import CHECK, LARGE, PLACE, REFLECTION, STREAM, WATCH, KeptLogs, Serve, ending, query, refusal, status_of
from waiting import bounded, eventually

from mmpos.errors import InvalidInputError
from mmpos.rpc.v1 import positions_pb2
from mmpos_server import app, arrivals, listening, pulse
from mmpos_server.config import load
from mmpos_server.health import Health, describe
from mmpos_server.testing import running

REQUEST, LARGE_REQUEST = (message(query(name)) for name in ("echo 1", "large"))
REFLECTIONS = (REFLECTION, REFLECTION.replace("v1alpha", "v1"))


# Malformed calls


def test_a_path_that_is_not_utf8_does_not_stop_the_server(serve: Serve) -> None:
    address = serve().address
    with Connection(address) as connection:
        for path in (b"/\xff", b"/" + b"\xff" * 300, PLACE.encode() + b"\xc3"):
            assert status_of(connection, path, REQUEST) == "UNKNOWN"
        statuses = [status_of(connection, path, REQUEST) for path in (f"{PLACE}None", b"", PLACE)]
        assert statuses == ["UNIMPLEMENTED", "UNIMPLEMENTED", "OK"]


def test_malformed_and_missing_messages_are_invalid_arguments(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    logs = KeptLogs()
    with Connection(serve(options={"logs": logs}).address) as connection:
        for path in (CHECK, WATCH, *REFLECTIONS, PLACE, STREAM):
            for raw in (b"\xff\xff", b"\xff" * 3000):
                assert status_of(connection, path, message(raw)) == "INVALID_ARGUMENT", path
        assert [status_of(connection, path, b"") for path in (PLACE, CHECK)] == ["INVALID_ARGUMENT"] * 2
    assert {line["event"] for line in logs.lines()} == {"call"}
    assert caplog.records == []


def test_compressed_requests_are_refused(serve: Serve) -> None:
    server = serve()
    with Connection(server.address) as connection:
        stream = connection.call(PLACE, (b"grpc-encoding", b"gzip"))
        connection.send(stream, message(bytes(1000), compressed=True))
        code, error = connection.ended(stream)
    assert (code, server.fake.names) == ("UNIMPLEMENTED", [])
    assert b"Compression algorithm 'gzip' is disabled." in error


def test_headers_beyond_the_limit_are_refused_and_reach_no_method(serve: Serve) -> None:
    server = serve()
    many, few = ([("x-odd", "a" * size)] for size in (20_000, 8_000))
    details = "received metadata size exceeds hard limit (value length 20000 vs. 16384)"
    assert ending(lambda: server.place(query("echo 1"), metadata=many)) == ("RESOURCE_EXHAUSTED", details)
    assert ending(lambda: server.place(query("echo 1"), metadata=few)) == ("OK", "")
    assert server.fake.names == ["echo 1"]


# Messages that do not arrive


@pytest.mark.parametrize("half", [b"", message(b"half", 1000)])
def test_a_late_request_is_ended_and_logged(serve: Serve, monkeypatch: pytest.MonkeyPatch, half: bytes) -> None:
    monkeypatch.setattr(arrivals, "RECEIVE_SECONDS", 0.2)
    logs = KeptLogs()
    server = serve(options={"logs": logs})
    with Connection(server.address) as connection:
        for path in (PLACE, STREAM, CHECK, WATCH, REFLECTION):
            stream = connection.call(path)
            connection.send(stream, half, end=False)
            code, error = connection.ended(stream)
            assert (code, b"request: no whole message arrived in 0 s" in error) == ("DEADLINE_EXCEEDED", True), path
        monkeypatch.undo()
        assert status_of(connection, PLACE, REQUEST) == "OK"
    assert eventually(lambda: not server.taken() and server.metric("in_flight") == 0)
    late = ["Place", "StreamPlace", "Check", "Watch", "ServerReflectionInfo"]
    assert [(line["method"], line["status"]) for line in logs.lines()] == [
        *((method, "DEADLINE_EXCEEDED") for method in late),
        ("Place", "OK"),
    ]


def test_a_stopping_server_does_not_wait_for_half_a_request() -> None:
    with running(grace=600) as address:
        connection = Connection(address)
        stream, watch = connection.call(PLACE), connection.call(WATCH)
        connection.send(stream, message(b"half", 1000), end=False)
        connection.send(watch, message(b""))
        assert status_of(connection, CHECK, message(b"")) == "OK"
        # The server stops without using its grace period of ten minutes, although the client does not even answer
        # GOAWAY.
    with connection:
        assert connection.ended(stream)[0] == "DEADLINE_EXCEEDED"
        assert connection.ended(watch) == ("OK", message(b"\x08\x01") + message(b"\x08\x02"))  # it stops serving


@bounded
async def test_a_stopping_server_does_not_wait_for_connected_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_HANG_UP_SECONDS", 0.1)
    ended = asyncio.Event()

    async def stop(grace: float | None) -> None:
        """Wait for the clients, as gRPC does, unless they get no time."""
        if grace is None:
            ended.set()
        await ended.wait()

    transport: Any = SimpleNamespace(stop=stop)
    await app.Server(load(), methods=[])._end(transport, 600.0)


@pytest.mark.parametrize(("path", "half"), [(PLACE, message(b"half", 1000)), (CHECK, b"")])
def test_half_requests_keep_no_other_client_waiting(serve: Serve, path: str, half: bytes) -> None:
    server = serve(streams_per_connection=300)
    with Connection(server.address) as connection, Connection(server.address, source="127.0.0.2") as other:
        streams = [connection.call(path) for _ in range(260)]
        for stream in streams:
            connection.send(stream, half, end=False, wait=False)
        results = [status_of(other, path, message(b"") if path == CHECK else REQUEST) for _ in range(20)]
        assert results == ["OK"] * 20
        # A client may have as many late messages as half of the places.
        assert eventually(lambda: server.taken().get("large_messages") == arrivals.MESSAGES // 2)
        code, error = connection.ended(streams[arrivals.MESSAGES])
        assert (code, b"late_messages: too many messages arrive slowly" in error) == ("RESOURCE_EXHAUSTED", True)
        assert status_of(other, path, message(b"") if path == CHECK else REQUEST) == "OK"
        labels = {"method": path.rpartition("/")[2], "reason": "late_messages"}
        assert eventually(lambda: server.metric("refused_total", **labels) == 252)
    assert eventually(lambda: not server.taken())


# Answers that are not read


def test_unread_answers_hold_their_bytes_until_they_are_read(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "UNREAD_BYTES", 5 * LARGE)
    server = serve()
    with Connection(server.address, window=0) as connection:
        streams = [connection.call(PLACE) for _ in range(3)]
        for number, stream in enumerate(streams, 1):
            connection.send(stream, LARGE_REQUEST)
            expected = min(number, 2) * LARGE
            assert eventually(partial(lambda expected: server.taken().get("unread_bytes", 0) >= expected, expected))
        code, error = connection.ended(streams[2])
        assert (code, b"unread_bytes: got 4" in error) == ("RESOURCE_EXHAUSTED", True)
        connection.h2.increment_flow_control_window(2 * LARGE, streams[0])
        connection.flush()
        assert connection.ended(streams[0])[0] == "OK"
    assert eventually(lambda: not server.taken())


@pytest.mark.parametrize("path", [PLACE, STREAM])
def test_a_client_that_reads_no_answer_loses_its_call(serve: Serve, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "SEND_SECONDS", 0.2)
    server = serve()
    with Connection(server.address, window=0) as connection:
        stream = connection.call(path)
        connection.send(stream, LARGE_REQUEST if path == PLACE else message(b"\x12" + LARGE_REQUEST[6:]))
        assert connection.closed()
    assert eventually(lambda: not server.taken())


# Floods


def reset(connection: Connection) -> None:
    """Begin a call, with or without its request, and reset its stream."""
    stream = connection.call(PLACE)
    if random.random() < 0.5:
        connection.send(stream, REQUEST, wait=False)
    connection.h2.reset_stream(stream)


def silent(connection: Connection) -> None:
    """Begin a call and send nothing more."""
    connection.call(PLACE)


@pytest.mark.parametrize("attack", [reset, silent])
def test_a_flood_fails_no_call_of_others_and_leaves_no_slot(serve: Serve, attack: Callable[[Connection], None]) -> None:
    server, done = serve(), threading.Event()

    def flood() -> None:
        while not done.is_set():
            with suppress(OSError), Connection(server.address, source="127.0.0.2") as connection:
                for _ in range(200):
                    attack(connection)
                connection.flush()
                connection.statuses(1, 0.05)

    health = health_pb2_grpc.HealthStub(server.channel)
    results = []
    with ThreadPoolExecutor(2) as threads:
        floods = [threads.submit(flood) for _ in range(2)]
        for _ in range(2):
            results.append(ending(lambda: server.place(query("echo 1"), timeout=300)))
            results.append(ending(lambda: health.Check(health_pb2.HealthCheckRequest(), timeout=300)))
        done.set()
    assert [flood.result() for flood in floods] == [None, None]
    assert set(results) == {("OK", "")}
    assert eventually(lambda: not server.taken()), server.taken()


def test_health_is_answered_even_while_calls_are_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_PERIOD_SECONDS", 600.0)  # so that no call changes the lags below
    server = serve()
    for places in (server.server.arrivals.messages, server.server.arrivals.streams, server.server.arrivals.work):
        places.add("other", places.limit)
    server.server._pulse._last = server.server._pulse._before = 60.0
    assert eventually(lambda: server.server.arrivals.lag == 60.0)
    server.place(query("echo 1"))  # refused above the bound, not at it
    server.server._pulse._last = server.server._pulse._before = 61.0
    assert eventually(lambda: server.server.arrivals.lag == 61.0)
    assert eventually(lambda: server.metric("lag_seconds") == 61.0)
    health = health_pb2_grpc.HealthStub(server.channel)
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=300).status == 1
    status, details, metadata = refusal(lambda: server.place(query("echo 1")))
    assert (status, details) == ("RESOURCE_EXHAUSTED", "overload: a call takes 61000 ms, want at most 60000")
    assert metadata["grpc-retry-pushback-ms"] == "122000"
    assert server.metric("refused_total", method="Place", reason="overload") == 1


def test_open_health_and_reflection_streams_are_limited(serve: Serve) -> None:
    server = serve(streams_per_connection=100)
    health = health_pb2_grpc.HealthStub(server.channel)
    watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(32)]
    assert [next(watch).status for watch in watches] == [1] * 32
    reflect: Any = server.channel.stream_stream(REFLECTION)
    for call in (health.Watch(health_pb2.HealthCheckRequest()), reflect(iter([b""]))):
        assert (call.code().name, call.details().partition(":")[0]) == ("RESOURCE_EXHAUSTED", "watches")
    assert health.Check(health_pb2.HealthCheckRequest()).status == 1
    watches[0].cancel()
    assert eventually(lambda: server.taken() == {"watches": 31})
    assert next(health.Watch(health_pb2.HealthCheckRequest())).status == 1


# Connections


@pytest.mark.parametrize(
    "changed",
    [
        {"max_allowed_incoming_connections": 3},
        {"max_connection_idle_ms": 200},
        {"max_connection_age_ms": 200, "max_connection_age_grace_ms": 200},
    ],
    ids=["too many", "idle", "old"],
)
def test_connections_are_limited(serve: Serve, monkeypatch: pytest.MonkeyPatch, changed: dict[str, int]) -> None:
    ours = listening.transport_options

    def altered(*arguments: Any, **settings: Any) -> list[tuple[str, int]]:
        return [(name, changed.get(name.partition(".")[2], value)) for name, value in ours(*arguments, **settings)]

    monkeypatch.setattr(app, "transport_options", altered)
    address = serve().address
    with Connection(address) as first, Connection(address) as second, Connection(address) as third:
        if "max_allowed_incoming_connections" in changed:
            assert [status_of(connection, PLACE, REQUEST) for connection in (first, second, third)] == ["OK"] * 3
            with suppress(ConnectionError), Connection(address) as fourth:  # refused before its first frames, or after
                assert fourth.closed()
            assert status_of(first, PLACE, REQUEST) == "OK"
            return
        with suppress(ConnectionError):  # on a busy machine, the connection may end before the call
            if len(changed) == 2:
                first.send(first.call(STREAM), REQUEST, end=False)
            else:
                status_of(first, PLACE, REQUEST)
        assert first.closed()


# Health and reflection from bytes to bytes

NAME = positions_pb2.DESCRIPTOR.services_by_name["PositionService"].full_name
SERVING, STOPPED, UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"


def asked(service: str) -> bytes:
    return health_pb2.HealthCheckRequest(service=service).SerializeToString()


@bounded
async def test_checks_and_watchers_see_the_stop_and_one_that_leaves_takes_no_other_along() -> None:
    own = Health([NAME])

    async def seen(name: str) -> list[bytes]:
        return [answer async for answer in own.watch(asked(name))]

    watches = [asyncio.create_task(seen(name)) for name in ("", NAME, "unknown")]
    await asyncio.sleep(0)
    leaves = own.watch(asked(NAME))
    assert await anext(leaves) == SERVING
    await leaves.aclose()
    assert [own.check(asked(name)) for name in ("", NAME)] == [SERVING, SERVING]
    own.stop()
    assert [own.check(asked(name)) for name in ("", NAME)] == [STOPPED, STOPPED]
    assert await asyncio.gather(*watches) == [[SERVING, STOPPED], [SERVING, STOPPED], [UNKNOWN]]
    assert await seen(NAME) == [STOPPED]


def test_reflection_lists_the_services_and_describes_them() -> None:
    answer = describe([NAME, "grpc.health.v1.Health"])

    def answered(**query: str) -> Any:
        (raw,) = answer(reflection_pb2.ServerReflectionRequest(**query).SerializeToString())
        return reflection_pb2.ServerReflectionResponse.FromString(raw)

    listed = answered(list_services="").list_services_response.service
    assert [service.name for service in listed] == ["grpc.health.v1.Health", NAME]
    files = answered(file_containing_symbol=NAME).file_descriptor_response.file_descriptor_proto
    assert positions_pb2.DESCRIPTOR.serialized_pb in files
    assert answered(file_by_filename="no such file").error_response.error_code == 5  # NOT_FOUND
    with pytest.raises(InvalidInputError, match=r"^request: got 1027 bytes, want <= 1024$"):
        answered(file_by_filename="x" * 1024)
