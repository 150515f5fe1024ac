"""Unary and streaming gRPC endpoints: bytes in, bytes out, every stage timed, every exception a status."""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from mmpos.errors import (
    LimitExceededError,
    MmposError,
    ServiceOverloadedError,
    ServiceTimeoutError,
    ServiceUnavailableError,
)
from mmpos.rpc.elements import count_elements
from mmpos.rpc.errors import RETRIED
from mmpos_server.admission import Window, client_name
from mmpos_server.call import Call
from mmpos_server.limits import check, check_elements
from mmpos_server.methods import Failure, failure, public
from mmpos_server.metrics import MethodMetrics
from mmpos_server.shared_memory import Exchange, SharedMemory, claimed, mentions
from mmpos_server.traffic import GoneError, Traffic
from mmpos_server.transport import abort, current_slot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.message import Message

    from mmpos_server.admission import Admission, Clients
    from mmpos_server.config import Limits, ServerConfig
    from mmpos_server.logs import Logs
    from mmpos_server.methods import Method
    from mmpos_server.metrics import Metrics
    from mmpos_server.tracing import Tracing
    from mmpos_server.traffic import Traffic

__all__ = ["REQUEST_ID", "Endpoint", "Form", "ServerContext", "StreamEndpoint"]


REQUEST_ID = "x-request-id"
"""Metadata in which a client may send an id, and in which it gets it back."""

_ATTEMPTS = "grpc-previous-rpc-attempts"  # set by transports that send a request again

_INLINE_BYTES, _INLINE_ELEMENTS = 2**20, 2**14
"""Most of a message that is parsed, and of an answer that is written, between two other calls."""

_SURELY_FEW = 2**15
"""Bytes of a message that are not worth counting what is in them: each element has two, or is a packed number."""

_SANE = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


def _ids() -> Iterator[str]:
    prefix = secrets.token_hex(5)
    return (f"{prefix}-{number}" for number in itertools.count(1))


@dataclass(frozen=True, eq=False)
class ServerContext:
    """What the methods of one server share.

    Args:
        config: its settings.
        admission: gates and pools.
        clients: what each client has.
        metrics: what is counted.
        logs: what is written.
        traffic: messages on their way.
        tracing: what makes spans; None: nothing does.
        shared_memory: what it takes of it.
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

    def call(self, context: Any) -> Call:
        """The call of a context, with its id and deadline."""
        remaining = context.time_remaining()
        deadline = None if remaining is None else monotonic() + remaining
        request_id: str | None = None
        retried: tuple[tuple[str, str], ...] = ()
        for key, value in context.invocation_metadata():
            if key == REQUEST_ID and _SANE.fullmatch(value):
                request_id = value
            elif key == _ATTEMPTS:
                retried = ((RETRIED, str(value)),)
        if request_id is None:
            request_id = next(self.ids)
        context.set_trailing_metadata(((REQUEST_ID, request_id), *retried))
        return Call(request_id, self.admission, self.clients.lease(client_name(context)), deadline)

    async def share(self, raw: bytes, request: Message, call: Call) -> None:
        """Give the call what its request has in shared memory; all of it is weighed before any is read.

        Raises:
            LimitExceededError: more bytes, documents or parts than one request may name.
            ServiceOverloadedError: the requests at work hold too many.
            UnsupportedError: the answer is to go there, and this server takes no shared memory.
            InvalidInputError: it is to go where nothing can.
        """
        if mentions(raw, self.shared_memory):
            # In a thread: a request may have a million parts to look at.
            size = await call.run("place", claimed, request, self.config.limits)
            check("shared_bytes", size, self.config.limits)
            await call.weigh(size)
        call.memory = Exchange(self.shared_memory, request)

    def failed(self, error: Exception, call: Call, method: str) -> Failure:
        """The status of an error; one of the server's own is written down."""
        failed = failure(error, call.request_id)
        if failed.status == "INTERNAL":
            self.logs.error("internal error", error, request_id=call.request_id, method=method, **call.trace)
        return failed

    def ended(self, kind: str, call: Call, method: str, status: str, context: Any, **sizes: int) -> None:
        """Write the line of a request or of a stream; sizes are what else is worth a number."""
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


class Form(Protocol):
    """What the messages of one request look like on the way, where that is not protobuf."""

    async def read(self, raw: bytes, call: Call) -> Any:
        """The request in these bytes."""

    async def write(self, response: Any, call: Call) -> bytes:
        """The bytes of an answer."""


class Endpoint:
    """The unary form of a method.

    Args:
        method: what it does.
        surroundings: of the server.
    """

    def __init__(self, method: Method, surroundings: ServerContext) -> None:
        self.method, self._around = method, surroundings
        self._path = f"{method.service}/{method.name}"
        self._metrics = MethodMetrics(surroundings.metrics, method.name)

    def renew(self, method: Method, surroundings: ServerContext) -> None:
        """Answer what comes from now on by this method, of the same name."""
        self.method, self._around = method, surroundings

    async def serve(self, _requests: object, context: Any) -> bytes:
        """Receive one request of gRPC and answer it, or abort with the status of the error."""
        place = current_slot.get()
        try:
            raw = await self._around.traffic.request(context)
        except MmposError as error:
            return await self.handle(b"", context, missing=error)
        if place is None:
            return await self.handle(raw, context)
        place.begin()
        try:
            return await self.handle(raw, context)
        finally:
            place.leave()  # before the answer is sent, which may take the client long to read

    async def handle(
        self, raw: bytes, context: Any, form: Form | None = None, missing: MmposError | None = None
    ) -> bytes:
        """Answer one request, or abort with the status of the error.

        Args:
            raw: the request.
            context: of the transport.
            form: what its messages look like, where it came over HTTP; None is protobuf over gRPC.
            missing: why there is no request.
        """
        call = self._around.call(context)
        if self._around.tracing is not None:
            self._around.tracing.begin(call, self._path, context)
        self._metrics.begin(len(raw))
        status, answer = "CANCELLED", b""
        try:
            try:
                if missing is not None:
                    raise missing
                if self.method.admitted:
                    call.admit(len(raw))
                answer = await self._answer(raw, call, form)
                if form is None:  # over HTTP answers are counted where they are sent
                    self._around.traffic.send(context, call, len(answer))
                status = "OK"
                return answer
            except Exception as error:
                if isinstance(error, ServiceOverloadedError):
                    self._metrics.refused.inc()
                failed = self._around.failed(error, call, self.method.name)
                status, answer = failed.status, b""
                metadata = ((REQUEST_ID, call.request_id), *failed.metadata)
            if form is None:
                self._around.traffic.leave(context)
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
            if self._around.tracing is not None:
                self._around.tracing.end(call, status, **sizes)
            call.stages.append(("total", call.seconds))
            self._metrics.end(status, call.stages, call.counts, len(answer))
            self._around.ended("request", call, self.method.name, status, context, **sizes)

    async def _answer(self, raw: bytes, call: Call, form: Form | None) -> bytes:
        limits = self._around.config.limits
        request = await (form.read(raw, call) if form else decode(self.method.request, raw, call, limits))
        await self._around.share(raw, request, call)
        response = self.method.response()
        await self.method.run(request, response, call)
        return await (form.write(response, call) if form else encode(response, call, limits))


async def decode(kind: type[Message], raw: bytes, call: Call, limits: Limits) -> Message:
    """The message in these bytes: parsed in a thread if it is not small, and only after what is in it was counted.

    Raises:
        DecodeError: they are no such message.
        LimitExceededError: more bytes than the limit, which gRPC refuses before, other ways to get here do not; or more
            fields and numbers than a request within the limits has.
        ServiceOverloadedError: too many wait for a thread.
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
    """The bytes of a message: written in a thread if they are many.

    Raises:
        LimitExceededError: more than the limit.
        OutputError: its tensors went to shared memory, and did not fit.
    """
    call.checkpoint()
    call.memory.finish()
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
    """The stream form of a method.

    Args:
        method: what it does; it has a stream twin.
        surroundings: of the server.
    """

    def __init__(self, method: Method, surroundings: ServerContext) -> None:
        self.renew(method, surroundings)
        self.name = self._twin.name
        self._path = f"{method.service}/{self.name}"
        self._metrics = MethodMetrics(surroundings.metrics, self.name)
        self._open: set[_Stream] = set()
        self._draining = False

    def renew(self, method: Method, surroundings: ServerContext) -> None:
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
            call.lease.end(call.seconds)
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
        await call.lease.turn()
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
