"""Answer health checks and reflection, under any load, and refuse unknown methods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from mmpos.errors import MmposError, UnsupportedError
from mmpos_server.arrivals import StreamEndedError
from mmpos_server.health import Health, describe
from mmpos_server.methods import refused_by

if TYPE_CHECKING:
    from mmpos_server.endpoints import Shared

__all__ = ["Introspection"]


class Introspection:
    """Handlers of health, reflection and unknown methods; calls of other methods never keep them waiting.

    Args:
        health: health of the services.
        services: the full names of the services that reflection lists.
        shared: state that the methods share.
    """

    def __init__(self, health: Health, services: list[str], shared: Shared) -> None:
        self._health, self._shared = health, shared
        self._describe = describe(services)

    async def check(self, _: object, context: Any) -> bytes:
        """Answer a health check."""
        shared = self._shared
        try:
            raw = await shared.arrivals.message(context, shared.client(context, open_to_all=True))
            return self._health.check(raw)
        except (MmposError, DecodeError) as error:
            return await self._abort(error, context, "Check")

    async def watch(self, _: object, context: Any) -> AsyncIterator[bytes]:
        """Yield the health of a service, now and when it changes."""
        async for answer in self._stream(context, "Watch", self._health.watch, open_to_all=True):
            yield answer

    async def reflect(self, _: object, context: Any) -> AsyncIterator[bytes]:
        """Yield the answers to the queries of a reflection stream."""
        async for answer in self._stream(context, "ServerReflectionInfo", self._described, open_to_all=False):
            yield answer

    async def unknown(self, _: object, context: Any) -> bytes:
        """Refuse a call to a method that the server does not have."""
        try:
            self._shared.client(context)
            raise UnsupportedError("method: this server has no method with this path")
        except MmposError as error:
            return await self._abort(error, context, "unknown")

    async def _described(self, raw: bytes) -> AsyncIterator[bytes]:
        for answer in self._describe(raw):
            yield answer

    async def _stream(
        self, context: Any, method: str, answers: Callable[[bytes], AsyncIterator[bytes]], *, open_to_all: bool
    ) -> AsyncIterator[bytes]:
        shared, arrivals, client = self._shared, self._shared.arrivals, None
        try:
            caller = shared.client(context, open_to_all=open_to_all)
            arrivals.watches.take(caller)
            client, first = caller, True
            while True:
                raw = await arrivals.message(context, caller, item=True, first=first)
                first = False
                async for answer in answers(raw):
                    with arrivals.sending(context, caller, len(answer)):
                        yield answer
        except StreamEndedError:
            return
        except (MmposError, DecodeError) as error:
            await self._abort(error, context, method)
        finally:
            if client is not None:
                arrivals.watches.leave(client)

    async def _abort(self, error: Exception, context: Any, method: str) -> bytes:
        failed = self._shared.failed(error, self._shared.request_id(context), method)
        why = {"reason": refused_by(error) or "", "message": failed.message}
        who = {"client": "", "peer": context.peer(), "request_id": failed.request_id}
        self._shared.logs.call(True, method=method, status=failed.status, **who, **why)
        await context.abort(failed.code, failed.message, failed.metadata)
        raise asyncio.CancelledError  # not reached: abort raises an error
