"""Test the server's admission, deadlines, streams, errors, metrics and logs through a real port."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from serving import LARGE, PLACE, STREAM, KeptLogs, Serve, ending, items, query, refusal
from waiting import eventually

from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos_server import arrivals, pulse
from mmpos_server.call import Call
from mmpos_server.config import Limits, ServerConfig
from mmpos_server.listening import Listen

NO_MESSAGE = "request: the bytes are not a protobuf message of this method"


def unary(channel: grpc.Channel, path: str) -> Any:
    """Return a method that takes and returns bytes."""
    method: Any = channel.unary_unary(path)
    return method


# Requests and answers


def test_a_valid_request_id_is_returned_with_a_failure_and_any_other_is_replaced(serve: Serve) -> None:
    ask, ids = serve().place, []
    for sent in ([("x-request-id", "a.b:1")], [("x-request-id", "two words")], [("x-request-id", "x" * 129)], []):
        answer, call = ask.with_call(query("echo 5"), metadata=sent)
        assert (answer.positions.cu_seqlens, call.trailing_metadata()) == ([5], ())
        ids.append(refusal(partial(ask, b"", metadata=sent))[2]["x-request-id"])
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
    never = {"grpc-retry-pushback-ms": "-1"} if status == "RESOURCE_EXHAUSTED" else {}
    assert refused == (status, details, {"x-request-id": "me", **never})


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
    gone = server.place.future(query("wait work"))
    assert eventually(lambda: "wait work" in server.fake.names)
    gone.cancel()
    server.server.arrivals.draining = True
    results += [(gone.code().name, ""), ending(partial(server.place, query("echo")))]
    assert results[-1] == ("UNAVAILABLE", "the server is about to stop")
    assert server.metric("refused_total", method="Place", reason="stopping") == 1
    page = (Path(__file__).parents[2] / "docs" / "service-operation.md").read_text()
    table = page.partition("| status | meaning | who acts |")[2].partition("\n\n")[0]
    assert sorted({status for status, _ in results}) == sorted(re.findall(r"^\| ([A-Z_]+) \|", table, re.MULTILINE))


def test_requests_and_answers_beyond_their_limits_are_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerConfig, "limits", Limits(request_bytes=2000, response_bytes=1024))
    server = serve(request_bytes=2000)
    assert refusal(lambda: server.place(query("echo " + "1" * 3000)))[0] == "RESOURCE_EXHAUSTED"
    assert server.fake.names == []
    status, details, metadata = refusal(lambda: server.place(query("large"), metadata=[("x-request-id", "me")]))
    assert (status, metadata["grpc-retry-pushback-ms"]) == ("RESOURCE_EXHAUSTED", "-1")
    assert re.fullmatch(r"response_bytes: got \d+, want at most 1024 in one request to this server", details)
    assert server.place(query("nothing")).HasField("positions")  # set, but empty


# Places


@pytest.mark.parametrize("pool", ["", " work"])
def test_every_call_in_a_burst_is_answered_and_keeps_no_other_connection_waiting(serve: Serve, pool: str) -> None:
    server = serve()
    calls = [server.place.future(query(f"wait{pool}"), timeout=300) for _ in range(30)]  # 16 at a time
    assert eventually(lambda: len(server.fake.names) == 16)
    with grpc.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)]) as other:
        assert ending(partial(unary(other, PLACE), query("echo 7"), timeout=300)) == ("OK", "")
    server.fake.go.set()
    assert [call.code().name for call in calls] == ["OK"] * 30


def test_a_large_request_needs_a_place_for_which_a_build_waits(serve: Serve) -> None:
    server = serve(options={"methods": None})
    server.server.arrivals.messages.add("other", 16)
    large = pb.PlaceRequest(query=pb.PositionsQuery(start_per_document=[1] * 2**18)).SerializeToString()
    assert refusal(lambda: server.place(large))[1].startswith(
        "large_messages: got 0 in use by this client and 16 by all"
    )
    build = unary(server.channel, "/mmpos.rpc.v1.SequenceService/Build").future(b"", timeout=300)
    assert eventually(lambda: server.server.arrivals.messages.wanted)
    server.server.arrivals.messages.leave("other")
    assert build.code().name == "INVALID_ARGUMENT"
    assert eventually(lambda: server.server.arrivals.messages.taken == 15)
    server.server.arrivals.messages.leave("other", 15)


def test_a_call_has_given_its_places_back_when_it_is_answered(serve: Serve) -> None:
    server = serve()
    server.fake.go.set()
    for name in ("wait work", "nothing " + "x" * LARGE):
        server.place(query(name))
        assert server.taken() == {}
    list(server.stream(items("wait work", "large")))
    assert server.taken() == {}


# Deadlines and cancellation


@pytest.mark.parametrize("pool", ["", "image"])
def test_an_expired_deadline_or_a_cancellation_stops_the_work(serve: Serve, pool: str) -> None:
    server = serve()
    for seconds in (0.3, 3, 30):  # a longer deadline each time, until the work begins before the deadline
        assert refusal(partial(server.place, query(f"wait {pool}"), timeout=seconds))[0] == "DEADLINE_EXCEEDED"
        if server.fake.begun.is_set():
            break
    assert server.fake.begun.is_set()
    assert server.fake.stopped.wait(300)
    server.fake.begun.clear()
    server.fake.stopped.clear()
    call = server.place.future(query(f"wait {pool}"))
    assert server.fake.begun.wait(300)
    call.cancel()
    assert server.fake.stopped.wait(300)
    assert eventually(lambda: bool(server.metric("requests_total", method="Place", status="CANCELLED")))
    assert server.metric("requests_total", method="Place", status="OK") is None
    assert eventually(lambda: not server.taken())


def test_failed_calls_and_streams_are_freed_without_a_garbage_collection(serve: Serve) -> None:
    server = serve()
    ask: Any = server.channel.stream_stream(STREAM)
    gc.collect()
    gc.disable()
    try:
        refusal(partial(next, ask(iter([b"\xff\xff"]))))
        server.server.arrivals.unread.add("other", 2**28)  # refuses large answers
        for name in ("fail bug", "fail limit", "large"):
            refusal(partial(server.place, query(name)))
        assert eventually(lambda: not [each for each in gc.get_objects() if type(each) is Call])
    finally:
        gc.enable()


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
    ask: Any = server.channel.stream_stream(STREAM)
    call = ask(iter([next(items("echo 1")).SerializeToString(), b"\xff\xff"]))
    assert pb.StreamPlaceResponse.FromString(next(call)).positions.cu_seqlens == [1]
    assert refusal(lambda: next(call))[:2] == ("INVALID_ARGUMENT", NO_MESSAGE)
    assert eventually(lambda: not server.taken())


def test_a_stream_reads_few_items_ahead(serve: Serve) -> None:
    server = serve(side_by_side=True)
    call = server.stream(items("wait image", *["echo 1"] * 19))
    assert eventually(lambda: len(server.fake.names) >= 6)
    time.sleep(0.2)
    assert len(server.fake.names) == 6  # one is awaited, four wait behind it, and one has been read
    server.fake.go.set()
    assert [answer.id for answer in call] == list(range(20))


def test_a_stream_reads_no_item_while_unread_answers_leave_no_room(serve: Serve) -> None:
    server = serve()
    server.server.arrivals.unread.add("other", arrivals.UNREAD_BYTES)
    call = server.stream(items("echo 1"))
    assert eventually(lambda: server.metric("streams") == 1)
    time.sleep(0.2)
    assert server.fake.names == []
    server.server.arrivals.unread.leave("other", arrivals.UNREAD_BYTES)
    assert [answer.id for answer in call] == [0]


def test_a_cancelled_stream_cancels_its_items_and_frees_its_place(serve: Serve) -> None:
    server = serve()
    server.server.arrivals.streams.add("other", 39)
    call = server.stream(items("wait image"))
    assert server.fake.begun.wait(300)
    status, details, metadata = refusal(lambda: next(server.stream(items("echo 1"))))
    message = "streams: got 1 in use by this client and 40 by all, want at most 20 and 40"
    assert (status, details) == ("RESOURCE_EXHAUSTED", message)
    assert metadata["grpc-retry-pushback-ms"] == "1000"
    assert server.metric("refused_total", method="StreamPlace", reason="streams") == 1
    call.cancel()
    assert server.fake.stopped.wait(300)
    assert eventually(lambda: server.taken() == {"streams": 39} and server.metric("streams") == 0)
    assert [answer.id for answer in server.stream(items("echo 1"))] == [0]
    ended = [server.metric("requests_total", method="StreamPlace", status=name) for name in ("OK", "CANCELLED")]
    assert ended == [1, 1]


def test_a_cancelled_stream_leaves_no_item_and_no_error_behind(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = serve(side_by_side=True)
    call = server.stream(items(*["wait"] * 20))
    assert eventually(lambda: len(server.fake.names) == 6)
    call.cancel()
    assert eventually(lambda: server.fake.over == 6)
    ask: Any = server.channel.stream_stream(STREAM)
    malformed = ask(iter([next(items("wait")).SerializeToString(), *[b"\xff\xff"] * 3]))
    assert eventually(lambda: len(server.fake.names) == 7)
    time.sleep(0.2)  # the malformed items fail meanwhile
    malformed.cancel()
    assert eventually(lambda: not server.taken())
    gc.collect()
    assert caplog.records == []


IDLE = "stream: no item arrived for 0.5 s; open a new stream"
STOPS = "the server is about to stop: send unanswered items in a new stream"


@pytest.mark.parametrize("reason", [IDLE, STOPS])
def test_a_stream_that_waits_for_an_item_is_ended(serve: Serve, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    server, second, more = serve(), threading.Event(), threading.Event()

    def two() -> Iterator[pb.StreamPlaceRequest]:
        yield from items("echo 1")
        second.wait(300)
        yield from items("echo 2")
        more.wait(300)

    call = server.stream(two())
    next(call)
    monkeypatch.setattr(arrivals, "RECEIVE_SECONDS", 0.1)  # of the first item alone
    monkeypatch.setattr(arrivals, "IDLE_SECONDS", 0.5 if reason == IDLE else 600)
    second.set()
    next(call)
    server.server.arrivals.draining = reason == STOPS
    assert refusal(lambda: next(call))[:2] == ("UNAVAILABLE", reason)
    more.set()


# The calls to oneself


def test_a_failed_check_stops_no_later_one(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    logs, ran = KeptLogs(), [0]

    def broken(_: object) -> None:
        ran[0] += 1
        raise OSError("no thread")

    monkeypatch.setattr(arrivals.Arrivals, "check", broken)
    serve(options={"logs": logs})
    assert eventually(lambda: ran[0] > 2)
    assert "no thread" in logs.lines()[0]["exception"]


def test_a_server_that_does_not_answer_its_own_calls_has_failed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_PERIOD_SECONDS", 0.01)
    reasons = SimpleQueue[str]()
    server = serve(options={"failed": reasons.put})
    assert eventually(lambda: 0.0 < server.server._pulse.lag < 60.0)
    monkeypatch.setattr(server.server.health, "check", lambda raw: time.sleep(0.2))  # the loop is busy
    monkeypatch.setattr(pulse, "_TIMEOUT_SECONDS", 0.02)
    assert reasons.get(timeout=300) == "3 calls to itself failed, the last with DEADLINE_EXCEEDED"


def test_only_failures_in_a_row_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class FailedError(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNAVAILABLE

    outcomes, calls, failed = iter("ff.ff.fff"), list[str](), SimpleQueue[int]()

    def check(request: bytes, timeout: float) -> None:
        calls.append(next(outcomes, "."))
        if calls[-1] == "f":
            raise FailedError

    channel = SimpleNamespace(unary_unary=lambda path: check)
    monkeypatch.setattr(grpc, "insecure_channel", lambda target: nullcontext(channel))
    monkeypatch.setattr(pulse, "_PERIOD_SECONDS", 0.001)
    beat = pulse.Pulse(lambda reason: failed.put(len(calls)))
    beat.start(str)
    assert failed.get(timeout=300) == 9
    beat.stop()


def test_one_slow_call_to_oneself_is_no_lag() -> None:
    beat = pulse.Pulse(print)
    beat._before, beat._last = 9.0, 0.1
    assert beat.lag == 0.1
    beat._before, beat._last = 0.1, 9.0
    assert beat.lag == 0.1
    beat._began = -1e9  # a call that is still running
    assert beat.lag == 9.0
    beat.stop()
