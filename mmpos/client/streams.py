"""Streams: a window of unanswered queries, with threads or tasks that send queries and read answers."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc

from mmpos.client import calls
from mmpos.client.calls import STREAM_BUILD, STREAM_PLACE, BuildSettings, Built, Errors, Prepared, Rpc, ServiceCall
from mmpos.client.channel import BACKOFF_FACTOR, FIRST_BACKOFF, MAX_BACKOFF, UntrustedError, closed, error_of
from mmpos.client.options import Pair
from mmpos.errors import (
    MmposError,
    ServiceError,
    ServiceOverloadedError,
    ServiceTimeoutError,
    ServiceUnavailableError,
)
from mmpos.rpc.errors import get_error
from mmpos.rpc.v1 import positions_pb2, sequences_pb2
from mmpos.support.checks import one_of

if TYPE_CHECKING:
    from mmpos.client.channel import Reach
    from mmpos.rpc.queries import PositionsQuery, PositionsResult


Q = TypeVar("Q")
T = TypeVar("T")

WINDOW = 8
"""Maximum number of unanswered requests in a stream."""

Answer = positions_pb2.StreamPlaceResponse | sequences_pb2.StreamBuildResponse
"""Answer to one item of a stream."""


@dataclass(frozen=True)
class Stream(Generic[Q, T]):
    """A stream of calls, as data.

    Args:
        method: method of the stream.
        call: function that returns the call for an item.
        refused: function that turns the error of an item into a result, or raises it.
    """

    method: Rpc[Answer]
    call: Callable[[Q], ServiceCall[T]]
    refused: Callable[[Q, MmposError], T]


def stream(profile: str | None, errors: Errors) -> Stream[PositionsQuery, PositionsResult | MmposError]:
    """Return a stream of queries; see ``Client.stream`` for the arguments."""
    one_of("errors", errors, ("raise", "return"))

    def refused(query: PositionsQuery, error: MmposError) -> MmposError:
        if errors == "raise":
            raise error
        return error

    return Stream(STREAM_PLACE, lambda query: calls.query(profile, query), refused)


def stream_build(settings: BuildSettings, errors: Errors) -> Stream[Sequence[Sequence[object]], Built]:
    """Return a stream of batches of documents; see ``Client.stream_build`` for the arguments."""
    one_of("errors", errors, ("raise", "return"))

    def refused(documents: Sequence[Sequence[object]], error: MmposError) -> Built:
        if errors == "raise" or not isinstance(documents, list | tuple):
            raise error
        return [error] * len(documents)

    return Stream(STREAM_BUILD, lambda documents: calls.batch_call(settings, documents, errors), refused)


@dataclass(frozen=True)
class _Entry(Generic[Q, T]):
    """An item of a stream: its request, or the error with which the client refused it."""

    id: int
    item: Q
    request: Prepared[T] | MmposError


class Unanswered(Generic[Q, T]):
    """Unanswered items of a stream in order, at most WINDOW.

    Args:
        stream: the stream that the items belong to.
        timeout: seconds that an answer may take.
        attempts: maximum number of consecutive streams that break without an answer.
        reach: whether the servers have ever answered; an answer may take longer if the server has disappeared.
    """

    def __init__(self, stream: Stream[Q, T], timeout: float, attempts: int, reach: Reach) -> None:
        self._stream, self._attempts = stream, attempts
        self._timeout, self._reach, self._patience = timeout, reach, reach.patience(timeout)
        self._entries: deque[_Entry[Q, T]] = deque()
        self._next = self._broken = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        """Whether no more items may be added."""
        return len(self._entries) >= WINDOW

    @property
    def refused(self) -> bool:
        """Whether the client refused the oldest item, so that its result needs no answer."""
        return bool(self._entries) and isinstance(self._entries[0].request, MmposError)

    def add(self, item: Q) -> bytes | None:
        """Add an item; return the request to send, or None if the client refused the item."""
        request: Prepared[T] | MmposError
        try:
            request = self._stream.call(item).request(self._stream.method.request(id=self._next))
        except MmposError as error:
            request = error
        self._entries.append(_Entry(self._next, item, request))
        self._next += 1
        return None if isinstance(request, MmposError) else request.data

    def requests(self) -> list[bytes]:
        """List the unanswered requests, oldest first."""
        return [entry.request.data for entry in self._entries if not isinstance(entry.request, MmposError)]

    def result(self, answer: Answer | None = None) -> T:
        """Remove the oldest item and return its result, from this answer or from the client's refusal."""
        if not self._entries:
            raise ServiceError("answer: got more answers than requests")
        entry = self._entries.popleft()
        if isinstance(entry.request, MmposError):
            return self._stream.refused(entry.item, entry.request)
        assert answer is not None, "only a refused item has no answer"
        if answer.id != entry.id:
            raise ServiceError(f"answer: got id {answer.id}, want {entry.id}")
        self._broken = 0
        self._reach.answered()
        field = answer.WhichOneof("outcome")
        if field == "error":
            return self._stream.refused(entry.item, get_error(answer.error))
        if field is None:
            raise ServiceError("answer: got neither a result nor an error")
        return entry.request.read(answer)

    def broken(self, error: MmposError | None) -> float:
        """Return the seconds to wait before unanswered items are sent again on a new stream.

        Args:
            error: error that ended the stream; None if it ended normally.

        Raises:
            MmposError: the error, if waiting does not help or the attempts are used up.
        """
        error = error or ServiceUnavailableError("stream: the server ended it before it answered all requests")
        if isinstance(error, UntrustedError) or not isinstance(error, ServiceUnavailableError | ServiceOverloadedError):
            raise error
        if not self.requests():
            return 0.0  # this does not count as an attempt
        if not self._broken:
            self._patience = self._reach.patience(self._timeout)
        self._broken += 1
        if self._broken >= self._attempts and self._patience.pause(error) is None:
            raise self._reach.explained(error)
        wait = min(FIRST_BACKOFF * BACKOFF_FACTOR ** min(self._broken - 1, 8), MAX_BACKOFF)
        return wait * random.uniform(0.8, 1.2)


def no_answer(timeout: float) -> ServiceTimeoutError:
    """Return the error for a stream that does not respond."""
    return ServiceTimeoutError(f"stream: no answer in {timeout:g} seconds")


L = TypeVar("L", "ThreadLink", "TaskLink")

_END: Any = object()


class ThreadLink:
    """An open stream that its own threads write and read, so that neither direction blocks the other."""

    def __init__(self, opened: grpc.StreamStreamMultiCallable[bytes, Answer], metadata: tuple[Pair, ...]) -> None:
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        self._answers: SimpleQueue[Answer | MmposError | None] = SimpleQueue()
        self._call = opened(iter(self._requests.get, None), metadata=metadata)
        threading.Thread(target=self._read, name="mmpos-stream", daemon=True).start()

    def _read(self) -> None:
        try:
            for answer in self._call:
                self._answers.put(answer)
            self._answers.put(None)
        except grpc.RpcError as error:
            self._answers.put(error_of(error))

    @property
    def ready(self) -> bool:
        """Whether ``receive`` would return without waiting."""
        return not self._answers.empty()

    def send(self, request: bytes) -> None:
        """Queue a request for writing."""
        self._requests.put(request)

    def finish(self) -> None:
        """End the stream of requests."""
        self._requests.put(None)

    def receive(self, timeout: float) -> Answer | MmposError | None:
        """Wait for and return the next answer, the error that ended the stream, or None at the end of the stream."""
        try:
            return self._answers.get(timeout=timeout)
        except Empty:
            return no_answer(timeout)

    def close(self) -> None:
        """Cancel the stream, unless it has ended."""
        self.finish()
        self._call.cancel()


def _opened(connect: Callable[[], L], unanswered: Unanswered[Q, T], more: bool) -> L:
    """Open a stream and send all unanswered requests."""
    link = connect()
    for request in unanswered.requests():
        link.send(request)
    if not more:
        link.finish()
    return link


def thread_results(
    unanswered: Unanswered[Q, T], items: Iterator[Q], connect: Callable[[], ThreadLink], timeout: float
) -> Iterator[T]:
    """Yield the results of the items in order while later items are sent; closing the iterator cancels the stream."""
    link: ThreadLink | None = None
    more = True
    try:
        while more or len(unanswered):
            if unanswered.refused:
                yield unanswered.result()
            elif more and not unanswered.full and (link is None or not link.ready):
                item = next(items, _END)
                more = item is not _END
                if link is not None and link.ready and not len(unanswered):
                    link.close()  # the stream ended while no item was unanswered
                    link = None
                request = unanswered.add(item) if more else None
                if link is None:
                    link = _opened(connect, unanswered, more) if request is not None else None
                elif request is not None:
                    link.send(request)
                elif not more:
                    link.finish()
            else:
                link = link or _opened(connect, unanswered, more)
                answer = link.receive(timeout)
                if answer is None or isinstance(answer, MmposError):
                    link.close()
                    link = None
                    time.sleep(unanswered.broken(answer))
                else:
                    yield unanswered.result(answer)
        if link is not None:
            link.receive(timeout)  # read to the end, so that the server does not see the stream as abandoned
    finally:
        if link is not None:
            link.close()


class TaskLink:
    """An open stream in an event loop: a gRPC task writes requests, and one read is always pending."""

    def __init__(self, opened: grpc.aio.StreamStreamMultiCallable[bytes, Answer], metadata: tuple[Pair, ...]) -> None:
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._heard, self._pause = asyncio.Event(), 0.0
        self._call = opened(self._written(), metadata=metadata)
        self.answer: asyncio.Task[Answer | MmposError | None] = asyncio.ensure_future(self._read())

    async def _written(self) -> AsyncIterator[bytes]:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._heard.wait(), self._pause)
        while (request := await self._requests.get()) is not None:
            yield request

    def listen_first(self, seconds: float) -> None:
        """Delay writes for ``seconds`` or until the server answers, since grpc loses the status if a write fails."""
        self._pause = seconds

    async def _read(self) -> Answer | MmposError | None:
        try:
            answer = await self._call.read()
        except grpc.RpcError as error:
            return error_of(error)
        except asyncio.CancelledError:
            return closed()
        finally:
            self._heard.set()
        return answer if isinstance(answer, Answer) else None  # the end

    def send(self, request: bytes) -> None:
        """Queue a request for writing."""
        self._requests.put_nowait(request)

    def finish(self) -> None:
        """End the stream of requests."""
        self._requests.put_nowait(None)

    def taken(self) -> Answer | MmposError | None:
        """Return the answer, the error that ended the stream, or None when it ends; start reading the next answer."""
        answer = self.answer.result()
        if answer is not None and not isinstance(answer, MmposError):
            self.answer = asyncio.ensure_future(self._read())
        return answer

    async def close(self) -> None:
        """Cancel the stream, unless it has ended."""
        self.finish()
        self._call.cancel()
        await asyncio.wait([self.answer])


async def _pulled(items: Iterator[Q] | AsyncIterator[Q]) -> Q:
    """Pull the next item, or the end marker."""
    if isinstance(items, AsyncIterator):
        return await anext(items, _END)
    return next(items, _END)


async def task_results(
    unanswered: Unanswered[Q, T],
    source: Iterable[Q] | AsyncIterable[Q],
    connect: Callable[[], TaskLink],
    timeout: float,
) -> AsyncIterator[T]:
    """Yield the results of the items in order while later items are sent; closing the iterator cancels the stream."""
    items = aiter(source) if isinstance(source, AsyncIterable) else iter(source)
    link: TaskLink | None = None
    pull: asyncio.Task[Q] | None = None
    more, pause = True, 0.0
    try:
        while more or len(unanswered):
            if unanswered.refused:
                yield unanswered.result()
                continue
            if pull is None and more and not unanswered.full:
                pull = asyncio.ensure_future(_pulled(items))
            if link is None and unanswered.requests():
                link = _opened(connect, unanswered, more)
                link.listen_first(pause)
            answered, pulled = await _first(link, pull, timeout if unanswered.requests() else None)
            if link is not None and (answered or not pulled):
                answer = link.taken() if answered else no_answer(timeout)
                if answer is None or isinstance(answer, MmposError):
                    await link.close()
                    link = None
                    pause = unanswered.broken(answer)
                    await asyncio.sleep(pause)
                else:
                    pause = 0.0
                    yield unanswered.result(answer)
            elif pull is not None:
                item, pull = pull.result(), None
                more = item is not _END
                request = unanswered.add(item) if more else None
                if link is not None and request is not None:
                    link.send(request)
                elif link is not None and not more:
                    link.finish()
        if link is not None:
            await _first(
                link, None, timeout
            )  # read to the end, so that the server does not see the stream as abandoned
    finally:
        if pull is not None:
            pull.cancel()
            await asyncio.wait([pull])
        if link is not None:
            await link.close()


async def _first(link: TaskLink | None, pull: asyncio.Task[Q] | None, timeout: float | None) -> tuple[bool, bool]:
    """Wait until the timeout for an answer or an item; return whether each has arrived."""
    reading = link.answer if link is not None else None
    tasks: list[asyncio.Task[object]] = [task for task in (reading, pull) if task is not None]
    done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    return reading in done, pull in done
