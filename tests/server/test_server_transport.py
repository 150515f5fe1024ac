"""Callers that break the rules of gRPC, or keep the server waiting: what they hold ends, and nobody else waits."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import grpc
import pytest
from grpc_calls import Stream, Unary, ending
from grpc_health.v1 import health_pb2, health_pb2_grpc
from http2 import Connection, closed_at_once, message
from waiting import eventually

from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos_server import testing
from mmpos_server.admission import Admission, Call
from mmpos_server.app import Server
from mmpos_server.config import ClientLimits, Concurrency, ServerConfig, load
from mmpos_server.listening import transport_options
from mmpos_server.services import place_method
from mmpos_server.telemetry import Logs
from mmpos_server.testing import running
from mmpos_server.traffic import Traffic
from mmpos_server.transport import Handler, RpcContext, TransportServer, Width

SERVICE = "/mmpos.rpc.v1.PositionService"
PLACE, STREAM = f"{SERVICE}/Place", f"{SERVICE}/StreamPlace"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
REQUEST = message(pb.PlaceRequest(query=pb.PositionsQuery(profile="x")).SerializeToString())
LARGE = message(pb.PlaceRequest(query=pb.PositionsQuery(profile="large")).SerializeToString())
MIB = 2**20


async def answer(query: pb.PositionsQuery, found: pb.Positions, call: Call) -> None:
    """One number, or a megabyte of them, or when the test lets it."""
    if query.profile == "blocked":
        assert GO.wait(60)
    found.cu_seqlens.extend([2**30] * (MIB // 5 if query.profile == "large" else 1))


GO = threading.Event()
SERVERS: list[Server] = []


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Start a server with these tables of settings."""

    def server(*arguments: Any, **options: Any) -> Server:
        SERVERS[:] = [Server(*arguments, **options)]
        return SERVERS[0]

    monkeypatch.setattr(testing, "Server", server)
    with ExitStack() as stack:

        def start(grace: float = 5.0, **tables: Any) -> str:
            place = place_method(answer)
            methods = [place, replace(place, name="Ready", twin=None, admitted=False)]
            config = ServerConfig.model_validate({**load().model_dump(), **tables})
            logs = Logs("info")
            return stack.enter_context(running(config, methods=lambda *_: methods, logs=logs, grace=grace))

        yield start


def lines(capfd: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    """The log of the server, without lines of calls; those of the core of gRPC are no JSON."""
    found = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    return [line for line in found if line["event"] not in ("request", "stream")]


def asked(connection: Connection, path: bytes | str, raw: bytes, *metadata: tuple[bytes, bytes]) -> str:
    """The name of the status of a call."""
    stream = connection.call(path, *metadata)
    connection.send(stream, raw)
    return connection.ended(stream)[0]


def test_a_path_that_is_no_utf8_ends_no_server(serve: Callable[..., str]) -> None:
    address = serve()
    with Connection(address) as connection:
        paths: list[bytes | str] = [b"/\xff", f"{SERVICE}/None", b"", b"/" + b"\xff" * 300, PLACE.encode() + b"\xc3"]
        assert [asked(connection, path, REQUEST) for path in paths] == ["UNIMPLEMENTED"] * 5
    with Connection(address) as connection:
        assert asked(connection, PLACE, REQUEST) == "OK"


@pytest.mark.parametrize("path", [CHECK, WATCH, REFLECTION, REFLECTION.replace("v1alpha", "v1"), PLACE, STREAM])
def test_broken_bytes_are_the_callers_mistake(
    serve: Callable[..., str], path: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with Connection(serve()) as connection:
        assert asked(connection, path, message(b"\xff\xff")) == "INVALID_ARGUMENT"
        assert asked(connection, path, message(b"\xff" * 3000)) == "INVALID_ARGUMENT"
    assert (lines(capfd), caplog.records) == ([], [])


def test_a_call_without_a_message_is_told_so(serve: Callable[..., str]) -> None:
    with Connection(serve()) as connection:
        assert [asked(connection, path, b"") for path in (PLACE, CHECK)] == ["INVALID_ARGUMENT"] * 2


def test_reflection_answers_under_both_of_its_names(serve: Callable[..., str]) -> None:
    with Connection(serve()) as connection:
        for path in (REFLECTION, REFLECTION.replace("v1alpha", "v1")):
            stream = connection.call(path)
            connection.send(stream, message(b"\x3a\x00"))  # list_services
            assert b"grpc.health.v1.Health" in connection.ended(stream)[1]


def test_what_callers_send_is_not_in_the_log(
    serve: Callable[..., str], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with Connection(serve()) as connection:
        for _ in range(3):
            assert asked(connection, PLACE, REQUEST, (b"authorization", b"Bearer secret\xff")) == "OK"
            assert asked(connection, b"/secret\xff", REQUEST, (b"secret", b"secret\xff")) == "UNIMPLEMENTED"
    out, err = capfd.readouterr()
    assert "secret" not in out + err + caplog.text
    assert err.count("metadata is not UTF-8") >= 1  # once a second
    assert caplog.records == []
    assert logging.getLogger("grpc._cython.cygrpc").filters != []


def test_compressed_requests_are_refused(serve: Callable[..., str]) -> None:
    with grpc.insecure_channel(serve(), compression=grpc.Compression.Gzip) as channel:
        ask: Unary = channel.unary_unary(PLACE)
        with pytest.raises(grpc.RpcError) as raised:
            ask(bytes(100_000), timeout=60)
        assert (raised.value.code().name, raised.value.details()) == (
            "UNIMPLEMENTED",
            "Compression algorithm 'gzip' is disabled.",
        )


def test_a_request_that_does_not_come_ends_in_time_and_is_in_the_log(
    serve: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    with Connection(serve(connections={"receive_seconds": 0.2})) as connection:
        for path in (PLACE, STREAM, CHECK, WATCH, REFLECTION):
            stream = connection.call(path)
            connection.send(stream, message(b"half", 1000), end=False)
            code, found = connection.ended(stream)
            assert code == "DEADLINE_EXCEEDED"
            assert b"request: got only part of it within 0.2 s" in found
        assert asked(connection, PLACE, REQUEST) == "OK"
    requests = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert [(line["method"], line["status"]) for line in requests] == [
        ("Place", "DEADLINE_EXCEEDED"),
        ("StreamPlace", "DEADLINE_EXCEEDED"),
        ("Place", "OK"),
    ]


def test_a_server_that_stops_waits_for_no_half_request(serve: Callable[..., str]) -> None:
    with ExitStack() as stack:
        with running(grace=60) as address:
            connection = stack.enter_context(Connection(address))
            stream = connection.call(PLACE)
            connection.send(stream, message(b"half", 1000), end=False)
            assert asked(connection, CHECK, message(b"")) == "OK"
            # To stop takes no grace, or this test is a minute long: the client does not even answer the goodbye.
        code, _ = connection.ended(stream)
        assert code == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"clients": {"max_in_flight_bytes": MIB}}, b"clients.max_in_flight_bytes of '127.0.0.1': got "),
        ({"concurrency": {"max_in_flight_bytes": MIB}}, b"max_in_flight_bytes: got "),
    ],
)
def test_what_has_come_of_requests_counts_as_their_bytes(
    serve: Callable[..., str], tables: dict[str, object], said: bytes
) -> None:
    with Connection(serve(**tables)) as connection:
        streams = [connection.call(path) for path in (PLACE, STREAM) * 2]
        for stream in streams:
            connection.send(stream, message(bytes(400_000), 30 * MIB), end=False)
        code, found = connection.ended(streams[0])
        assert code == "RESOURCE_EXHAUSTED"
        assert said in found
    assert eventually(lambda: not SERVERS[0]._traffic._requests)


def test_requests_that_have_come_are_not_counted_as_on_their_way(serve: Callable[..., str]) -> None:
    tables: dict[str, object] = {"clients": {"max_in_flight_bytes": MIB}}
    with Connection(serve(**tables)) as connection:
        idle = connection.call(STREAM)
        connection.send(idle, REQUEST, end=False)
        padded = message(pb.PlaceRequest(query=pb.PositionsQuery(profile="x" * 300_000)).SerializeToString())
        assert {asked(connection, PLACE, padded) for _ in range(20)} == {"OK"}
        assert eventually(lambda: bool(SERVERS[0]._traffic._accounted))
        assert {asked(connection, PLACE, padded) for _ in range(20)} == {"OK"}
        connection.send(idle, b"")
        assert connection.ended(idle)[0] == "OK"


def test_answers_that_are_not_taken_count_until_they_are(serve: Callable[..., str]) -> None:
    address = serve(clients={"max_unsent_bytes": 5 * MIB // 2})

    def unsent() -> int:
        return SERVERS[0]._admission.unsent.taken

    with Connection(address, window=0) as connection:
        streams = [connection.call(PLACE) for _ in range(3)]
        for number, stream in enumerate(streams, 1):
            connection.send(stream, LARGE)
            least = min(number, 2) * MIB
            assert eventually(partial(lambda least: unsent() >= least, least))
        code, found = connection.ended(streams[2])
        assert code == "RESOURCE_EXHAUSTED"
        assert b"clients.max_unsent_bytes of '127.0.0.1': got " in found
        connection.open(streams[0], 2 * MIB)
        assert connection.ended(streams[0])[0] == "OK"
    assert eventually(lambda: unsent() == 0)


def test_who_does_not_take_an_answer_in_time_loses_the_connection(
    serve: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    address = serve(connections={"send_seconds": 0.2})
    with Connection(address, window=0) as stalled, Connection(address) as other:
        stalled.send(stalled.call(PLACE), LARGE)
        assert stalled.closed()
        assert asked(other, PLACE, REQUEST) == "OK"
    assert [(line["event"], line["client"]) for line in lines(capfd)] == [
        ("connection closed: client does not read answers", "127.0.0.1")
    ]
    assert eventually(lambda: SERVERS[0]._admission.unsent.taken == 0)


def test_a_stream_through_which_nothing_comes_ends(serve: Callable[..., str]) -> None:
    with Connection(serve(connections={"stream_idle_seconds": 0.2})) as connection:
        stream = connection.call(STREAM)
        connection.send(stream, REQUEST, end=False)
        code, found = connection.ended(stream)
        assert code == "UNAVAILABLE"
        assert b"stream: got nothing for 0.2 s, want a new one" in found


class LateMessage:
    """Context whose message comes when the test wants."""

    def __init__(self) -> None:
        self.came, self.read_to_the_end = asyncio.Event(), False

    def peer(self) -> str:
        return "unix:"

    async def read(self) -> bytes:
        await self.came.wait()
        self.read_to_the_end = True
        return b"message"


def test_a_read_that_nobody_waits_for_goes_on() -> None:
    async def scenario() -> bool:
        config = load()
        traffic, context = Traffic(config, Admission(config.concurrency, config.pools), Logs("error")), LateMessage()
        traffic.open([])
        reader = asyncio.create_task(traffic.receive(cast(RpcContext, context)))
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.wait([reader])
        context.came.set()
        await asyncio.sleep(0.01)
        await traffic.close()
        return reader.cancelled() and context.read_to_the_end

    assert asyncio.run(scenario())


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_stream_whose_first_item_is_broken_leaves_nothing_of_the_others(serve: Callable[..., str]) -> None:
    item = message(b"\xff") + message(bytes(50_000))

    def broken(connection: Connection, count: int) -> None:
        for _ in range(count):
            stream = connection.call(STREAM)
            connection.send(stream, item, end=False)
            assert connection.ended(stream)[0] == "INVALID_ARGUMENT"

    with Connection(serve(connections={"receive_seconds": 60.0})) as connection:
        broken(connection, 100)
        before = resident()
        broken(connection, 1000)
        assert resident() - before < 25_000_000  # half of what came


@pytest.mark.parametrize("table", ["clients", "concurrency"])
def test_open_streams_of_health_and_reflection_have_a_limit(serve: Callable[..., str], table: str) -> None:
    with grpc.insecure_channel(serve(**{table: {"max_watches": 2}})) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        assert [next(watch).status for watch in watches] == [1, 1]
        reflect: Stream = channel.stream_stream(REFLECTION)
        for call in (health.Watch(health_pb2.HealthCheckRequest()), reflect(iter([b""]))):
            assert (call.code().name, call.details().rpartition(": ")[2]) == (
                "RESOURCE_EXHAUSTED",
                "got 2 taken of 2",
            )
        assert health.Check(health_pb2.HealthCheckRequest()).status == 1
        watches[0].cancel()
        assert eventually(lambda: SERVERS[0]._admission.watches.taken == 1)
        assert next(health.Watch(health_pb2.HealthCheckRequest())).status == 1


def test_an_address_has_so_many_connections_and_the_first_ones_stay(serve: Callable[..., str]) -> None:
    address = serve(clients={"max_connections": 2})
    with Connection(address) as first, Connection(address) as second:
        assert [asked(each, PLACE, REQUEST) for each in (first, second)] == ["OK"] * 2
        assert eventually(lambda: len(SERVERS[0]._traffic._accounted) == 2)
        assert closed_at_once(address)
        assert [asked(each, PLACE, REQUEST) for each in (first, second)] == ["OK"] * 2


def test_connections_beyond_the_limit_are_closed(serve: Callable[..., str]) -> None:
    address = serve(connections={"max_connections": 2})
    with Connection(address) as first, Connection(address) as second:
        assert [asked(each, PLACE, REQUEST) for each in (first, second)] == ["OK"] * 2
        assert closed_at_once(address)
        assert asked(first, PLACE, REQUEST) == "OK"


def test_a_connection_without_calls_is_closed(serve: Callable[..., str]) -> None:
    with Connection(serve(connections={"idle_seconds": 0.2})) as connection:
        assert asked(connection, PLACE, REQUEST) == "OK"
        assert connection.closed()


def test_a_connection_has_an_age_after_which_its_calls_have_a_grace(serve: Callable[..., str]) -> None:
    with Connection(serve(connections={"age_seconds": 0.2, "grace_seconds": 0.2})) as connection:
        stream = connection.call(STREAM)
        connection.send(stream, REQUEST, end=False)
        assert connection.closed()


def test_each_method_has_a_queue_of_its_own(serve: Callable[..., str]) -> None:
    address = serve(concurrency={"max_at_work": 4})
    blocked = pb.PlaceRequest(query=pb.PositionsQuery(profile="blocked")).SerializeToString()
    with (
        grpc.insecure_channel(address, options=[("grpc.enable_retries", 0)]) as channel,
        ThreadPoolExecutor(40) as pool,
    ):
        place: Unary = channel.unary_unary(PLACE)
        ready: Unary = channel.unary_unary(f"{SERVICE}/Ready")
        dropped: list[str] = []

        def ask(method: Unary, raw: bytes) -> str:
            code, _ = ending(lambda: method(raw, timeout=60))
            dropped.extend(() if code == "OK" else (code,))
            return code

        GO.set()
        assert ask(place, REQUEST[5:]) == "OK"  # connects
        GO.clear()
        calls = [pool.submit(ask, place, blocked) for _ in range(30)]
        assert eventually(lambda: len(dropped) > 20)  # the queue of Place is full
        probes = [pool.submit(ask, ready, REQUEST[5:]) for _ in range(3)]
        threading.Event().wait(0.2)
        GO.set()
        assert [probe.result() for probe in probes] == ["OK"] * 3
        assert {call.result() for call in calls} == {"OK", "CANCELLED"}


def test_a_server_that_has_started_drops_no_call() -> None:
    """Two calls of each of ten methods reach twenty servers that have just started, before their loop turns again."""
    names = [f"Method{number}" for number in range(10)]

    async def echo(requests: object, context: RpcContext) -> bytes:
        return cast("bytes", await context.read())

    async def answers() -> list[bytes]:
        server = TransportServer([], transport_options(load(), reuse_port=False), ahead=8)
        handlers: dict[str, Handler] = {name: grpc.stream_unary_rpc_method_handler(echo) for name in [*names, "Never"]}
        server.add("service", handlers, {"Never": Width(0, 0)})
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                send: dict[str, Any] = {name: channel.unary_unary(f"/service/{name}").future for name in handlers}
                # Of calls that nobody asks for, the transport keeps one and drops the next: a sign that it has come.
                dropped, never = SimpleQueue[Any](), [send["Never"](b"x") for _ in range(2)]
                for call in never:
                    call.add_done_callback(dropped.put)
                assert dropped.get(timeout=60).code() is grpc.StatusCode.CANCELLED
                calls = [send[name](b"x") for name in names for _ in range(2)]
                assert send["Never"](b"x").code() is grpc.StatusCode.CANCELLED
                found = [await asyncio.to_thread(call.result) for call in calls]
                for call in never:
                    call.cancel()
        finally:
            await server.stop(None)
        return found

    for _ in range(20):
        assert asyncio.run(answers()) == [b"x"] * 20


def test_by_default_one_client_has_no_more_than_half_of_what_there_is() -> None:
    whole = {**Concurrency().model_dump(), **load().connections.model_dump()}
    of_one = ClientLimits().model_dump()
    shares = {name: of_one[name] / whole[name] for name in of_one if name in whole}
    assert sorted(shares) == [
        "max_connections",
        "max_in_flight",
        "max_in_flight_bytes",
        "max_streams",
        "max_unsent_bytes",
        "max_watches",
    ]
    assert all(0 < share <= 0.5 for share in shares.values())
