"""The protocol over HTTP/1.1: the same methods behind paths, admitted, limited, counted and logged as over gRPC."""

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
from mmpos_server.inference.rest import Wanted, infer_request, infer_response, plain, register_request
from mmpos_server.listening import Listen, address, bind_http
from mmpos_server.methods import failure

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from mmpos_server.access import Door
    from mmpos_server.call import Call
    from mmpos_server.certificates import Certificates
    from mmpos_server.endpoints import Endpoint, ServerContext
    from mmpos_server.logs import Logs

__all__ = ["HttpForm"]

JSON_SIZE = "Inference-Header-Content-Length"
"""Header of a message whose JSON has bytes of tensors behind it: where they begin."""

_INLINE_BYTES = 16_384
"""JSON up to this size is read and written between two requests: a thread would cost more than it does."""

_ROUND_SECONDS = 0.01
"""How often it is looked at the end whether there is still a request."""

_CODES = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 413,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""Status of HTTP for each of gRPC; too much at once, which has a time to come back, is 429, and all others are 500."""

_Pairs = Iterable[tuple[str, str]]


@dataclass(frozen=True)
class _Route:
    """A path, and the method behind it.

    Args:
        verb: of HTTP.
        path: with the names of its parts.
        method: of the protocol.
        request: makes its request, from the parts of the path and the body.
        answer: what is answered, of its response.
        ready: whether the response is a good one; else the status is 503.
    """

    verb: str
    path: str
    method: str
    request: Callable[[Mapping[str, str], bytes], Message]
    answer: Callable[[Any], Any] = plain
    ready: Callable[[Any], bool] = lambda _: True


def _routes() -> list[_Route]:
    """All but ModelInfer, whose bodies need a form of their own."""

    def named(kind: Callable[..., Message]) -> Callable[[Mapping[str, str], bytes], Message]:
        return lambda parts, _: kind(**parts)

    def regions(answer: Any) -> list[Any]:
        return [plain(region) for region in answer.regions.values()]

    def register_cuda(parts: Mapping[str, str], _: bytes) -> Message:
        return pb.CudaSharedMemoryRegisterRequest(name=parts["name"])

    def flag(answer: Any) -> bool:
        return bool(answer.ready)

    model, region = "/v2/models/{name}", "/region/{name}"
    found = [
        _Route("GET", "/v2", "ServerMetadata", named(pb.ServerMetadataRequest)),
        _Route("GET", "/v2/health/live", "ServerLive", named(pb.ServerLiveRequest)),
        _Route("GET", "/v2/health/ready", "ServerReady", named(pb.ServerReadyRequest), ready=flag),
        _Route("GET", "/v2/models/stats", "ModelStatistics", named(pb.ModelStatisticsRequest)),
    ]
    for path in (model, f"{model}/versions/{{version}}"):
        found += [
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
        for place in (path, f"{path}{region}"):
            found += [
                _Route("GET", f"{place}/status", f"{method}Status", named(status), regions),
                _Route("POST", f"{place}/unregister", f"{method}Unregister", named(unregister)),
            ]
        found.append(_Route("POST", f"{path}{region}/register", f"{method}Register", register))
    return found


class HttpForm:
    """The HTTP form of the Open Inference Protocol on a port of its own, on the event loop of the server.

    Args:
        endpoints: the unary methods of the server; those of the protocol are offered.
        surroundings: of the server.
        door: who may call; None is everybody.
        listen: where; http_port is set.
    """

    def __init__(
        self, endpoints: Iterable[Endpoint], surroundings: ServerContext, door: Door | None, listen: Listen
    ) -> None:
        self.surroundings = surroundings
        self._door, self._listen = door, listen
        self._endpoints = {one.method.name: one for one in endpoints if one.method.service == SERVICE}
        self._settings = surroundings.config.http
        self._busy: set[Any] = set()
        self._runner: web.AppRunner | None = None
        self._accepting: asyncio.Server | None = None

    def renew(self, surroundings: ServerContext) -> None:
        """Hold bodies to these limits from now on."""
        self.surroundings = surroundings

    async def start(self, certificates: Certificates | None) -> str:
        """Listen and serve; gives the address.

        Args:
            certificates: of the server; None is no TLS.

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
            logger=_logger(self.surroundings.logs),
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
        place = address(listen.host, listening.getsockname()[1])
        return f"{'http' if context is None else 'https'}://{place}"

    async def stop(self, grace: float | None) -> None:
        """Take no further connections, answer the requests that came, and end.

        Args:
            grace: seconds after which requests at work are cancelled; None is at once.
        """
        if self._accepting is None or self._runner is None or self._runner.server is None:
            return
        self._accepting.close()
        end = monotonic() + (grace or 0.0)
        # Not by the shutdown of aiohttp: it reads no further, and what of a body is on its way would never come.
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
        """What speaks on a new connection."""
        assert self._runner is not None
        assert self._runner.server is not None
        # Many may come in one round of the loop, and are among the connections of the server in the next one.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._make_room)
        return self._runner.server()

    def _make_room(self) -> None:
        """Close idle connections while there are too many; the oldest go first, and the newest is always idle."""
        assert self._runner is not None
        connections = [] if self._runner.server is None else self._runner.server.connections
        if len(connections) > self._settings.max_connections:
            # One that was closed is among them until the next round.
            live = {one: one.transport for one in connections if one.transport and not one.transport.is_closing()}
            idle = [transport for one, transport in live.items() if one not in self._busy]
            for transport in idle[: max(0, len(live) - self._settings.max_connections)]:
                transport.abort()

    def _handler(self, route: _Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._answer(request, route.method, _Told(route, request.match_info))

        return handle

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "ModelInfer", _Tensors(request.match_info, request.headers.get(JSON_SIZE)))

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
        if self._door is not None and not self._door.lets_in(f"/{SERVICE}/{method}", context.invocation_metadata()):
            raise _AbortedError(*self._door.refused(context.peer()))
        try:
            raw = await self._body(request)
        except MmposError as error:
            failed = failure(error, "")
            raise _AbortedError(failed.status, failed.message, failed.metadata) from None
        return await self._endpoints[method].handle(raw, context, form)

    async def _body(self, request: web.Request) -> bytes:
        """The body of a request, which counts as the bytes of requests at work do while it comes.

        Raises:
            LimitExceededError: it is too large; nothing is read of one that says so.
            ServiceOverloadedError: there is no room.
        """
        if request.headers.get("Content-Encoding", "identity") != "identity":
            got = request.headers["Content-Encoding"]
            raise web.HTTPUnsupportedMediaType(text=f"Content-Encoding: got {got[:100]!r}, want none")
        limit, gate = self.surroundings.config.limits.request_bytes, self.surroundings.admission.bytes
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
        """Send an answer, which counts as requests at work do until the client has read it; not for ever."""
        transport, gate, began = request.transport, self.surroundings.admission.bytes, monotonic()
        if transport is None:  # the client has gone
            return response
        if self.surroundings.admission.announced:
            response.force_close()
        transport.set_write_buffer_limits(0)  # all of it, or the rest would stay when the connection is closed
        size = len(response.body) if isinstance(response.body, bytes) else 0
        gate.enter(size, gate.taken)  # it is there: nothing is refused
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
    """How the messages of one request look; and after it was answered, status and headers of the answer."""

    def __init__(self) -> None:
        self.status = 200
        self.headers = {"Content-Type": "application/json"}

    async def read(self, raw: bytes, call: Call) -> Any:
        raise NotImplementedError

    async def write(self, response: Any, call: Call) -> bytes:
        raise NotImplementedError


class _Told(_Form):
    """A request that is in the path, or small; and a small answer."""

    def __init__(self, route: _Route, parts: Mapping[str, str]) -> None:
        super().__init__()
        self._route, self._parts = route, dict(parts)

    async def read(self, raw: bytes, call: Call) -> Message:
        return self._route.request(self._parts, raw)

    async def write(self, response: Any, call: Call) -> bytes:
        self.status = 200 if self._route.ready(response) else 503
        return json.dumps(self._route.answer(response)).encode()


class _Tensors(_Form):
    """A request of ModelInfer and its answer."""

    def __init__(self, parts: Mapping[str, str], json_size: str | None) -> None:
        super().__init__()
        self._parts, self._json_size = parts, json_size
        self._wanted = Wanted(False, {})

    async def read(self, raw: bytes, call: Call) -> pb.ModelInferRequest:
        size = None if self._json_size is None else _natural(JSON_SIZE, self._json_size)
        arguments = raw, size, self._parts["name"], self._parts.get("version", "")
        if len(raw) <= _INLINE_BYTES:
            message, self._wanted = self._decoded(call, *arguments)
        else:
            message, self._wanted = await call.run("place", self._decoded, call, *arguments)
        return message

    async def write(self, response: pb.ModelInferResponse, call: Call) -> bytes:
        call.checkpoint()
        if response.ByteSize() <= _INLINE_BYTES:
            return self._encoded(call, response)
        return await call.run("place", self._encoded, call, response)

    def _decoded(self, call: Call, *arguments: Any) -> tuple[pb.ModelInferRequest, Wanted]:
        with call.stage("decode"):
            return infer_request(*arguments)

    def _encoded(self, call: Call, response: pb.ModelInferResponse) -> bytes:
        with call.stage("encode"):
            head, behind = infer_response(response, self._wanted)
            if behind:
                self.headers = {"Content-Type": "application/octet-stream", JSON_SIZE: str(len(head))}
            return head + behind


class _AbortedError(Exception):
    """A call that fails, with the status of gRPC that it would have."""

    def __init__(self, status: str, message: str, metadata: _Pairs = ()) -> None:
        super().__init__(message)
        self.status, self.metadata = status, dict(metadata)


class _Context:
    """What endpoints ask of the context of gRPC, of a request over HTTP."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.trailing: list[tuple[str, str]] = []

    def invocation_metadata(self) -> list[tuple[str, str]]:
        # Of gRPC all is ASCII; nothing else is known here, and could be a token.
        return [(name.lower(), value) for name, value in self._request.headers.items() if value.isascii()]

    def peer(self) -> str:
        found = self._request.transport.get_extra_info("peername") if self._request.transport else None
        if not found:
            return "unknown"
        host, port = found[:2]
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"

    def auth_context(self) -> dict[str, list[bytes]]:
        found = self._request.transport.get_extra_info("peercert") if self._request.transport else None
        subject = (pair for name in (found or {}).get("subject", ()) for pair in name)
        names = [value.encode() for key, value in subject if key == "commonName"]
        others = [value.encode() for _, value in (found or {}).get("subjectAltName", ())]
        return {"x509_common_name": names, "x509_subject_alternative_name": others}

    def time_remaining(self) -> None:
        """HTTP tells no deadline; who waits no longer closes the connection, which cancels the call."""

    def set_trailing_metadata(self, metadata: _Pairs) -> None:
        self.trailing = list(metadata)

    async def abort(self, code: grpc.StatusCode, details: str, metadata: _Pairs = ()) -> NoReturn:
        self.set_trailing_metadata(metadata)
        raise _AbortedError(code.name, details, metadata)


class _Handler(logging.Handler):
    """Writes of bytes that are no HTTP one line, since they are the client's; of all else what there is."""

    def __init__(self, logs: Logs) -> None:
        super().__init__(logging.WARNING)
        self._logs = logs

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            self._logs.info("request that is no HTTP", reason=shortened(error.message))
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
    """Errors of paths, verbs and bodies in the form of the protocol."""
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
