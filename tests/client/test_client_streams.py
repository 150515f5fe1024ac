"""Test the streams of both clients: order, windows, errors, broken connections and cancellation."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest
from clients import failure, open_client
from fake_server import UNAVAILABLE, Fake, Stream, echo_stream, serving
from results import assert_equal
from waiting import eventually

from mmpos import Grid, SegmentTable, SequenceBuilder, Text
from mmpos.client import PositionsQuery, streams
from mmpos.client.channel import error_of
from mmpos.errors import InvalidInputError, ServiceError, ServiceTimeoutError, ServiceUnavailableError
from mmpos.images import ImageProcessor
from mmpos.rpc.v1 import positions_pb2 as pb

SEGMENTS = SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(4)]])
WRONG = PositionsQuery(SEGMENTS, "none")
UNSENT: Any = "no query"


def numbered(count: int) -> list[PositionsQuery]:
    return [PositionsQuery(SEGMENTS, start=i) for i in range(count)]


@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_stream_yields_the_same_results_as_the_calls_in_order(
    kind: str, window: int, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "WINDOW", window)
    with open_client(kind, server) as client:
        assert_equal(list(client.stream(iter(numbered(20)))), [query.run() for query in numbered(20)])
        assert list(client.stream([])) == []
        batches: list[list[list[Any]]] = [[["a"], ["b", Grid(1, 2)]], [["c"]], []]
        assert_equal(list(client.stream_build(batches)), [SequenceBuilder().build_batch(batch) for batch in batches])
        ((built,),) = client.stream_build([[["c"]]], scheme="mrope", start=7)
        assert_equal(built, SequenceBuilder(scheme="mrope", start=7).build(["c"]))


def test_errors_are_yielded_in_order_or_end_the_stream(kind: str, server: str) -> None:
    queries = [*numbered(2), WRONG, UNSENT, *numbered(1)]
    batches: list[Any] = [[["a"], [0.5]], [["b"]]]
    with open_client(kind, server) as client:

        def failed(name: str, *args: object, **kwargs: object) -> tuple[type, str]:
            return failure(lambda: list(getattr(client, name)(*args, **kwargs)))

        results = list(client.stream(queries, errors="return"))
        assert_equal([results[i] for i in (0, 1, 4)], [query.run() for query in (*numbered(2), *numbered(1))])
        unsent = InvalidInputError, "query: got str, want a PositionsQuery"
        assert [(type(e), str(e)) for e in results[2:4]] == [failure(WRONG.run), unsent]
        assert failed("stream", queries) == failure(WRONG.run)
        assert failed("stream", [UNSENT, WRONG]) == unsent
        want = failure(lambda: SequenceBuilder(images=ImageProcessor()).build_batch(batches[0]))
        (_, wrong), (right,) = client.stream_build(batches, errors="return")
        assert (type(wrong), str(wrong)) == want
        assert_equal(right, SequenceBuilder().build(["b"]))
        assert failed("stream_build", batches) == want
        (refused,) = client.stream_build([[["a"], ["b"]]], errors="return", scheme="none")
        assert [type(error) for error in refused] == [InvalidInputError] * 2
        assert failed("stream_build", [5], errors="return")[0] is InvalidInputError
        assert failed("stream", 5)[1] == "queries: got int, want an iterable"
        assert failed("stream", [], errors="no")[1] == "errors: got 'no', want one of 'raise', 'return'"


@pytest.mark.parametrize("window", [1, 4])
def test_a_source_is_read_no_further_ahead_than_the_window(
    kind: str, window: int, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "WINDOW", window)
    consumed = 0

    def source() -> Iterator[PositionsQuery]:
        nonlocal consumed
        for query in numbered(30):
            consumed += 1
            yield query

    with open_client(kind, server) as client:
        ahead = [consumed - i for i, _ in enumerate(client.stream(source()))]
    assert len(ahead) == 30
    assert max(ahead) <= window
    assert consumed == 30


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that receives each stream that a client opens."""
    links: list[Any] = []
    original: Any = streams._opened

    def opened(*arguments: Any) -> Any:
        links.append(original(*arguments))
        return links[-1]

    monkeypatch.setattr(streams, "_opened", opened)
    return links


def after(event: Callable[[], bool], links: list[Any], kind: str, count: int, sent: list[PositionsQuery]) -> Any:
    """Return a source that yields each query but the first after an event, or after the answer if it is awaited."""

    def source() -> Iterator[PositionsQuery]:
        for query in numbered(count):
            assert not sent or eventually(event)
            sent.append(query)
            yield query

    async def awaited() -> AsyncIterator[PositionsQuery]:
        for query in numbered(count):
            if sent:
                await asyncio.wait([links[-1].answer])
            sent.append(query)
            yield query

    return source() if kind == "sync" else awaited()


def test_an_answer_does_not_wait_until_a_slow_source_fills_the_window(kind: str, server: str, links: list[Any]) -> None:
    sent: list[PositionsQuery] = []
    source = after(lambda: links[-1].ready, links, kind, 4, sent)  # the previous answer has arrived
    with open_client(kind, server) as client:
        counts = [len(sent) for _ in client.stream(source)]
    assert len(counts) == 4
    assert counts[0] < 4


def test_an_error_in_the_source_is_raised_to_the_caller(kind: str, server: str) -> None:
    def broken() -> Iterator[PositionsQuery]:
        yield from numbered(1)
        raise KeyError("mine")

    with open_client(kind, server) as client, pytest.raises(KeyError, match="mine"):
        list(client.stream(broken()))


def test_closing_the_iterator_cancels_the_stream(kind: str) -> None:
    ended = threading.Event()

    def stream(
        requests: Iterator[pb.StreamPlaceRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.StreamPlaceResponse]:
        context.add_callback(ended.set)
        yield next(echo_stream(requests, context))
        ended.wait(60)  # set only when the call ends

    with serving(Fake(stream=stream)) as address, open_client(kind, address) as client:
        results = client.stream(numbered(10))
        assert_equal(next(results), numbered(1)[0].run())
        assert not ended.is_set()
        results.close()
        assert ended.wait(30)


def test_a_completed_stream_is_not_cancelled(kind: str) -> None:
    active: list[bool] = []

    def stream(
        requests: Iterator[pb.StreamPlaceRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.StreamPlaceResponse]:
        yield from echo_stream(requests, context)
        time.sleep(0.1)
        active.append(context.is_active())

    with serving(Fake(stream=stream)) as address, open_client(kind, address) as client:
        assert len(list(client.stream(numbered(3)))) == 3
    assert active == [True]


def test_a_stream_that_breaks_with_no_unanswered_items_loses_nothing(
    kind: str, links: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> bool:  # the stream is broken and its reader has noticed
        return all(thread.name != "mmpos-stream" for thread in threading.enumerate())

    def ending(
        requests: Iterator[pb.StreamPlaceRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.StreamPlaceResponse]:
        yield next(echo_stream(requests, context))
        context.abort(*UNAVAILABLE[:2])

    source = after(broken, links, kind, 3, [])
    monkeypatch.setattr(streams, "WINDOW", 1)
    with serving(Fake(stream=ending)) as address, open_client(kind, address, attempts=1) as client:
        assert_equal(list(client.stream(source)), [query.run() for query in numbered(3)])


def breaking(after: int, times: int) -> tuple[Stream, list[int]]:
    """Return a handler that breaks its first ``times`` streams after ``after`` answers, and the answers per stream."""
    answered: list[int] = []

    def stream(
        requests: Iterator[pb.StreamPlaceRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.StreamPlaceResponse]:
        answered.append(0)
        number = len(answered)
        for response in echo_stream(requests, context):
            if number <= times and answered[-1] == after:
                context.abort(*UNAVAILABLE[:2])
            answered[-1] += 1
            yield response

    return stream, answered


def test_items_unanswered_by_a_broken_stream_are_sent_again(kind: str) -> None:
    stream, answered = breaking(
        after=4, times=6
    )  # breaks more often than attempts allows, but never twice without an answer
    with serving(Fake(stream=stream)) as address, open_client(kind, address, attempts=2) as client:
        assert_equal(list(client.stream(numbered(30))), [query.run() for query in numbered(30)])
    # An answer in transit when its stream broke may be sent again.
    assert answered[:6] == [4] * 6
    assert answered[6] >= 6


def test_a_stream_that_breaks_too_often_without_an_answer_is_an_error(kind: str) -> None:
    stream, answered = breaking(after=0, times=9)
    with serving(Fake(stream=stream)) as address, open_client(kind, address, attempts=2) as client:
        error, words = failure(lambda: list(client.stream(numbered(3))))
    # A write may fail before the status of the broken stream is read.
    assert error is ServiceUnavailableError
    assert words in ("gone", "stream: the connection broke while a request was written")
    assert answered == [0, 0]


def test_a_failed_write_is_reported_as_a_broken_connection() -> None:
    for details, kind in (("Internal error from Core", ServiceUnavailableError), ("other", ServiceError)):
        error = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
        assert type(error_of(error)) is kind


def test_a_stream_that_ends_too_early_is_resumed(kind: str) -> None:
    def stream(
        requests: Iterator[pb.StreamPlaceRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.StreamPlaceResponse]:
        answers = echo_stream(requests, context)
        yield next(answers)
        yield next(answers)

    with serving(Fake(stream=stream)) as address, open_client(kind, address) as client:
        assert_equal(list(client.stream(numbered(6))), [query.run() for query in numbered(6)])


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (pb.StreamPlaceResponse(id=1), "answer: got id 1, want 0"),
        (pb.StreamPlaceResponse(id=0), "answer: got neither a result nor an error"),
    ],
)
def test_unexpected_answers_are_service_errors(kind: str, response: pb.StreamPlaceResponse, message: str) -> None:
    def stream(
        requests: Iterator[pb.StreamPlaceRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.StreamPlaceResponse]:
        next(requests)
        yield response

    with serving(Fake(stream=stream)) as address, open_client(kind, address) as client:
        assert failure(lambda: list(client.stream(numbered(1)))) == (ServiceError, message)


def test_the_stream_timeout_limits_the_wait_for_each_answer(kind: str) -> None:
    def stream(
        requests: Iterator[pb.StreamPlaceRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.StreamPlaceResponse]:
        for n, response in enumerate(echo_stream(requests, context)):
            time.sleep(0.1 if n < 3 else 0.5)
            yield response

    error = ServiceTimeoutError, "stream: no answer in 0.2 seconds"
    with serving(Fake(stream=stream)) as address, open_client(kind, address, timeout=0.2) as client:
        assert failure(lambda: list(client.stream(numbered(4)))) == error
