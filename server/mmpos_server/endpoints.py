"""Answer unary calls, from bytes to bytes: time every stage and turn exceptions into statuses."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote

from mmpos.errors import ServiceUnauthenticatedError
from mmpos.rpc import beside
from mmpos.rpc.errors import get_token
from mmpos_server.call import Call, GoneError
from mmpos_server.limits import check, most_fields
from mmpos_server.methods import Failure, failure, refused_by
from mmpos_server.telemetry import MethodMetrics
from mmpos_server.transit import Transport

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from mmpos_server.access import TokenFile
    from mmpos_server.admission import Admission
    from mmpos_server.config import ServerConfig
    from mmpos_server.methods import Method
    from mmpos_server.telemetry import Logs, Metrics
    from mmpos_server.tracing import Tracing
    from mmpos_server.transit import Transit

__all__ = ["REQUEST_ID", "Answer", "Context", "Endpoint", "ServerContext"]


REQUEST_ID = "x-request-id"
"""Metadata key of the request id; a client may set it, and the server returns it."""

_PREFIX = secrets.token_hex(5)
"""Prefix of this process's request ids."""

_VALID_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)

Metadata = tuple[tuple[str, str], ...]

M = TypeVar("M", bound="Message")


class Answer(NamedTuple):
    """Outcome of a call.

    Args:
        raw: the serialized answer.
        metadata: trailing metadata of the call.
        failed: status of a failed call, or None.
    """

    raw: bytes = b""
    metadata: Metadata = ()
    failed: Failure | None = None


class Context(Transport, Protocol):
    """Context of a call: gRPC's, or a test's."""

    def invocation_metadata(self) -> Any:
        """Return the client's metadata as pairs."""

    def peer(self) -> str:
        """Return the client's address as gRPC writes it."""

    def auth_context(self) -> Any:
        """Return the names from the client's certificate."""

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline, or None if there is none."""


@lru_cache(maxsize=4096)
def _host_of(peer: str) -> str:
    """Return the host of a peer as gRPC names it, such as ipv4:127.0.0.1:50051; "unix" for a unix socket."""
    kind, _, address = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind
    host = address.rpartition(":")[0]
    return unquote(host).strip("[]") if kind == "ipv6" else host


@dataclass(frozen=True, eq=False)
class ServerContext:
    """State that all methods of a server share.

    Args:
        config: settings of the server.
        admission: gates and thread pools.
        transit: the messages in transit.
        metrics: the server's metrics.
        logs: the server's log.
        tokens: the known tokens; None if the server requires no token.
        tracing: source of OpenTelemetry spans; None disables tracing.
        numbers: counter that numbers requests without an id.
    """

    config: ServerConfig
    admission: Admission
    transit: Transit
    metrics: Metrics
    logs: Logs
    tokens: TokenFile | None = None
    tracing: Tracing | None = None
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def call(self, context: Context, client: str) -> tuple[Call, Metadata]:
        """Create the call for a context and return it with its trailing metadata."""
        remaining = context.time_remaining()
        deadline = None if remaining is None else monotonic() + remaining
        request_id: str | None = None
        for key, value in context.invocation_metadata():
            if key == REQUEST_ID and _VALID_ID.fullmatch(str(value)):
                request_id = str(value)
        if request_id is None:
            request_id = f"{_PREFIX}-{next(self.numbers)}"
        return Call(request_id, client, self.admission, context, deadline), ((REQUEST_ID, request_id),)

    def client(self, context: Context, *, open_to_all: bool = False) -> str:
        """Return the caller's name, taken from its token, else its certificate, else its address without the port.

        Args:
            context: context of the call.
            open_to_all: whether the method can be called without a token.

        Raises:
            ServiceUnauthenticatedError: the server requires a token, and the call has none or an unknown one.
        """
        if self.tokens is not None and not open_to_all:
            token = get_token(context.invocation_metadata())
            name = None if token is None else self.tokens.name(token)
            if name is None:
                self.metrics.unauthenticated.inc()
                self.logs.seldom("unauthenticated", last_peer=context.peer())
                raise ServiceUnauthenticatedError('authorization: got no known token, want "Bearer TOKEN"')
            return name
        identity = context.auth_context()
        for key in ("x509_common_name", "x509_subject_alternative_name"):
            for value in identity.get(key, ()):
                if value:
                    return str(value.decode(errors="replace"))
        return _host_of(context.peer())

    def parse(self, kind: type[M], raw: bytes, call: Call, *, bulky: bool) -> M:
        """Parse a request; ``bulky`` requests may have more bytes besides large tensors than limits.message_bytes.

        Raises:
            DecodeError: the bytes are not a message of this kind.
            LimitExceededError: the request has too many bytes that are not in large tensors.
        """
        call.request_bytes = len(raw)
        began = perf_counter()
        limits = self.config.limits
        marked = raw if len(raw) < beside.LEAST_BYTES else call.beside.marked(kind, raw, most_fields(limits))
        if not bulky:
            check("message_bytes", len(marked), limits)
        message = kind.FromString(marked)
        call.stages.append(("decode", perf_counter() - began))
        return message

    def encode(self, response: Message, call: Call) -> bytes:
        """Serialize the answer.

        Raises:
            LimitExceededError: the answer has more bytes than the limit allows.
        """
        call.checkpoint()
        began = perf_counter()
        raw = call.beside.serialize(response)
        call.stages.append(("encode", perf_counter() - began))
        check("response_bytes", len(raw), self.config.limits)
        return raw

    def failed(self, error: Exception, request_id: str, method: str, **trace: str) -> Failure:
        """Return the status for an error, log internal errors, and count refusals by reason."""
        failed = failure(error, request_id)
        if failed.status == "INTERNAL":
            self.logs.error("internal error", error, request_id=request_id, method=method, **trace)
        elif reason := refused_by(error):
            self.metrics.refused.labels(method, reason).inc()
        return failed

    def ended(self, kind: str, call: Call, method: str, status: str, context: Context, **sizes: int) -> None:
        """Log the end of a request or stream; ``sizes`` contains further numbers to log."""
        self.logs.info(
            kind,
            request_id=call.request_id,
            peer=context.peer(),
            client=call.client,
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

    def answer(self, requests: Iterator[bytes], context: Context) -> Answer:
        """Answer one call; its request is not read until the call has a slot.

        Raises:
            GoneError: the client has disconnected.
        """
        server, method = self._server, self.method
        try:
            client = server.client(context)
        except ServiceUnauthenticatedError as error:
            return Answer(failed=server.failed(error, "", method.name))
        call, metadata = server.call(context, client)
        if server.tracing is not None:
            server.tracing.begin(call, self._path, context)
        self._metrics.begin()
        raw = answer = b""
        status = "CANCELLED"
        try:
            server.admission.arrive()
            call.admit(server.admission.calls)
            raw = server.transit.request(requests, context)
            plain = None if method.plain is None else call.plain(method.plain, raw)
            answer = self._parsed(raw, call) if plain is None else plain
            server.transit.send(call, context, len(answer) if plain is None else len(raw) + len(answer))
            status = "OK"
            return Answer(answer, metadata)
        except GoneError:
            status = "DEADLINE_EXCEEDED" if call.late else "CANCELLED"
            raise
        except Exception as error:
            failed = server.failed(error, call.request_id, method.name, **call.trace)
            status, answer = failed.status, b""
            return Answer(b"", (*metadata, *failed.metadata), failed)
        finally:
            call.release()
            if status != "OK":
                call.free()
            sizes = {"request_bytes": len(raw), "response_bytes": len(answer)}
            if server.tracing is not None:
                server.tracing.end(call, status, **sizes)
            call.stages.append(("total", call.seconds))
            self._metrics.end(status, call.stages, call.counts, **sizes)
            if server.logs.requests:
                server.ended("request", call, method.name, status, context, **sizes)

    def _parsed(self, raw: bytes, call: Call) -> bytes:
        """Parse a request, call the method, and serialize the answer."""
        server, method = self._server, self.method
        call.hold(len(raw))
        request, response = server.parse(method.request, raw, call, bulky=method.bulky), method.response()
        method.run(request, response, call)
        return server.encode(response, call)
