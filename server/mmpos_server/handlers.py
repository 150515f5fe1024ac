"""A method as gRPC calls it: bytes in, bytes out, every stage timed, every error a status."""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from mmpos.errors import LimitExceededError, MmposError, ServiceOverloadedError
from mmpos.wire.errors import RETRIED
from mmpos_server.call import Call
from mmpos_server.clients import client_name
from mmpos_server.exchange import Exchange, claimed, mentions
from mmpos_server.failures import Failure, failure
from mmpos_server.metrics import MethodMetrics
from mmpos_server.refusals import check
from mmpos_server.shared_memory import SharedMemory
from mmpos_server.transport import abort

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.message import Message

    from mmpos_server.admission import Admission
    from mmpos_server.clients import Clients
    from mmpos_server.config import ServerConfig
    from mmpos_server.logs import Logs
    from mmpos_server.methods import Method
    from mmpos_server.metrics import Metrics
    from mmpos_server.tracing import Tracing
    from mmpos_server.traffic import Traffic

__all__ = ["REQUEST_ID", "Endpoint", "Surroundings"]

REQUEST_ID = "x-request-id"
"""Metadata in which a client may send an id, and in which it gets it back."""

_ATTEMPTS = "grpc-previous-rpc-attempts"  # set by transports that send a request again

_SANE = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


def _ids() -> Iterator[str]:
    prefix = secrets.token_hex(5)
    return (f"{prefix}-{number}" for number in itertools.count(1))


@dataclass(frozen=True, eq=False)
class Surroundings:
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
        return Call(request_id, self.admission, self.clients.visit(client_name(context)), deadline)

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
                client=call.visit.name,
                method=method,
                status=status,
                milliseconds=round(1000 * call.seconds, 3),
                **sizes,
                **call.counts,
                **call.trace,
            )


class Endpoint:
    """The unary form of a method.

    Args:
        method: what it does.
        surroundings: of the server.
    """

    def __init__(self, method: Method, surroundings: Surroundings) -> None:
        self.method, self._around = method, surroundings
        self._path = f"{method.service}/{method.name}"
        self._metrics = MethodMetrics(surroundings.metrics, method.name)

    async def serve(self, _requests: object, context: Any) -> bytes:
        """Receive one request and answer it, or abort with the status of the error."""
        try:
            raw = await self._around.traffic.request(context)
        except MmposError as error:
            return await self.handle(b"", context, error)
        return await self.handle(raw, context)

    async def handle(self, raw: bytes, context: Any, missing: MmposError | None = None) -> bytes:
        """Answer one request, or abort with the status of the error.

        Args:
            raw: the request.
            context: of the call.
            missing: why there is none.
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
                answer = await self._answer(raw, call)
                self._around.traffic.send(context, call, len(answer))
                status = "OK"
                return answer
            except Exception as error:
                if isinstance(error, ServiceOverloadedError):
                    self._metrics.refused.inc()
                failed = self._around.failed(error, call, self.method.name)
                status, answer = failed.status, b""
                metadata = ((REQUEST_ID, call.request_id), *failed.metadata)
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

    async def _answer(self, raw: bytes, call: Call) -> bytes:
        limits = self._around.config.limits
        request = decode(self.method.request, raw, call, limits.request_bytes)
        await self._around.share(raw, request, call)
        response = self.method.response()
        await self.method.run(request, response, call)
        return encode(response, call, limits.response_bytes)


def decode(kind: type[Message], raw: bytes, call: Call, limit: int) -> Message:
    """The message in these bytes.

    Raises:
        DecodeError: they are no such message.
        LimitExceededError: more than the limit; gRPC refuses them before, other ways to get here do not.
    """
    if len(raw) > limit:
        raise LimitExceededError(f"request: got {len(raw)} bytes, want <= {limit}")
    began = perf_counter()
    message = kind.FromString(raw)
    call.stages.append(("decode", perf_counter() - began))
    return message


def encode(response: Message, call: Call, limit: int) -> bytes:
    """The bytes of a message.

    Raises:
        LimitExceededError: more than the limit.
        OutputError: its tensors went to shared memory, and did not fit.
    """
    call.checkpoint()
    call.memory.finish()
    began = perf_counter()
    raw = response.SerializeToString()
    call.stages.append(("encode", perf_counter() - began))
    if len(raw) > limit:
        raise LimitExceededError(f"response: got {len(raw)} bytes, want <= {limit}")
    return raw
