"""Client that waits for its answers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import grpc

from mmpos.client import calls, streams
from mmpos.client.base import BaseClient
from mmpos.client.calls import Built, Call, Errors, Method
from mmpos.client.channel import closed, error_of, was_closed
from mmpos.client.shared_memory import Lease
from mmpos.client.streams import Answer, Stream, ThreadLink, Window, thread_results
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


class Client(BaseClient[grpc.Channel]):
    """A client of a service of mmpos that waits for its answers; threads may share it. Arguments: see BaseClient.

    >>> Client("localhost:50051", profile="qwen-vl")
    Client('localhost:50051', profile='qwen-vl', timeout=30)
    """

    def place(
        self,
        segments: SegmentTable | Spans | InputIds,
        scheme: str | Scheme | None = None,
        start: npt.ArrayLike = 0,
        strict: bool | None = None,
        *,
        views: Sequence[View] = (),
    ) -> PositionTable:
        """Place documents, as ``mmpos.place`` does.

        Args:
            segments: the documents, as a SegmentTable, Spans or InputIds.
            scheme: a name from mmpos.SCHEMES or a scheme object; None: that of the profile.
            start: id of each document's first token, one for all or (documents,).
            strict: whether two grids without text between are an error; None: the scheme decides.
            views: what to make of the placed table, in this order: Take, Window, Decode, Shard, Pad.

        Returns:
            A new PositionTable.

        Raises:
            MmposError: what ``mmpos.place`` and the views raise; LimitExceededError also for a limit of the server.
            ServiceError: no answer.
        """
        return self._send(calls.place(self._options.profile, segments, scheme, start, strict, views))

    def query(self, query: PositionsQuery) -> PositionsResult:
        """Answer a query, as its ``run`` does, but for what it leaves to the profile.

        Args:
            query: which documents, which scheme, which views, table or ids.

        Raises:
            MmposError: what ``query.run`` raises; LimitExceededError also for a limit of the server.
            ServiceError: no answer.
        """
        return self._send(calls.query(self._options.profile, query))

    def build(
        self, parts: Sequence[object], *, scheme: str | Scheme | None = None, start: int = 0, patches: bool = True
    ) -> InterleavedSequence:
        """Build the sequence of these parts, as ``SequenceBuilder.build`` does with the settings of the profile.

        Args:
            parts: text, token ids, Grid, ImageSize, Video, and images as SequenceBuilder takes them. A path travels as
                the bytes of its file; a Pillow image, an array or a tensor as its upright pixels, without loss.
            scheme: a name from mmpos.SCHEMES or a scheme object; None: that of the profile.
            start: id of the first token.
            patches: whether pixels are wanted; without them nothing is decoded.

        Returns:
            A new InterleavedSequence, its image hashes those of the call in process.

        Raises:
            MmposError: what ``SequenceBuilder.build`` raises; LimitExceededError also for a limit of the server.
            ServiceError: no answer.
        """
        return self._send(self._building(scheme, start, patches).build(parts))

    def build_batch(
        self,
        documents: Sequence[Sequence[object]],
        errors: Errors = "raise",
        *,
        scheme: str | Scheme | None = None,
        start: int = 0,
        patches: bool = True,
    ) -> Built:
        """Build the sequences of several documents in one call.

        Args:
            documents: the parts of each, as for ``build``.
            errors: "raise" raises the first error, which names ``documents[d].parts[i]``; "return" puts each error
                where its sequence would be.
            scheme: as for ``build``.
            start: id of the first token of every document.
            patches: as for ``build``.

        Returns:
            One entry per document.

        Raises:
            MmposError: as for ``build``; with errors="return" only what is wrong with the whole call.
            ServiceError: no answer.
        """
        return self._send(self._building(scheme, start, patches).build_batch(documents, errors))

    def cos_sin(
        self, rotary: Rotary | None, positions: PositionTable | torch.Tensor, layout: TableLayout = "pairs"
    ) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        """Compute cos and sin of all tokens, as ``mmpos.rotary.cos_sin`` does.

        Args:
            rotary: the rotation; None: that of the profile.
            positions: a PositionTable, or ids of shape (axes, tokens) or (axes, batch, seq).
            layout: "pairs", "transformers" or "torchtitan", as for ``mmpos.rotary.cos_sin``.

        Returns:
            New tensors, float32 or complex64, where the positions are.

        Raises:
            MmposError: what ``mmpos.rotary.cos_sin`` raises; LimitExceededError also for a limit of the server.
            ServiceError: no answer.
        """
        return self._send(calls.cos_sin(self._options.profile, rotary, positions, layout))

    def angles(self, rotary: Rotary | None, positions: PositionTable | torch.Tensor) -> torch.Tensor:
        """Compute exact angles wrapped to [−π, π], as ``mmpos.rotary.angles`` does.

        Args:
            rotary: the rotation; None: that of the profile.
            positions: a PositionTable, or ids of shape (axes, tokens) or (axes, batch, seq).

        Returns:
            A new float32 tensor where the positions are.

        Raises:
            MmposError: what ``mmpos.rotary.angles`` raises; LimitExceededError also for a limit of the server.
            ServiceError: no answer.
        """
        return self._send(calls.angles(self._options.profile, rotary, positions))

    def apply_rotary(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        positions: PositionTable | torch.Tensor,
        rotary: Rotary | None,
        *,
        layout: Layout | None = None,
        conjugate: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate q and k, as ``mmpos.rotary.apply_rotary`` does; both travel, there and back.

        Args:
            q: queries, as for ``apply_rotary``; without gradients.
            k: keys, or None.
            positions: a PositionTable, or ids of shape (axes, tokens) or (axes, batch, seq).
            rotary: the rotation; None: that of the profile.
            layout: "thd", "bshd" or "bhsd"; None is thd for three dimensions and bshd for four.
            conjugate: rotate by the negative angles.

        Returns:
            New tensors on the device of q.

        Raises:
            MmposError: what ``apply_rotary`` raises; LimitExceededError also for a limit of the server.
            UnsupportedError: q or k requires gradients.
            ServiceError: no answer.
        """
        return self._send(calls.apply_rotary(self._options.profile, q, k, positions, rotary, layout, conjugate))

    def info(self) -> ServerInfo:
        """Ask for version, schemes, limits and profiles of the server."""
        return self._send(calls.info())

    def healthy(self, service: str = "") -> bool:
        """Ask whether the server says that it serves; False also where none answers.

        Args:
            service: full name of a service, such as "mmpos.rpc.v1.PositionService"; empty: the whole server.
        """
        return self._send(calls.healthy(service))

    def stream(
        self, queries: Iterable[PositionsQuery], *, errors: Errors = "raise"
    ) -> Iterator[PositionsResult | MmposError]:
        """Answer queries, in order, while later queries are on their way.

        The queries are read in the caller's thread, at most ``window`` ahead of the answers. Closing the iterator
        ends the stream. What a broken connection leaves unanswered is sent again.

        Args:
            queries: as for ``query``; one that waits for an answer needs ``window=1``.
            errors: "raise" raises the error of a query and ends; "return" gives it in place of the result.

        Raises:
            MmposError: as for ``query``, while iterating.
            ServiceError: likewise: no answer.
        """
        return self._stream(streams.stream(self._options.profile, errors), queries, "queries")

    def stream_build(
        self,
        batches: Iterable[Sequence[Sequence[object]]],
        *,
        errors: Errors = "raise",
        scheme: str | Scheme | None = None,
        start: int = 0,
        patches: bool = True,
    ) -> Iterator[Built]:
        """Build batch after batch, in order, while later batches are on their way; see ``stream``.

        Args:
            batches: the documents of each, as for ``build_batch``.
            errors: as for ``build_batch``; with "return" a batch that is refused as a whole is that error, repeated.
            scheme: as for ``build``.
            start: as for ``build``.
            patches: as for ``build``.

        Raises:
            MmposError: as for ``build_batch``, while iterating.
            ServiceError: likewise: no answer.
        """
        return self._stream(streams.stream_build(self._building(scheme, start, patches), errors), batches, "batches")

    def close(self) -> None:
        """Close the channel of this process; calls and streams under way fail, a later call opens a new one."""
        self._pools.close()
        channel = self._channels.pop()
        if channel is not None:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _channel(self) -> grpc.Channel:
        return self._channels.get(
            lambda: self._connect(grpc.secure_channel, grpc.insecure_channel), lambda channel: channel.close()
        )

    def _send(self, call: Call[T]) -> T:
        if not call.shares or not self._pools.budget:
            return self._ask(call)
        pool = self._pools.get() or self._pools.open(self._ask(calls.info()))
        for lease in pool.leases():
            with lease:
                return self._ask(call, lease)
        raise AssertionError("the last lease raises")

    def _ask(self, call: Call[T], lease: Lease | None = None) -> T:
        request = call.request(memory=lease)
        send: grpc.UnaryUnaryMultiCallable[bytes, Message]
        send = self._channel().unary_unary(call.method.path, None, call.method.parse)
        patience = self._reach.patience(self._options.timeout)
        while True:
            try:
                answer, done = send.with_call(request.data, timeout=patience.left, metadata=self._metadata())
                break
            except grpc.RpcError as error:
                failed = error_of(error)
            except ValueError as error:
                if not was_closed(error):
                    raise
                failed = closed()
            pause = patience.pause(failed) if call.waits else None
            if pause is None:
                return call.refused(self._reach.explained(failed))
            time.sleep(pause)
        self._reach.answered()
        if lease is not None:
            lease.arrived(done.trailing_metadata())
        return request.read(answer)

    def _stream(self, stream: Stream[Q, T], items: Iterable[Q], name: str) -> Iterator[T]:
        if not isinstance(items, Iterable):
            raise InvalidInputError(f"{name}: got {type(items).__name__}, want an iterable")
        window = Window(stream, self._options, self._endpoint.attempts, self._reach)
        return thread_results(window, iter(items), lambda: self._link(stream.method), self._options.timeout)

    def _link(self, method: Method[Answer]) -> ThreadLink:
        try:
            return ThreadLink(self._channel().stream_stream(method.path, None, method.parse), self._metadata())
        except ValueError as error:
            if not was_closed(error):
                raise
            raise closed() from None
