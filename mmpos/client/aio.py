"""Client whose calls are awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import grpc

from mmpos.client import calls, streams
from mmpos.client.base import BaseClient
from mmpos.client.calls import Built, Call, Errors, Method
from mmpos.client.channel import closed, error_of
from mmpos.client.shared_memory import Lease
from mmpos.client.streams import Answer, Stream, TaskLink, Window, task_results
from mmpos.errors import InvalidInputError, MmposError

if TYPE_CHECKING:
    from typing import Self

    import numpy.typing as npt
    import torch
    from google.protobuf.message import Message

    from mmpos.client.info import ServerInfo
    from mmpos.positions.table import PositionTable
    from mmpos.rotary import Rotary
    from mmpos.rotary.apply import Layout, TableLayout
    from mmpos.rpc.queries import InputIds, PositionsQuery, PositionsResult, Spans, View
    from mmpos.schemes import Scheme
    from mmpos.segments.table import SegmentTable
    from mmpos.sequence.builder import InterleavedSequence

Q = TypeVar("Q")
T = TypeVar("T")


class AsyncClient(BaseClient[grpc.aio.Channel]):
    """A client of a service of mmpos whose calls are awaited. Arguments: see BaseClient.

    >>> AsyncClient(["replica-0:50051", "replica-1:50051"])
    AsyncClient(['replica-0:50051', 'replica-1:50051'], profile=None, timeout=30)
    """

    async def place(
        self,
        segments: SegmentTable | Spans | InputIds,
        scheme: str | Scheme | None = None,
        start: npt.ArrayLike = 0,
        strict: bool | None = None,
        *,
        views: Sequence[View] = (),
    ) -> PositionTable:
        """Place documents, as ``mmpos.place`` does; see ``Client.place``."""
        return await self._send(calls.place(self._options.profile, segments, scheme, start, strict, views))

    async def query(self, query: PositionsQuery) -> PositionsResult:
        """Answer a query, as its ``run`` does, but for what it leaves to the profile; see ``Client.query``."""
        return await self._send(calls.query(self._options.profile, query))

    async def build(
        self, parts: Sequence[object], *, scheme: str | Scheme | None = None, start: int = 0, patches: bool = True
    ) -> InterleavedSequence:
        """Build the sequence of these parts with the settings of the profile; see ``Client.build``."""
        return await self._send(self._building(scheme, start, patches).build(parts))

    async def build_batch(
        self,
        documents: Sequence[Sequence[object]],
        errors: Errors = "raise",
        *,
        scheme: str | Scheme | None = None,
        start: int = 0,
        patches: bool = True,
    ) -> Built:
        """Build the sequences of several documents in one call; see ``Client.build_batch``."""
        return await self._send(self._building(scheme, start, patches).build_batch(documents, errors))

    async def cos_sin(
        self, rotary: Rotary | None, positions: PositionTable | torch.Tensor, layout: TableLayout = "pairs"
    ) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        """Compute cos and sin of all tokens, as ``mmpos.rotary.cos_sin`` does; see ``Client.cos_sin``."""
        return await self._send(calls.cos_sin(self._options.profile, rotary, positions, layout))

    async def angles(self, rotary: Rotary | None, positions: PositionTable | torch.Tensor) -> torch.Tensor:
        """Compute exact angles wrapped to [−π, π], as ``mmpos.rotary.angles`` does; see ``Client.angles``."""
        return await self._send(calls.angles(self._options.profile, rotary, positions))

    async def apply_rotary(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        positions: PositionTable | torch.Tensor,
        rotary: Rotary | None,
        *,
        layout: Layout | None = None,
        conjugate: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate q and k; both travel, there and back; see ``Client.apply_rotary``."""
        return await self._send(calls.apply_rotary(self._options.profile, q, k, positions, rotary, layout, conjugate))

    async def info(self) -> ServerInfo:
        """Ask for version, schemes, limits and profiles of the server; see ``Client.info``."""
        return await self._send(calls.info())

    async def healthy(self, service: str = "") -> bool:
        """Ask whether the server says that it serves; False also where none answers; see ``Client.healthy``."""
        return await self._send(calls.healthy(service))

    def stream(
        self, queries: Iterable[PositionsQuery] | AsyncIterable[PositionsQuery], *, errors: Errors = "raise"
    ) -> AsyncIterator[PositionsResult | MmposError]:
        """Answer queries, in order, while later queries are on their way.

        The queries are read at most ``window`` ahead of the answers. Closing the iterator ends the stream. What a
        broken connection leaves unanswered is sent again.

        Args:
            queries: as for ``query``, from an iterable or an async iterable.
            errors: "raise" raises the error of a query and ends; "return" gives it in place of the result.

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
        """Build batch after batch, in order, while later batches are on their way; see ``stream``.

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
        return self._stream(streams.stream_build(self._building(scheme, start, patches), errors), batches, "batches")

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
        self._channels.forget_closed_loops()
        # Nothing runs between looking and opening, so none is opened twice.
        return self._channels.get(
            lambda: self._connect(grpc.aio.secure_channel, grpc.aio.insecure_channel),
            lambda channel: None,
            asyncio.get_running_loop(),
        )

    async def _send(self, call: Call[T]) -> T:
        if not call.shares or not self._pools.budget:
            return await self._ask(call)
        pool = self._pools.get() or self._pools.open(await self._ask(calls.info()))
        for lease in pool.leases():
            with lease:
                return await self._ask(call, lease)
        raise AssertionError("the last lease raises")

    async def _ask(self, call: Call[T], lease: Lease | None = None) -> T:
        request = call.request(memory=lease)
        send: grpc.aio.UnaryUnaryMultiCallable[bytes, Message]
        send = self._channel().unary_unary(call.method.path, None, call.method.parse)
        patience = self._reach.patience(self._options.timeout)
        while True:
            asked = send(request.data, timeout=patience.left, metadata=self._metadata())
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
        return request.read(answer)

    def _stream(self, stream: Stream[Q, T], items: Iterable[Q] | AsyncIterable[Q], name: str) -> AsyncIterator[T]:
        if not isinstance(items, Iterable | AsyncIterable):
            raise InvalidInputError(f"{name}: got {type(items).__name__}, want an iterable")
        window = Window(stream, self._options, self._endpoint.attempts, self._reach)
        return task_results(window, items, lambda: self._link(stream.method), self._options.timeout)

    def _link(self, method: Method[Answer]) -> TaskLink:
        return TaskLink(self._channel().stream_stream(method.path, None, method.parse), self._metadata())


def _being_cancelled() -> bool:
    """Check whether the running task is cancelled; otherwise the channel of a cancelled call was closed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
