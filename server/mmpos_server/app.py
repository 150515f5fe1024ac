"""The server: methods, health and reflection behind one port, from start to drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from mmpos.errors import InvalidInputError, MmposError
from mmpos_server.access import Certificates, TokenFile, TokenInterceptor
from mmpos_server.admission import Admission, Clients, client_name
from mmpos_server.config import Profiles
from mmpos_server.endpoints import Endpoint, ServerContext, StreamEndpoint
from mmpos_server.listening import Listen, address, bind, transport_options
from mmpos_server.methods import NotFoundError, failure
from mmpos_server.shared_memory import SharedMemory
from mmpos_server.telemetry import Logs, Metrics
from mmpos_server.traffic import GoneError, Traffic
from mmpos_server.transport import CallContext, Handler, MetadataLogFilter, RpcContext, TransportServer, Width, abort

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from mmpos_server.config import Limits, ServerConfig
    from mmpos_server.methods import Method
    from mmpos_server.tracing import Tracing

__all__ = ["HEALTH", "REFLECTION", "Health", "Introspection", "Reflection", "Server", "one_pool"]


# Seconds that calls may keep arriving before and after they are refused; rounds and seconds without any.
_SETTLE_SECONDS, _QUIET_ROUNDS, _QUIET_SECONDS = 0.5, 3, 0.1

_ON_THEIR_WAY = 4
"""Further calls of a method between transport and threads, so that the threads never wait for a call."""

MethodsOf = Callable[[Profiles, "Limits", SharedMemory], Sequence["Method"]]


class Server:
    """Server on one event loop. The constructor builds the profiles, so that errors in them come before it listens.

    Args:
        config: limits, concurrency, limits of clients, pools and profiles.
        listen: addresses to listen on, TLS and tokens.
        logs: log of the server; None writes errors only.
        shared_memory: access to shared memory of clients; None for none.
        tracing: source of OpenTelemetry spans; None for none.
        methods: function from profiles, limits and shared memory to the methods; None is all services of mmpos.

    Raises:
        InvalidInputError: a profile or the token file is wrong (the message names file and field or line), or shared
            memory is used and other machines could reach the server.
    """

    def __init__(
        self,
        config: ServerConfig,
        listen: Listen | None = None,
        *,
        logs: Logs | None = None,
        shared_memory: SharedMemory | None = None,
        tracing: Tracing | None = None,
        methods: MethodsOf | None = None,
    ) -> None:
        self.config, self.listen = config, listen or Listen()
        self.logs = logs or Logs("error")
        self.metrics = Metrics()
        if methods is None:
            from mmpos_server.services import methods as all_methods

            methods = all_methods
        memory = shared_memory or SharedMemory()
        memory.check(self.listen)
        self._offered: Callable[[ServerConfig], Sequence[Method]] = lambda config: methods(
            Profiles.from_config(config), config.limits, memory
        )
        self._methods = self._offered(config)
        self._admission, clients = Admission(config.concurrency, config.pools), Clients(config.clients)
        self._traffic = Traffic(config, self._admission, self.logs)
        self._context = ServerContext(
            config,
            self._admission,
            clients,
            self.metrics,
            self.logs,
            self._traffic,
            tracing,
            memory,
        )
        self._introspection = Introspection(self._admission, clients, self._traffic)
        self._unary = [Endpoint(method, self._context) for method in self._methods]
        self._streams = [StreamEndpoint(method, self._context) for method in self._methods if method.twin]
        tokens = self.listen.token_file
        self._interceptor = TokenInterceptor(TokenFile(tokens, self.logs), self.metrics, self.logs) if tokens else None
        self._server: TransportServer | None = None
        self._health: Health | None = None
        self._log = MetadataLogFilter(self.logs)
        self._certificates: asyncio.Task[None] | None = None
        self._sockets = ExitStack()

    @property
    def ready(self) -> bool:
        """Whether the server takes calls and reports SERVING; from any thread."""
        return self._server is not None and not self._admission.announced

    async def start(self) -> list[str]:
        """Listen and serve.

        Returns:
            Addresses as clients write them: of the port, of the unix socket.

        Raises:
            InvalidInputError: an address is taken, the host is not of this machine, or a TLS file is wrong.
        """
        listen = self.listen
        services = list(dict.fromkeys(method.service for method in self._methods))
        options = transport_options(self.config, reuse_port=listen.reuse_port)
        ahead = self.config.concurrency.max_pending
        server = TransportServer([self._interceptor] if self._interceptor else [], options, ahead)
        for service in services:
            server.add(service, self._handlers(service), self._widths(service))
        self._health = Health(services)
        server.add(HEALTH, self._introspection.health(self._health))
        # The methods come from several descriptor pools, and reflection takes one.
        pool = one_pool(method.request for method in self._methods)
        offered = Reflection([*services, HEALTH, REFLECTION[0]], pool)
        for name in REFLECTION:
            server.add(name, self._introspection.reflection(offered))
        # Before the ports: an error in a file comes before one of a taken port.
        certificates = Certificates(listen.tls, self.logs) if listen.tls else None
        addresses = [self._add_port(server, certificates)] if listen.tcp else []
        if listen.uds:
            self._sockets.callback(listen.uds.listen(server.add_insecure_port))
            addresses.append(listen.uds.address)
        await server.start()
        self._server = server
        if certificates is not None:
            self._certificates = asyncio.create_task(certificates.watch())
        self._log.open()
        self._traffic.open([int(addresses[0].rpartition(":")[2])] if listen.tcp else [])
        if self._interceptor is not None:
            self._interceptor.open()
        return addresses

    def _add_port(self, server: TransportServer, certificates: Certificates | None) -> str:
        """Listen on the port; returns its address."""
        listen, credentials = self.listen, certificates.credentials() if certificates else None
        # Before the transport, whose own answer to a taken port is a number and lines on stderr.
        bind(listen.host, listen.port, reuse_port=listen.reuse_port).close()
        target = address(listen.host, listen.port)
        try:
            port = server.add_secure_port(target, credentials) if credentials else server.add_insecure_port(target)
        except RuntimeError:
            port = 0
        if not port:
            raise InvalidInputError(f"port: got {target}, which cannot be listened on, want a free one (0 picks one)")
        return address(listen.host, port)

    async def renew(self, config: ServerConfig) -> None:
        """Answer calls from now on with other profiles, limits and client limits.

        Raises:
            InvalidInputError: a profile is wrong; nothing has changed.
            ImportError: a profile needs a package that is not installed.
        """
        # In a thread: a tokenizer may take seconds to read.
        methods = await asyncio.to_thread(self._offered, config)
        clients = Clients(config.clients)
        self.config, context = config, replace(self._context, config=config, clients=clients)
        self._traffic.renew(config)
        self._introspection.renew(clients)
        by_name = {(method.service, method.name): method for method in methods}
        endpoints: list[Endpoint | StreamEndpoint] = [*self._unary, *self._streams]
        for endpoint in endpoints:
            endpoint.renew(by_name[endpoint.method.service, endpoint.method.name], context)

    def announce_stop(self) -> None:
        """Report NOT_SERVING in health checks, and go on serving."""
        self._admission.announced = True
        if self._health is not None:
            self._health.stop()

    async def stop(self, grace: float | None = 30.0) -> None:
        """Take no further calls, answer those that have arrived, and stop.

        A stream ends with UNAVAILABLE after the answers to the items that were read.

        Args:
            grace: seconds after which calls at work are cancelled; None is at once.
        """
        self.announce_stop()
        for stream in self._streams:
            stream.drain()
        if self._server is not None:
            began = monotonic()
            await self._settle(grace or 0.0)
            self._traffic.drain()
            # Before the transport closes the sockets: until then no other file can be mistaken for them.
            self._sockets.close()
            left = None if grace is None else max(0.0, grace - (monotonic() - began))
            ending = asyncio.create_task(self._server.stop(left))
            await self._traffic.hang_up(ending)
            await ending
        await self._traffic.close()
        self._log.close()
        if self._certificates is not None:
            self._certificates.cancel()
        if self._interceptor is not None:
            await self._interceptor.close()
        self._admission.close()
        # Cancelled tasks learn of it in the next round of the event loop.
        await asyncio.sleep(0)

    async def _settle(self, seconds: float) -> None:
        """Wait until no call arrives, since the transport cancels calls it has received and not yet handed over.

        Calls are answered for a while; if they keep arriving, further ones are refused with UNAVAILABLE.
        """
        admission = self._admission
        for admission.ending in (False, True):
            end, quiet, before = monotonic() + min(seconds / 2, _SETTLE_SECONDS), 0, admission.arrivals
            while monotonic() < end:
                await asyncio.sleep(0.01)
                quiet, before = quiet + 1 if admission.arrivals == before else 0, admission.arrivals
                # Rounds of the loop hand over waiting calls; time lets through calls that clients are sending.
                if quiet >= _QUIET_ROUNDS and monotonic() - admission.last_arrival > _QUIET_SECONDS:
                    return

    def _handlers(self, service: str) -> dict[str, Handler]:
        """Return the handlers of a service over raw bytes, so that invalid messages get a status of ours.

        All are registered as streams, since of a stream nothing is read before the handler asks for it; on the wire
        both are the same.
        """
        handlers: dict[str, Handler] = {
            endpoint.method.name: grpc.stream_unary_rpc_method_handler(endpoint.serve)
            for endpoint in self._unary
            if endpoint.method.service == service
        }
        for stream in self._streams:
            if stream.method.service == service:
                handlers[stream.name] = grpc.stream_stream_rpc_method_handler(stream.handle)
        return handlers

    def _widths(self, service: str) -> dict[str, Width]:
        """Return how many calls of each unary method of a service are taken at once.

        Under overload these are two per thread, one at work and one that waits, and a few in between.
        """
        most, threads = self.config.concurrency.max_at_work, self._admission.threads
        return {
            endpoint.method.name: Width(most, 2 * threads[endpoint.method.pool] + _ON_THEIR_WAY)
            for endpoint in self._unary
            if endpoint.method.service == service and endpoint.method.admitted
        }


REFLECTION = ("grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection")
"""Full names of the two versions of the reflection service, whose messages are the same."""


class Reflection:
    """Reflection of the services of a server, for tools such as grpcurl.

    Args:
        services: full names of the services.
        pool: descriptors of the services.
    """

    def __init__(self, services: Iterable[str], pool: DescriptorPool) -> None:
        self._servicer = reflection.ReflectionServicer(services, pool)

    async def answers(self, raw: bytes) -> AsyncIterator[bytes]:
        """Answer one reflection request.

        Raises:
            DecodeError: the bytes are no request.
        """
        request = reflection_pb2.ServerReflectionRequest.FromString(raw)
        for answer in self._servicer.ServerReflectionInfo([request], None):
            yield answer.SerializeToString()


class Introspection:
    """Handlers of health and reflection, which are answered under any load.

    Args:
        admission: gates of the server, with one for open streams of these services.
        clients: slots of each client.
        traffic: messages in transit.
    """

    def __init__(self, admission: Admission, clients: Clients, traffic: Traffic) -> None:
        self._admission, self._clients, self._traffic = admission, clients, traffic

    def renew(self, clients: Clients) -> None:
        """Apply these client limits from now on."""
        self._clients = clients

    def health(self, health: Health) -> dict[str, Handler]:
        """Return the handlers of the health service."""
        return {
            "Check": grpc.stream_unary_rpc_method_handler(partial(self._unary, health.check)),
            "Watch": grpc.stream_stream_rpc_method_handler(partial(self._stream, health.watch)),
        }

    def reflection(self, offered: Reflection) -> dict[str, Handler]:
        """Return the handler of the reflection service."""
        return {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(partial(self._stream, offered.answers))}

    async def _unary(
        self, answer: Callable[[bytes], Awaitable[bytes]], _requests: object, context: RpcContext
    ) -> bytes:
        try:
            response = await answer(await self._traffic.request(context))
            self._traffic.leave(context)
            return response
        except (MmposError, DecodeError) as error:
            await self._fail(error, context)
            return b""

    async def _stream(
        self, answers: Callable[[bytes], AsyncIterator[bytes]], _requests: object, context: RpcContext
    ) -> None:
        lease, gate, entered = self._clients.lease(client_name(context)), self._admission.watches, False
        try:
            lease.begin_watch()
            gate.enter()
            entered, read = True, False
            while (raw := await self._traffic.receive(context, idle=read)) is not None:
                read = True
                async for answer in answers(raw):
                    await self._traffic.write(context, answer)
        except GoneError:
            raise asyncio.CancelledError from None
        except (MmposError, DecodeError) as error:
            await self._fail(error, context)
        finally:
            if entered:
                gate.leave(1.0)
            lease.end(1.0)

    async def _fail(self, error: Exception, context: CallContext) -> None:
        failed = failure(error, "")
        self._traffic.leave(context)
        await abort(context, failed.code, failed.message, failed.metadata)


HEALTH: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
"""Full name of the health service."""

_Status = health_pb2.HealthCheckResponse


class Health:
    """Health of each service and, under the empty name, of the server.

    The servicer of grpc_health keeps watchers until they leave by themselves, so that a server with one watcher would
    not stop within its grace, and forgets all watchers of a service when one leaves.

    Args:
        services: full names of the services.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = {"", *services}
        self._stopping = asyncio.Event()

    async def check(self, raw: bytes) -> bytes:
        """Return the current status of one service.

        Raises:
            DecodeError: the bytes are no request.
            NotFoundError: there is no such service.
        """
        service = health_pb2.HealthCheckRequest.FromString(raw).service
        if service not in self._services:
            # Cut, since anybody may send it: health needs no token.
            raise NotFoundError(f"service: got {service[:300]!r}, want one of this server")
        return self._answer(service)

    async def watch(self, raw: bytes) -> AsyncIterator[bytes]:
        """Yield the current status of one service, and the next one when the server drains.

        Raises:
            DecodeError: the bytes are no request.
        """
        service = health_pb2.HealthCheckRequest.FromString(raw).service
        yield self._answer(service)
        if not self._stopping.is_set():
            await self._stopping.wait()
            yield self._answer(service)

    def stop(self) -> None:
        """Report NOT_SERVING from now on."""
        self._stopping.set()

    def _answer(self, service: str) -> bytes:
        status = _Status.NOT_SERVING if self._stopping.is_set() else _Status.SERVING
        if service not in self._services:
            status = _Status.SERVICE_UNKNOWN
        return bytes(_Status(status=status).SerializeToString())


def one_pool(messages: Iterable[type[Message]]) -> DescriptorPool:
    """Build a pool of the files of these messages, their imports, and the files of health and reflection."""
    pool, added = DescriptorPool(), set[str]()

    def add(file: Any) -> None:
        if file.name in added:
            return
        added.add(file.name)
        for imported in file.dependencies:
            add(imported)
        pool.AddSerializedFile(file.serialized_pb)

    for file in (*(message.DESCRIPTOR.file for message in messages), health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        add(file)
    return pool
