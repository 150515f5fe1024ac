"""Run the server, from start to drain, with its methods, health checks and reflection on one port."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import grpc

from mmpos.errors import InvalidInputError
from mmpos_server.access import Certificates, TokenFile
from mmpos_server.admission import CHECKS, WATCHES, Admission
from mmpos_server.call import GoneError
from mmpos_server.config import Profiles
from mmpos_server.endpoints import Answer, Endpoint, ServerContext
from mmpos_server.introspection import HEALTH, REFLECTION, Health, Introspection
from mmpos_server.listening import Listen, address, bind, bind_uds, transport_options
from mmpos_server.streams import StreamEndpoint
from mmpos_server.telemetry import Logs, Metrics
from mmpos_server.transit import Transit

if TYPE_CHECKING:
    from mmpos_server.config import Limits, ServerConfig
    from mmpos_server.methods import Method
    from mmpos_server.tracing import Tracing

__all__ = ["MethodsOf", "Server"]


_SPARE_THREADS = 64
"""Number of threads for calls that are about to be refused."""

_TICK, _REFRESH = 0.25, 1.0
"""Seconds between checks of messages in transit, and between checks of the token and certificate files."""

_DEAD_SECONDS = 5.0
"""Seconds without a check after which the server no longer counts as live."""

# The seconds to wait for arriving calls, first while they are accepted and then while they are refused; and the number
# of rounds and the seconds without a new call after which no more calls are expected.
_SETTLE_SECONDS, _QUIET_ROUNDS, _QUIET_SECONDS = 0.5, 3, 0.1

_HANG_UP_SECONDS = 1.0
"""Seconds after the last message within which clients should close their connections."""

MethodsOf = Callable[[Profiles, "Limits"], Sequence["Method"]]


class Server:
    """Server that handles each call in its own thread.

    The constructor builds the profiles, and raises an error if that fails.

    Args:
        config: limits per request and per client, concurrency, and profiles.
        listen: addresses to listen on, TLS and tokens.
        logs: log of the server; with None, only errors are written.
        tracing: source of OpenTelemetry spans; None disables tracing.
        methods: function that returns the methods for these profiles and limits; None serves every service of mmpos.

    Raises:
        InvalidInputError: a profile or the token file is wrong; the message names the file and the field or line.
    """

    def __init__(
        self,
        config: ServerConfig,
        listen: Listen | None = None,
        *,
        logs: Logs | None = None,
        tracing: Tracing | None = None,
        methods: MethodsOf | None = None,
    ) -> None:
        self.config, self.listen = config, listen or Listen()
        self.logs, self._own_logs = logs or Logs("error"), logs is None
        self.metrics = Metrics()
        if methods is None:
            from mmpos_server.services import methods as all_methods

            methods = all_methods
        self._methods = methods(Profiles.from_config(config), config.limits)
        self._admission = Admission(config.concurrency, config.clients)
        tokens = self.listen.token_file
        self._context = ServerContext(
            config,
            self._admission,
            Transit(self.logs),
            self.metrics,
            self.logs,
            TokenFile(tokens, self.logs) if tokens else None,
            tracing,
        )
        self.unary = {method.name: Endpoint(method, self._context) for method in self._methods}
        streams, items = config.concurrency.max_streams, config.concurrency.max_in_flight
        threads = ThreadPoolExecutor(streams, "mmpos-stream"), ThreadPoolExecutor(items, "mmpos-item")
        endpoints = (StreamEndpoint(method, self._context, *threads) for method in self._methods if method.twin)
        self.streams = {stream.name: stream for stream in endpoints}
        services = list(dict.fromkeys(method.service for method in self._methods))
        self._health = Health(services)
        self.introspection = Introspection(self._health, [*services, HEALTH, REFLECTION[0]], self._context)
        self._server: grpc.Server | None = None
        self._threads: list[ThreadPoolExecutor] = list(threads)
        self._tasks = [self._context.transit.check, self.metrics.settle]
        self._files: list[Callable[[], None]] = [] if self._context.tokens is None else [self._context.tokens.refresh]
        self._last_round = -math.inf
        self._ended = Event()

    @property
    def ready(self) -> bool:
        """Whether the server accepts calls and reports SERVING. This is thread-safe."""
        return self._server is not None and not self._admission.announced

    @property
    def live(self) -> bool:
        """Whether the thread that watches the server is still running its checks. This is thread-safe."""
        return monotonic() - self._last_round < _DEAD_SECONDS

    def start(self) -> list[str]:
        """Start listening and serving calls.

        Returns:
            the addresses to which clients connect: the port and the unix socket.

        Raises:
            InvalidInputError: an address is in use, the host is not on this machine, or a TLS file is wrong.
        """
        listen, concurrency = self.listen, self.config.concurrency
        # This comes first, so that an error in a file is reported before a port that is in use.
        certificates = Certificates(listen.tls, self.logs) if listen.tls else None
        if certificates is not None:
            self._files.append(certificates.refresh)
        most = concurrency.max_in_flight + concurrency.max_streams + WATCHES + CHECKS + _SPARE_THREADS
        executor = ThreadPoolExecutor(most, thread_name_prefix="mmpos-call")
        self._threads.append(executor)
        options = transport_options(self.config, reuse_port=listen.reuse_port)
        server = grpc.server(executor, options=options, maximum_concurrent_rpcs=most)
        self._add_methods(server)
        addresses = [self._add_port(server, certificates)] if listen.tcp else []
        if listen.uds:
            addresses.append(bind_uds(listen.uds, server.add_insecure_port))
        server.start()
        self._server = server
        self._last_round = monotonic()
        Thread(target=self._watch, name="mmpos-watch", daemon=True).start()
        return addresses

    def announce_stop(self) -> None:
        """Report NOT_SERVING in health checks, but continue to serve calls."""
        self._admission.announced = True
        self._health.stop()

    def stop(self, grace: float | None = 30.0) -> None:
        """Refuse new calls, answer the calls that have arrived, and stop.

        A stream ends with UNAVAILABLE once all items that the server has read are answered.

        Args:
            grace: seconds after which running calls are cancelled; None cancels them immediately.
        """
        self.announce_stop()
        for stream in self.streams.values():
            stream.drain()
        if self._server is not None:
            end = monotonic() + (grace or 0.0)
            self._settle(grace or 0.0)
            self._context.transit.drain()
            ended = self._server.stop(max(0.0, end - monotonic()))
            quiet_since = math.inf
            # The transport itself would wait 20 seconds for a client that does not acknowledge the end.
            while not ended.wait(_TICK / 5) and monotonic() < end + _HANG_UP_SECONDS:
                quiet_since = min(quiet_since, monotonic()) if self._quiet else math.inf
                if monotonic() - quiet_since > _HANG_UP_SECONDS:
                    break
        self._ended.set()
        self._admission.close()
        self.metrics.settle()
        for threads in self._threads:
            threads.shutdown(wait=False, cancel_futures=True)
        if self._own_logs:
            self.logs.close()

    @property
    def _quiet(self) -> bool:
        """Whether no call is running and no message is in transit."""
        admission = self._admission
        gates = (admission.calls, admission.streams, admission.watches, admission.checks)
        return self._context.transit.quiet and not any(gate.taken for gate in gates)

    def _watch(self) -> None:
        """Run the server's periodic checks until it ends; an error in one check does not stop the others."""
        refreshed = monotonic()
        while not self._ended.wait(_TICK):
            tasks = list(self._tasks)
            if monotonic() - refreshed >= _REFRESH:
                refreshed = monotonic()
                tasks += self._files
            for task in tasks:
                try:
                    task()
                except Exception as error:
                    self.logs.error("a check of the server failed", error, task=task.__qualname__)
            self._last_round = monotonic()

    def _settle(self, seconds: float) -> None:
        """Wait until no more calls arrive, since the transport cancels calls that it has received but not handed over.

        For a while, the server continues to answer calls; if calls keep arriving, it refuses further ones with
        UNAVAILABLE.
        """
        admission = self._admission
        for admission.ending in (False, True):
            end, quiet, before = monotonic() + min(seconds / 2, _SETTLE_SECONDS), 0, admission.arrivals
            while monotonic() < end:
                sleep(0.01)
                quiet, before = quiet + 1 if admission.arrivals == before else 0, admission.arrivals
                # The rounds let the transport hand over waiting calls; the pauses let clients finish sending their
                # calls.
                if quiet >= _QUIET_ROUNDS and monotonic() - admission.last_arrival > _QUIET_SECONDS:
                    return

    def _add_port(self, server: grpc.Server, certificates: Certificates | None) -> str:
        """Listen on the port and return its address."""
        listen, credentials = self.listen, certificates.credentials() if certificates else None
        # Check this first: the transport reports a port that is in use only by returning port 0 and writing to stderr.
        bind(listen.host, listen.port, reuse_port=listen.reuse_port).close()
        target = address(listen.host, listen.port)
        try:
            port = server.add_secure_port(target, credentials) if credentials else server.add_insecure_port(target)
        except RuntimeError:
            port = 0
        if not port:
            raise InvalidInputError(f"port: cannot listen on {target}, want a free port (0 picks one)")
        return address(listen.host, port)

    def _add_methods(self, server: grpc.Server) -> None:
        """Add all methods as methods on raw bytes, so that mmpos chooses the status of invalid messages.

        All methods are registered as streams because the transport does not read from a stream until the handler asks
        for data. On the wire, a unary call looks the same.
        """
        for endpoint in self.unary.values():
            method = endpoint.method
            server.add_registered_method_handlers(method.service, {method.name: _unary(endpoint.answer)})
        for stream in self.streams.values():
            server.add_registered_method_handlers(stream.method.service, {stream.name: _stream(stream.answers)})
        introspection = self.introspection
        server.add_registered_method_handlers(
            HEALTH, {"Check": _unary(introspection.check), "Watch": _stream(introspection.watch)}
        )
        for name in REFLECTION:
            server.add_registered_method_handlers(name, {"ServerReflectionInfo": _stream(introspection.reflect)})
        server.add_generic_rpc_handlers((_Unknown(_unary(introspection.unknown)),))


class _Unknown(grpc.GenericRpcHandler):
    """Handler for all methods that are not registered."""

    def __init__(self, handler: grpc.RpcMethodHandler[bytes, bytes]) -> None:
        self._handler = handler

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        """Return the handler."""
        return self._handler


def _unary(answer: Callable[[Iterator[bytes], Any], Answer]) -> grpc.RpcMethodHandler[bytes, bytes]:
    """Return the handler for a unary endpoint."""

    def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        try:
            answered = answer(requests, context)
        except GoneError:
            return b""
        _end(answered, context)
        return answered.raw

    return grpc.stream_unary_rpc_method_handler(handle)


def _stream(
    answers: Callable[[Iterator[bytes], Any], Generator[bytes, None, Answer]],
) -> grpc.RpcMethodHandler[bytes, bytes]:
    """Return the handler for a streaming endpoint."""

    def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            answered = yield from answers(requests, context)
        except GoneError:
            return
        _end(answered, context)

    return grpc.stream_stream_rpc_method_handler(handle)


def _end(answered: Answer, context: grpc.ServicerContext) -> None:
    """Set the trailing metadata of a call, and its status if it failed."""
    context.set_trailing_metadata(answered.metadata)
    if answered.failed is not None:
        context.abort(answered.failed.code, answered.failed.message)
