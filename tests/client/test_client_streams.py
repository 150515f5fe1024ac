"""Test the streams of both clients: order, errors, broken streams, late answers and cancellation."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count, islice
from typing import Any

import grpc
import pytest
from clients import failure, open_client
from fake_server import UNAVAILABLE, Fake, echo_stream, serving
from results import assert_equal
from waiting import eventually

from mmpos import Grid, SegmentTable, SequenceBuilder, Text
from mmpos.client import AsyncClient, Client, PositionsQuery
from mmpos.errors import (
    InvalidInputError,
    ServiceError,
    ServiceOverloadedError,
    ServiceTimeoutError,
    ServiceUnavailableError,
)
from mmpos.images import ImageProcessor
from mmpos.rpc.v1 import positions_pb2 as pb

SEGMENTS = SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(4)]])
WRONG = PositionsQuery(SEGMENTS, "none")
UNSENT: Any = "no query"

BROKE = "the connection broke while a request was written"
"""Reason that grpc.aio gives if it writes before it reads the status of a stream that has ended."""

Requests = Iterator[pb.StreamPlaceRequest]
Responses = Iterator[pb.StreamPlaceResponse]


def numbered(count: int) -> list[PositionsQuery]:
    return [PositionsQuery(SEGMENTS, start=i) for i in range(count)]


def paced(kind: str, over: threading.Event, *pauses: float) -> Any:
    """Return a source for this kind of client: a numbered query after each pause, which ``over`` ends."""

    def source() -> Iterator[PositionsQuery]:
        for query, pause in zip(numbered(len(pauses)), pauses, strict=True):
            assert over.wait(pause) or pause < 300, "the stream has waited for its source"
            yield query

    async def async_source() -> AsyncIterator[PositionsQuery]:
        for query, pause in zip(numbered(len(pauses)), pauses, strict=True):
            await asyncio.sleep(pause)
            assert pause < 300, "the stream has waited for its source"
            yield query

    return source() if kind == "sync" else async_source()


def test_a_stream_yields_the_same_results_as_the_calls_in_order(kind: str, server: str) -> None:
    with open_client(kind, server) as client:
        assert_equal(list(client.stream(iter(numbered(60)))), [query.run() for query in numbered(60)])
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


def test_a_source_may_wait_for_each_result_also_of_an_item_that_cannot_be_sent(server: str) -> None:
    queries, answered = [*numbered(2), UNSENT, *numbered(2)], threading.Semaphore()

    def source() -> Iterator[PositionsQuery]:
        for query in queries:
            assert answered.acquire(timeout=300)
            yield query

    with Client(server) as client:
        for _ in client.stream(source(), errors="return"):
            answered.release()

    async def main() -> None:
        results = asyncio.Queue[object]()
        results.put_nowait(None)

        async def awaited() -> AsyncIterator[PositionsQuery]:
            for query in queries:
                await results.get()
                yield query

        async with AsyncClient(server) as client:
            async for result in client.stream(awaited(), errors="return"):
                results.put_nowait(result)

    asyncio.run(main())


def test_an_endless_source_is_read_no_further_than_the_server_accepts(kind: str, server: str) -> None:
    numbers = count()
    with open_client(kind, server) as client:
        results = client.stream(PositionsQuery(SEGMENTS, start=i) for i in numbers)
        assert_equal([next(results) for _ in range(20)], [query.run() for query in numbered(20)])
        results.close()

    def rests() -> bool:
        read = next(numbers)
        time.sleep(0.2)
        return next(numbers) == read + 1

    assert eventually(rests)  # a closed stream reads at most the item that gRPC's thread is about to read


@pytest.mark.parametrize("error", [KeyError, grpc.RpcError])
def test_an_error_of_the_source_is_raised_after_earlier_results(kind: str, server: str, error: type[Exception]) -> None:
    def broken() -> Iterator[PositionsQuery]:
        yield from numbered(3)
        raise error("mine")

    results: list[object] = []
    with open_client(kind, server) as client, pytest.raises(error, match="mine"):
        results.extend(client.stream(broken()))  # keeps those before the error
    assert_equal(results, [query.run() for query in numbered(3)])


def test_closing_the_iterator_cancels_the_stream(kind: str) -> None:
    ended = threading.Event()

    def stream(requests: Requests, context: grpc.ServicerContext) -> Responses:
        context.add_callback(ended.set)
        yield next(echo_stream(requests, context))
        ended.wait(300)  # set only when the call ends

    with serving(Fake(stream=stream)) as address, open_client(kind, address) as client:
        results = client.stream(numbered(10))
        assert_equal(next(results), numbered(1)[0].run())
        assert not ended.is_set()
        results.close()
        assert ended.wait(300)


def test_a_completed_stream_is_not_cancelled(kind: str) -> None:
    active: list[bool] = []

    def stream(requests: Requests, context: grpc.ServicerContext) -> Responses:
        yield from echo_stream(requests, context)
        time.sleep(0.1)
        active.append(context.is_active())

    with serving(Fake(stream=stream)) as address, open_client(kind, address) as client:
        assert len(list(client.stream(numbered(3)))) == 3
    assert active == [True]


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("after", "reason"), [(0, "gone"), (4, "gone"), (2, "the server ended the stream")])
def test_a_broken_stream_names_its_first_unanswered_item(kind: str, after: int, reason: str, waits: bool) -> None:
    answered, results, over = list[int](), list[object](), threading.Event()

    def stream(requests: Requests, context: grpc.ServicerContext) -> Responses:
        for response in islice(echo_stream(requests, context), after):
            answered.append(response.id)
            yield response
        if not waits:
            next(requests, None)  # the first that gets no answer
        if reason == "gone":
            context.abort(*UNAVAILABLE[:2])

    source = paced(kind, over, *[0] * after, 300) if waits else numbered(30)
    with serving(Fake(stream=stream)) as address, open_client(kind, address) as client:
        error = failure(lambda: results.extend(client.stream(source)))
        over.set()
    reasons = (reason,) if waits else (reason, BROKE)
    assert error in [(ServiceUnavailableError, f"queries[{after}]: {reason}") for reason in reasons]
    assert_equal(results, [query.run() for query in numbered(after)])
    assert answered == [*range(after)]  # nothing is sent again


def test_a_stream_refused_by_an_overloaded_server_keeps_its_retry_time(kind: str) -> None:
    def stream(requests: Requests, context: grpc.ServicerContext) -> Responses:
        context.set_trailing_metadata((("grpc-retry-pushback-ms", "250"),))
        yield context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")

    busy = pytest.raises(ServiceOverloadedError, match=r"^queries\[0\]: busy$")
    with serving(Fake(stream=stream)) as address, open_client(kind, address) as client, busy as caught:
        list(client.stream(numbered(1)))
    assert caught.value.retry_after == 0.25


ODD: list[tuple[Callable[[Any], list[Any]], str]] = [
    (lambda right: [pb.StreamPlaceResponse(id=1)], "id 1, want 0"),
    (lambda right: [pb.StreamPlaceResponse()], "neither a result nor an error"),
    (lambda right: [right, right], "more answers than requests"),
]


@pytest.mark.parametrize(("answers", "got"), ODD)
def test_unexpected_answers_are_service_errors(kind: str, answers: Callable[[Any], list[Any]], got: str) -> None:
    def stream(requests: Requests, context: grpc.ServicerContext) -> Responses:
        yield from answers(next(echo_stream(requests, context)))

    with serving(Fake(stream=stream)) as address, open_client(kind, address) as client:
        assert failure(lambda: list(client.stream(numbered(1)))) == (ServiceError, f"answer: got {got}")


def timed_out(kind: str, timeout: float) -> tuple[int, tuple[type, str]]:
    """Return the number of results and the error of a stream with pauses, whose fourth answer does not arrive."""
    over = threading.Event()

    def stream(requests: Requests, context: grpc.ServicerContext) -> Responses:
        for n, response in enumerate(echo_stream(requests, context)):
            over.wait(0.4 * timeout if n < 3 else 300)
            yield response

    results: list[object] = []

    def read(client: Any) -> None:
        for result in client.stream(paced(kind, over, 0, 0, 1.4 * timeout, 0)):
            results.append(result)
            time.sleep(1.4 * timeout if len(results) == 1 else 0)

    with serving(Fake(stream=stream)) as address, open_client(kind, address, timeout=timeout) as client:
        error = failure(read, client)
        over.set()
    return len(results), error


def test_the_timeout_limits_the_wait_for_each_answer_but_not_for_the_source_or_the_caller(kind: str) -> None:
    for timeout in (0.5, 5.0, 50.0):  # a longer one each time, until this machine answers before it
        number, error = timed_out(kind, timeout)
        if number == 3:
            break
    assert (number, error) == (3, (ServiceTimeoutError, f"queries[3]: timeout: got no answer within {timeout:g} s"))
