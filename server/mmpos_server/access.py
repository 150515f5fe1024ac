"""The door of a server that asks who calls: without a token that it knows, nothing is answered but health."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import grpc

from mmpos.errors import ServiceUnauthenticatedError
from mmpos.rpc.errors import get_token, to_status
from mmpos_server.transport import abort

if TYPE_CHECKING:
    from mmpos_server.logs import Logs
    from mmpos_server.metrics import Metrics
    from mmpos_server.tokens import Tokens

__all__ = ["OPEN", "Door", "token_name"]

OPEN = frozenset(
    {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/ServerReady",
    }
)
"""What is answered to everybody: probes and balancers have no token."""

_SECONDS = 1.0
_STATUS, _DETAILS = to_status(
    ServiceUnauthenticatedError('authorization: got no token that is known, want "Bearer TOKEN"')
)

_token_name: ContextVar[str | None] = ContextVar("token_name", default=None)


def token_name() -> str | None:
    """Whose token the running call has; None where none was asked for."""
    return _token_name.get()


class Door(grpc.aio.ServerInterceptor):
    """Stands before all methods, those of other handlers and unknown ones included, and is closed unless told.

    Args:
        tokens: who may pass.
        metrics: where those who may not are counted.
        logs: where they are written, once a second at most.
    """

    def __init__(self, tokens: Tokens, metrics: Metrics, logs: Logs) -> None:
        self._tokens, self._metrics, self._logs = tokens, metrics, logs
        # As a stream, since of a stream nothing is read before the handler wants it; on the wire both are the same.
        self._refusal: Any = grpc.stream_stream_rpc_method_handler(self._refuse)
        self._refused, self._peer = 0, ""
        self._watch: asyncio.Task[None] | None = None

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a call, or the one that refuses it."""
        if not self.lets_in(handler_call_details.method, handler_call_details.invocation_metadata):
            return self._refusal
        return await continuation(handler_call_details)

    def lets_in(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Whether a call of this path may pass; the running task has then the name of its token."""
        if method in OPEN:
            return True
        token = get_token(metadata)
        name = None if token is None else self._tokens.name(token)
        if name is None:
            return False
        _token_name.set(name)
        return True

    def refused(self, peer: str) -> tuple[str, str]:
        """Count a call of this peer that may not pass; gives its status and its details."""
        self._refused, self._peer = self._refused + 1, peer
        self._metrics.unauthenticated.inc()
        return _STATUS, _DETAILS

    def open(self) -> None:
        """Begin to look, every second, whether the tokens have changed."""
        self._watch = asyncio.create_task(self._look())

    async def close(self) -> None:
        """End that."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_SECONDS)
            try:
                # In a thread: the file may lie on a network.
                await asyncio.to_thread(self._tokens.refresh)
            except Exception as error:  # whatever it is: a token that was taken away must not stay for good
                self._logs.error("tokens stay as they were", error)
            if self._refused:
                self._logs.warning("unauthenticated", calls=self._refused, last_peer=self._peer)
                self._refused = 0

    async def _refuse(self, _requests: object, context: Any) -> None:
        status, details = self.refused(context.peer())
        await abort(context, grpc.StatusCode[status], details)
