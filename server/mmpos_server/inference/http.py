"""Open Inference Protocol over HTTP/1.1: the same methods, admitted, limited, counted and logged as over gRPC."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from mmpos.errors import InvalidInputError, LimitExceededError, MmposError
from mmpos.rpc.errors import RETRY_AFTER, shortened
from mmpos_server.inference import open_inference_pb2 as pb
from mmpos_server.inference.methods import SERVICE
from mmpos_server.inference.rest import BinaryOutputs, infer_request, infer_response, plain, register_request
from mmpos_server.listening import Listen, address, bind_http
from mmpos_server.methods import failure
from mmpos_server.transport import Metadata

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from mmpos_server.access import Certificates, TokenInterceptor
    from mmpos_server.admission import Call
    from mmpos_server.endpoints import Endpoint, ServerContext
    from mmpos_server.telemetry import Logs

__all__ = ["HttpForm"]

JSON_SIZE = "Inference-Header-Content-Length"
"""Header with the size of the JSON, where bytes of tensors follow it."""

_INLINE_BYTES = 16_384
"""Largest JSON that is read and written on the event loop: a thread would cost more than the work."""

_ROUND_SECONDS = 0.01
"""Seconds between two checks for requests at work while the server stops."""

_CODES = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 413,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""HTTP status for each gRPC status; overload, which has a time to retry, is 429, and all others are 500."""


@dataclass(frozen=True)
class _Route:
    """HTTP path of a method.

    Args:
        verb: HTTP verb.
        path: path with named variables.
        method: name of the method.
        request: function from the variables of the path and the body to the request.
        answer: function from the response to the JSON value of the answer.
        ready: function that checks the response; if it returns False, the status is 503.
    """

    verb: str
    path: str
    method: str
    request: Callable[[Mapping[str, str], bytes], Message]
    answer: Callable[[Any], Any] = plain
    ready: Callable[[Any], bool] = lambda _: True


def _routes() -> list[_Route]:
    """Return the routes of all methods but ModelInfer, whose bodies have an encoding of their own."""

    def named(kind: Callable[..., Message]) -> Callable[[Mapping[str, str], bytes], Message]:
        return lambda parts, _: kind(**parts)

    def regions(answer: Any) -> list[dict[str, Any]]:
        return [plain(region) for region in answer.regions.values()]

    def register_cuda(parts: Mapping[str, str], _: bytes) -> Message:
        return pb.CudaSharedMemoryRegisterRequest(name=parts["name"])

    def flag(answer: Any) -> bool:
        return bool(answer.ready)

    model, region = "/v2/models/{name}", "/region/{name}"
    routes = [
        _Route("GET", "/v2", "ServerMetadata", named(pb.ServerMetadataRequest)),
        _Route("GET", "/v2/health/live", "ServerLive", named(pb.ServerLiveRequest)),
        _Route("GET", "/v2/health/ready", "ServerReady", named(pb.ServerReadyRequest), ready=flag),
        _Route("GET", "/v2/models/stats", "ModelStatistics", named(pb.ModelStatisticsRequest)),
    ]
    for path in (model, f"{model}/versions/{{version}}"):
        routes += [
            _Route("GET", path, "ModelMetadata", named(pb.ModelMetadataRequest)),
            _Route("GET", f"{path}/ready", "ModelReady", named(pb.ModelReadyRequest), ready=flag),
            _Route("GET", f"{path}/config", "ModelConfig", named(pb.ModelConfigRequest), lambda it: plain(it.config)),
            _Route("GET", f"{path}/stats", "ModelStatistics", named(pb.ModelStatisticsRequest)),
        ]
    memories: list[tuple[str, str, Any, Any, Callable[[Mapping[str, str], bytes], Message]]] = [
        (
            "system",
            "SystemSharedMemory",
            pb.SystemSharedMemoryStatusRequest,
            pb.SystemSharedMemoryUnregisterRequest,
            lambda parts, raw: register_request(raw, parts["name"]),
        ),
        (
            "cuda",
            "CudaSharedMemory",
            pb.CudaSharedMemoryStatusRequest,
            pb.CudaSharedMemoryUnregisterRequest,
            register_cuda,
        ),
    ]
    for kind, method, status, unregister, register in memories:
        path = f"/v2/{kind}sharedmemory"
        for prefix in (path, f"{path}{region}"):
            routes += [
                _Route("GET", f"{prefix}/status", f"{method}Status", named(status), regions),
                _Route("POST", f"{prefix}/unregister", f"{method}Unregister", named(unregister)),
            ]
        routes.append(_Route("POST", f"{path}{region}/register", f"{method}Register", register))
    return routes


class HttpForm:
    """HTTP server of the Open Inference Protocol on a port of its own, on the event loop of the server.

    Args:
        endpoints: unary endpoints of the server; those of the protocol are served.
        server: state that its methods share.
        interceptor: check of tokens; None admits everybody.
        listen: addresses, with http_port set.
    """

    def __init__(
        self, endpoints: Iterable[Endpoint], server: ServerContext, interceptor: TokenInterceptor | None, listen: Listen
    ) -> None:
        self._server = server
        self._interceptor, self._listen = interceptor, listen
        self._endpoints = {one.method.name: one for one in endpoints if one.method.service == SERVICE}
        self._settings = server.config.http
        self._busy: set[web.RequestHandler] = set()
        self._runner: web.AppRunner | None = None
        self._accepting: asyncio.Server | None = None

    def renew(self, server: ServerContext) -> None:
        """Apply these limits to bodies from now on."""
        self._server = server

    async def start(self, certificates: Certificates | None) -> str:
        """Listen and serve; returns the address.

        Args:
            certificates: certificates of the server; None is no TLS.

        Raises:
            InvalidInputError: the port is taken, or the host is not of this machine.
        """
        listen, settings = self._listen, self._settings
        context = None if certificates is None else certificates.context()
        listening = bind_http(listen)
        self._runner = web.AppRunner(
            self._application(),
            handler_cancellation=True,
            access_log=None,
            logger=_logger(self._server.logs),
            keepalive_timeout=settings.idle_seconds,
            lingering_time=min(settings.receive_seconds, 10.0),
            auto_decompress=False,
        )
        await self._runner.setup()
        self._accepting = await asyncio.get_running_loop().create_server(
            self._connection,
            sock=listening,
            ssl=context,
            ssl_handshake_timeout=None if context is None else settings.receive_seconds,
        )
        scheme = "http" if context is None else "https"
        return f"{scheme}://{address(listen.host, listening.getsockname()[1])}"

    async def stop(self, grace: float | None) -> None:
        """Take no further connections, answer the requests that have arrived, and stop.

        Args:
            grace: seconds after which requests at work are cancelled; None is at once.
        """
        if self._accepting is None or self._runner is None or self._runner.server is None:
            return
        self._accepting.close()
        end = monotonic() + (grace or 0.0)
        # Not by the shutdown of aiohttp, which stops reading, so that incomplete bodies would never arrive.
        while self._busy and monotonic() < end:
            await asyncio.sleep(_ROUND_SECONDS)
        await self._runner.server.shutdown(0.0)
        await self._runner.cleanup()

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[_named_errors])
        for route in _routes():
            application.router.add_route(route.verb, route.path, self._handler(route))
        for path in ("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer"):
            application.router.add_post(path, self._infer)
        return application

    def _connection(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        assert self._runner is not None
        assert self._runner.server is not None
        # Two rounds later, when all connections of this round are among those of the server.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._make_room)
        return self._runner.server()

    def _make_room(self) -> None:
        """Close idle connections while there are too many, oldest first; the newest is always idle."""
        assert self._runner is not None
        connections = [] if self._runner.server is None else self._runner.server.connections
        if len(connections) > self._settings.max_connections:
            # A closed connection is among them until the next round.
            live = {one: one.transport for one in connections if one.transport and not one.transport.is_closing()}
            idle = [transport for one, transport in live.items() if one not in self._busy]
            for transport in idle[: max(0, len(live) - self._settings.max_connections)]:
                transport.abort()

    def _handler(self, route: _Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._answer(request, route.method, _JsonForm(route, request.match_info))

        return handle

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(
            request, "ModelInfer", _TensorForm(request.match_info, request.headers.get(JSON_SIZE))
        )

    async def _answer(self, request: web.Request, method: str, form: _Form) -> web.StreamResponse:
        """Answer a request by a method, and wait until the answer is sent."""
        self._busy.add(request.protocol)
        context = _Context(request)
        try:
            body = await self._answered(request, method, form, context)
        except _AbortedError as error:
            response = _error(error)
        else:
            response = web.Response(body=body, status=form.status, headers=form.headers)
        try:
            response.headers.update({name: value for name, value in context.trailing if name != RETRY_AFTER})
            return await self._sent(request, response)
        finally:
            self._busy.discard(request.protocol)

    async def _answered(self, request: web.Request, method: str, form: _Form, context: _Context) -> bytes:
        if self._interceptor is not None and not self._interceptor.authenticate(
            f"/{SERVICE}/{method}", context.invocation_metadata()
        ):
            raise _AbortedError(*self._interceptor.refused(context.peer()))
        try:
            raw = await self._body(request)
        except MmposError as error:
            failed = failure(error, "")
            raise _AbortedError(failed.status, failed.message, failed.metadata) from None
        return await self._endpoints[method].handle(raw, context, form)

    async def _body(self, request: web.Request) -> bytes:
        """Read the body of a request; while it arrives, it counts among the bytes of requests at work.

        Raises:
            LimitExceededError: the body is too large; one whose header says so is not read.
            ServiceOverloadedError: the requests at work hold too many bytes.
        """
        if request.headers.get("Content-Encoding", "identity") != "identity":
            got = request.headers["Content-Encoding"]
            raise web.HTTPUnsupportedMediaType(text=f"Content-Encoding: got {got[:100]!r}, want none")
        limit, gate = self._server.config.limits.request_bytes, self._server.admission.bytes
        _check_size(request.content_length or 0, limit)
        chunks: list[bytes] = []
        size, began = 0, monotonic()
        try:
            async with asyncio.timeout(self._settings.receive_seconds):
                async for chunk in request.content.iter_any():
                    gate.enter(len(chunk), size)
                    size += len(chunk)
                    chunks.append(chunk)
                    _check_size(size, limit)
        except TimeoutError:
            raise web.HTTPRequestTimeout(
                text=f"body: got {size} bytes, want all of it within {self._settings.receive_seconds:g} s"
            ) from None
        finally:
            if size:
                gate.leave(monotonic() - began, size)
        return b"".join(chunks)

    async def _sent(self, request: web.Request, response: web.Response) -> web.Response:
        """Send an answer within a time limit; until the client has read it, it counts like the requests at work."""
        transport, gate, began = request.transport, self._server.admission.bytes, monotonic()
        if transport is None:  # the client has gone
            return response
        if self._server.admission.announced:
            response.force_close()
        transport.set_write_buffer_limits(
            0
        )  # the drain waits for all bytes, or the rest would be lost when the connection is closed
        size = len(response.body) if isinstance(response.body, bytes) else 0
        gate.enter(size, gate.taken)  # the answer exists: it is never refused
        try:
            async with asyncio.timeout(self._settings.send_seconds):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            transport.abort()
        except ConnectionError:  # the client has gone meanwhile
            pass
        finally:
            gate.leave(monotonic() - began, size)
        return response


class _Form:
    """Encoding of the messages of one request, with status and headers of its answer."""

    def __init__(self) -> None:
        self.status = 200
        self.headers = {"Content-Type": "application/json"}

    async def read(self, raw: bytes, call: Call) -> Message:
        raise NotImplementedError

    async def write(self, response: Any, call: Call) -> bytes:
        raise NotImplementedError


class _JsonForm(_Form):
    """Encoding of methods with a small request, from the path or the body, and a small answer."""

    def __init__(self, route: _Route, parts: Mapping[str, str]) -> None:
        super().__init__()
        self._route, self._parts = route, dict(parts)

    async def read(self, raw: bytes, call: Call) -> Message:
        return self._route.request(self._parts, raw)

    async def write(self, response: Any, call: Call) -> bytes:
        self.status = 200 if self._route.ready(response) else 503
        return json.dumps(self._route.answer(response)).encode()


class _TensorForm(_Form):
    """Encoding of ModelInfer: JSON, with tensors in it or as bytes behind it."""

    def __init__(self, parts: Mapping[str, str], json_size: str | None) -> None:
        super().__init__()
        self._parts, self._json_size = parts, json_size
        self._binary = BinaryOutputs(False, {})

    async def read(self, raw: bytes, call: Call) -> pb.ModelInferRequest:
        size = None if self._json_size is None else _natural(JSON_SIZE, self._json_size)
        if len(raw) <= _INLINE_BYTES:
            message, self._binary = self._decoded(call, raw, size)
        else:
            message, self._binary = await call.run("place", self._decoded, call, raw, size)
        return message

    async def write(self, response: pb.ModelInferResponse, call: Call) -> bytes:
        call.checkpoint()
        if response.ByteSize() <= _INLINE_BYTES:
            return self._encoded(call, response)
        return await call.run("place", self._encoded, call, response)

    def _decoded(self, call: Call, raw: bytes, size: int | None) -> tuple[pb.ModelInferRequest, BinaryOutputs]:
        with call.stage("decode"):
            return infer_request(raw, size, self._parts["name"], self._parts.get("version", ""))

    def _encoded(self, call: Call, response: pb.ModelInferResponse) -> bytes:
        with call.stage("encode"):
            head, behind = infer_response(response, self._binary)
            if behind:
                self.headers = {"Content-Type": "application/octet-stream", JSON_SIZE: str(len(head))}
            return head + behind


class _AbortedError(Exception):
    """Failed call, with its gRPC status."""

    def __init__(self, status: str, message: str, metadata: Metadata = ()) -> None:
        super().__init__(message)
        self.status, self.metadata = status, dict(metadata)


class _Context:
    """Adapter that gives an HTTP request the interface of a gRPC context."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.trailing: list[tuple[str, str]] = []

    def invocation_metadata(self) -> list[tuple[str, str]]:
        # ASCII only, as in gRPC: other bytes could be part of a token in a log.
        return [(name.lower(), value) for name, value in self._request.headers.items() if value.isascii()]

    def peer(self) -> str:
        name = self._request.transport.get_extra_info("peername") if self._request.transport else None
        if not name:
            return "unknown"
        host, port = name[:2]
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"

    def auth_context(self) -> dict[str, list[bytes]]:
        certificate = self._request.transport.get_extra_info("peercert") if self._request.transport else None
        subject = (pair for name in (certificate or {}).get("subject", ()) for pair in name)
        names = [value.encode() for key, value in subject if key == "commonName"]
        others = [value.encode() for _, value in (certificate or {}).get("subjectAltName", ())]
        return {"x509_common_name": names, "x509_subject_alternative_name": others}

    def time_remaining(self) -> None:
        """Return None: HTTP has no deadline; a client that gives up closes the connection, which cancels the call."""

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self.trailing = list(metadata)

    async def abort(self, code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> NoReturn:
        self.set_trailing_metadata(metadata)
        raise _AbortedError(code.name, details, metadata)


class _Handler(logging.Handler):
    """Log handler that writes one line for invalid HTTP of a client, and a traceback for all other errors."""

    def __init__(self, logs: Logs) -> None:
        super().__init__(logging.WARNING)
        self._logs = logs

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            self._logs.info("request is not HTTP", reason=shortened(error.message))
        else:
            self._logs.error(record.getMessage(), error)


def _logger(logs: Logs) -> logging.Logger:
    logger = logging.Logger("mmpos_server.inference.http", logging.WARNING)
    logger.addHandler(_Handler(logs))
    return logger


@web.middleware
async def _named_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer errors of paths, verbs and bodies in the JSON form of the protocol."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        kept = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
        return web.json_response({"error": error.text}, status=error.status, headers=kept)


def _error(error: _AbortedError) -> web.Response:
    code, headers = _CODES.get(error.status, 500), {}
    if RETRY_AFTER in error.metadata:
        code, headers = 429, {"Retry-After": str(ceil(int(error.metadata[RETRY_AFTER]) / 1000))}
    if code == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    return web.json_response({"error": str(error)}, status=code, headers=headers)


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise LimitExceededError(f"request: got {size} bytes, want <= {limit}")


def _natural(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise InvalidInputError(f"{name}: got {text[:100]!r}, want an integer >= 0")
    return int(text)
