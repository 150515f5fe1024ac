"""Health and reflection services, behind limits of their own: callers need no admission, and for health no token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from mmpos.errors import MmposError
from mmpos_server.admission import Admission, Clients, client_name
from mmpos_server.methods import NotFoundError, failure
from mmpos_server.traffic import GoneError, Traffic
from mmpos_server.transport import abort

__all__ = ["HEALTH", "REFLECTION", "Health", "Introspection", "Reflection", "one_pool"]


REFLECTION = ("grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection")
"""Full names of the two versions of the reflection service, whose messages are the same."""

Handlers = Mapping[str, Any]


class Reflection:
    """Reflection of the services of a server, for tools such as grpcurl.

    Args:
        services: full names of the services.
        pool: descriptors of the services.
    """

    def __init__(self, services: Iterable[str], pool: DescriptorPool) -> None:
        self._servicer: Any = reflection.ReflectionServicer(services, pool)

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

    def health(self, health: Health) -> Handlers:
        """Return the handlers of the health service."""
        return {
            "Check": grpc.stream_unary_rpc_method_handler(partial(self._unary, health.check)),
            "Watch": grpc.stream_stream_rpc_method_handler(partial(self._stream, health.watch)),
        }

    def reflection(self, offered: Reflection) -> Handlers:
        """Return the handler of the reflection service."""
        return {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(partial(self._stream, offered.answers))}

    async def _unary(self, answer: Callable[[bytes], Awaitable[bytes]], _requests: object, context: Any) -> bytes:
        try:
            response = await answer(await self._traffic.request(context))
            self._traffic.leave(context)
            return response
        except (MmposError, DecodeError) as error:
            await self._fail(error, context)
            return b""

    async def _stream(self, answers: Callable[[bytes], AsyncIterator[bytes]], _requests: object, context: Any) -> None:
        lease, gate, entered = self._clients.lease(client_name(context)), self._admission.watches, False
        try:
            lease.begin_watch()
            gate.enter()
            entered, read = True, False
            while (raw := await self._traffic.receive(context, idle=read)) is not grpc.aio.EOF:
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

    async def _fail(self, error: Exception, context: Any) -> None:
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


def one_pool(files: Iterable[Any]) -> DescriptorPool:
    """Build a pool of these file descriptors, their imports, and those of health and reflection."""
    pool, added = DescriptorPool(), set[str]()

    def add(file: Any) -> None:
        if file.name in added:
            return
        added.add(file.name)
        for imported in file.dependencies:
            add(imported)
        pool.AddSerializedFile(file.serialized_pb)

    for file in (*files, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        add(file)
    return pool
