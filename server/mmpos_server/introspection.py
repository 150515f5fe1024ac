"""Answer health checks and reflection, under any load, and refuse unknown methods."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from functools import lru_cache
from threading import Event
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from mmpos.errors import MmposError, UnsupportedError
from mmpos_server.endpoints import Answer
from mmpos_server.methods import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mmpos_server.endpoints import Context, ServerContext

__all__ = ["HEALTH", "REFLECTION", "Health", "Introspection"]


HEALTH: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
"""Full name of the health service."""

REFLECTION = ("grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection")
"""Full names of the two versions of the reflection service; both have the same messages."""

_Status = health_pb2.HealthCheckResponse


class Health:
    """Health of each service and, under an empty name, of the server.

    grpc_health's servicer is not suitable: it keeps watchers until they leave, so a server with one watcher would not
    stop within its grace period, and it forgets all watchers of a service when one of them leaves.

    Args:
        services: full names of the services.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = {"", *services}
        self._watchers: set[Event] = set()
        self.stopping = False

    def check(self, raw: bytes) -> bytes:
        """Return the current status of one service.

        Raises:
            DecodeError: the bytes are not a request.
            NotFoundError: the server has no service of this name.
        """
        service = health_pb2.HealthCheckRequest.FromString(raw).service
        if service not in self._services:
            # Truncate the name because anybody may send it: health checks need no token.
            raise NotFoundError(f"service: got {service[:300]!r}, want a service of this server")
        return self._answer(service)

    def watch(self, raw: bytes, ended: Event) -> Iterator[bytes]:
        """Yield the current status of one service, and the new status when the server drains.

        Args:
            raw: bytes of the request.
            ended: set when the call has ended.

        Raises:
            DecodeError: the bytes are not a request.
        """
        service = health_pb2.HealthCheckRequest.FromString(raw).service
        self._watchers.add(ended)
        try:
            before = self._answer(service)
            yield before
            if not self.stopping:
                ended.wait()
            if (now := self._answer(service)) != before:
                yield now
        finally:
            self._watchers.discard(ended)

    def stop(self) -> None:
        """Report NOT_SERVING for all services from now on."""
        self.stopping = True
        for watcher in list(self._watchers):
            watcher.set()

    def _answer(self, service: str) -> bytes:
        status = _Status.NOT_SERVING if self.stopping else _Status.SERVING
        if service not in self._services:
            status = _Status.SERVICE_UNKNOWN
        return bytes(_Status(status=status).SerializeToString())


class Introspection:
    """Endpoints for health and reflection, and for refusing all methods that the server does not have.

    Args:
        health: health of the services.
        services: the full names of the services that reflection lists.
        server: state that the methods share.
    """

    def __init__(self, health: Health, services: Iterable[str], server: ServerContext) -> None:
        self._health, self.server = health, server
        self._servicer = reflection.ReflectionServicer(services)
        # Cache answers: descriptors do not change, and answering a query takes 200 times as long as a lookup.
        self._described = lru_cache(maxsize=1024)(self._describe)

    def check(self, requests: Iterator[bytes], context: Context) -> Answer:
        """Answer a health check."""
        server, gate = self.server, self.server.admission.checks
        client = server.client(context, open_to_all=True)
        try:
            gate.enter(client)
        except MmposError as error:
            return self._failed(error, "Check")
        try:
            return Answer(self._health.check(server.transit.request(requests, context)))
        except (MmposError, DecodeError) as error:
            return self._failed(error, "Check")
        finally:
            gate.leave(client)

    def watch(self, requests: Iterator[bytes], context: Context) -> Generator[bytes, None, Answer]:
        """Yield the health of a service, now and when it changes."""
        ended = Event()
        context.add_callback(ended.set)
        return self._stream(requests, context, "Watch", lambda raw: self._health.watch(raw, ended), open_to_all=True)

    def reflect(self, requests: Iterator[bytes], context: Context) -> Generator[bytes, None, Answer]:
        """Answer the queries of a reflection stream."""
        return self._stream(requests, context, "ServerReflectionInfo", self._described, open_to_all=False)

    def unknown(self, requests: Iterator[bytes], context: Context) -> Answer:
        """Refuse a call to a method that the server does not have."""
        try:
            self.server.client(context)
            raise UnsupportedError("method: this server has no method with this path")
        except MmposError as error:
            return self._failed(error, "unknown")

    def _describe(self, raw: bytes) -> list[bytes]:
        request = reflection_pb2.ServerReflectionRequest.FromString(raw)
        return [answer.SerializeToString() for answer in self._servicer.ServerReflectionInfo([request], None)]

    def _stream(
        self,
        requests: Iterator[bytes],
        context: Context,
        method: str,
        answers: Callable[[bytes], Iterable[bytes]],
        *,
        open_to_all: bool,
    ) -> Generator[bytes, None, Answer]:
        server, gate = self.server, self.server.admission.watches
        client = None
        try:
            caller = server.client(context, open_to_all=open_to_all)
            gate.enter(caller)
            client = caller
            raw = server.transit.receive(requests, context.cancel)
            while raw is not None:
                yield from answers(raw)
                raw = server.transit.receive(requests, None)
            return Answer()
        except (MmposError, DecodeError) as error:
            return self._failed(error, method)
        finally:
            if client is not None:
                gate.leave(client)

    def _failed(self, error: Exception, method: str) -> Answer:
        failed = self.server.failed(error, "", method)
        return Answer(b"", failed.metadata, failed)
