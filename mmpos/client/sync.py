"""Client that waits for its answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Concatenate, TypeVar

import grpc
from google.protobuf.message import DecodeError

from mmpos.client import calls, streams
from mmpos.client.base import BaseClient
from mmpos.client.calls import BuildSettings, Built, Errors, Maker, P, Rpc, ServiceCall, T, documented
from mmpos.client.channel import OpenChannel, closed, error_of, unreadable, was_closed
from mmpos.client.shared_memory import Lease
from mmpos.client.streams import Answer, Stream, ThreadLink, Unanswered, thread_results
from mmpos.errors import InvalidInputError, MmposError

if TYPE_CHECKING:
    from typing import Self

    from mmpos.rpc.queries import PositionsQuery, PositionsResult
    from mmpos.schemes import Scheme

Q = TypeVar("Q")


def _sent(maker: Maker[P, T]) -> Callable[Concatenate[Client, P], T]:
    """Make the method that sends a call and waits for its answer."""

    def method(client: Client, /, *args: P.args, **options: P.kwargs) -> T:
        return client._send(maker(client._options.profile, *args, **options))

    return documented(method, maker)


class Client(BaseClient[grpc.Channel]):
    """A client of a service of mmpos that waits for its answers; threads may share it. Arguments: see BaseClient.

    >>> Client("localhost:50051", profile="qwen-vl")
    Client('localhost:50051', profile='qwen-vl', timeout=30)
    """

    place = _sent(calls.place)
    query = _sent(calls.query)
    build = _sent(calls.build)
    build_batch = _sent(calls.build_batch)
    cos_sin = _sent(calls.cos_sin)
    angles = _sent(calls.angles)
    apply_rotary = _sent(calls.apply_rotary)
    info = _sent(calls.info)
    healthy = _sent(calls.healthy)

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
        return self._stream(
            streams.stream_build(BuildSettings(self._options.profile, scheme, start, patches), errors),
            batches,
            "batches",
        )

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

    def _connection(self) -> OpenChannel[grpc.Channel]:
        return self._channels.get(
            lambda: self._connect(grpc.secure_channel, grpc.insecure_channel), lambda channel: channel.close()
        )

    def _send(self, call: ServiceCall[T]) -> T:
        if not call.shares or not self._pools.budget:
            return self._ask(call)
        pool = self._pools.get() or self._pools.open(self._ask(calls.info(None)))
        for lease in pool.leases():
            with lease:
                return self._ask(call, lease)
        raise AssertionError("the last lease raises")

    def _ask(self, call: ServiceCall[T], lease: Lease | None = None) -> T:
        request = call.request(memory=lease)
        send: grpc.UnaryUnaryMultiCallable[bytes, bytes]
        send = self._connection().method(call.method.path)
        patience = self._reach.patience(self._options.timeout)
        while True:
            try:
                raw, done = send.with_call(request.data, timeout=patience.left, metadata=self._metadata())
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
        try:
            answer = request.parse(raw)
        except DecodeError:
            return call.refused(unreadable())
        return request.read(answer)

    def _stream(self, stream: Stream[Q, T], items: Iterable[Q], name: str) -> Iterator[T]:
        if not isinstance(items, Iterable):
            raise InvalidInputError(f"{name}: got {type(items).__name__}, want an iterable")
        unanswered = Unanswered(stream, self._options, self._destination.attempts, self._reach)
        return thread_results(unanswered, iter(items), lambda: self._link(stream.method), self._options.timeout)

    def _link(self, method: Rpc[Answer]) -> ThreadLink:
        try:
            return ThreadLink(
                self._connection().channel.stream_stream(method.path, None, method.response.FromString),
                self._metadata(),
            )
        except ValueError as error:
            if not was_closed(error):
                raise
            raise closed() from None
