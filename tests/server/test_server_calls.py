"""The server around its methods: admission, deadlines, streams, errors and logs, through a real port."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_calls import Stream
from waiting import eventually

from mmpos.errors import LimitExceededError, UnsupportedError
from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos_server.admission import Call, Pool
from mmpos_server.config import ServerConfig, load
from mmpos_server.services import place_method
from mmpos_server.telemetry import Logs
from mmpos_server.testing import running

Start = Callable[..., grpc.Channel]


class Fake:
    """A method that does what the profile's name of the query says; its events tell how far it came."""

    def __init__(self) -> None:
        self.begun, self.stopped, self.go = threading.Event(), threading.Event(), threading.Event()
        self.names: list[str] = []
        self.over = 0

    async def run(self, query: pb.PositionsQuery, answer: pb.Positions, call: Call) -> None:
        name, _, rest = query.profile.partition(" ")
        self.names.append(query.profile)
        try:
            await getattr(self, name)(rest, answer, call)
        finally:
            self.over += 1

    async def echo(self, rest: str, answer: pb.Positions, call: Call) -> None:
        answer.cu_seqlens.append(int(rest or 0))
        call.count(documents=1, tokens=2, images=3)

    async def nothing(self, rest: str, answer: pb.Positions, call: Call) -> None:
        """Answer with no field set."""

    async def many(self, rest: str, answer: pb.Positions, call: Call) -> None:
        answer.cu_seqlens.extend([1] * 2000)

    async def wait(self, pool: Pool, answer: pb.Positions, call: Call) -> None:
        await call.run(pool, self._wait, call)
        answer.cu_seqlens.append(1)

    async def last(self, rest: str, answer: pb.Positions, call: Call) -> None:
        """Answer after so many others."""
        while self.over < int(rest):
            await asyncio.sleep(0.001)
        answer.cu_seqlens.append(int(rest))

    async def fail(self, rest: str, answer: pb.Positions, call: Call) -> None:
        raise {"limit": LimitExceededError, "unsupported": UnsupportedError, "bug": KeyError}[rest]("why " + "é" * 3000)

    def _wait(self, call: Call) -> None:
        self.begun.set()
        try:
            while not self.go.wait(0.01):
                call.checkpoint()
        finally:
            self.stopped.set()


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def serve(fake: Fake) -> Iterator[Start]:
    """Start a server with the fake method and give a channel to it."""
    method = place_method(fake.run)
    with ExitStack() as stack:

        def start(logs: Logs | None = None, **tables: dict[str, int]) -> grpc.Channel:
            values = {**load().model_dump(), **tables}
            config = ServerConfig.model_validate(values)
            address = stack.enter_context(running(config, logs=logs, methods=lambda *_: [method], grace=2.0))
            return stack.enter_context(grpc.insecure_channel(address))

        yield start
        fake.go.set()


def place(channel: grpc.Channel) -> Any:
    return channel.unary_unary("/mmpos.rpc.v1.PositionService/Place", response_deserializer=pb.PlaceResponse.FromString)


def stream(channel: grpc.Channel) -> Any:
    return channel.stream_stream(
        "/mmpos.rpc.v1.PositionService/StreamPlace",
        pb.StreamPlaceRequest.SerializeToString,
        pb.StreamPlaceResponse.FromString,
    )


def query(name: str) -> bytes:
    return pb.PlaceRequest(query=pb.PositionsQuery(profile=name)).SerializeToString()


def items(*names: str) -> Iterator[pb.StreamPlaceRequest]:
    return (pb.StreamPlaceRequest(id=i, query=pb.PositionsQuery(profile=name)) for i, name in enumerate(names))


def refusal(call: Callable[[], object]) -> tuple[str, str, dict[str, str]]:
    """Status, details and trailing metadata of a call that fails."""
    with pytest.raises(grpc.RpcError) as raised:
        call()
    error: Any = raised.value
    return error.code().name, error.details(), dict(error.trailing_metadata())


def test_a_request_id_that_is_sane_comes_back_and_any_other_is_replaced(serve: Start) -> None:
    ask = place(serve())
    ids = []
    for sent in ([("x-request-id", "a.b:1")], [("x-request-id", "two words")], [("x-request-id", "x" * 129)], []):
        answer, call = ask.with_call(query("echo 5"), metadata=sent)
        assert answer == pb.PlaceResponse(positions=pb.Positions(cu_seqlens=[5]))
        ids += [value for key, value in call.trailing_metadata() if key == "x-request-id"]
    assert ids[0] == "a.b:1"
    assert all(re.fullmatch(r"[0-9a-f]{10}-[1-9]", made) for made in ids[1:])
    assert len(set(ids)) == 4


def test_an_answer_is_set_though_nothing_is_in_it(serve: Start) -> None:
    assert place(serve())(query("nothing")).HasField("positions")


@pytest.mark.parametrize(
    ("sent", "status", "details"),
    [
        (b"\xff\xff", "INVALID_ARGUMENT", "request: got bytes that are no message of this method, want valid protobuf"),
        (b"", "INVALID_ARGUMENT", "query: got none, want a PositionsQuery"),
        (query("fail limit"), "RESOURCE_EXHAUSTED", "why " + "é" * 748 + "…"),
        (query("fail unsupported"), "UNIMPLEMENTED", "why " + "é" * 748 + "…"),
        (query("fail bug"), "INTERNAL", "internal error, request me"),
    ],
)
def test_errors_are_statuses(serve: Start, sent: bytes, status: str, details: str) -> None:
    ask = place(serve())
    found = refusal(lambda: ask(sent, metadata=[("x-request-id", "me")]))
    assert found == (status, details, {"x-request-id": "me"})


def test_requests_and_answers_beyond_their_limits_are_refused(serve: Start, fake: Fake) -> None:
    ask = place(serve(limits={"request_bytes": 2000, "response_bytes": 1024}))
    status, details, _ = refusal(lambda: ask(query("echo " + "1" * 3000)))
    assert (status, fake.names) == ("RESOURCE_EXHAUSTED", [])
    status, details, metadata = refusal(lambda: ask(query("many"), metadata=[("x-request-id", "me")]))
    assert (status, details, metadata) == (
        "RESOURCE_EXHAUSTED",
        "response: got 2006 bytes, want <= 1024",
        {"x-request-id": "me"},
    )


@pytest.mark.parametrize(("pool", "gate"), [("image", "max_in_flight_images"), ("place", "max_in_flight")])
def test_calls_beyond_their_places_are_refused_with_a_hint(serve: Start, fake: Fake, pool: str, gate: str) -> None:
    ask = place(serve(concurrency={"max_in_flight_images": 1, "max_in_flight": 2, gate: 1}))
    first = ask.future(query(f"wait {pool}"))
    assert fake.begun.wait(60)
    status, details, metadata = refusal(lambda: ask(query(f"wait {pool}")))
    assert (status, details) == ("RESOURCE_EXHAUSTED", f"{gate}: got 1 taken of 1")
    assert metadata["grpc-retry-pushback-ms"] == "1000"
    if pool == "image":  # cheap calls go on
        assert ask(query("echo 1")).positions.cu_seqlens == [1]
    fake.go.set()
    assert first.result(60).positions.cu_seqlens == [1]
    assert ask(query(f"wait {pool}")).positions.cu_seqlens == [1]  # the place is free again


def test_bytes_of_requests_beyond_their_sum_are_refused(serve: Start, fake: Fake) -> None:
    ask = place(serve(concurrency={"max_in_flight_bytes": 1024}))
    waiting = ask.future(query("wait place"))
    assert fake.begun.wait(60)
    assert refusal(lambda: ask(query("echo " + "0" * 1020)))[:2] == (
        "RESOURCE_EXHAUSTED",
        f"max_in_flight_bytes: got {len(query('wait place'))} taken of 1024",
    )
    fake.go.set()
    waiting.result(60)
    assert ask(query("echo " + "0" * 1020)).positions.cu_seqlens == [0]  # alone, it may come


def test_a_deadline_stops_the_work_in_a_thread(serve: Start, fake: Fake) -> None:
    ask = place(serve())
    for seconds in (0.3, 3, 30):  # as long as it takes until work begins
        assert refusal(partial(ask, query("wait image"), timeout=seconds))[0] == "DEADLINE_EXCEEDED"
        if fake.begun.is_set():
            break
    assert fake.begun.is_set()
    assert fake.stopped.wait(60)


def test_a_client_that_goes_stops_the_work_in_a_thread(serve: Start, fake: Fake) -> None:
    call = place(serve()).future(query("wait image"))
    assert fake.begun.wait(60)
    assert not fake.stopped.is_set()
    call.cancel()
    assert fake.stopped.wait(60)


def test_work_that_nobody_waits_for_any_more_never_begins(serve: Start, fake: Fake) -> None:
    ask = place(serve(pools={"image": 1}))
    first = ask.future(query("wait image"))
    assert fake.begun.wait(60)
    fake.begun.clear()
    second = ask.future(query("wait image"))
    assert eventually(lambda: len(fake.names) == 2)
    second.cancel()
    assert eventually(lambda: fake.over == 1)
    fake.go.set()
    first.result(60)
    assert not fake.begun.wait(0.1)


def test_a_stream_answers_in_order_and_an_item_that_fails_fails_alone(serve: Start, fake: Fake) -> None:
    names = ("last 4", "last 2", "fail bug", "echo 4", "last 3")  # side by side, or none would ever end
    found = list(stream(serve())(items(*names), metadata=[("x-request-id", "me")]))
    assert [(answer.id, list(answer.positions.cu_seqlens), answer.error.message) for answer in found] == [
        (0, [4], ""),
        (1, [2], ""),
        (2, [], "internal error, request me.3"),
        (3, [4], ""),
        (4, [3], ""),
    ]
    assert [answer.WhichOneof("outcome") for answer in found] == ["positions"] * 2 + ["error"] + ["positions"] * 2


def test_an_item_without_a_query_fails_alone(serve: Start) -> None:
    (answer,) = stream(serve())(iter([pb.StreamPlaceRequest(id=7)]))
    assert answer.id == 7
    assert (answer.error.code, answer.error.message) == (1, "query: got none, want a PositionsQuery")


def test_bytes_that_are_no_item_end_the_stream_after_the_answers_before_them(serve: Start) -> None:
    path = "/mmpos.rpc.v1.PositionService/StreamPlace"
    ask: Stream = serve().stream_stream(path)
    call = ask(iter([next(items("echo 1")).SerializeToString(), b"\xff\xff"]))
    assert pb.StreamPlaceResponse.FromString(next(call)).positions.cu_seqlens == [1]
    status, details, _ = refusal(lambda: next(call))
    assert (status, details) == (
        "INVALID_ARGUMENT",
        "request: got bytes that are no message of this method, want valid protobuf",
    )


@pytest.mark.parametrize("bound", [{"stream_window": 3}, {"stream_bytes": 14 + 12 + 12}])
def test_a_stream_reads_no_further_than_its_window(serve: Start, fake: Fake, bound: dict[str, int]) -> None:
    sent = list(items("wait place", *["echo 1"] * 9))
    assert [item.ByteSize() for item in sent[:3]] == [14, 12, 12]
    call = stream(serve(concurrency=bound))(iter(sent))
    assert eventually(lambda: len(fake.names) >= 3)
    time.sleep(0.2)
    assert len(fake.names) == 3
    fake.go.set()
    assert [answer.id for answer in call] == list(range(10))


def test_a_stream_that_is_cancelled_cancels_its_items(serve: Start, fake: Fake) -> None:
    call = stream(serve())(items("wait image"))
    assert fake.begun.wait(60)
    call.cancel()
    assert fake.stopped.wait(60)


def test_streams_beyond_their_number_are_refused(serve: Start, fake: Fake) -> None:
    ask = stream(serve(concurrency={"max_streams": 1}))
    first = ask(items("wait place"))
    assert fake.begun.wait(60)
    status, details, metadata = refusal(lambda: next(ask(items("echo 1"))))
    assert (status, details) == ("RESOURCE_EXHAUSTED", "max_streams: got 1 taken of 1")
    assert metadata["grpc-retry-pushback-ms"] == "1000"
    fake.go.set()
    assert [answer.id for answer in first] == [0]


def test_logs_are_json_and_only_internal_errors_have_tracebacks(
    serve: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    channel = serve(Logs("info"))
    named = [("x-request-id", "me")]
    place(channel)(query("echo 1"), metadata=named)
    refusal(lambda: place(channel)(query("fail bug"), metadata=named))
    refusal(lambda: place(channel)(b"", metadata=named))
    list(stream(channel)(items("echo 1"), metadata=named))
    lines: list[dict[str, Any]] = []

    def all_there() -> bool:
        lines.extend(json.loads(line) for line in capsys.readouterr().err.splitlines())
        return len(lines) == 5

    assert eventually(all_there)
    varying = ("timestamp", "milliseconds", "peer", "exception")
    base = {"event": "request", "request_id": "me", "method": "Place", "level": "info", "client": "127.0.0.1"}
    assert [{key: value for key, value in line.items() if key not in varying} for line in lines] == [
        {**base, "status": "OK", "request_bytes": 10, "response_bytes": 5, "documents": 1, "tokens": 2, "images": 3},
        {"event": "internal error", "request_id": "me", "method": "Place", "level": "error"},
        {**base, "status": "INTERNAL", "request_bytes": 12, "response_bytes": 0},
        {**base, "status": "INVALID_ARGUMENT", "request_bytes": 0, "response_bytes": 0},
        {**base, "event": "stream", "method": "StreamPlace", "status": "OK", "items": 1},
    ]
    assert ["exception" in line for line in lines] == [False, True, False, False, False]
    assert "KeyError" in lines[1]["exception"]
    assert lines[0]["peer"].startswith("ipv4:127.0.0.1:")
