"""Answer health checks and reflection, from bytes to bytes."""

from __future__ import annotations

from asyncio import Event
from collections.abc import AsyncGenerator, Callable, Iterable

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from mmpos.errors import InvalidInputError
from mmpos_server.methods import NotFoundError

__all__ = ["HEALTH", "REFLECTION", "Health", "describe"]


HEALTH: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
"""Full name of the health service."""

REFLECTION = ("grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection")
"""Full names of the two versions of the reflection service; both have the same messages."""

_Status = health_pb2.HealthCheckResponse


class Health:
    """Health of each service and, under an empty name, of the server.

    The asyncio servicer of grpcio-health-checking 1.81 does not fit: when one watcher of a service leaves, the servicer
    forgets the others, and its watchers do not end when the server drains. It also requires parsed messages.

    Args:
        services: full names of the services.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services, self._stopping = {"", *services}, Event()

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

    async def watch(self, raw: bytes) -> AsyncGenerator[bytes, None]:
        """Yield the current status of one service, then the new status when the server drains, and end.

        Raises:
            DecodeError: the bytes are not a request.
        """
        service = health_pb2.HealthCheckRequest.FromString(raw).service
        yield (before := self._answer(service))
        await self._stopping.wait()
        if (now := self._answer(service)) != before:
            yield now

    def stop(self) -> None:
        """Report NOT_SERVING for all services from now on; the thread of the event loop must call this."""
        self._stopping.set()

    def _answer(self, service: str) -> bytes:
        status = _Status.NOT_SERVING if self._stopping.is_set() else _Status.SERVING
        if service not in self._services:
            status = _Status.SERVICE_UNKNOWN
        return bytes(_Status(status=status).SerializeToString())


_MOST_BYTES = 1024
"""Maximum size of a query of reflection, whose answer repeats the query."""


def describe(services: Iterable[str]) -> Callable[[bytes], list[bytes]]:
    """Return the function that answers a query of reflection, of either version, for these services."""
    servicer = reflection.ReflectionServicer(services)

    def answer(raw: bytes) -> list[bytes]:
        if len(raw) > _MOST_BYTES:
            raise InvalidInputError(f"request: got {len(raw)} bytes, want <= {_MOST_BYTES}")
        query = reflection_pb2.ServerReflectionRequest.FromString(raw)
        return [response.SerializeToString() for response in servicer.ServerReflectionInfo([query], None)]

    return answer
