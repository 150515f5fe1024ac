"""The stream twin of a method: items are answered in order, several at once, and none fails another."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from mmpos.errors import ServiceOverloadedError, ServiceTimeoutError, ServiceUnavailableError
from mmpos_server.admission import Window
from mmpos_server.call import Call
from mmpos_server.failures import failure, public
from mmpos_server.handlers import REQUEST_ID, Surroundings, decode, encode
from mmpos_server.metrics import MethodMetrics
from mmpos_server.traffic import GoneError, Traffic
from mmpos_server.transport import abort

if TYPE_CHECKING:
    from mmpos_server.methods import Method

__all__ = ["StreamEndpoint"]


class StreamEndpoint:
    """The stream form of a method.

    Args:
        method: what it does; it has a stream twin.
        surroundings: of the server.
    """

    def __init__(self, method: Method, surroundings: Surroundings) -> None:
        self.renew(method, surroundings)
        self.name = self._twin.name
        self._path = f"{method.service}/{self.name}"
        self._metrics = MethodMetrics(surroundings.metrics, self.name)
        self._open: set[_Stream] = set()
        self._draining = False

    def renew(self, method: Method, surroundings: Surroundings) -> None:
        """Answer the items that come from now on by this method, of the same name."""
        assert method.twin is not None
        self.method, self._twin, self._around = method, method.twin, surroundings

    def drain(self) -> None:
        """Read no further from any stream: what was read is answered, then the stream ends with UNAVAILABLE."""
        self._draining = True
        for stream in self._open:
            stream.drain()

    async def handle(self, _requests: object, context: Any) -> None:
        """Answer the items of one stream until it ends; abort with the status of what broke it."""
        call = self._around.call(context)
        if self._around.tracing is not None:
            self._around.tracing.begin(call, self._path, context)
        stream = _Stream(self, call, context, self._around.traffic)
        gate = self._around.admission.streams
        status, entered = "CANCELLED", False
        self._around.metrics.streams.inc()
        try:
            try:
                self._around.admission.arrive()
                call.visit.begin_stream()
                gate.enter()
                entered = True
                self._open.add(stream)
                await stream.serve(draining=self._draining)
                status = "OK"
                return
            except GoneError:
                raise asyncio.CancelledError from None
            except Exception as error:
                if isinstance(error, ServiceOverloadedError):
                    self._metrics.refused.inc()
                failed = self._around.failed(error, call, self.name)
                status = failed.status
            self._around.traffic.leave(context)
            await abort(context, failed.code, failed.message, ((REQUEST_ID, call.request_id), *failed.metadata))
        except asyncio.CancelledError:
            status = "DEADLINE_EXCEEDED" if call.late else "CANCELLED"
            raise
        finally:
            self._open.discard(stream)
            self._around.metrics.streams.dec()
            if entered:
                gate.leave(call.seconds)
            call.visit.end(call.seconds)
            if self._around.tracing is not None:
                self._around.tracing.end(call, status, items=stream.items)
            self._around.ended("stream", call, self.name, status, context, items=stream.items)

    async def item(self, raw: bytes, call: Call, stream: Call) -> bytes:
        """The answer to one item of a stream; an error of its own is in the answer.

        Raises:
            DecodeError: the bytes are no request, so there is no id to answer to.
            LimitExceededError: likewise, they are too many.
            ServiceTimeoutError: the deadline of the stream has passed.
        """
        # Here and not before it is read: who waits to read does not see that the stream has ended.
        await call.visit.turn()
        tracing = self._around.tracing
        if tracing is not None:
            tracing.begin_item(call, self._path, stream)
        self._metrics.begin(len(raw))
        status, encoded = "CANCELLED", b""
        try:
            encoded, status = await self._outcome(raw, call)
            return encoded
        except asyncio.CancelledError:
            call.cancel()
            raise
        except Exception as error:
            status = failure(error, call.request_id).status
            raise
        finally:
            call.release()
            if tracing is not None:
                tracing.end(call, status, request_bytes=len(raw), response_bytes=len(encoded))
            call.stages.append(("total", call.seconds))
            self._metrics.end(status, call.stages, call.counts, len(encoded))

    async def _outcome(self, raw: bytes, call: Call) -> tuple[bytes, str]:
        """The answer to one item, and its status."""
        twin, limits = self._twin, self._around.config.limits
        request, response = await decode(twin.request, raw, call, limits), twin.response()
        try:
            await self._around.share(raw, request, call)
            await twin.run(request, response, call)
            return await encode(response, call, limits), "OK"
        except ServiceTimeoutError:
            raise
        except Exception as error:
            failed = self._around.failed(error, call, self.name)
            response = twin.response()
            twin.refuse(request, response, public(error, call.request_id))
            return response.SerializeToString(), failed.status

    def window(self) -> Window:
        """How far a stream may read ahead."""
        concurrency = self._around.config.concurrency
        return Window(concurrency.stream_window, concurrency.stream_bytes)


class _Stream:
    """One open stream: a reader that starts items as the window allows, and a writer that sends their answers."""

    def __init__(self, endpoint: StreamEndpoint, call: Call, context: Any, traffic: Traffic) -> None:
        self._endpoint, self._call, self._context, self._traffic = endpoint, call, context, traffic
        self._window = endpoint.window()
        self._answers: asyncio.Queue[tuple[asyncio.Task[bytes], int] | None] = asyncio.Queue()
        self._at_work: set[asyncio.Task[bytes]] = set()
        self._reader: asyncio.Task[None] | None = None
        self._draining = self._ended = False
        self.items = 0

    def drain(self) -> None:
        """Read no further."""
        self._draining = True
        if self._reader is not None:
            self._reader.cancel()

    async def serve(self, draining: bool) -> None:
        """Answer items in order until the client is done.

        Raises:
            ServiceUnavailableError: the server is about to stop.
            MmposError, DecodeError: an item broke the stream.
        """
        self._draining = draining
        self._reader = asyncio.create_task(self._read())
        try:
            while (item := await self._answers.get()) is not None:
                task, size = item
                answered = await task
                await self._traffic.write(self._context, answered)
                self._window.leave(size + len(answered))
            if self._draining and not self._ended:
                raise ServiceUnavailableError("the server is about to stop, want a new stream for what has no answer")
            await self._reader
        finally:
            self._reader.cancel()
            for task in self._at_work:
                task.cancel()

    async def _read(self) -> None:
        try:
            while not self._draining:
                await self._window.room()
                raw = await self._traffic.receive(self._context, idle=self.items > 0)
                if raw is grpc.aio.EOF:
                    self._ended = True
                    break
                self.items += 1
                self._window.enter(len(raw))
                task = asyncio.create_task(self._endpoint.item(raw, self._call.item(self.items), self._call))
                self._at_work.add(task)
                task.add_done_callback(self._done)
                self._answers.put_nowait((task, len(raw)))
        finally:
            self._answers.put_nowait(None)

    def _done(self, task: asyncio.Task[bytes]) -> None:
        self._at_work.discard(task)
        # Looked at, so that an error of an item nobody waits for any more is no noise in the logs.
        if not task.cancelled() and task.exception() is None:
            self._window.answered(len(task.result()))
