"""A stream that is awaited: items are pulled, requests written and answers read side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Any, TypeVar

import grpc

from mmpos.client.failures import closed, error_of
from mmpos.client.options import Metadata
from mmpos.client.streams import Window, no_answer
from mmpos.errors import MmposError

Q = TypeVar("Q")
T = TypeVar("T")

_END: Any = object()


class Link:
    """A stream that is open: requests are written by a task of gRPC, and one answer is always being read."""

    def __init__(self, opened: Any, metadata: Metadata) -> None:
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._call = opened(self._written(), metadata=metadata)
        self.answer: asyncio.Task[Any] = asyncio.ensure_future(self._read())

    async def _written(self) -> AsyncIterator[bytes]:
        while (request := await self._requests.get()) is not None:
            yield request

    async def _read(self) -> Any:
        try:
            answer = await self._call.read()
        except grpc.RpcError as error:
            return error_of(error)
        except asyncio.CancelledError:
            return closed()
        return None if answer is grpc.aio.EOF else answer

    def send(self, request: bytes) -> None:
        """Have a request written."""
        self._requests.put_nowait(request)

    def finish(self) -> None:
        """No request follows."""
        self._requests.put_nowait(None)

    def taken(self) -> Any:
        """The answer that came, None for the end, or the error that ended the stream; the next one is read."""
        answer = self.answer.result()
        if answer is not None and not isinstance(answer, MmposError):
            self.answer = asyncio.ensure_future(self._read())
        return answer

    async def close(self) -> None:
        """Cancel the stream, unless it has ended."""
        self.finish()
        self._call.cancel()
        await asyncio.wait([self.answer])


def _opened(connect: Callable[[], Link], window: Window[Any, Any], more: bool) -> Link:
    """A new stream on which all that has no answer was sent."""
    link = connect()
    for request in window.requests():
        link.send(request)
    if not more:
        link.finish()
    return link


async def _pulled(items: Iterator[Q] | AsyncIterator[Q]) -> Q:
    """The next item, or the mark of the end."""
    if isinstance(items, AsyncIterator):
        return await anext(items, _END)
    return next(items, _END)


async def results(
    window: Window[Q, T], source: Iterable[Q] | AsyncIterable[Q], connect: Callable[[], Link], timeout: float
) -> AsyncIterator[T]:
    """The results of the items, in order, while later ones are on their way; closing it cancels the stream."""
    items = aiter(source) if isinstance(source, AsyncIterable) else iter(source)
    link: Link | None = None
    pull: asyncio.Task[Q] | None = None
    more = True
    try:
        while more or len(window):
            if window.refused:
                yield window.result()
                continue
            if pull is None and more and not window.full:
                pull = asyncio.ensure_future(_pulled(items))
            if link is None and window.requests():
                link = _opened(connect, window, more)
            answered, pulled = await _first(link, pull, timeout if window.requests() else None)
            if link is not None and (answered or not pulled):
                answer = link.taken() if answered else no_answer(timeout)
                if answer is None or isinstance(answer, MmposError):
                    await link.close()
                    link = None
                    await asyncio.sleep(window.broken(answer))
                else:
                    yield window.result(answer)
            elif pull is not None:
                item, pull = pull.result(), None
                more = item is not _END
                request = window.add(item) if more else None
                if link is not None and request is not None:
                    link.send(request)
                elif link is not None and not more:
                    link.finish()
        if link is not None:
            await _first(link, None, timeout)  # the end, so that the server does not see a stream that was left
    finally:
        if pull is not None:
            pull.cancel()
            await asyncio.wait([pull])
        if link is not None:
            await link.close()


async def _first(link: Link | None, pull: asyncio.Task[Any] | None, timeout: float | None) -> tuple[bool, bool]:
    """Whether an answer and an item are there, after waiting for one of them, or for neither within the timeout."""
    reading = link.answer if link is not None else None
    tasks: list[asyncio.Task[Any]] = [task for task in (reading, pull) if task is not None]
    done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    return reading in done, pull in done
