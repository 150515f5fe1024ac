"""Answer streams: one thread reads and answers the items, another sends the answers in order."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from threading import Condition, Event
from time import perf_counter
from typing import TYPE_CHECKING

from mmpos.errors import (
    ServiceTimeoutError,
    ServiceUnauthenticatedError,
    ServiceUnavailableError,
)
from mmpos_server.call import GoneError
from mmpos_server.endpoints import Answer
from mmpos_server.methods import failure, public
from mmpos_server.telemetry import MethodMetrics

if TYPE_CHECKING:
    from mmpos_server.call import Call
    from mmpos_server.endpoints import Context, ServerContext
    from mmpos_server.methods import Method

__all__ = ["IDLE_SECONDS", "ItemWindow", "StreamEndpoint"]

WINDOW_ITEMS, WINDOW_BYTES = 16, 32 * 2**20
"""Bounds at which reading pauses: unanswered items of one stream, and bytes of these items and their answers."""

IDLE_SECONDS = 600.0
"""Seconds without an item after which a stream ends."""

_FIRST_ITEMS = 4
"""Number of items that may begin before the size of an answer is known."""


class ItemWindow:
    """Flow control for one stream, which limits reading ahead of the answers.

    An answer may be far larger than its item and is held until the client reads it. Therefore answers count towards
    the limit, each running item counts as the largest answer so far, and few items begin before the first answer.

    Args:
        items: maximum number of items that are read but not answered.
        size: total bytes of these items and their answers at which reading pauses.
    """

    def __init__(self, items: int = WINDOW_ITEMS, size: int = WINDOW_BYTES) -> None:
        self._most, self._size = items, size
        # Keep separate totals of read and sent items, so that only one thread writes each number: the reader or the
        # writer.
        self._read = self._read_bytes = self._sent = self._sent_bytes = 0
        # Totals for answers, which several threads update.
        self._answered = self._answer_bytes = 0
        self._largest = -1
        self._changed = Condition()
        self._waiting = self._closed = False

    @property
    def full(self) -> bool:
        """Whether reading must pause; a single item may always be read."""
        items = self._read - self._sent
        if items and self._largest < 0 and items >= _FIRST_ITEMS:
            return True
        size = self._read_bytes + self._answer_bytes - self._sent_bytes
        expected = (self._read - self._answered) * max(self._largest, 0)
        return items >= self._most or (items > 0 and size + expected >= self._size)

    def room(self) -> bool:
        """Wait until another item may be read; return False if the window has been closed."""
        if self.full:
            with self._changed:
                self._waiting = True
                self._changed.wait_for(lambda: self._closed or not self.full)
                self._waiting = False
        return not self._closed

    def close(self) -> None:
        """Wake the reader if it is waiting for room, and let all later waits return immediately."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def enter(self, size: int) -> None:
        """Record an item of ``size`` bytes that was read and is running. Only the reading thread calls this."""
        self._read += 1
        self._read_bytes += size

    def answered(self, size: int) -> None:
        """Record an answer of ``size`` bytes. This is thread-safe."""
        with self._changed:
            self._answered += 1
            self._answer_bytes += size
            self._largest = max(self._largest, size)
            self._changed.notify()

    def leave(self, size: int) -> None:
        """Record a sent answer; ``size`` includes the answer and its item. Only the sending thread calls this."""
        self._sent += 1
        self._sent_bytes += size
        if self._waiting:  # read this after writing the sums; the reader sets it before reading the sums
            with self._changed:
                self._changed.notify()


class StreamEndpoint:
    """Streaming endpoint of a method, which answers in order; an item that fails does not affect the others.

    Args:
        method: a method with a streaming form.
        server: state that the methods share.
        readers: threads that read streams, one per stream.
        workers: threads for items that run in parallel.
    """

    def __init__(
        self, method: Method, server: ServerContext, readers: ThreadPoolExecutor, workers: ThreadPoolExecutor
    ) -> None:
        assert method.twin is not None
        self.method, self._twin, self.server = method, method.twin, server
        self.readers, self.workers = readers, workers
        self.name = self._twin.name
        self._path = f"{method.service}/{self.name}"
        self._metrics = MethodMetrics(server.metrics, self.name)
        self._open: set[_Stream] = set()
        self._draining = False

    @property
    def side_by_side(self) -> bool:
        """Whether items of one stream run in parallel."""
        return self._twin.side_by_side

    def drain(self) -> None:
        """Stop reading from all streams: answer the items already read, then end each stream with UNAVAILABLE."""
        self._draining = True
        for stream in list(self._open):
            stream.drain()

    def answers(self, requests: Iterator[bytes], context: Context) -> Generator[bytes, None, Answer]:
        """Yield the answers to the items of one stream; return its metadata, and its status if it failed.

        Raises:
            GoneError: the client has disconnected.
        """
        server = self.server
        try:
            client = server.client(context)
        except ServiceUnauthenticatedError as error:
            return Answer(failed=server.failed(error, "", self.name))
        call, metadata = server.call(context, client)
        if server.tracing is not None:
            server.tracing.begin(call, self._path, context)
        stream = _Stream(self, call, context)
        gate, entered = server.admission.streams, False
        server.metrics.streams.inc()
        status = "CANCELLED"
        try:
            server.admission.arrive()
            gate.enter(client)
            entered = True
            self._open.add(stream)
            if self._draining:
                stream.drain()
            yield from stream.serve(requests)
            status = "OK"
            return Answer(b"", metadata)
        except GoneError:
            status = "DEADLINE_EXCEEDED" if call.late else "CANCELLED"
            raise
        except Exception as error:
            failed = server.failed(error, call.request_id, self.name, **call.trace)
            status = failed.status
            return Answer(b"", (*metadata, *failed.metadata), failed)
        finally:
            self._open.discard(stream)
            server.metrics.streams.dec()
            if entered:
                gate.leave(client, 1, call.seconds)
            if server.tracing is not None:
                server.tracing.end(call, status, items=stream.items)
            if server.logs.requests:
                server.ended("stream", call, self.name, status, context, items=stream.items)

    def plain(self, raw: bytes, stream: Call) -> bytes | None:
        """Answer a plain item whose client is still waiting; return None for any other item."""
        answering = self._twin.plain
        if answering is None or self.server.tracing is not None or not stream.awaited:
            return None
        began = perf_counter()
        plain = answering(raw)
        if plain is None:
            return None
        answer, documents, tokens, images = plain
        seconds = perf_counter() - began
        counts = {"documents": documents, "tokens": tokens, "images": images}
        self._metrics.begin()
        self._metrics.end(
            "OK",
            (("place", seconds), ("total", seconds)),
            counts,
            request_bytes=len(raw),
            response_bytes=len(answer),
        )
        return answer

    def item(self, raw: bytes, call: Call, stream: Call) -> bytes:
        """Answer one item of a stream; if the item fails, its answer contains the error.

        Raises:
            DecodeError: the bytes are not a request, so the item has no id.
            LimitExceededError: the item has too many fields and numbers.
            ServiceTimeoutError: the stream's deadline has passed.
            GoneError: the client has disconnected.
        """
        tracing = self.server.tracing
        if tracing is not None:
            tracing.begin_item(call, self._path, stream)
        self._metrics.begin()
        status, answer = "CANCELLED", b""
        try:
            call.hold(len(raw))
            answer, status = self._outcome(raw, call)
            return answer
        except Exception as error:
            status = failure(error, call.request_id).status
            raise
        finally:
            call.release()
            call.free()
            sizes = {"request_bytes": len(raw), "response_bytes": len(answer)}
            if tracing is not None:
                tracing.end(call, status, **sizes)
            call.stages.append(("total", call.seconds))
            self._metrics.end(status, call.stages, call.counts, **sizes)

    def _outcome(self, raw: bytes, call: Call) -> tuple[bytes, str]:
        """Return the answer to one item and the item's status."""
        twin, server = self._twin, self.server
        request, response = server.parse(twin.request, raw, call, bulky=self.method.bulky), twin.response()
        try:
            twin.run(request, response, call)
            return server.encode(response, call), "OK"
        except ServiceTimeoutError:
            raise
        except Exception as error:
            failed = server.failed(error, call.request_id, self.name, **call.trace)
            response = twin.response()
            twin.refuse(request, response, public(error, call.request_id))
            return response.SerializeToString(), failed.status


class _Stream:
    """An open stream: a reader that answers items as the window allows, and a writer that sends the answers."""

    def __init__(self, endpoint: StreamEndpoint, call: Call, context: Context) -> None:
        self._endpoint, self._call, self._context = endpoint, call, context
        self._window = ItemWindow()
        # Answers in order, with the sizes of their items; an error aborts the stream, and None marks its end.
        self._answers: SimpleQueue[tuple[bytes | Future[bytes], int] | BaseException | None] = SimpleQueue()
        self._draining = Event()
        self._reading = self._ended = False
        self.items = 0

    def drain(self) -> None:
        """Stop reading."""
        self._draining.set()
        if self._reading:
            self._answers.put(None)

    def serve(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the answers to the items in order until the client ends the stream.

        Raises:
            ServiceUnavailableError: the server is about to stop, or no item arrived for a long time.
            MmposError, DecodeError: an item broke the stream.
            GoneError: the client has disconnected.
        """
        transit = self._endpoint.server.transit
        self._context.add_callback(lambda: self._answers.put(GoneError()))
        self._endpoint.readers.submit(self._read, requests)
        try:
            while (item := self._next()) is not None:
                answer, size = item
                del item
                try:
                    raw = answer if isinstance(answer, bytes) else answer.result()
                finally:
                    del answer  # an error keeps this frame alive; the frame must not keep the answer alive
                transit.sending(self, self._context)
                yield raw
                transit.sent(self)
                self._window.leave(size + len(raw))
            if self._draining.is_set() and not self._ended:
                raise ServiceUnavailableError("the server is about to stop: send unanswered items in a new stream")
        finally:
            transit.sent(self)
            self._window.close()

    def _next(self) -> tuple[bytes | Future[bytes], int] | None:
        """Wait for the next answer."""
        try:
            item = self._answers.get(timeout=IDLE_SECONDS)
        except Empty:
            if not self._reading:  # a running item is slow
                return self._next()
            raise ServiceUnavailableError(
                f"stream: no item arrived for {IDLE_SECONDS:g} s; open a new stream"
            ) from None
        if isinstance(item, BaseException):
            try:
                raise item
            finally:
                del item  # an error keeps this frame alive; the frame must not keep the item alive
        return item

    def _read(self, requests: Iterator[bytes]) -> None:
        """Read the items and answer them or pass them to workers."""
        endpoint, call = self._endpoint, self._call
        transit = endpoint.server.transit
        late = ServiceTimeoutError("request: only part of it arrived in time")
        try:
            while self._window.room():
                self._reading = True
                if self._draining.is_set():
                    break
                raw = transit.receive(requests, None if self.items else lambda: self._answers.put(late))
                self._reading = False
                if raw is None:
                    self._ended = True
                    break
                if self._draining.is_set():
                    break
                self.items += 1
                self._window.enter(len(raw))
                answer = endpoint.plain(raw, call)
                if answer is None and endpoint.side_by_side:
                    task = endpoint.workers.submit(endpoint.item, raw, call.of_item(self.items), call)
                    task.add_done_callback(self._done)
                    self._answers.put((task, len(raw)))
                else:
                    answer = endpoint.item(raw, call.of_item(self.items), call) if answer is None else answer
                    self._window.answered(len(answer))
                    self._answers.put((answer, len(raw)))
        except BaseException as error:  # raised by the items; the writer handles it
            self._answers.put(error)
        self._answers.put(None)

    def _done(self, task: Future[bytes]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._window.answered(len(task.result()))
