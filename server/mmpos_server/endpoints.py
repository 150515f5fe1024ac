"""Answer unary calls, from bytes to bytes: identify the client, read, answer, and turn exceptions into statuses."""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from mmpos.errors import ServiceUnauthenticatedError
from mmpos.rpc import beside
from mmpos.rpc.errors import get_token
from mmpos_server.arrivals import LARGE_BYTES, Arrivals
from mmpos_server.call import Call, GoneError, Threads
from mmpos_server.limits import check, most_fields
from mmpos_server.methods import REQUEST_ID, Failure, failure, refused_by
from mmpos_server.metrics import MethodMetrics

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from mmpos_server.access import TokenFile
    from mmpos_server.config import Limits
    from mmpos_server.logs import Logs
    from mmpos_server.methods import Method
    from mmpos_server.metrics import Metrics

__all__ = ["Endpoint", "Shared"]


_PREFIX = secrets.token_hex(5)
"""Prefix of this process's request ids."""

_VALID_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)

M = TypeVar("M", bound="Message")


@lru_cache(maxsize=4096)
def _host_of(peer: str) -> str:
    """Return the host of a peer as gRPC names it, such as ipv4:127.0.0.1:50051; "unix" for a unix socket."""
    kind, _, address = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind
    host = address.rpartition(":")[0]
    return unquote(host).strip("[]") if kind == "ipv6" else host


@dataclass(frozen=True, eq=False)
class Shared:
    """State that all methods of a server share.

    Args:
        limits: limits of one request.
        arrivals: bounds for messages, streams and answers.
        threads: threads for long work.
        metrics: the server's metrics.
        logs: the server's log.
        tokens: the known tokens; None if the server requires no token.
        numbers: counter that numbers requests without an id.
    """

    limits: Limits
    arrivals: Arrivals
    threads: Threads
    metrics: Metrics
    logs: Logs
    tokens: TokenFile | None = None
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def client(self, context: Any, *, open_to_all: bool = False) -> str:
        """Return the caller's name, taken from its token, else its certificate, else its address without the port.

        Args:
            context: context of the call.
            open_to_all: whether the method can be called without a token.

        Raises:
            ServiceUnauthenticatedError: the server requires a token, and the call has none or an unknown one.
        """
        if self.tokens is not None and not open_to_all:
            token = get_token(context.invocation_metadata() or ())
            name = None if token is None else self.tokens.name(token)
            if name is None:
                self.metrics.unauthenticated.inc()
                raise ServiceUnauthenticatedError('authorization: got no known token, want "Bearer TOKEN"')
            return name
        identity = context.auth_context()
        for key in ("x509_common_name", "x509_subject_alternative_name") if identity else ():
            for value in identity.get(key, ()):
                if value:
                    return str(value.decode(errors="replace"))
        return _host_of(context.peer())

    def request_id(self, context: Any) -> str:
        """Return the id that the client has set for a call, or a new one."""
        for key, value in context.invocation_metadata() or ():
            if key == REQUEST_ID and _VALID_ID.fullmatch(str(value)):
                return str(value)
        return f"{_PREFIX}-{next(self.numbers)}"

    def parse(self, kind: type[M], raw: bytes, call: Call, bulky: bool) -> M:
        """Parse a request; ``bulky`` requests may have more bytes besides large tensors than limits.message_bytes.

        Raises:
            DecodeError: the bytes are not a message of this kind.
            LimitExceededError: the request has too many bytes that are not in large tensors.
        """
        call.request_bytes = len(raw)
        began = perf_counter()
        limits = self.limits
        marked = raw if len(raw) < beside.LEAST_BYTES else call.beside.marked(kind, raw, most_fields(limits))
        if not bulky:
            check("message_bytes", len(marked), limits)
        message = kind.FromString(marked)
        call.staged("decode", began)
        return message

    def encode(self, response: Message, call: Call) -> bytes:
        """Serialize the answer.

        Raises:
            LimitExceededError: the answer has more bytes than the limit allows.
        """
        call.checkpoint()
        began = perf_counter()
        raw = call.beside.serialize(response)
        call.staged("encode", began)
        check("response_bytes", len(raw), self.limits)
        return raw

    def failed(self, error: Exception, request_id: str, method: str) -> Failure:
        """Return the status for an error, log internal errors, and count refusals by reason."""
        failed = failure(error, request_id)
        if failed.status == "INTERNAL":
            self.logs.error("internal error", error, request_id=request_id, method=method)
        elif reason := refused_by(error):
            self.metrics.refused.labels(method, reason).inc()
        error.__traceback__ = None  # its frames hold messages, and grpc keeps the error in a cycle
        return failed

    def ended(
        self,
        method: str,
        status: str,
        request_id: str,
        peer: str,
        call: Call,
        error: Exception | None,
        failed: Failure | None,
        **sizes: int,
    ) -> None:
        """Write the log line of a call or stream."""
        why: dict[str, object] = {}
        if error is not None and failed is not None:
            why = {"reason": refused_by(error) or "", "message": failed.message, **_names(call.request)}
        self.logs.call(
            status != "OK",
            method=method,
            status=status,
            client=call.client,
            peer=peer,
            request_id=request_id,
            milliseconds=round(1000 * (perf_counter() - call.began), 3),
            **sizes,
            **call.counts,
            **why,
        )


def _names(request: Any) -> dict[str, str]:
    """Return the profile and the scheme that a request names, shortened, since they may be wrong."""
    query = getattr(request, "query", None)
    names = {"profile": getattr(query, "profile", ""), "scheme": getattr(getattr(query, "scheme", None), "name", "")}
    return {key: name[:100] for key, name in names.items() if name}


class Endpoint:
    """Unary endpoint of a method.

    Args:
        method: method to call.
        shared: state that the methods share.
    """

    def __init__(self, method: Method, shared: Shared) -> None:
        self.method, self._shared = method, shared
        self._metrics = MethodMetrics(shared.metrics, method.name)

    async def answer(self, _: object, context: Any) -> bytes:
        """Answer one call, whose request grpc does not read before this asks for it.

        Raises:
            AbortError: the call failed; the status is set.
        """
        shared, method = self._shared, self.method
        call, failed, cause = Call("", shared.arrivals, shared.threads), None, None
        raw = answer = b""
        status = "CANCELLED"
        placed = False
        self._metrics.begin()
        shared.arrivals.running += 1
        try:
            call.client = client = shared.client(context)
            call.context = context
            shared.arrivals.check_open()
            if method.large:
                await shared.arrivals.messages.wait(client)
                placed = True
            raw = await shared.arrivals.message(context, client, placed=placed)
            if len(raw) > LARGE_BYTES and not placed:
                shared.arrivals.messages.take(client)
                placed = True
            plain = call.plain(method.plain, raw)
            answer = await self._parsed(raw, call) if plain is None else plain
            if len(answer) > LARGE_BYTES and not call.reserved:
                await call.reserve(len(answer))
            status = "OK"
            return answer
        except (asyncio.CancelledError, GoneError):
            remaining = context.time_remaining()
            if remaining is not None and remaining < 0.1:  # the client ends a call at the deadline, too
                status = "DEADLINE_EXCEEDED"
            raise asyncio.CancelledError from None
        except Exception as error:
            cause, failed = error, shared.failed(error, shared.request_id(context), method.name)
            status, answer = failed.status, b""
            await context.abort(failed.code, failed.message, failed.metadata)
            raise  # not reached: abort raises an error
        finally:
            call.gone = True
            shared.arrivals.running -= 1
            if placed:
                shared.arrivals.messages.leave(client)
            sizes = {"request_bytes": len(raw), "response_bytes": len(answer)}
            call.staged("total", call.began)
            self._metrics.end(status, call.stages, call.counts, **sizes)
            if status != "OK" or shared.logs.sampled():
                request_id = shared.request_id(context) if failed is None else failed.request_id
                shared.ended(method.name, status, request_id, context.peer(), call, cause, failed, **sizes)
            del call, raw, answer  # grpc keeps the frame of a call that it aborts in a cycle

    async def _parsed(self, raw: bytes, call: Call) -> bytes:
        """Parse a request, call the method, and serialize the answer."""
        shared, method, response = self._shared, self.method, self.method.response()
        if len(raw) <= LARGE_BYTES:
            call.request = shared.parse(method.request, raw, call, method.bulky)
        else:
            call.request = await call.run("work", shared.parse, method.request, raw, call, method.bulky)
        await method.run(call.request, response, call)
        if call.answer_bytes <= LARGE_BYTES:
            return shared.encode(response, call)
        return await call.run("work", shared.encode, response, call)
