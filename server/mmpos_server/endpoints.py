"""Unary and streaming gRPC endpoints: bytes in, bytes out, every stage timed, every exception a status."""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from mmpos.errors import (
    LimitExceededError,
    MmposError,
    ServiceOverloadedError,
    ServiceTimeoutError,
    ServiceUnavailableError,
)
from mmpos.rpc.elements import count_elements
from mmpos.rpc.errors import RETRIED
from mmpos_server.admission import Call, ItemWindow, client_name
from mmpos_server.limits import check, check_elements
from mmpos_server.methods import Failure, failure, public
from mmpos_server.shared_memory import Exchange, SharedMemory, claimed, mentions
from mmpos_server.telemetry import MethodMetrics
from mmpos_server.traffic import GoneError, Traffic
from mmpos_server.transport import abort, current_slot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.message import Message

    from mmpos_server.admission import Admission, Clients
    from mmpos_server.config import Limits, ServerConfig
    from mmpos_server.methods import Method
    from mmpos_server.telemetry import Logs, Metrics
    from mmpos_server.tracing import Tracing
    from mmpos_server.transport import CallContext, RpcContext

__all__ = ["REQUEST_ID", "Endpoint", "ServerContext", "StreamEndpoint"]


REQUEST_ID = "x-request-id"
"""Metadata key of the request id, which a client may set and gets back."""

_ATTEMPTS = "grpc-previous-rpc-attempts"  # set by transports that retry a request

_INLINE_BYTES, _INLINE_ELEMENTS = 2**20, 2**14
"""Largest message that is parsed, and largest answer that is written, on the event loop."""

_SURELY_FEW = 2**15
"""Bytes of a message below which its elements are not counted: each has two bytes, or is a packed number."""

_SANE = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


def _ids() -> Iterator[str]:
    prefix = secrets.token_hex(5)
    return (f"{prefix}-{number}" for number in itertools.count(1))


@dataclass(frozen=True, eq=False)
class ServerContext:
    """State that all methods of one server share.

    Args:
        config: settings of the server.
        admission: gates and thread pools.
        clients: slots of each client.
        metrics: metrics of the server.
        logs: log of the server.
        traffic: messages in transit.
        tracing: source of OpenTelemetry spans; None for none.
        shared_memory: access to shared memory of clients.
        ids: ids of requests that came without one.
    """

    config: ServerConfig
    admission: Admission
    clients: Clients
    metrics: Metrics
    logs: Logs
    traffic: Traffic
    tracing: Tracing | None = None
    shared_memory: SharedMemory = field(default_factory=SharedMemory)
    ids: Iterator[str] = field(default_factory=_ids)

    def call(self, context: CallContext) -> Call:
        """Create the call of a gRPC context, with its id, client and deadline."""
        remaining = context.time_remaining()
        deadline = None if remaining is None else monotonic() + remaining
        request_id: str | None = None
        retried: tuple[tuple[str, str], ...] = ()
        for key, value in context.invocation_metadata():
            if key == REQUEST_ID and _SANE.fullmatch(str(value)):
                request_id = str(value)
            elif key == _ATTEMPTS:
                retried = ((RETRIED, str(value)),)
        if request_id is None:
            request_id = next(self.ids)
        context.set_trailing_metadata(((REQUEST_ID, request_id), *retried))
        return Call(request_id, self.admission, self.clients.lease(client_name(context)), deadline)

    async def share(self, raw: bytes, request: Message, call: Call) -> None:
        """Open the shared memory that a request names for its call; its size is checked before any is read.

        Raises:
            LimitExceededError: more bytes, documents or parts than one request may name.
            ServiceOverloadedError: the requests at work hold too many bytes.
            UnsupportedError: the answer is to go to shared memory, which this server does not use.
            InvalidInputError: the answer is to go to an object that cannot be opened.
        """
        if mentions(raw, self.shared_memory):
            # In a thread: a request may have a million parts.
            size = await call.run("place", claimed, request, self.config.limits)
            check("shared_bytes", size, self.config.limits)
            await call.weigh(size)
        call.memory = Exchange(self.shared_memory, request)

    def failed(self, error: Exception, call: Call, method: str) -> Failure:
        """Return the status of an error; an internal error is logged."""
        failed = failure(error, call.request_id)
        if failed.status == "INTERNAL":
            self.logs.error("internal error", error, request_id=call.request_id, method=method, **call.trace)
        return failed

    def ended(self, kind: str, call: Call, method: str, status: str, context: CallContext, **sizes: int) -> None:
        """Log the end of a request or stream, with further numbers in ``sizes``."""
        if self.logs.requests:
            self.logs.info(
                kind,
                request_id=call.request_id,
                peer=context.peer(),
                client=call.lease.name,
                method=method,
                status=status,
                milliseconds=round(1000 * call.seconds, 3),
                **sizes,
                **call.counts,
                **call.trace,
            )


class Endpoint:
    """Unary endpoint of a method.

    Args:
        method: method to call.
        server: state that the methods share.
    """

    def __init__(self, method: Method, server: ServerContext) -> None:
        self.method, self._server = method, server
        self._path = f"{method.service}/{method.name}"
        self._metrics = MethodMetrics(server.metrics, method.name)

    def renew(self, method: Method, server: ServerContext) -> None:
        """Answer calls from now on by this method, of the same name."""
        self.method, self._server = method, server

    async def serve(self, _requests: object, context: RpcContext) -> bytes:
        """Receive one gRPC request and answer it, or abort with the status of the error."""
        slot = current_slot.get()
        try:
            raw = await self._server.traffic.request(context)
        except MmposError as error:
            return await self.handle(b"", context, missing=error)
        if slot is None:
            return await self.handle(raw, context)
        slot.begin()
        try:
            return await self.handle(raw, context)
        finally:
            slot.leave()  # before the answer is sent, which may take the client long to read

    async def handle(self, raw: bytes, context: CallContext, missing: MmposError | None = None) -> bytes:
        """Answer one request, or abort with the status of the error.

        Args:
            raw: bytes of the request.
            context: context of the transport.
            missing: error of a request that did not arrive.
        """
        call = self._server.call(context)
        if self._server.tracing is not None:
            self._server.tracing.begin(call, self._path, context)
        self._metrics.begin(len(raw))
        status, answer = "CANCELLED", b""
        try:
            try:
                if missing is not None:
                    raise missing
                if self.method.admitted:
                    call.admit(len(raw))
                answer = await self._answer(raw, call)
                self._server.traffic.send(context, call, len(answer))
                status = "OK"
                return answer
            except Exception as error:
                if isinstance(error, ServiceOverloadedError):
                    self._metrics.refused.inc()
                failed = self._server.failed(error, call, self.method.name)
                status, answer = failed.status, b""
                metadata = ((REQUEST_ID, call.request_id), *failed.metadata)
            self._server.traffic.leave(context)
            await abort(context, failed.code, failed.message, metadata)
            return b""
        except asyncio.CancelledError:
            call.cancel()
            # Core cancels calls at their deadline, too.
            status = "DEADLINE_EXCEEDED" if call.late else "CANCELLED"
            raise
        finally:
            call.release()
            sizes = {"request_bytes": len(raw), "response_bytes": len(answer)}
            if self._server.tracing is not None:
                self._server.tracing.end(call, status, **sizes)
            call.stages.append(("total", call.seconds))
            self._metrics.end(status, call.stages, call.counts, len(answer))
            self._server.ended("request", call, self.method.name, status, context, **sizes)

    async def _answer(self, raw: bytes, call: Call) -> bytes:
        limits = self._server.config.limits
        request = await decode(self.method.request, raw, call, limits)
        await self._server.share(raw, request, call)
        response = self.method.response()
        await self.method.run(request, response, call)
        return await encode(response, call, limits)


async def decode(kind: type[Message], raw: bytes, call: Call, limits: Limits) -> Message:
    """Parse a message: in a thread if it is not small, and only after its elements were counted.

    Raises:
        DecodeError: the bytes are no such message.
        LimitExceededError: more bytes than a limit lowered since the start (the transport refuses more than the first
            one), or more fields and numbers than a request within the limits has.
        ServiceOverloadedError: too many calls wait for a thread.
    """
    if len(raw) > limits.request_bytes:
        raise LimitExceededError(f"request: got {len(raw)} bytes, want <= {limits.request_bytes}")
    call.request_bytes = len(raw)
    if len(raw) <= _SURELY_FEW or (
        len(raw) <= _INLINE_BYTES and count_elements(kind, raw, _INLINE_ELEMENTS) <= _INLINE_ELEMENTS
    ):
        return _parsed(kind, raw, call)
    return await call.run("place", _counted, kind, raw, call, limits)


def _counted(kind: type[Message], raw: bytes, call: Call, limits: Limits) -> Message:
    check_elements(kind, raw, limits)
    return _parsed(kind, raw, call)


def _parsed(kind: type[Message], raw: bytes, call: Call) -> Message:
    with call.stage("decode"):
        return kind.FromString(raw)


async def encode(response: Message, call: Call, limits: Limits) -> bytes:
    """Serialize a message: in a thread if it is large.

    Raises:
        LimitExceededError: more bytes than the limit.
        OutputError: the tensors of the answer did not fit into shared memory.
    """
    call.checkpoint()
    if call.answer_bytes <= _INLINE_BYTES:
        raw = _written(response, call)
    else:
        raw = await call.run("place", _written, response, call)
    if len(raw) > limits.response_bytes:
        raise LimitExceededError(f"response: got {len(raw)} bytes, want <= {limits.response_bytes}")
    return raw


def _written(response: Message, call: Call) -> bytes:
    with call.stage("encode"):
        return call.memory.serialize(response)


class StreamEndpoint:
    """Streaming endpoint of a method: items are answered in order, several at once, and none fails another.

    Args:
        method: method with a stream form.
        server: state that the methods share.
    """

    def __init__(self, method: Method, server: ServerContext) -> None:
        self.renew(method, server)
        self.name = self._twin.name
        self._path = f"{method.service}/{self.name}"
        self._metrics = MethodMetrics(server.metrics, self.name)
        self._open: set[_Stream] = set()
        self._draining = False

    def renew(self, method: Method, server: ServerContext) -> None:
        """Answer items from now on by this method, of the same name."""
        assert method.twin is not None
        self.method, self._twin, self._server = method, method.twin, server

    def drain(self) -> None:
        """Stop reading from all streams: items that were read are answered, then each stream ends with UNAVAILABLE."""
        self._draining = True
        for stream in self._open:
            stream.drain()

    async def handle(self, _requests: object, context: RpcContext) -> None:
        """Answer the items of one stream until it ends; abort with the status of an error of the stream."""
        call = self._server.call(context)
        if self._server.tracing is not None:
            self._server.tracing.begin(call, self._path, context)
        stream = _Stream(self, call, context, self._server.traffic)
        gate = self._server.admission.streams
        status, entered = "CANCELLED", False
        self._server.metrics.streams.inc()
        try:
            try:
                self._server.admission.arrive()
                call.lease.begin_stream()
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
                failed = self._server.failed(error, call, self.name)
                status = failed.status
            self._server.traffic.leave(context)
            await abort(context, failed.code, failed.message, ((REQUEST_ID, call.request_id), *failed.metadata))
        except asyncio.CancelledError:
            status = "DEADLINE_EXCEEDED" if call.late else "CANCELLED"
            raise
        finally:
            self._open.discard(stream)
            self._server.metrics.streams.dec()
            if entered:
                gate.leave(call.seconds)
            call.lease.end(call.seconds)
            if self._server.tracing is not None:
                self._server.tracing.end(call, status, items=stream.items)
            self._server.ended("stream", call, self.name, status, context, items=stream.items)

    async def item(self, raw: bytes, call: Call, stream: Call) -> bytes:
        """Answer one item of a stream; an error of the item is in its answer.

        Raises:
            DecodeError: the bytes are no request, so that the item has no id.
            LimitExceededError: the bytes are too many, likewise.
            ServiceTimeoutError: the deadline of the stream has passed.
        """
        # After reading: a stream that waits before it reads would not notice its end.
        await call.lease.turn()
        tracing = self._server.tracing
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
        """Return the answer to one item, and its status."""
        twin, limits = self._twin, self._server.config.limits
        request, response = await decode(twin.request, raw, call, limits), twin.response()
        try:
            await self._server.share(raw, request, call)
            await twin.run(request, response, call)
            return await encode(response, call, limits), "OK"
        except ServiceTimeoutError:
            raise
        except Exception as error:
            failed = self._server.failed(error, call, self.name)
            response = twin.response()
            twin.refuse(request, response, public(error, call.request_id))
            return response.SerializeToString(), failed.status

    def window(self) -> ItemWindow:
        """Return the flow control of a new stream."""
        concurrency = self._server.config.concurrency
        return ItemWindow(concurrency.stream_window, concurrency.stream_bytes)


class _Stream:
    """Open stream: a reader that starts items as the window allows, and a writer that sends their answers."""

    def __init__(self, endpoint: StreamEndpoint, call: Call, context: RpcContext, traffic: Traffic) -> None:
        self._endpoint, self._call, self._context, self._traffic = endpoint, call, context, traffic
        self._window = endpoint.window()
        self._answers: asyncio.Queue[tuple[asyncio.Task[bytes], int] | None] = asyncio.Queue()
        self._at_work: set[asyncio.Task[bytes]] = set()
        self._reader: asyncio.Task[None] | None = None
        self._draining = self._ended = False
        self.items = 0

    def drain(self) -> None:
        """Stop reading."""
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
                raise ServiceUnavailableError(
                    "the server is about to stop, want a new stream for items without an answer"
                )
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
                if raw is None:
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
        # Retrieved, so that asyncio does not log the error of an item that nobody waits for.
        if not task.cancelled() and task.exception() is None:
            self._window.answered(len(task.result()))
