"""Client with coroutine methods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import grpc

from mmpos.client import calls
from mmpos.client.calls import Built, Errors, ServiceCall
from mmpos.client.channel import BaseClient, OpenChannel, closed, failure, lost_status
from mmpos.client.streams import Stream, build_stream, place_stream
from mmpos.client.sync import Client
from mmpos.errors import MmposError, ServiceError

if TYPE_CHECKING:
    from typing import Self

    from mmpos.rpc.queries import PositionsQuery, PositionsResult
    from mmpos.schemes import Scheme

P = ParamSpec("P")
Q = TypeVar("Q")
T = TypeVar("T")


def _awaited(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Return a method of Client as a coroutine method; ``AsyncClient._ask`` returns an awaitable to it."""

    @wraps(method)
    async def awaited(client: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        answer: Any = method(client, *args, **kwargs)
        result: T = await answer
        return result

    return awaited


class AsyncClient(BaseClient):
    """Asynchronous client for an mmpos service: the methods of ``Client``, which describes them, as coroutines.

    >>> AsyncClient("dns:///replicas:50051")
    AsyncClient('dns:///replicas:50051', profile=None, timeout=30)
    """

    place = _awaited(Client.place)
    query = _awaited(Client.query)
    build = _awaited(Client.build)
    build_batch = _awaited(Client.build_batch)
    cos_sin = _awaited(Client.cos_sin)
    angles = _awaited(Client.angles)
    apply_rotary = _awaited(Client.apply_rotary)
    info = _awaited(Client.info)

    async def healthy(self) -> bool:
        """Return whether the server reports that it is serving; False if no server answers."""
        try:
            return await self._ask(calls.healthy(), waits=False)
        except ServiceError:
            return False

    def stream(
        self, queries: Iterable[PositionsQuery] | AsyncIterable[PositionsQuery], *, errors: Errors = "raise"
    ) -> AsyncIterator[PositionsResult | MmposError]:
        """Send queries, from an iterable or an async iterable, and yield results in order; see ``Client.stream``."""
        return self._results(place_stream(self._options, errors), queries)

    def stream_build(
        self,
        batches: Iterable[Sequence[Sequence[object]]] | AsyncIterable[Sequence[Sequence[object]]],
        *,
        errors: Errors = "raise",
        scheme: str | Scheme | None = None,
        start: int = 0,
        patches: bool = True,
    ) -> AsyncIterator[Built]:
        """Send batches, from an iterable or an async iterable, and yield sequences; see ``Client.stream_build``."""
        return self._results(build_stream(self._options, errors, scheme, start, patches), batches)

    async def close(self) -> None:
        """Close the client and its channel of this event loop; running calls and streams fail, later calls too."""
        channel = self._channels.close(asyncio.get_running_loop())
        if channel is not None:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _opened(self) -> OpenChannel:
        return self._open(grpc.aio.secure_channel, grpc.aio.insecure_channel, asyncio.get_running_loop())

    async def _ask(self, call: ServiceCall[T], *, waits: bool = True) -> T:
        opened = self._opened()
        settings = self._settings(opened, waits=waits)
        try:
            raw = await opened.method(call.path)(call.data, timeout=self._options.timeout, **settings)
        except grpc.RpcError as error:
            raise failure(error, call.path, self._options, opened.answered) from None
        except asyncio.CancelledError:
            if _being_cancelled():
                raise
            raise closed() from None
        opened.answered = True
        return call.read(raw)

    def _results(self, stream: Stream[Q, T], items: Iterable[Q] | AsyncIterable[Q]) -> AsyncIterator[T]:
        stream.check(items, Iterable, AsyncIterable)
        return self._streamed(stream, items if isinstance(items, AsyncIterable) else _each(items))

    async def _streamed(self, stream: Stream[Q, T], items: AsyncIterable[Q]) -> AsyncIterator[T]:
        opened = self._opened()

        def start(timeout: float | None = None) -> Any:
            method = opened.channel.stream_stream(stream.method.path)
            return method(timeout=timeout, **self._settings(opened))

        async def send() -> None:
            try:
                async for item in items:
                    request = stream.request(item)
                    try:
                        await call.write(request)
                    except (grpc.RpcError, asyncio.InvalidStateError):
                        return  # the reader raises the status
                stream.exhausted = True
            except Exception as error:  # the stream raises it at its end
                stream.failed = error
            finally:
                await call.done_writing()

        async def watch() -> None:
            while (left := stream.left()) > 0:
                await asyncio.sleep(left)
            call.cancel()

        call = start()
        tasks = asyncio.ensure_future(send()), asyncio.ensure_future(watch())
        try:
            stream.wait()
            async for raw in call:
                opened.answered = True
                yield stream.result(raw)
                stream.wait()
        except grpc.RpcError as error:
            if stream.answered == 0 and lost_status(error):
                error = await _status(start(self._options.timeout)) or error
            raise stream.broken(failure(error, stream.method.path, self._options, opened.answered)) from None
        except asyncio.CancelledError:
            if _being_cancelled():
                raise
            raise stream.broken(closed()) from None
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        stream.end()


async def _status(call: Any) -> grpc.RpcError | None:
    """Return why the server refuses a stream, even one without items, or None if it does not."""
    try:
        await call.done_writing()
        async for _ in call:
            pass
    except grpc.RpcError as error:
        return error
    return None


async def _each(items: Iterable[Q]) -> AsyncIterator[Q]:
    for item in items:
        yield item


def _being_cancelled() -> bool:
    """Return whether the running task is being cancelled; if not, a cancelled call means a closed channel."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
