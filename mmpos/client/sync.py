"""Client with blocking methods."""

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
from mmpos.client.streams import Answer, Stream, ThreadLink, Unanswered, thread_results
from mmpos.errors import InvalidInputError, MmposError

if TYPE_CHECKING:
    from typing import Self

    from mmpos.rpc.queries import PositionsQuery, PositionsResult
    from mmpos.schemes import Scheme

Q = TypeVar("Q")


def _sent(maker: Maker[P, T]) -> Callable[Concatenate[Client, P], T]:
    """Return the method that sends a call and waits for the answer."""

    def method(client: Client, /, *args: P.args, **options: P.kwargs) -> T:
        return client._ask(maker(client._options.profile, *args, **options))

    return documented(method, maker)


class Client(BaseClient[grpc.Channel]):
    """Blocking, thread-safe client for an mmpos service. See BaseClient for the arguments.

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
        """Send queries and yield their results in order.

        Queries are read in the caller's thread, at most ``window`` ahead of the results. Closing the iterator ends
        the stream. After a broken connection, unanswered queries are sent again.

        Args:
            queries: queries for ``query``; if a query depends on an earlier result, set ``window=1``.
            errors: "raise" raises the error of a query and ends the stream; "return" yields the error instead of the
                result.

        Raises:
            MmposError: see ``query``; raised while iterating.
            ServiceError: the server did not answer; raised while iterating.
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
        """Send batches and yield their sequences in order; see ``stream``.

        Args:
            batches: documents of each batch; see ``build_batch``.
            errors: see ``build_batch``; with "return", a batch that is refused as a whole yields its error for every
                document.
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

    def close(self) -> None:
        """Close the channel of this process; running calls and streams fail, and a later call opens a new channel."""
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

    def _ask(self, call: ServiceCall[T]) -> T:
        request = call.request()
        send: grpc.UnaryUnaryMultiCallable[bytes, bytes]
        send = self._connection().method(call.method.path)
        patience = self._reach.patience(self._options.timeout)
        while True:
            try:
                raw = send(request.data, timeout=patience.left, metadata=self._metadata())
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
        try:
            answer = request.parse(raw)
        except DecodeError:
            return call.refused(unreadable())
        return request.read(answer)

    def _stream(self, stream: Stream[Q, T], items: Iterable[Q], name: str) -> Iterator[T]:
        if not isinstance(items, Iterable):
            raise InvalidInputError(f"{name}: got {type(items).__name__}, want an iterable")
        unanswered = Unanswered(stream, self._options.timeout, self._destination.attempts, self._reach)
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
