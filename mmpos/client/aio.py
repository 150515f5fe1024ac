"""Client with coroutine methods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, TypeVar

import grpc
from google.protobuf.message import DecodeError

from mmpos.client import calls, streams
from mmpos.client.base import BaseClient
from mmpos.client.calls import BuildSettings, Built, Errors, Maker, P, Rpc, ServiceCall, T, documented
from mmpos.client.channel import OpenChannel, closed, error_of, unreadable
from mmpos.client.streams import Answer, Stream, TaskLink, Unanswered, task_results
from mmpos.errors import InvalidInputError, MmposError

if TYPE_CHECKING:
    from typing import Self

    from mmpos.rpc.queries import PositionsQuery, PositionsResult
    from mmpos.schemes import Scheme

Q = TypeVar("Q")


def _awaited(maker: Maker[P, T]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Return the coroutine method that sends a call."""

    async def method(client: AsyncClient, /, *args: P.args, **options: P.kwargs) -> T:
        return await client._ask(maker(client._options.profile, *args, **options))

    return documented(method, maker)


class AsyncClient(BaseClient[grpc.aio.Channel]):
    """Asynchronous client for an mmpos service. See BaseClient for the arguments.

    >>> AsyncClient(["replica-0:50051", "replica-1:50051"])
    AsyncClient(['replica-0:50051', 'replica-1:50051'], profile=None, timeout=30)
    """

    place = _awaited(calls.place)
    query = _awaited(calls.query)
    build = _awaited(calls.build)
    build_batch = _awaited(calls.build_batch)
    cos_sin = _awaited(calls.cos_sin)
    angles = _awaited(calls.angles)
    apply_rotary = _awaited(calls.apply_rotary)
    info = _awaited(calls.info)
    healthy = _awaited(calls.healthy)

    def stream(
        self, queries: Iterable[PositionsQuery] | AsyncIterable[PositionsQuery], *, errors: Errors = "raise"
    ) -> AsyncIterator[PositionsResult | MmposError]:
        """Send queries and yield their results in order; see ``Client.stream``.

        Args:
            queries: queries for ``query``, from an iterable or an async iterable.
            errors: see ``Client.stream``.

        Raises:
            MmposError: see ``query``; raised while iterating.
            ServiceError: the server did not answer; raised while iterating.
        """
        return self._stream(streams.stream(self._options.profile, errors), queries, "queries")

    def stream_build(
        self,
        batches: Iterable[Sequence[Sequence[object]]] | AsyncIterable[Sequence[Sequence[object]]],
        *,
        errors: Errors = "raise",
        scheme: str | Scheme | None = None,
        start: int = 0,
        patches: bool = True,
    ) -> AsyncIterator[Built]:
        """Send batches and yield their sequences in order; see ``Client.stream_build``.

        Args:
            batches: documents of each batch for ``build_batch``, from an iterable or an async iterable.
            errors: see ``Client.stream_build``.
            scheme: see ``build``.
            start: see ``build``.
            patches: see ``build``.

        Raises:
            MmposError: see ``build_batch``; raised while iterating.
            ServiceError: the server did not answer; raised while iterating.
        """
        return self._stream(
            streams.stream_build(BuildSettings(self._options.profile, scheme, start, patches), errors),
            batches,
            "batches",
        )

    async def close(self) -> None:
        """Close the channel of this event loop; running calls and streams fail, and a later call opens a new one."""
        channel = self._channels.pop(asyncio.get_running_loop())
        if channel is not None:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _connection(self) -> OpenChannel[grpc.aio.Channel]:
        self._channels.forget_closed_loops()
        # No other task runs between the check and the call that opens a channel, so no channel is opened twice.
        return self._channels.get(
            lambda: self._connect(grpc.aio.secure_channel, grpc.aio.insecure_channel),
            lambda channel: None,
            asyncio.get_running_loop(),
        )

    async def _ask(self, call: ServiceCall[T]) -> T:
        request = call.request()
        send: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        send = self._connection().method(call.method.path)
        patience = self._reach.patience(self._options.timeout)
        while True:
            try:
                raw = await send(request.data, timeout=patience.left, metadata=self._metadata())
                break
            except grpc.RpcError as error:
                failed = error_of(error)
            except asyncio.CancelledError:
                if _being_cancelled():
                    raise
                failed = closed()
            pause = patience.pause(failed) if call.waits else None
            if pause is None:
                return call.refused(self._reach.explained(failed))
            await asyncio.sleep(pause)
        self._reach.answered()
        try:
            answer = request.parse(raw)
        except DecodeError:
            return call.refused(unreadable())
        return request.read(answer)

    def _stream(self, stream: Stream[Q, T], items: Iterable[Q] | AsyncIterable[Q], name: str) -> AsyncIterator[T]:
        if not isinstance(items, Iterable | AsyncIterable):
            raise InvalidInputError(f"{name}: got {type(items).__name__}, want an iterable")
        unanswered = Unanswered(stream, self._options.timeout, self._destination.attempts, self._reach)
        return task_results(unanswered, items, lambda: self._link(stream.method), self._options.timeout)

    def _link(self, method: Rpc[Answer]) -> TaskLink:
        return TaskLink(
            self._connection().channel.stream_stream(method.path, None, method.response.FromString), self._metadata()
        )


def _being_cancelled() -> bool:
    """Return whether the running task is being cancelled; if not, a cancelled call means a closed channel."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
