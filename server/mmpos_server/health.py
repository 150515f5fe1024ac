"""The standard health service, whose watchers are let go when the server drains."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

__all__ = ["Health"]

_Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Health of each service and, under the empty name, of the server.

    The servicer of grpc_health keeps watchers until they go by themselves, so that a server with one watcher would
    never end within its grace, and forgets all watchers of a service when one leaves.

    Args:
        services: their full names.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = {"", *services}
        self._stopping = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 (the name in the protocol)
        """The status of one service now."""
        if request.service not in self._services:
            got = request.service[:300]  # of anybody, and perhaps of megabytes
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service: got {got!r}, want one of this server")
        return self._response(request.service)

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802 (the name in the protocol)
        """The status of one service now and when it changes; ends when the server drains."""
        await context.write(self._response(request.service))
        if not self._stopping.is_set():
            await self._stopping.wait()
            await context.write(self._response(request.service))

    def stop(self) -> None:
        """Say NOT_SERVING from now on."""
        self._stopping.set()

    def _response(self, service: str) -> Any:
        if service not in self._services:
            return _Status(status=_Status.SERVICE_UNKNOWN)
        return _Status(status=_Status.NOT_SERVING if self._stopping.is_set() else _Status.SERVING)
