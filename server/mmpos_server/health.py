"""The standard health service, whose watchers are let go when the server drains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from grpc_health.v1 import health_pb2

from mmpos_server.failures import NotFoundError

__all__ = ["SERVICE", "Health"]

SERVICE: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
"""Full name of the service."""

_Status = health_pb2.HealthCheckResponse


class Health:
    """Health of each service and, under the empty name, of the server.

    The servicer of grpc_health keeps watchers until they go by themselves, so that a server with one watcher would
    never end within its grace, and forgets all watchers of a service when one leaves.

    Args:
        services: their full names.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = {"", *services}
        self._stopping = asyncio.Event()

    async def check(self, raw: bytes) -> bytes:
        """The status of one service now.

        Raises:
            DecodeError: the bytes are no request.
            NotFoundError: there is no such service.
        """
        service = health_pb2.HealthCheckRequest.FromString(raw).service
        if service not in self._services:
            # Cut, since it is of anybody: health asks for no token.
            raise NotFoundError(f"service: got {service[:300]!r}, want one of this server")
        return self._answer(service)

    async def watch(self, raw: bytes) -> AsyncIterator[bytes]:
        """The status of one service now and when it changes; ends when the server drains.

        Raises:
            DecodeError: the bytes are no request.
        """
        service = health_pb2.HealthCheckRequest.FromString(raw).service
        yield self._answer(service)
        if not self._stopping.is_set():
            await self._stopping.wait()
            yield self._answer(service)

    def stop(self) -> None:
        """Say NOT_SERVING from now on."""
        self._stopping.set()

    def _answer(self, service: str) -> bytes:
        status = _Status.NOT_SERVING if self._stopping.is_set() else _Status.SERVING
        if service not in self._services:
            status = _Status.SERVICE_UNKNOWN
        return bytes(_Status(status=status).SerializeToString())
