"""Test the server's admission, deadlines, streams, errors, metrics and logs through a real port."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_calls import Stream, ending
from grpc_health.v1 import health_pb2, health_pb2_grpc
from serving import STREAM, KeptLogs, Serve, items, query
from waiting import eventually

from mmpos import SegmentTable, Text
from mmpos.client import Client, PositionsQuery
from mmpos.errors import LimitExceededError, ServiceError
from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos_server import app, streams
from mmpos_server.listening import Listen
from mmpos_server.streams import ItemWindow

NO_MESSAGE = "request: the bytes are not a protobuf message of this method"
SEGMENTS = SegmentTable.from_documents([[Text(3)]])


def refusal(call: Callable[[], object]) -> tuple[str, str, dict[str, str]]:
    """Return the status, details and trailing metadata of a failing call."""
    with pytest.raises(grpc.RpcError) as raised:
        call()
    error: Any = raised.value
    return error.code().name, error.details(), dict(error.trailing_metadata())


# Requests and answers


def test_a_valid_request_id_is_returned_and_any_other_is_replaced(serve: Serve) -> None:
    ask, ids = serve().place, []
    for sent in ([("x-request-id", "a.b:1")], [("x-request-id", "two words")], [("x-request-id", "x" * 129)], []):
        answer, call = ask.with_call(query("echo 5"), metadata=sent)
        assert answer == pb.PlaceResponse(positions=pb.Positions(cu_seqlens=[5]))
        ids += [value for key, value in call.trailing_metadata() if key == "x-request-id"]
    assert ids[0] == "a.b:1"
    assert all(re.fullmatch(r"[0-9a-f]{10}-[1-9]", request_id) for request_id in ids[1:])
    assert len(set(ids)) == 4


@pytest.mark.parametrize(
    ("sent", "status", "details"),
    [
        (b"\xff\xff", "INVALID_ARGUMENT", NO_MESSAGE),
        (b"", "INVALID_ARGUMENT", "query: got none, want a PositionsQuery"),
        (query("fail limit"), "RESOURCE_EXHAUSTED", "why " + "é" * 748 + "…"),
        (query("fail unsupported"), "UNIMPLEMENTED", "why " + "é" * 748 + "…"),
        (query("fail bug"), "INTERNAL", "internal error, request me"),
    ],
)
def test_errors_are_converted_to_statuses(serve: Serve, sent: bytes, status: str, details: str) -> None:
    refused = refusal(lambda: serve().place(sent, metadata=[("x-request-id", "me")]))
    assert refused == (status, details, {"x-request-id": "me"})


def test_the_documentation_lists_exactly_the_statuses_that_occur(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("alice alice-alice-alice-1\n")
    server, closed = serve(), serve(options={"listen": Listen(token_file=file)})
    health = health_pb2_grpc.HealthStub(server.channel)
    calls: list[Callable[[], object]] = [partial(server.place, query(f"fail {kind}")) for kind in ("limit", "bug")]
    calls += [partial(server.place, raw) for raw in (query("echo"), query("fail unsupported"), b"\xff")]
    calls += [partial(server.place, query("wait"), timeout=0.1), partial(closed.place, b"")]
    calls.append(partial(health.Check, health_pb2.HealthCheckRequest(service="x" * 10_000)))
    results = [ending(call) for call in calls]
    assert results[-1] == ("NOT_FOUND", f"service: got {'x' * 300!r}, want a service of this server")
    gone = server.place.future(query("wait"))
    assert eventually(lambda: server.fake.names.count("wait") == 2)
    gone.cancel()
    server.server._admission.ending = True
    results += [(gone.code().name, ""), ending(partial(server.place, query("echo")))]
    assert results[-1] == ("UNAVAILABLE", "the server is about to stop")
    assert server.metric("refused_total", method="Place", reason="stopping") == 1
    page = (Path(__file__).parents[2] / "docs" / "service-operation.md").read_text()
    table = page.partition("| status | meaning | who acts |")[2].partition("\n\n")[0]
    assert sorted({status for status, _ in results}) == sorted(re.findall(r"^\| ([A-Z_]+) \|", table, re.MULTILINE))


def test_requests_and_answers_beyond_their_limits_are_refused(serve: Serve) -> None:
    server = serve(limits={"request_bytes": 2000, "response_bytes": 1024})
    assert refusal(lambda: server.place(query("echo " + "1" * 3000)))[0] == "RESOURCE_EXHAUSTED"
    assert server.fake.names == []
    status, details, metadata = refusal(lambda: server.place(query("large"), metadata=[("x-request-id", "me")]))
    assert (status, metadata) == ("RESOURCE_EXHAUSTED", {"x-request-id": "me"})
    assert re.fullmatch(r"response_bytes: got \d+, want at most 1024 in one request to this server", details)
    assert server.place(query("nothing")).HasField("positions")  # set, but empty


def test_a_message_beyond_the_transport_limit_is_not_an_overload(serve: Serve) -> None:
    address = serve(limits={"request_bytes": 1024}).address
    segments = SegmentTable.from_documents([[Text(1)] * 2000])
    refused = r"limits\.request_bytes: got 60\d\d, want at most 1024 in one request to this server$"
    with Client(address) as client:
        with pytest.raises(LimitExceededError, match=f"^{refused}"):
            client.place(segments)
        with pytest.raises(LimitExceededError, match=rf"^queries\[0\]: {refused}"):
            list(client.stream([PositionsQuery(segments)]))


# Slots


@pytest.mark.parametrize(
    ("limits", "pool", "message"),
    [
        ({"max_in_flight": 1}, "", "max_in_flight: got 1 of 1 in use"),
        ({"max_in_flight": 4}, "image", "max_in_flight_images: got 1 of 1 in use"),
        ({"max_in_flight_bytes": 1024}, "", "max_in_flight_bytes: got 8 of 1024 in use"),
    ],
)
def test_calls_beyond_a_limit_are_counted_and_refused_with_a_hint(
    serve: Serve, limits: dict[str, int], pool: str, message: str
) -> None:
    server = serve(concurrency=limits, clients={"max_share": 1})
    more = query("echo " + "0" * 1020) if "bytes" in message else query(f"wait {pool}")
    first = server.place.future(query(f"wait {pool}".strip()))
    assert server.fake.begun.wait(60)
    status, details, metadata = refusal(lambda: server.place(more))
    assert (status, details) == ("RESOURCE_EXHAUSTED", message)
    assert metadata["grpc-retry-pushback-ms"] == "1000"
    if pool == "image":  # calls without images are still answered
        assert server.place(query("echo 1")).positions.cu_seqlens == [1]
    server.fake.go.set()
    assert first.result(60).positions.cu_seqlens == [1]
    assert server.place(more).positions.cu_seqlens in ([0], [1])
    assert server.metric("refused_total", method="Place", reason=message.partition(":")[0]) == 1
    # The documented condition for the overload alert holds.
    assert server.total("refused_total") > 0.05 * server.total("requests_total")
    assert eventually(lambda: not server.taken())


def test_every_call_in_a_burst_below_the_limits_is_answered(serve: Serve) -> None:
    server = serve(clients={"max_share": 1})
    calls = [server.place.future(query("wait"), timeout=60) for _ in range(100)]  # on one connection, with 256 slots
    assert eventually(lambda: len(server.fake.names) == 100)
    assert server.place(query("echo 7"), timeout=60).positions.cu_seqlens == [7]
    server.fake.go.set()
    assert [call.code().name for call in calls] == ["OK"] * 100


# Deadlines and cancellation


@pytest.mark.parametrize("pool", ["", "image"])
def test_an_expired_deadline_or_a_cancellation_stops_the_work(serve: Serve, pool: str) -> None:
    server = serve()
    for seconds in (0.3, 3, 30):  # a longer deadline each time, until the work begins before the deadline
        assert refusal(partial(server.place, query(f"wait {pool}"), timeout=seconds))[0] == "DEADLINE_EXCEEDED"
        if server.fake.begun.is_set():
            break
    assert server.fake.begun.is_set()
    assert server.fake.stopped.wait(60)
    server.fake.begun.clear()
    server.fake.stopped.clear()
    call = server.place.future(query(f"wait {pool}"))
    assert server.fake.begun.wait(60)
    assert not server.fake.stopped.is_set()
    call.cancel()
    assert server.fake.stopped.wait(60)
    assert eventually(lambda: not server.taken())
    statuses = [server.metric("requests_total", method="Place", status=name) for name in ("OK", "CANCELLED")]
    assert statuses == [None, 1]


# Streams


@pytest.mark.parametrize("side_by_side", [False, True])
def test_a_stream_answers_in_order_and_continues_after_a_failed_item(serve: Serve, side_by_side: bool) -> None:
    server = serve(side_by_side=side_by_side)
    # If items run in parallel, the first items wait for later ones.
    names = ("last 3", "last 2", "fail bug", "echo 4") if side_by_side else ("last 0", "last 1", "fail bug", "echo 4")
    results = list(server.stream(items(*names), metadata=[("x-request-id", "me")]))
    numbers = [int(name[-1]) if name[-1].isdigit() else None for name in names]
    assert [(answer.id, list(answer.positions.cu_seqlens), answer.error.message) for answer in results] == [
        (i, [] if number is None else [number], "internal error, request me.3" if number is None else "")
        for i, number in enumerate(numbers)
    ]
    (answer,) = server.stream(iter([pb.StreamPlaceRequest(id=7)]))
    assert (answer.id, answer.error.code, answer.error.message) == (7, 1, "query: got none, want a PositionsQuery")


@pytest.mark.parametrize("side_by_side", [False, True])
def test_malformed_bytes_end_the_stream_after_the_answers_to_earlier_items(serve: Serve, side_by_side: bool) -> None:
    server = serve(side_by_side=side_by_side)
    ask: Stream = server.channel.stream_stream(STREAM)
    call = ask(iter([next(items("echo 1")).SerializeToString(), b"\xff\xff"]))
    assert pb.StreamPlaceResponse.FromString(next(call)).positions.cu_seqlens == [1]
    assert refusal(lambda: next(call))[:2] == ("INVALID_ARGUMENT", NO_MESSAGE)
    assert eventually(lambda: not server.taken())


def test_a_stream_reads_no_further_ahead_than_its_window(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "ItemWindow", partial(ItemWindow, 3))
    server = serve(side_by_side=True)
    call = server.stream(items("wait image", *["echo 1"] * 9))
    assert eventually(lambda: len(server.fake.names) >= 3)
    time.sleep(0.2)
    assert len(server.fake.names) == 3
    server.fake.go.set()
    assert [answer.id for answer in call] == list(range(10))


def test_an_unread_stream_holds_few_answers_and_frees_its_thread_when_cancelled(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "ItemWindow", partial(ItemWindow, 16, 1024))
    server = serve(concurrency={"max_streams": 1})
    for cancelled in (True, False):
        server.fake.names.clear()
        call = server.stream(items(*["large"] * 20))
        assert eventually(lambda: len(server.fake.names) >= 2)
        time.sleep(0.3)
        assert 2 <= len(server.fake.names) <= 8  # and not sixteen, the size of the window
        if cancelled:
            call.cancel()
            assert eventually(lambda: not server.taken())
        else:  # read by the only thread for streams
            assert sum(1 for _ in call) == 20


def test_a_cancelled_stream_cancels_its_items_and_frees_its_slot(serve: Serve) -> None:
    server = serve(concurrency={"max_streams": 1})
    call = server.stream(items("wait image"))
    assert server.fake.begun.wait(60)
    status, details, metadata = refusal(lambda: next(server.stream(items("echo 1"))))
    assert (status, details) == ("RESOURCE_EXHAUSTED", "max_streams: got 1 of 1 in use")
    assert metadata["grpc-retry-pushback-ms"] == "1000"
    call.cancel()
    assert server.fake.stopped.wait(60)
    assert eventually(lambda: not server.taken() and server.metric("streams") == 0)
    assert [answer.id for answer in server.stream(items("echo 1"))] == [0]


def test_an_idle_stream_is_ended(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "IDLE_SECONDS", 0.2)
    more = threading.Event()

    def some() -> Iterable[pb.StreamPlaceRequest]:
        yield from items("echo 1")
        more.wait(60)

    server = serve()
    call = server.stream(some())
    next(call)
    assert refusal(lambda: next(call))[:2] == ("UNAVAILABLE", "stream: no item arrived for 0.2 s; open a new stream")
    more.set()
    assert server.metric("refused_total", method="StreamPlace", reason="stopping") is None


def test_a_client_waits_for_a_free_stream_slot(serve: Serve) -> None:
    server = serve(concurrency={"max_streams": 1})
    first = server.stream(items("wait"))
    assert server.fake.begun.wait(60)
    threading.Timer(0.2, server.fake.go.set).start()
    with Client(server.address) as client, pytest.raises(ServiceError, match="got neither table nor dense"):
        list(client.stream([PositionsQuery(SEGMENTS)]))  # this error proves that the server answered
    assert len(list(first)) == 1


# Background tasks and the log


def test_a_failed_background_task_stops_no_other_task(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_TICK", 0.01)
    logs, ran = KeptLogs("error"), [0]
    server = serve(options={"logs": logs}).server

    def broken() -> None:
        raise OSError("no thread")

    def works() -> None:
        ran[0] += 1

    server._tasks[:] = [broken, works]
    assert eventually(lambda: ran[0] > 2)
    assert server.live
    assert "no thread" in logs.lines()[0]["exception"]
    monkeypatch.setattr(app, "_DEAD_SECONDS", 0.0)
    assert not server.live


def test_log_lines_are_json_and_only_internal_errors_have_tracebacks(serve: Serve) -> None:
    logs, named = KeptLogs(), [("x-request-id", "me")]
    server = serve(options={"logs": logs})
    server.place(query("echo 1"), metadata=named)
    refusal(lambda: server.place(query("fail bug"), metadata=named))
    refusal(lambda: server.place(b"", metadata=named))
    list(server.stream(items("echo 1"), metadata=named))
    assert eventually(lambda: server.metric("streams") == 0)
    time.sleep(0.1)  # a call is logged after its answer is sent
    lines = logs.lines()
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
