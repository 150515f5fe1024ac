"""The client: arguments, results, errors, retries, streams, channels and processes."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from certificates import make_certificate
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from results import same
from waiting import eventually

import mmpos.rotary
from mmpos import Grid, SegmentTable, SequenceBuilder, Text, place
from mmpos.client import AsyncClient, Client, Tls, streams
from mmpos.client.calls import BuildSettings
from mmpos.client.channel import channel_options, error_of, target
from mmpos.client.options import Endpoint
from mmpos.errors import (
    InvalidInputError,
    LimitExceededError,
    MmposError,
    ServiceError,
    ServiceOverloadedError,
    ServiceTimeoutError,
    ServiceUnavailableError,
    UnsupportedError,
)
from mmpos.images import ImageProcessor
from mmpos.rotary import DevicePositions, Rotary, apply_rotary
from mmpos.rpc.positions import get_query, put_result
from mmpos.rpc.queries import PositionsQuery
from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos_server.testing import running

SEGMENTS = SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(4)]])
KINDS = ["sync", "async"]
PLACE, STREAM = "/mmpos.rpc.v1.PositionService/Place", "/mmpos.rpc.v1.PositionService/StreamPlace"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with running() as address:
        yield address


class Calls:
    """Either client, behind calls that wait."""

    def __init__(self, kind: str, addresses: Any, **options: Any) -> None:
        self.kind, self.addresses, self.options = kind, addresses, options

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.kind == "sync":
                with Client(self.addresses, **self.options) as client:
                    found = getattr(client, name)(*args, **kwargs)
                    return list(found) if name.startswith("stream") else found
            return asyncio.run(self._awaited(name, args, kwargs))

        return call

    async def _awaited(self, name: str, args: Any, kwargs: Any) -> Any:
        async with AsyncClient(self.addresses, **self.options) as client:
            found = getattr(client, name)(*args, **kwargs)
            return [item async for item in found] if name.startswith("stream") else await found


def answer(query: pb.PositionsQuery, message: pb.Positions) -> None:
    put_result(message, get_query("query", query).run())


def echo(request: pb.PlaceRequest, context: Any) -> pb.PlaceResponse:
    response = pb.PlaceResponse()
    answer(request.query, response.positions)
    return response


def echo_stream(requests: Any, context: Any) -> Iterator[pb.StreamPlaceResponse]:
    for request in requests:
        response = pb.StreamPlaceResponse(id=request.id)
        answer(request.query, response.positions)
        yield response


@dataclass
class Fake(grpc.GenericRpcHandler):
    """A server that does as it is told, and counts."""

    place: Callable[..., Any] = echo
    stream: Callable[..., Any] = echo_stream
    metadata: list[Any] = field(default_factory=list)

    def service(self, details: Any) -> Any:
        self.metadata.append(details.invocation_metadata)
        if details.method == PLACE:
            return grpc.unary_unary_rpc_method_handler(
                self.place, pb.PlaceRequest.FromString, pb.PlaceResponse.SerializeToString
            )
        return grpc.stream_stream_rpc_method_handler(
            self.stream, pb.StreamPlaceRequest.FromString, pb.StreamPlaceResponse.SerializeToString
        )


@contextmanager
def serving(fake: Fake, address: str = "127.0.0.1:0", serving: bool = True) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(16), handlers=[fake], options=[("grpc.so_reuseport", 0)])
    servicer = health.HealthServicer()
    states = health_pb2.HealthCheckResponse
    servicer.set("", states.SERVING if serving else states.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port(address)
    server.start()
    try:
        yield address if address.startswith("unix") else f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def aborting(*outcomes: Any) -> tuple[Callable[..., Any], list[int]]:
    """A handler that aborts with these, one after the other, and then answers; and its count."""
    left, count = list(outcomes), [0]

    def handler(request: Any, context: Any) -> Any:
        count[0] += 1
        if left:
            code, details, metadata = left.pop(0)
            context.set_trailing_metadata(metadata)
            context.abort(code, details)
        return echo(request, context)

    return handler, count


UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, "gone", ())


def failure(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[type, str]:
    with pytest.raises(MmposError) as caught:
        call(*args, **kwargs)
    return type(caught.value), str(caught.value)


# Arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"addresses": []}, "addresses: got none, want at least one"),
        ({"addresses": 5}, "addresses: got int, want a host:port or a list of them"),
        ({"addresses": "localhost"}, 'addresses[0]: got \'localhost\', want "host:port", "unix:path"'),
        ({"addresses": "localhost:0"}, "addresses[0]: got 'localhost:0'"),
        ({"addresses": "localhost:65536"}, "addresses[0]: got 'localhost:65536'"),
        ({"addresses": "::1:50051"}, "addresses[0]: got '::1:50051'"),
        ({"addresses": ["a:1", "unix:b"]}, "addresses[1]: got 'unix:b', want \"host:port\" for each of several"),
        ({"addresses": ["a:1", None]}, "addresses[1]: got None"),
        ({"timeout": None}, "timeout: got None, want seconds above 0"),
        ({"timeout": 0}, "timeout: got 0, want"),
        ({"timeout": float("nan")}, "timeout: got nan, want"),
        ({"timeout": float("inf")}, "timeout: got inf, want"),
        ({"timeout": True}, "timeout: got True, want"),
        ({"attempts": 0}, "attempts: got 0, want >= 1"),
        ({"attempts": 6}, "attempts: got 6, want <= 5"),
        ({"window": 0}, "window: got 0, want >= 1"),
        ({"window": 1.5}, "window: got 1.5, want an integer"),
        ({"profile": 3}, "profile: got 3, want a name or None"),
        ({"tls": True}, "tls: got bool, want Tls or None"),
        ({"metadata": "ab"}, "metadata: got str, want a list of pairs of name and value"),
        ({"metadata": [("a",)]}, "metadata[0]: got ('a',), want a pair"),
        ({"metadata": [("A", "b")]}, "metadata[0]: got name 'A', want a-z"),
        ({"metadata": [("grpc-x", "b")]}, "metadata[0]: got name 'grpc-x', want a-z"),
        ({"metadata": [("a", b"b")]}, "metadata[0]: got value b'b' of 'a', want printable ASCII text"),
        ({"metadata": [("a-bin", "b")]}, "metadata[0]: got value 'b' of 'a-bin', want bytes"),
    ],
)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_wrong_arguments_are_refused_before_any_connection(kind: Any, arguments: Any, message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        kind(**arguments)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"root_certificates": 1}, "tls.root_certificates: got int, want bytes of PEM, or a path"),
        ({"certificate": b"x"}, "tls: got a certificate, want its key too"),
        ({"key": b"x"}, "tls: got a key, want its certificate too"),
        ({"server_name": 1}, "tls.server_name: got 1, want a name or None"),
    ],
)
def test_wrong_certificates_are_refused(arguments: Any, message: str) -> None:
    assert failure(lambda: Tls(**arguments)) == (InvalidInputError, message)


def test_a_certificate_file_that_is_missing_is_named(tmp_path: Path) -> None:
    client = Client("localhost:1", tls=Tls(tmp_path / "none.pem"))
    with pytest.raises(InvalidInputError, match=r"^tls.root_certificates: got '.*none.pem', want a file that can"):
        client.info()


def test_a_private_key_is_not_shown() -> None:
    assert "secret" not in repr(Tls(certificate=b"public", key=b"secret"))


def test_options_change_on_the_same_channel_and_are_checked() -> None:
    handler, count = aborting(*[UNAVAILABLE] * 9)
    fake = Fake(handler)
    with serving(fake) as address, Client(address, attempts=1, metadata=[("a", "b")]) as client:
        other = client.with_options(profile="p", timeout=5, metadata=[("c", "d")], window=2)
        assert repr(other) == f"Client({address!r}, profile='p', timeout=5)"
        assert failure(lambda: client.with_options(timeout=-1))[0] is InvalidInputError
        for each in (client, other):
            failure(each.place, SEGMENTS)
    assert count == [2]
    assert [[key for key, _ in m if len(key) == 1] for m in fake.metadata] == [["a"], ["c"]]
    assert other._channels is client._channels


# Requests


def test_nothing_travels_from_the_part_on_that_is_refused_here() -> None:
    documents: list[list[Any]] = [["b", 3.5, b"x" * 1000], [3.5, b"x" * 1000], ["a"]]
    settings = BuildSettings(None)
    assert len(settings.build_batch(documents, "return").request().data) < 100
    with pytest.raises(InvalidInputError, match=r"^parts\[0\]: image: got float"):  # without asking
        settings.build(documents[1]).request()


def test_rotations_that_a_service_cannot_make_are_refused(server: str) -> None:
    rotary, positions, q = Rotary(head_dim=8), place(SEGMENTS), torch.randn(15, 2, 8)
    with Client(server) as client:

        def turned(*args: Any, **kwargs: Any) -> Any:
            return failure(lambda: client.apply_rotary(*args, **kwargs))

        def here(*args: Any, **kwargs: Any) -> Any:
            return failure(lambda: apply_rotary(*args, **kwargs))

        assert turned([1], None, positions, rotary) == here([1], None, positions, rotary)
        assert turned(q, q.double(), positions, rotary) == here(q, q.double(), positions, rotary)
        assert turned(q, None, positions, rotary, layout="x") == here(q, None, positions, rotary, layout="x")
        assert turned(q[:3], None, positions, rotary) == here(q[:3], None, positions, rotary)
        assert turned(q.clone().requires_grad_(), None, positions, rotary) == (
            UnsupportedError,
            "q: got a tensor that requires gradients, want it detached: none come back",
        )
        assert turned(q, q.to("meta"), positions, rotary) == (
            InvalidInputError,
            "k: got a tensor on meta, want cpu as q",
        )
        assert turned(q, None, positions, "x")[1] == "rotary: got str, want a Rotary or None"
        device = DevicePositions.from_table(positions, "cpu")
        assert failure(client.angles, rotary, device)[0] is InvalidInputError
        assert failure(client.cos_sin, rotary, positions, "x") == failure(mmpos.rotary.cos_sin, rotary, positions, "x")


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_tells_what_it_is_and_whether_it_serves(kind: str, server: str) -> None:
    client = Calls(kind, server)
    info = client.info()
    assert (info.profiles[0].name, info.profiles[0].rotary, info.profiles[0].patch_token_id) == ("default", True, 258)
    assert {s.name: s.parameters for s in info.schemes}["rope-tie-v2"] == ("axes", "rounding")
    assert info.limits.documents > 0
    assert (client.healthy(), client.healthy("no.such.Service")) == (True, False)
    assert failure(lambda: client.healthy(3)) == (InvalidInputError, "service: got 3, want a name")


def test_both_clients_have_the_same_methods_with_the_same_arguments() -> None:
    names = [name for name in dir(Client) if not name.startswith("_")]
    assert names == [name for name in dir(AsyncClient) if not name.startswith("_")]
    for name in set(names) - {"stream", "stream_build"}:  # whose items may also come from an async iterable
        one, other = (inspect.signature(getattr(kind, name)) for kind in (Client, AsyncClient))
        assert one == other, name


# Retries, deadlines, and the statuses of gRPC


@pytest.mark.parametrize("kind", KINDS)
def test_unavailable_is_tried_again_and_in_the_end_an_error(kind: str) -> None:
    handler, count = aborting(*[UNAVAILABLE] * 3)
    with serving(Fake(handler)) as address:
        same(Calls(kind, address).place(SEGMENTS), place(SEGMENTS))
    assert count == [4]
    handler, count = aborting(*[UNAVAILABLE] * 9)
    with serving(Fake(handler)) as address:
        assert failure(lambda: Calls(kind, address, attempts=2).place(SEGMENTS)) == (ServiceUnavailableError, "gone")
        assert count == [2]
        assert failure(lambda: Calls(kind, address, attempts=1).place(SEGMENTS)) == (ServiceUnavailableError, "gone")
        assert count == [3]


def test_what_a_server_cancels_as_it_stops_is_tried_again() -> None:
    handler, count = aborting((grpc.StatusCode.CANCELLED, "bye", ()))
    with serving(Fake(handler)) as address:
        same(Calls("sync", address).place(SEGMENTS), place(SEGMENTS))
    assert count == [2]


@pytest.mark.parametrize(
    ("code", "metadata", "kind"),
    [
        ("INVALID_ARGUMENT", (), InvalidInputError),
        ("UNIMPLEMENTED", (), UnsupportedError),
        ("RESOURCE_EXHAUSTED", (), LimitExceededError),
        ("RESOURCE_EXHAUSTED", (("grpc-retry-pushback-ms", "250"),), ServiceOverloadedError),
        ("DEADLINE_EXCEEDED", (), ServiceTimeoutError),
        ("INTERNAL", (), ServiceError),
        ("ABORTED", (), ServiceError),
    ],
)
def test_no_other_status_is_tried_again_and_each_is_an_error_of_ours(code: str, metadata: Any, kind: Any) -> None:
    handler, count = aborting((grpc.StatusCode[code], "why: got this", metadata))
    matching = pytest.raises(MmposError, match="why: got this")
    with serving(Fake(handler)) as address, Client(address) as client, matching as caught:
        client.place(SEGMENTS)
    assert type(caught.value) is kind
    assert count == [1]
    if isinstance(caught.value, ServiceOverloadedError):
        assert caught.value.retry_after == 0.25


@pytest.mark.parametrize("kind", KINDS)
def test_no_call_takes_longer_than_its_timeout(kind: str) -> None:
    over = threading.Event()

    def slow(request: Any, context: Any) -> Any:
        assert over.wait(60)
        return echo(request, context)

    with serving(Fake(slow)) as address:
        assert failure(lambda: Calls(kind, address, timeout=0.2).place(SEGMENTS))[0] is ServiceTimeoutError
        over.set()


def test_an_answer_that_makes_no_sense_is_the_fault_of_the_server() -> None:
    with serving(Fake(lambda request, context: pb.PlaceResponse())) as address, Client(address) as client:
        assert failure(lambda: client.place(SEGMENTS)) == (
            ServiceError,
            "answer: positions: got neither table nor dense, want one of them",
        )


def test_nobody_there_is_an_error_and_not_healthy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with Client(f"127.0.0.1:{taken.getsockname()[1]}", attempts=2) as client:
            assert failure(lambda: client.place(SEGMENTS))[0] is ServiceUnavailableError
            assert failure(lambda: list(client.stream([PositionsQuery(SEGMENTS)])))[0] is ServiceUnavailableError
            assert not client.healthy()


REPLICA = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import grpc
from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos.rpc.positions import get_query, put_result

def place(request, context):
    time.sleep(0.5)  # under way when a worker dies
    response = pb.PlaceResponse()
    put_result(response.positions, get_query("query", request.query).run())
    return response

def stream(requests, context):
    for request in requests:
        time.sleep(0.02)
        response = pb.StreamPlaceResponse(id=request.id)
        put_result(response.positions, get_query("query", request.query).run())
        yield response

methods = {
    "Place": grpc.unary_unary_rpc_method_handler(
        place, pb.PlaceRequest.FromString, pb.PlaceResponse.SerializeToString
    ),
    "StreamPlace": grpc.stream_stream_rpc_method_handler(
        stream, pb.StreamPlaceRequest.FromString, pb.StreamPlaceResponse.SerializeToString
    ),
}
handler = grpc.method_handlers_generic_handler("mmpos.rpc.v1.PositionService", methods)
server = grpc.server(ThreadPoolExecutor(64), handlers=[handler])
server.add_insecure_port(sys.argv[1])
server.start()
print("up", flush=True)
threading.Event().wait()
"""


@contextmanager
def replicas(count: int) -> Iterator[tuple[str, list[subprocess.Popen[str]]]]:
    """Servers that share a port, as workers do."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        command = [sys.executable, "-c", REPLICA, address]
        started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
        try:
            for process in started:
                assert process.stdout is not None
                assert process.stdout.readline() == "up\n"
            yield address, started
        finally:
            for process in started:
                process.kill()
                process.communicate()


@contextmanager
def clients_of(address: str, count: int) -> Iterator[list[Client]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Client(address)) for _ in range(count)]


def test_a_killed_worker_loses_no_call_and_no_item_of_a_stream() -> None:
    large = SegmentTable.from_documents([[Text(1)] * 100_000])  # a request above what gRPC keeps by itself
    queries = [PositionsQuery(SEGMENTS, start=i) for i in range(60)]
    want = [query.run() for query in queries]
    with replicas(2) as (address, workers), clients_of(address, 4) as clients, ThreadPoolExecutor(32) as pool:
        calls = [pool.submit(clients[i % 4].place, SEGMENTS, "mrope", i) for i in range(24)]
        calls += [pool.submit(clients[i].place, large) for i in range(2)]
        answered = [pool.submit(Calls(kind, address).stream, queries) for kind in KINDS for _ in range(2)]
        time.sleep(0.3)
        workers[0].kill()
        for i, call in enumerate(calls[:24]):
            same(call.result(), place(SEGMENTS, "mrope", i))
        for call in calls[24:]:
            assert call.result().num_tokens == 100_000
        for stream in answered:
            got = stream.result()
            assert len(got) == 60
            for g, w in zip(got, want, strict=True):
                same(g, w)


# Streams


def numbered(count: int) -> list[PositionsQuery]:
    return [PositionsQuery(SEGMENTS, start=i) for i in range(count)]


WRONG = PositionsQuery(SEGMENTS, "none")
UNSENT: Any = "no query"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_stream_answers_in_order_with_what_the_calls_give(kind: str, window: int, server: str) -> None:
    client = Calls(kind, server, window=window)
    same(client.stream(iter(numbered(20))), [query.run() for query in numbered(20)])
    assert client.stream([]) == []
    batches: list[list[list[Any]]] = [[["a"], ["b", Grid(1, 2)]], [["c"]], []]
    same(client.stream_build(batches), [SequenceBuilder().build_batch(batch) for batch in batches])
    ((built,),) = client.stream_build([[["c"]]], scheme="mrope", start=7)
    same(built, SequenceBuilder(scheme="mrope", start=7).build(["c"]))


@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_a_stream_stand_in_their_place_or_end_it(kind: str, server: str) -> None:
    client = Calls(kind, server)
    queries = [*numbered(2), WRONG, UNSENT, *numbered(1)]
    found = client.stream(queries, errors="return")
    same([found[i] for i in (0, 1, 4)], [query.run() for query in (*numbered(2), *numbered(1))])
    assert [(type(e), str(e)) for e in found[2:4]] == [
        failure(WRONG.run),
        (InvalidInputError, "query: got str, want a PositionsQuery"),
    ]
    assert failure(lambda: client.stream(queries)) == failure(WRONG.run)
    assert failure(lambda: client.stream([UNSENT, WRONG])) == (type(found[3]), str(found[3]))
    batches: list[Any] = [[["a"], [0.5]], [["b"]]]
    want = failure(lambda: SequenceBuilder(images=ImageProcessor()).build_batch(batches[0]))
    (_, wrong), (right,) = client.stream_build(batches, errors="return")
    assert (type(wrong), str(wrong)) == want
    same(right, SequenceBuilder().build(["b"]))
    assert failure(lambda: client.stream_build(batches)) == want
    refused = client.stream_build([[["a"], ["b"]]], errors="return", scheme="none")
    assert [type(error) for error in refused[0]] == [InvalidInputError] * 2
    assert failure(lambda: client.stream_build([5], errors="return"))[0] is InvalidInputError
    assert failure(lambda: client.stream(5))[1] == "queries: got int, want an iterable"
    assert failure(lambda: client.stream([], errors="no"))[1] == "errors: got 'no', want one of 'raise', 'return'"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 4])
def test_a_source_is_read_no_further_than_the_window(kind: str, window: int, server: str) -> None:
    read = 0

    def source() -> Iterator[PositionsQuery]:
        nonlocal read
        for query in numbered(30):
            read += 1
            yield query

    ahead = []
    if kind == "sync":
        with Client(server, window=window) as client:
            ahead = [read - i for i, _ in enumerate(client.stream(source()))]
    else:

        async def main() -> None:
            async with AsyncClient(server, window=window) as client:
                i = 0
                async for _ in client.stream(source()):
                    ahead.append(read - i)
                    i += 1

        asyncio.run(main())
    assert len(ahead) == 30
    assert max(ahead) <= window
    assert read == 30


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The streams that a client has opened."""
    found: list[Any] = []
    opened: Any = streams._opened

    def kept(*arguments: Any) -> Any:
        found.append(opened(*arguments))
        return found[-1]

    monkeypatch.setattr(streams, "_opened", kept)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_does_not_wait_until_a_slow_source_fills_the_window(kind: str, server: str, links: list[Any]) -> None:
    given: list[PositionsQuery] = []

    def slowly() -> Iterator[PositionsQuery]:
        for query in numbered(4):
            assert not given or eventually(lambda: links[-1].ready)  # the answer to the one before has come
            given.append(query)
            yield query

    async def slowly_awaited() -> AsyncIterator[PositionsQuery]:
        for query in numbered(4):
            if given:
                await asyncio.wait([links[-1].answer])
            given.append(query)
            yield query

    async def main() -> list[int]:
        async with AsyncClient(server) as client:
            return [len(given) async for _ in client.stream(slowly_awaited())]

    if kind == "sync":
        with Client(server) as client:
            counts = [len(given) for _ in client.stream(slowly())]
    else:
        counts = asyncio.run(main())
    assert len(counts) == 4
    assert counts[0] < 4


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_the_source_is_the_callers(kind: str, server: str) -> None:
    def broken() -> Iterator[PositionsQuery]:
        yield from numbered(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Calls(kind, server, window=1).stream(broken())


@pytest.mark.parametrize("kind", KINDS)
def test_closing_the_iterator_cancels_the_stream(kind: str) -> None:
    ended = threading.Event()

    def stream(requests: Any, context: Any) -> Iterator[pb.StreamPlaceResponse]:
        context.add_callback(ended.set)
        yield next(echo_stream(requests, context))
        ended.wait(60)  # which nothing but the end of the call sets

    async def first(address: str) -> Any:
        async with AsyncClient(address) as client:
            results: Any = client.stream(numbered(10))
            found = await anext(results)
            assert not ended.is_set()
            await results.aclose()
            assert await asyncio.to_thread(ended.wait, 30)
            return found

    with serving(Fake(stream=stream)) as address:
        if kind == "async":
            same(asyncio.run(first(address)), numbered(1)[0].run())
        else:
            with Client(address) as client:
                results: Any = client.stream(numbered(10))
                same(next(results), numbered(1)[0].run())
                assert not ended.is_set()
                results.close()
                assert ended.wait(30)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_is_done_is_not_cancelled(kind: str) -> None:
    active: list[bool] = []

    def stream(requests: Any, context: Any) -> Iterator[pb.StreamPlaceResponse]:
        yield from echo_stream(requests, context)
        time.sleep(0.1)
        active.append(context.is_active())

    with serving(Fake(stream=stream)) as address:
        assert len(Calls(kind, address).stream(numbered(3))) == 3
    assert active == [True]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_breaks_while_nothing_is_under_way_has_lost_nothing(kind: str, links: list[Any]) -> None:
    def broken() -> bool:
        return all(thread.name != "mmpos-stream" for thread in threading.enumerate())

    def slowly() -> Iterator[PositionsQuery]:
        for query in numbered(3):
            yield query
            assert eventually(broken)  # and what reads it has seen that

    async def slowly_awaited() -> AsyncIterator[PositionsQuery]:
        for query in numbered(3):
            yield query
            await asyncio.wait([links[-1].answer])

    def ending(requests: Any, context: Any) -> Iterator[pb.StreamPlaceResponse]:
        yield next(echo_stream(requests, context))
        context.abort(*UNAVAILABLE[:2])

    source = slowly() if kind == "sync" else slowly_awaited()
    with serving(Fake(stream=ending)) as address:
        same(Calls(kind, address, attempts=1, window=1).stream(source), [query.run() for query in numbered(3)])


def breaking(after: int, times: int) -> tuple[Callable[..., Any], list[int]]:
    """A stream that breaks after so many answers, so many times; and how many items each stream was asked."""
    asked: list[int] = []

    def stream(requests: Any, context: Any) -> Iterator[pb.StreamPlaceResponse]:
        asked.append(0)
        number = len(asked)
        for response in echo_stream(requests, context):
            if number <= times and asked[-1] == after:
                context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            asked[-1] += 1
            yield response

    return stream, asked


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_broken_stream_left_unanswered_is_asked_again(kind: str) -> None:
    stream, asked = breaking(after=4, times=6)  # more often than attempts, but never twice without an answer
    with serving(Fake(stream=stream)) as address:
        same(Calls(kind, address, attempts=2).stream(numbered(30)), [query.run() for query in numbered(30)])
    # An answer that was on its way as the stream broke may have to be given again.
    assert asked[:6] == [4] * 6
    assert asked[6] >= 6
    stream, asked = breaking(after=0, times=9)
    with serving(Fake(stream=stream)) as address:
        error, words = failure(lambda: Calls(kind, address, attempts=2).stream(numbered(3)))
    # A write may find the stream broken before its status is read.
    assert error is ServiceUnavailableError
    assert words in ("gone", "stream: got a connection that broke while a request was written")
    assert asked == [0, 0]


def test_a_write_that_fails_is_a_broken_connection() -> None:
    for details, kind in (("Internal error from Core", ServiceUnavailableError), ("other", ServiceError)):
        error = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
        assert type(error_of(error)) is kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_ends_too_early_is_taken_up_again(kind: str) -> None:
    def stream(requests: Any, context: Any) -> Iterator[pb.StreamPlaceResponse]:
        answers = echo_stream(requests, context)
        yield next(answers)
        yield next(answers)

    with serving(Fake(stream=stream)) as address:
        same(Calls(kind, address).stream(numbered(6)), [query.run() for query in numbered(6)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("responses", "message"),
    [
        ([pb.StreamPlaceResponse(id=1)], "answer: got id 1, want 0"),
        ([pb.StreamPlaceResponse(id=0)], "answer: got no outcome, want one"),
    ],
)
def test_answers_that_nobody_asked_for_are_the_fault_of_the_server(kind: str, responses: Any, message: str) -> None:
    def stream(requests: Any, context: Any) -> Iterator[pb.StreamPlaceResponse]:
        next(requests)
        yield from responses

    with serving(Fake(stream=stream)) as address:
        assert failure(lambda: Calls(kind, address).stream(numbered(1))) == (ServiceError, message)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_waits_for_each_answer_as_long_as_the_timeout(kind: str) -> None:
    def stream(requests: Any, context: Any) -> Iterator[pb.StreamPlaceResponse]:
        for n, response in enumerate(echo_stream(requests, context)):
            time.sleep(0.1 if n < 3 else 0.5)
            yield response

    found: list[Any] = []
    with serving(Fake(stream=stream)) as address, Client(address, timeout=0.2) as client:
        with pytest.raises(ServiceTimeoutError, match=r"^stream: got no answer in 0.2 seconds, want one$"):
            found.extend(client.stream(numbered(4)))
        assert failure(lambda: Calls(kind, address, timeout=0.2).stream(numbered(4)))[0] is ServiceTimeoutError


# Channels


def test_several_servers_take_turns_and_the_sick_one_takes_none() -> None:
    fakes = [Fake(), Fake(), Fake()]
    with ExitStack() as stack:
        addresses = [stack.enter_context(serving(fake, serving=i < 2)) for i, fake in enumerate(fakes)]
        client = stack.enter_context(Client(addresses))
        # Until those that are well are connected.
        assert eventually(lambda: bool(client.place(SEGMENTS)) and all(fake.metadata for fake in fakes[:2]))
        counts = [len(fake.metadata) for fake in fakes]
        for _ in range(10):
            client.place(SEGMENTS)
        assert [len(f.metadata) - c for f, c in zip(fakes, counts, strict=True)] == [5, 5, 0]
        assert [len(f.metadata) for f in fakes][2] == 0
        many = stack.enter_context(Client([addresses[2], "127.0.0.1:1"], attempts=1))
        assert failure(lambda: many.place(SEGMENTS))[0] is ServiceUnavailableError


def test_names_in_a_list_become_numbers_of_one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"four": ["10.0.0.1", "10.0.0.2"], "both": ["::2", "10.0.0.3"], "six": ["::6"]}

    def resolve(host: str, port: int, **_: Any) -> Any:
        if host not in known:
            raise socket.gaierror("not known")
        return [(None, None, None, "", (ip, port)) for ip in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert target(("four:1",)) == "four:1"
    assert target(("four:1", "both:2", "four:1")) == "ipv4:10.0.0.1:1,10.0.0.2:1,10.0.0.3:2"
    assert target(("both:1", "six:2")) == "ipv6:[::2]:1,[::ffff:10.0.0.3]:1,[::6]:2"
    with pytest.raises(ServiceUnavailableError, match=r"^addresses\[1\]: got 'none:2', want a host that is known \("):
        target(("four:1", "none:2"))


def test_a_channel_has_these_options() -> None:
    several = dict(channel_options(Endpoint(("a:1", "b:2"), 3, Tls())))
    assert json.loads(several.pop("grpc.service_config")) == {
        "methodConfig": [
            {
                "name": [
                    {"service": "mmpos.rpc.v1.PositionService", "method": "StreamPlace"},
                    {"service": "mmpos.rpc.v1.SequenceService", "method": "StreamBuild"},
                ]
            },
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.1s",
                    "backoffMultiplier": 3,
                    "maxBackoff": "2.0s",
                    "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
                },
            },
        ],
        "retryThrottling": {"maxTokens": 1000, "tokenRatio": 1},
        "loadBalancingConfig": [{"round_robin": {}}],
        "healthCheckConfig": {"serviceName": ""},
    }
    assert several == {
        "grpc.max_receive_message_length": -1,
        "grpc.per_rpc_retry_buffer_size": 2**31 - 1,
        "grpc.keepalive_time_ms": 30_000,
        "grpc.keepalive_timeout_ms": 10_000,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.max_pings_without_data": 0,
        "grpc.initial_reconnect_backoff_ms": 100,
        "grpc.max_reconnect_backoff_ms": 5_000,
        "grpc.service_config_disable_resolution": 1,
        "grpc.use_local_subchannel_pool": 1,
        "grpc.default_authority": "a:1",
        "grpc.ssl_target_name_override": "a",
    }
    one = dict(channel_options(Endpoint(("a:1",), 1, Tls(server_name="b"))))
    config = json.loads(one["grpc.service_config"])
    assert config["methodConfig"][1] == {"name": [{}]}
    assert "loadBalancingConfig" not in config
    assert one["grpc.ssl_target_name_override"] == "b"
    replicas = dict(channel_options(Endpoint(("dns:///a:1",), 1, None)))
    assert "loadBalancingConfig" in json.loads(replicas["grpc.service_config"])


def test_a_unix_socket_is_an_address(tmp_path: Path) -> None:
    with serving(Fake(), f"unix:{tmp_path}/socket") as address, Client(address) as client:
        same(client.place(SEGMENTS), place(SEGMENTS))


def test_a_large_answer_is_received() -> None:
    many = SegmentTable.from_documents([[Text(1)] * 60_000])
    with serving(Fake()) as address, Client(address) as client:
        table = client.place(many)
    assert table.table.nbytes > 4 * 2**20  # what gRPC takes by itself
    same(table, place(many))


@pytest.mark.parametrize("kind", KINDS)
def test_certificates_make_a_channel_safe(kind: str, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "server.test")
    client_cert, client_key = make_certificate(tmp_path, "client.test")
    credentials = grpc.ssl_server_credentials(
        [(key.read_bytes(), cert.read_bytes())], client_cert.read_bytes(), require_client_auth=True
    )
    server = grpc.server(ThreadPoolExecutor(2), handlers=[Fake()])
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    tls = Tls(cert, str(client_cert), client_key.read_bytes(), "server.test")
    same(Calls(kind, address, tls=tls).place(SEGMENTS), place(SEGMENTS))
    nobody = Tls(cert, server_name="server.test")
    assert failure(lambda: Calls(kind, address, tls=nobody, attempts=1).place(SEGMENTS))[0] is ServiceUnavailableError
    server.stop(0).wait()


def test_a_client_that_was_closed_opens_again(server: str) -> None:
    client = Client(server)
    client.close()
    same(client.place(SEGMENTS), place(SEGMENTS))
    client.close()
    client.close()
    same(client.place(SEGMENTS), place(SEGMENTS))
    client.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_whose_client_is_closed_ends(kind: str) -> None:
    arrived, over = threading.Event(), threading.Event()

    def slow(request: Any, context: Any) -> Any:
        arrived.set()
        over.wait(60)
        return echo(request, context)

    async def main(address: str) -> None:
        client = AsyncClient(address)
        calls = [asyncio.ensure_future(client.place(SEGMENTS)) for _ in range(2)]
        assert await asyncio.to_thread(arrived.wait, 60)
        calls[0].cancel()
        await asyncio.sleep(0.05)
        assert calls[0].cancelled()
        await client.close()
        with pytest.raises(ServiceError, match=r"^CANCELLED: "):
            await calls[1]

    with serving(Fake(slow)) as address:
        if kind == "async":
            asyncio.run(main(address))
        else:
            client = Client(address)
            with ThreadPoolExecutor(1) as pool:
                call = pool.submit(client.place, SEGMENTS)
                assert arrived.wait(60)
                client.close()
                with pytest.raises(ServiceError, match=r"^CANCELLED: "):
                    call.result()
        over.set()


def test_a_call_that_begins_while_another_thread_closes_the_client_fails_as_calls_do(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(server) as client, grpc.insecure_channel(server) as channel:
        channel.close()
        monkeypatch.setattr(client, "_channel", lambda: channel)
        asks: list[Callable[[], object]] = [
            lambda: client.place(SEGMENTS),
            lambda: list(client.stream([PositionsQuery(SEGMENTS)])),
        ]
        for ask in asks:
            with pytest.raises(ServiceError, match=r"^CANCELLED: the client was closed$"):
                ask()
        assert client.healthy() is False


def test_one_async_client_serves_one_event_loop_after_the_other(server: str) -> None:
    client = AsyncClient(server)
    for _ in range(2):  # the first loop leaves its channel open
        same(asyncio.run(client.place(SEGMENTS)), place(SEGMENTS))
    assert len(client._channels._open) == 1

    async def last() -> None:
        same(await client.place(SEGMENTS), place(SEGMENTS))
        await client.close()

    asyncio.run(last())
    assert client._channels._open == {}
    gc.collect()


def test_threads_share_one_channel(server: str) -> None:
    with Client(server) as client, ThreadPoolExecutor(8) as pool:
        for table in pool.map(lambda _: client.place(SEGMENTS), range(40)):
            same(table, place(SEGMENTS))
        assert len(client._channels._open) == 1


# Processes


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_pickled_client_is_told_the_same_and_has_no_channel(kind: Any) -> None:
    client = kind(["a:1", "b:2"], profile="p", timeout=3, attempts=2, tls=Tls(b"x"), metadata=[("a", "b")], window=5)
    other = pickle.loads(pickle.dumps(client))
    assert (type(other), other._endpoint, other._options) == (kind, client._endpoint, client._options)
    assert other._channels is not client._channels
    assert repr(other) == repr(client) == f"{kind.__name__}(['a:1', 'b:2'], profile='p', timeout=3)"


LOADER = """
import sys
from torch.utils.data import DataLoader, Dataset
from mmpos import SequenceBuilder
from mmpos.client import Client

class Texts(Dataset):
    def __init__(self, builder):
        self.builder = builder
    def __len__(self):
        return 12
    def __getitem__(self, i):
        return self.builder.build(["text %d" % i])

if __name__ == "__main__":
    address, method, used = sys.argv[1:]
    client = Client(address, timeout=60)
    if used == "used":
        client.build(["before"])
    workers = 1 if method == "spawn" else 2
    loader = DataLoader(Texts(client), batch_size=None, num_workers=workers, multiprocessing_context=method)
    for epoch in range(workers):
        got = [sequence.input_ids.tolist() for sequence in loader]
        assert got == [sequence.input_ids.tolist() for sequence in map(Texts(SequenceBuilder()).__getitem__, range(12))]
        if used == "used":
            assert client.build(["a"]).input_ids.tolist() == [97]
    client.close()
    print("done")
"""


def load(path: Path, address: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = path / "loader.py"
    script.write_text(LOADER)
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(script), address, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0", **environment},
    )


@pytest.mark.parametrize(
    ("method", "used", "support"),
    [
        ("fork", "used", "1"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("fork", "new", "0"), ("spawn", "used", "0"))),
    ],
)
def test_a_client_works_in_the_workers_of_a_loader(
    method: str, used: str, support: str, server: str, tmp_path: Path
) -> None:
    done = load(tmp_path, server, method, used, GRPC_ENABLE_FORK_SUPPORT=support)
    assert done.stdout == "done\n", done.stderr


def test_a_fork_that_would_hang_is_an_error_instead(server: str, tmp_path: Path) -> None:
    done = load(tmp_path, server, "fork", "used")
    assert done.stdout == ""
    assert "UnsupportedError: fork: got a client that called before the fork, want GRPC_ENABLE_FORK_SUPPORT=1" in (
        done.stderr
    )


def test_without_grpc_the_import_names_the_pip_command() -> None:
    for module in ("grpc", "google.protobuf"):
        code = f"""
import sys
sys.modules[{module!r}] = None
try:
    import mmpos.client
except ImportError as error:
    print(error)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        want = r'want pip install "multimodal-positions\[client\]"'
        assert re.fullmatch(rf"mmpos\.client: {module}[\w.]* is not installed, {want}\n", done.stdout), done.stdout
