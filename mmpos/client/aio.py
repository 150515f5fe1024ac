"""The client whose calls are awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import grpc

from mmpos.client import calls, streams
from mmpos.client.base import BaseClient, presented
from mmpos.client.calls import Built, Call, Errors
from mmpos.client.channel import closed, error_of, traced
from mmpos.client.options import Options
from mmpos.client.shared_memory import Lease
from mmpos.client.streams import Stream, TaskLink, Window, task_results
from mmpos.errors import InvalidInputError, MmposError

if TYPE_CHECKING:
    from typing import Self

    from mmpos.rpc.queries import PositionsQuery, PositionsResult
    from mmpos.schemes import Scheme

P = ParamSpec("P")
Q = TypeVar("Q")
T = TypeVar("T")


def _async(
    function: Callable[Concatenate[Options, P], Call[T]], *, shares: bool = False
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """The method that makes this call and is awaited; shares: its tensors may lie in shared memory."""

    async def method(client: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await client._send(lambda options: function(options, *args, **kwargs), shares=shares)

    presented(method, function)
    return method


class AsyncClient(BaseClient[grpc.aio.Channel]):
    """A client of a service of mmpos whose calls are awaited. Arguments: see BaseClient.

    >>> AsyncClient(["replica-0:50051", "replica-1:50051"])
    AsyncClient(['replica-0:50051', 'replica-1:50051'], profile=None, timeout=30)
    """

    place = _async(calls.place, shares=True)
    query = _async(calls.query, shares=True)
    build = _async(calls.build, shares=True)
    build_batch = _async(calls.build_batch, shares=True)
    cos_sin = _async(calls.cos_sin)
    angles = _async(calls.angles)
    apply_rotary = _async(calls.apply_rotary, shares=True)
    info = _async(calls.info)
    healthy = _async(calls.healthy)

    def stream(
        self, queries: Iterable[PositionsQuery] | AsyncIterable[PositionsQuery], *, errors: Errors = "raise"
    ) -> AsyncIterator[PositionsResult | MmposError]:
        """Answers to queries, in order, while later queries are on their way.

        The queries are read at most ``window`` ahead of the answers. Closing the iterator ends the stream. What a
        broken connection leaves unanswered is sent again.

        Args:
            queries: as for ``query``, from an iterable or an async iterable.
            errors: "raise" raises the error of a query and ends; "return" gives it in place of the result.

        Raises:
            MmposError: as for ``query``, while iterating.
            ServiceError: likewise: no answer.
        """
        return self._stream(streams.stream(self._options, errors), queries, "queries")

    def stream_build(
        self,
        batches: Iterable[Sequence[Sequence[Any]]] | AsyncIterable[Sequence[Sequence[Any]]],
        *,
        errors: Errors = "raise",
        scheme: str | Scheme | None = None,
        start: int = 0,
        patches: bool = True,
    ) -> AsyncIterator[Built]:
        """Sequences of batch after batch, in order, while later batches are on their way; see ``stream``.

        Args:
            batches: the documents of each, as for ``build_batch``, from an iterable or an async iterable.
            errors: as for ``build_batch``; with "return" a batch that is refused as a whole is that error, repeated.
            scheme: as for ``build``.
            start: as for ``build``.
            patches: as for ``build``.

        Raises:
            MmposError: as for ``build_batch``, while iterating.
            ServiceError: likewise: no answer.
        """
        return self._stream(streams.stream_build(self._options, errors, scheme, start, patches), batches, "batches")

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

    def _channel(self) -> grpc.aio.Channel:
        self._channels.forget(lambda loop: loop.is_closed())
        # Nothing runs between looking and opening, so none is opened twice.
        return self._channels.get(
            lambda: self._connect(grpc.aio.secure_channel, grpc.aio.insecure_channel),
            lambda channel: None,
            asyncio.get_running_loop(),
        )

    async def _send(self, make: Callable[[Options], Call[T]], *, shares: bool) -> T:
        if not shares or not self._pools.budget:
            return await self._ask(make(self._options))
        pool = self._pools.get() or self._pools.open(await self._ask(calls.info(self._options)))
        for lease in pool.leases():
            with lease:
                return await self._ask(make(replace(self._options, memory=lease)), lease)
        raise AssertionError("the last lease raises")

    async def _ask(self, call: Call[T], lease: Lease | None = None) -> T:
        method: Any = self._channel().unary_unary(call.path, None, call.response.FromString)
        patience = self._reach.patience(self._options.timeout)
        while True:
            asked = method(call.request, timeout=patience.left, metadata=traced(self._metadata()))
            try:
                answer = await asked
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
        return call.decode(answer)

    def _stream(self, stream: Stream[Q, T], items: Iterable[Q] | AsyncIterable[Q], name: str) -> AsyncIterator[T]:
        if not isinstance(items, Iterable | AsyncIterable):
            raise InvalidInputError(f"{name}: got {type(items).__name__}, want an iterable")
        window = Window(stream, self._options, self._endpoint.attempts, self._reach)
        return task_results(window, items, lambda: self._link(stream), self._options.timeout)

    def _link(self, stream: Stream[Any, Any]) -> TaskLink:
        method = stream.method
        opened: Any = self._channel().stream_stream(method.stream_path, None, method.stream_response.FromString)
        return TaskLink(opened, traced(self._metadata()))


def _being_cancelled() -> bool:
    """Whether the running task is cancelled; if not, a cancelled call is one whose channel was closed under it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
