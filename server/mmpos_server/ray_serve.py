"""Run the services as a Ray Serve application: every replica has all methods, behind the gRPC proxy of a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from grpc_health.v1 import health_pb2

from mmpos.errors import InvalidInputError
from mmpos.rpc.v1 import info_pb2, positions_pb2, rotary_pb2, sequences_pb2
from mmpos.support.extras import needed_for
from mmpos_server import malloc
from mmpos_server.app import Server
from mmpos_server.call import GoneError
from mmpos_server.config import Profiles, ServerConfig, load
from mmpos_server.endpoints import Answer, Caller
from mmpos_server.inference import open_inference_pb2
from mmpos_server.telemetry import LEVELS, Logs

if TYPE_CHECKING:
    from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
    from ray import serve

    from mmpos_server.endpoints import Context

__all__ = ["SERVICER", "Message", "Replica", "add_services", "answered", "answers", "app", "application"]


SERVICER = "mmpos_server.ray_serve.add_services"
"""Entry for grpc_servicer_functions in Serve's gRPCOptions."""

_ARGUMENTS = ("config", "num_replicas", "log_level")


class _Host(Protocol):
    """A server from Serve or grpc.aio."""

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler], /) -> None:
        """Add services."""


class _ServeContext(Caller, Protocol):
    """The context that Serve passes for a call."""

    def set_code(self, code: grpc.StatusCode, /) -> None:
        """Set the call's status."""

    def set_details(self, details: str, /) -> None:
        """Set the status message."""

    def set_trailing_metadata(self, metadata: list[tuple[str, str]], /) -> None:
        """Set the call's trailing metadata."""


def _methods() -> Iterator[tuple[ServiceDescriptor, list[MethodDescriptor]]]:
    """Yield each service and its methods. Method names are unique across services because Serve routes by them."""
    for file in (positions_pb2, sequences_pb2, rotary_pb2, info_pb2, open_inference_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            yield service, list(service.methods)
    health = health_pb2.DESCRIPTOR.services_by_name["Health"]
    # Omit Watch, which would keep a replica alive as long as its client.
    yield health, [health.methods_by_name["Check"]]


def add_services(servicer: object, server: _Host) -> None:
    """Add all services to a server, as generated code does for one service; messages stay bytes.

    Args:
        servicer: an object with the methods of all services.
        server: a server from Serve or grpc.aio.
    """
    for service, members in _methods():
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            method.name: (
                grpc.stream_stream_rpc_method_handler
                if method.client_streaming
                else grpc.unary_unary_rpc_method_handler
            )(getattr(servicer, method.name))
            for method in members
        }
        # Pass one handler at a time, because Serve uses only the first of several.
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


class Replica:
    """Replica of a Ray Serve deployment, with the methods of all services and with its own gates, pools and profiles.

    Args:
        config: settings of the server.
        log_level: minimum level at which log lines are written to stderr.
    """

    def __init__(self, config: ServerConfig, log_level: str) -> None:
        malloc.keep_large_blocks()
        # The server has no port: Serve passes the calls.
        self._server = Server(config, logs=Logs(log_level))
        # There is a thread for each call, as in a server: an open stream needs its own thread.
        self._threads = ThreadPoolExecutor(_most_calls(config), "mmpos-call")

    async def Check(self, request: bytes, grpc_context: _ServeContext) -> Message:  # noqa: N802 (the name in the protocol)
        """Answer a health check with SERVING, since the replica is able to answer."""
        return await answered(self._server.introspection.check, request, grpc_context, self._threads)


def _add(method: MethodDescriptor) -> None:
    """Add a method to the class Replica."""
    name = method.name

    async def unary(self: Replica, request: bytes, grpc_context: _ServeContext) -> Message:
        return await answered(self._server.unary[name].answer, request, grpc_context, self._threads)

    async def stream(
        self: Replica, requests: AsyncIterator[bytes], grpc_context: _ServeContext
    ) -> AsyncIterator[Message]:
        async for answer in answers(self._server.streams[name].answers, requests, grpc_context, self._threads):
            yield answer

    function: Any = stream if method.client_streaming else unary
    function.__name__, function.__qualname__ = name, f"{Replica.__qualname__}.{name}"
    function.__doc__ = f"{method.full_name}."
    setattr(Replica, name, function)


for _, _members in _methods():
    for _method in _members:
        if not hasattr(Replica, _method.name):
            _add(_method)


def application(config: ServerConfig | None = None, *, log_level: str = "warning", **options: Any) -> serve.Application:
    """Create an application with one deployment, "mmpos", for serve.run.

    Args:
        config: settings of each replica; None uses the embedded settings. Replicas read the files that profiles name.
        log_level: key of LEVELS; the minimum level at which replicas write log lines to stderr.
        options: options for serve.deployment, such as num_replicas, autoscaling_config and ray_actor_options.

    Raises:
        InvalidInputError: a profile or the level is wrong.
        ImportError: Ray Serve is missing; the message names the pip command.
    """
    with needed_for("mmpos_server.ray_serve", extra="serve"):
        from ray import serve
    config = config or load()
    if log_level not in LEVELS:
        raise InvalidInputError(f"log_level: got {log_level!r}, want one of {', '.join(LEVELS)}")
    # Report errors once instead of once per replica.
    Profiles.from_config(config)
    options.setdefault("max_ongoing_requests", _most_calls(config))
    deployment: serve.Deployment = serve.deployment(name="mmpos", **options)(Replica)
    return deployment.bind(config, log_level)


def _most_calls(config: ServerConfig) -> int:
    """Return one call more than the gates admit, so that the gates can refuse it; other calls wait in Serve's queue."""
    return config.concurrency.max_in_flight + config.concurrency.max_streams + 1


def app(arguments: Mapping[str, Any]) -> serve.Application:
    """Create the application for ``serve run mmpos_server.ray_serve:app config=FILE`` and Serve config files.

    Args:
        arguments: "config", the path of a settings file; "num_replicas", a number or "auto"; "log_level".

    Raises:
        InvalidInputError: an argument or the file is wrong.
    """
    for name in arguments:
        if name not in _ARGUMENTS:
            raise InvalidInputError(f"{name}: got an unknown argument, want one of {', '.join(_ARGUMENTS)}")
    options = dict(arguments)
    config = options.pop("config", None)
    if "num_replicas" in options:
        options["num_replicas"] = _replicas(options["num_replicas"])
    # Make the path absolute because each replica works in its own folder.
    return application(load(None if config is None else Path(config).absolute()), **options)


def _replicas(value: object) -> object:
    """Parse the number of replicas, which the command line passes as text."""
    text = str(value)
    if value == "auto" or (text.isdecimal() and int(text) >= 1):
        return value if value == "auto" else int(text)
    raise InvalidInputError(f'num_replicas: got {value!r}, want a number >= 1 or "auto"')


class Message:
    """A serialized message with the interface of a message.

    Args:
        raw: the serialized message.
    """

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def SerializeToString(self) -> bytes:  # noqa: N802 (the name that Serve calls)
        """Return the bytes."""
        return self._raw


async def answered(
    answer: Callable[[Iterator[bytes], Context], Answer],
    request: bytes,
    context: _ServeContext,
    threads: ThreadPoolExecutor,
) -> Message:
    """Call a unary endpoint from Serve in a thread.

    Args:
        answer: the endpoint's method.
        request: the serialized request.
        context: Serve's context, which receives the metadata and the status of the call.
        threads: thread pool that runs the calls.
    """
    with _Context(context) as caller:
        try:
            outcome = await asyncio.get_running_loop().run_in_executor(threads, answer, iter([request]), caller)
        except GoneError:
            raise asyncio.CancelledError from None
    _end(outcome, context)
    return Message(outcome.raw)


async def answers(
    answer: Callable[[Iterator[bytes], Context], Generator[bytes, None, Answer]],
    requests: AsyncIterator[bytes],
    context: _ServeContext,
    threads: ThreadPoolExecutor,
) -> AsyncIterator[Message]:
    """Call a streaming endpoint from Serve in threads.

    Args:
        answer: the endpoint's method.
        requests: the serialized items.
        context: Serve's context, which receives the metadata and the status of the stream.
        threads: thread pool that runs the calls.
    """
    loop = asyncio.get_running_loop()

    def items() -> Iterator[bytes]:
        while (item := asyncio.run_coroutine_threadsafe(_next(requests), loop).result()) is not None:
            yield item

    with _Context(context) as caller:
        stream = answer(items(), caller)
        ended: list[Answer] = []

        def step() -> bytes | None:
            try:
                return next(stream)
            except StopIteration as end:
                ended.append(end.value)
                return None

        try:
            while (raw := await loop.run_in_executor(threads, step)) is not None:
                yield Message(raw)
        except GoneError:
            raise asyncio.CancelledError from None
        _end(ended[0], context)
        if ended[0].failed is not None:  # Serve reads the status of a stream only after an exception
            raise _StreamError(ended[0].failed.message)


class _StreamError(Exception):
    """A stream has failed; its context contains the status."""


async def _next(requests: AsyncIterator[bytes]) -> bytes | None:
    return await anext(requests, None)


def _end(outcome: Answer, context: _ServeContext) -> None:
    """Set a call's metadata, and its status if it has failed.

    The call then returns normally because Serve sends no trailing metadata after an exception.
    """
    context.set_trailing_metadata(list(outcome.metadata))
    if outcome.failed is not None:
        context.set_code(outcome.failed.code)
        context.set_details(outcome.failed.message)


class _Context:
    """Adapter that gives Serve's context the interface of a gRPC context for the duration of a call."""

    def __init__(self, context: _ServeContext) -> None:
        self.peer, self.auth_context = context.peer, context.auth_context
        self.invocation_metadata = context.invocation_metadata
        self._callbacks: list[Callable[[], None]] = []
        self._active = True

    def __enter__(self) -> _Context:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()

    def time_remaining(self) -> None:
        """Return None because Serve passes no deadline; its proxy cancels late calls."""

    def is_active(self) -> bool:
        """Return whether Serve is still waiting for the answer."""
        return self._active

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Call a function when the call has ended."""
        self._callbacks.append(callback)
        return True

    def cancel(self) -> None:
        """End the call."""
        self._active = False
        while self._callbacks:
            self._callbacks.pop()()
