"""Run the server on grpc's asyncio transport, from start to drain, with health checks and reflection on its port."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
from grpc import aio

from mmpos.errors import InvalidInputError
from mmpos_server.access import Certificates, TokenFile
from mmpos_server.arrivals import TICK_SECONDS, Arrivals
from mmpos_server.call import Threads
from mmpos_server.config import Profiles
from mmpos_server.endpoints import Endpoint, Shared
from mmpos_server.health import HEALTH, REFLECTION, Health
from mmpos_server.introspection import Introspection
from mmpos_server.listening import Listen, address, bind, bind_uds, transport_options
from mmpos_server.logs import Logs
from mmpos_server.metrics import Metrics
from mmpos_server.pulse import Pulse
from mmpos_server.streams import StreamEndpoint

if TYPE_CHECKING:
    from mmpos_server.config import ServerConfig
    from mmpos_server.methods import Method

__all__ = ["Server"]


_HANG_UP_SECONDS = 1.0
"""Seconds after the last call within which clients should close their connections to a server that stops."""

_REFRESH_TICKS = 10
"""Number of checks of messages for each check of the token and certificate files."""

_NOTICE_SECONDS, _REFUSE_SECONDS = 0.5, 0.05
"""Seconds for which a server that stops answers new calls, and then refuses those that gRPC has received."""


class Server:
    """Server of all methods on one event loop; a few threads do the long work.

    The constructor builds the profiles, and raises an error if that fails.

    Args:
        config: settings of the server.
        listen: addresses to listen on, TLS and tokens.
        logs: log of the server; with None, failed calls and errors are written to stderr.
        rotations: whether to serve rotations, for which the constructor imports torch.
        methods: the methods to serve; None serves every service of mmpos.
        failed: function that receives the reason when the server no longer answers calls, which should end the process;
            any thread may call it. With None, only a log line is written.

    Raises:
        InvalidInputError: a profile or the token file is wrong; the message names the file and the field or line.
        ImportError: a package is missing; the message names the pip command.
    """

    def __init__(
        self,
        config: ServerConfig,
        listen: Listen | None = None,
        *,
        logs: Logs | None = None,
        rotations: bool = False,
        methods: Sequence[Method] | None = None,
        failed: Callable[[str], None] | None = None,
    ) -> None:
        self.config, self.listen = config, listen or Listen()
        self.metrics = Metrics(self.listen.tls)
        self.logs, self._own_logs = logs or Logs(sample=0), logs is None
        if methods is None:
            from mmpos_server.services import methods as all_methods

            methods = all_methods(Profiles.from_config(config), config.limits, rotations=rotations)
        self.arrivals = Arrivals(config.overload_ms / 1000)
        tokens = self.listen.token_file
        self._tokens = TokenFile(tokens, self.logs) if tokens else None
        self._threads = Threads()
        self._shared = Shared(config.limits, self.arrivals, self._threads, self.metrics, self.logs, self._tokens)
        self._services = list(dict.fromkeys(method.service for method in methods))
        self.health = Health(self._services)
        self._handlers = _Handlers(self._shared, methods, self.health)
        self._failed = failed or self._log_failure
        self._pulse = Pulse(self._failed)
        self._server: aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    @property
    def ready(self) -> bool:
        """Whether the server accepts calls and reports SERVING. This is thread-safe."""
        return self._server is not None and not self._stopping

    async def start(self) -> list[str]:
        """Start listening and serving calls.

        Returns:
            the addresses to which clients connect: the port and the unix socket.

        Raises:
            InvalidInputError: an address is in use, the host is not on this machine, or a TLS file is wrong.
        """
        listen = self.listen
        # This comes first, so that an error in a file is reported before a port that is in use.
        certificates = Certificates(listen.tls, self.logs) if listen.tls else None
        server = aio.server(options=transport_options(self.config, reuse_port=listen.reuse_port))
        server.add_generic_rpc_handlers((self._handlers,))
        addresses = [_add_port(server, listen, certificates)] if listen.tcp else []
        if listen.uds:
            addresses.append(bind_uds(listen.uds, server.add_insecure_port))
        self._pulse.start(server.add_insecure_port)
        await server.start()
        self._server = server
        files = [file.refresh for file in (self._tokens, certificates) if file is not None]
        self._tasks = [asyncio.create_task(self._watch(files)), asyncio.create_task(self._ended(server))]
        return addresses

    async def stop(self, grace: float = 30.0) -> None:
        """Refuse new calls, answer the calls that have arrived, and stop.

        A stream ends with UNAVAILABLE once all items that the server has read are answered.

        Args:
            grace: seconds after which running calls are cancelled.
        """
        self._stopping = True
        self.health.stop()
        if self._server is not None:
            await asyncio.sleep(min(grace, _NOTICE_SECONDS))
            self.arrivals.draining = True
            await asyncio.sleep(min(grace, _REFUSE_SECONDS))
            self._pulse.stop()
            await self._end(self._server, grace)
        for task in self._tasks:
            task.cancel()
        self._threads.close()
        if self._own_logs:
            self.logs.close()

    async def _end(self, server: aio.Server, grace: float) -> None:
        """Wait until all calls have ended, but not for clients that then do not close their connections."""
        ending, quiet = asyncio.create_task(server.stop(grace)), 0
        while not ending.done() and quiet * TICK_SECONDS < _HANG_UP_SECONDS:
            await asyncio.wait({ending}, timeout=TICK_SECONDS)
            quiet = quiet + 1 if self.arrivals.quiet else 0
        await server.stop(None)
        await ending

    def _log_failure(self, reason: str) -> None:
        self.logs.error("server failed", reason=reason)

    async def _watch(self, files: Sequence[Callable[[], None]]) -> None:
        """Check messages, answers and the time that a call takes, and read files again that have changed."""
        for tick in itertools.count(1):
            await asyncio.sleep(TICK_SECONDS)
            self.arrivals.lag = lag = self._pulse.lag
            self.metrics.lag.set(lag)
            try:
                self.arrivals.check()
                for refresh in files if tick % _REFRESH_TICKS == 0 else ():
                    refresh()
            except Exception as error:
                self.logs.error("a check of the server failed", error)

    async def _ended(self, server: aio.Server) -> None:
        """Report that the transport has ended by itself."""
        try:
            await server.wait_for_termination()
        except Exception as error:
            self.logs.error("the transport failed", error)
        if not self._stopping:
            self._failed("the transport has ended")


class _Handlers(grpc.GenericRpcHandler):
    """Handlers of all methods, on raw bytes, so that mmpos chooses the status of invalid messages.

    Unary methods are registered with streams of requests: grpc then reads a request only when the handler asks for it.
    On the wire, a unary call looks the same.
    """

    def __init__(self, shared: Shared, methods: Sequence[Method], health: Health) -> None:
        unary, stream = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        services = [*dict.fromkeys(method.service for method in methods), HEALTH, REFLECTION[0]]
        introspection = Introspection(health, services, shared)
        self._handlers: dict[str, Any] = {
            f"/{method.service}/{method.name}": unary(Endpoint(method, shared).answer) for method in methods
        }
        for method in methods:
            if method.item is not None:
                endpoint = StreamEndpoint(method, shared)
                self._handlers[f"/{method.service}/{endpoint.name}"] = stream(endpoint.answers)
        self._handlers[f"/{HEALTH}/Check"] = unary(introspection.check)
        self._handlers[f"/{HEALTH}/Watch"] = stream(introspection.watch)
        for name in REFLECTION:
            self._handlers[f"/{name}/ServerReflectionInfo"] = stream(introspection.reflect)
        self._unknown: Any = unary(introspection.unknown)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a method, or one that refuses the call."""
        return self._handlers.get(handler_call_details.method, self._unknown)


def _add_port(server: aio.Server, listen: Listen, certificates: Certificates | None) -> str:
    """Listen on the port and return its address."""
    # Check this first: the transport reports a port that is in use only by an error without the reason.
    bind(listen.host, listen.port, reuse_port=listen.reuse_port).close()
    target = address(listen.host, listen.port)
    try:
        if certificates is None:
            port = server.add_insecure_port(target)
        else:
            port = server.add_secure_port(target, certificates.credentials())
    except RuntimeError:
        port = 0
    if not port:
        raise InvalidInputError(f"--listen: cannot listen on {target}, want a free port (0 picks one)")
    return address(listen.host, port)
