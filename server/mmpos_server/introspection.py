"""Health and reflection behind limits: callers of these services need no place, and of health no token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection, reflection_pb2

from mmpos.errors import MmposError
from mmpos_server.admission import Admission
from mmpos_server.clients import Clients, client_name
from mmpos_server.failures import failure
from mmpos_server.health import Health
from mmpos_server.traffic import GoneError, Traffic
from mmpos_server.transport import abort

__all__ = ["REFLECTION", "Introspection", "Reflection"]

REFLECTION = ("grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection")
"""Full names of the service, whose messages are the same in both."""

Handlers = Mapping[str, Any]


class Reflection:
    """What the server offers, for tools.

    Args:
        services: their full names.
        pool: descriptions of them.
    """

    def __init__(self, services: Iterable[str], pool: DescriptorPool) -> None:
        self._servicer: Any = reflection.ReflectionServicer(services, pool)

    async def answers(self, raw: bytes) -> AsyncIterator[bytes]:
        """The answer to one request.

        Raises:
            DecodeError: the bytes are no request.
        """
        request = reflection_pb2.ServerReflectionRequest.FromString(raw)
        for answer in self._servicer.ServerReflectionInfo([request], None):
            yield answer.SerializeToString()


class Introspection:
    """Methods that are answered however much there is to do.

    Args:
        admission: has the gate of their open streams.
        clients: what each client has.
        traffic: messages on their way.
    """

    def __init__(self, admission: Admission, clients: Clients, traffic: Traffic) -> None:
        self._admission, self._clients, self._traffic = admission, clients, traffic

    def renew(self, clients: Clients) -> None:
        """Hold clients to these limits from now on."""
        self._clients = clients

    def health(self, health: Health) -> Handlers:
        """The methods of health."""
        return {
            "Check": grpc.stream_unary_rpc_method_handler(partial(self._unary, health.check)),
            "Watch": grpc.stream_stream_rpc_method_handler(partial(self._stream, health.watch)),
        }

    def reflection(self, found: Reflection) -> Handlers:
        """The method of reflection."""
        return {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(partial(self._stream, found.answers))}

    async def _unary(self, answer: Callable[[bytes], Awaitable[bytes]], _requests: object, context: Any) -> bytes:
        try:
            found = await answer(await self._traffic.request(context))
            self._traffic.leave(context)
            return found
        except (MmposError, DecodeError) as error:
            await self._fail(error, context)
            return b""

    async def _stream(self, answers: Callable[[bytes], AsyncIterator[bytes]], _requests: object, context: Any) -> None:
        visit, gate, entered = self._clients.visit(client_name(context)), self._admission.watches, False
        try:
            visit.begin_watch()
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
            visit.end(1.0)

    async def _fail(self, error: Exception, context: Any) -> None:
        failed = failure(error, "")
        self._traffic.leave(context)
        await abort(context, failed.code, failed.message, failed.metadata)
