"""Client whose calls are awaited."""

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
from mmpos.client.shared_memory import Lease
from mmpos.client.streams import Answer, Stream, TaskLink, Unanswered, task_results
from mmpos.errors import InvalidInputError, MmposError

if TYPE_CHECKING:
    from typing import Self

    from mmpos.rpc.queries import PositionsQuery, PositionsResult
    from mmpos.schemes import Scheme

Q = TypeVar("Q")


def _awaited(maker: Maker[P, T]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Make the method that sends a call and is awaited."""

    async def method(client: AsyncClient, /, *args: P.args, **options: P.kwargs) -> T:
        return await client._send(maker(client._options.profile, *args, **options))

    return documented(method, maker)


class AsyncClient(BaseClient[grpc.aio.Channel]):
    """A client of a service of mmpos whose calls are awaited. Arguments: see BaseClient.

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
        """Answer queries, in order, while later queries are on their way; see ``Client.stream``.

        Args:
            queries: as for ``query``, from an iterable or an async iterable.
            errors: as for ``Client.stream``.

        Raises:
            MmposError: as for ``query``, while iterating.
            ServiceError: likewise: no answer.
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
        """Build batch after batch, in order, while later batches are on their way; see ``Client.stream_build``.

        Args:
            batches: the documents of each, as for ``build_batch``, from an iterable or an async iterable.
            errors: as for ``Client.stream_build``.
            scheme: as for ``build``.
            start: as for ``build``.
            patches: as for ``build``.

        Raises:
            MmposError: as for ``build_batch``, while iterating.
            ServiceError: likewise: no answer.
        """
        return self._stream(
            streams.stream_build(BuildSettings(self._options.profile, scheme, start, patches), errors),
            batches,
            "batches",
        )

    async def close(self) -> None:
        """Close the channel of this event loop; calls and streams under way fail, a later call opens a new one."""
        self._pools.close()
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
        # Nothing runs between looking and opening, so none is opened twice.
        return self._channels.get(
            lambda: self._connect(grpc.aio.secure_channel, grpc.aio.insecure_channel),
            lambda channel: None,
            asyncio.get_running_loop(),
        )

    async def _send(self, call: ServiceCall[T]) -> T:
        if not call.shares or not self._pools.budget:
            return await self._ask(call)
        pool = self._pools.get() or self._pools.open(await self._ask(calls.info(None)))
        for lease in pool.leases():
            with lease:
                return await self._ask(call, lease)
        raise AssertionError("the last lease raises")

    async def _ask(self, call: ServiceCall[T], lease: Lease | None = None) -> T:
        request = call.request(memory=lease)
        send: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        send = self._connection().method(call.method.path)
        patience = self._reach.patience(self._options.timeout)
        while True:
            asked = send(request.data, timeout=patience.left, metadata=self._metadata())
            try:
                raw = await asked
                trailing = await asked.trailing_metadata() if lease is not None else None
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
        if lease is not None:
            lease.arrived(trailing)
        try:
            answer = request.parse(raw)
        except DecodeError:
            return call.refused(unreadable())
        return request.read(answer)

    def _stream(self, stream: Stream[Q, T], items: Iterable[Q] | AsyncIterable[Q], name: str) -> AsyncIterator[T]:
        if not isinstance(items, Iterable | AsyncIterable):
            raise InvalidInputError(f"{name}: got {type(items).__name__}, want an iterable")
        unanswered = Unanswered(stream, self._options, self._destination.attempts, self._reach)
        return task_results(unanswered, items, lambda: self._link(stream.method), self._options.timeout)

    def _link(self, method: Rpc[Answer]) -> TaskLink:
        return TaskLink(
            self._connection().channel.stream_stream(method.path, None, method.response.FromString), self._metadata()
        )


def _being_cancelled() -> bool:
    """Check whether the running task is cancelled; otherwise the channel of a cancelled call was closed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
