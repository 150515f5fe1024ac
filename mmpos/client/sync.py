"""The client that waits for its answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import grpc

from mmpos.client import calls, streams
from mmpos.client.base import BaseClient, presented
from mmpos.client.calls import Built, Call, Errors
from mmpos.client.channel import closed, error_of, traced, was_closed
from mmpos.client.options import Options
from mmpos.client.shared_memory import Lease
from mmpos.client.streams import Stream, ThreadLink, Window, thread_results
from mmpos.errors import InvalidInputError, MmposError

if TYPE_CHECKING:
    from typing import Self

    from mmpos.rpc.queries import PositionsQuery, PositionsResult
    from mmpos.schemes import Scheme

P = ParamSpec("P")
Q = TypeVar("Q")
T = TypeVar("T")


def _sync(
    function: Callable[Concatenate[Options, P], Call[T]], *, shares: bool = False
) -> Callable[Concatenate[Client, P], T]:
    """The method that makes this call and waits; shares: its tensors may lie in shared memory."""

    def method(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return client._send(lambda options: function(options, *args, **kwargs), shares=shares)

    presented(method, function)
    return method


class Client(BaseClient[grpc.Channel]):
    """A client of a service of mmpos that waits for its answers; threads may share it. Arguments: see BaseClient.

    >>> Client("localhost:50051", profile="qwen-vl")
    Client('localhost:50051', profile='qwen-vl', timeout=30)
    """

    place = _sync(calls.place, shares=True)
    query = _sync(calls.query, shares=True)
    build = _sync(calls.build, shares=True)
    build_batch = _sync(calls.build_batch, shares=True)
    cos_sin = _sync(calls.cos_sin)
    angles = _sync(calls.angles)
    apply_rotary = _sync(calls.apply_rotary, shares=True)
    info = _sync(calls.info)
    healthy = _sync(calls.healthy)

    def stream(
        self, queries: Iterable[PositionsQuery], *, errors: Errors = "raise"
    ) -> Iterator[PositionsResult | MmposError]:
        """Answers to queries, in order, while later queries are on their way.

        The queries are read in the caller's thread, at most ``window`` ahead of the answers. Closing the iterator
        ends the stream. What a broken connection leaves unanswered is sent again.

        Args:
            queries: as for ``query``; one that waits for an answer needs ``window=1``.
            errors: "raise" raises the error of a query and ends; "return" gives it in place of the result.

        Raises:
            MmposError: as for ``query``, while iterating.
            ServiceError: likewise: no answer.
        """
        return self._stream(streams.stream(self._options, errors), queries, "queries")

    def stream_build(
        self,
        batches: Iterable[Sequence[Sequence[Any]]],
        *,
        errors: Errors = "raise",
        scheme: str | Scheme | None = None,
        start: int = 0,
        patches: bool = True,
    ) -> Iterator[Built]:
        """Sequences of batch after batch, in order, while later batches are on their way; see ``stream``.

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
        return self._stream(streams.stream_build(self._options, errors, scheme, start, patches), batches, "batches")

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

    def _send(self, make: Callable[[Options], Call[T]], *, shares: bool) -> T:
        if not shares or not self._pools.budget:
            return self._ask(make(self._options))
        pool = self._pools.get() or self._pools.open(self._ask(calls.info(self._options)))
        for lease in pool.leases():
            with lease:
                return self._ask(make(replace(self._options, memory=lease)), lease)
        raise AssertionError("the last lease raises")

    def _ask(self, call: Call[T], lease: Lease | None = None) -> T:
        method: Any = self._channel().unary_unary(call.path, None, call.response.FromString)
        patience = self._reach.patience(self._options.timeout)
        while True:
            try:
                answer, done = method.with_call(call.request, timeout=patience.left, metadata=traced(self._metadata()))
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
        return call.decode(answer)

    def _stream(self, stream: Stream[Q, T], items: Iterable[Q], name: str) -> Iterator[T]:
        if not isinstance(items, Iterable):
            raise InvalidInputError(f"{name}: got {type(items).__name__}, want an iterable")
        window = Window(stream, self._options, self._endpoint.attempts, self._reach)
        return thread_results(window, iter(items), lambda: self._link(stream), self._options.timeout)

    def _link(self, stream: Stream[Any, Any]) -> ThreadLink:
        method = stream.method
        opened: Any = self._channel().stream_stream(method.stream_path, None, method.stream_response.FromString)
        try:
            return ThreadLink(opened, traced(self._metadata()))
        except ValueError as error:
            if not was_closed(error):
                raise
            raise closed() from None
