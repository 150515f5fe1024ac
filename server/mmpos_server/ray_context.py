"""Between endpoints, which know gRPC, and Ray Serve, whose replicas get a copy of the context and return messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc

__all__ = ["Answer", "answered", "answers"]


class Answer:
    """Bytes in the place of the message that they are.

    Args:
        raw: the bytes.
    """

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def SerializeToString(self) -> bytes:  # noqa: N802 (the name that Serve calls)
        """The bytes."""
        return self._raw


async def answered(handle: Callable[[bytes, Any], Awaitable[bytes]], request: bytes, context: Any) -> Answer:
    """The answer of an endpoint to a request.

    Args:
        handle: of the endpoint.
        request: the message.
        context: of Serve; gets the status of a call that fails.
    """
    try:
        return Answer(await handle(request, _Context(context)))
    except _AbortedError:
        # Returned and not raised: of what raises, Serve sends no trailing metadata.
        return Answer(b"")


async def answers(
    handle: Callable[[object, Any], Awaitable[None]], requests: AsyncIterator[bytes], context: Any
) -> AsyncIterator[Answer]:
    """The answers of a stream's endpoint.

    Args:
        handle: of the endpoint.
        requests: the messages.
        context: of Serve; gets the status of a stream that fails.
    """
    exchange = _Exchange(context, requests)
    handling = asyncio.ensure_future(handle(None, exchange))
    handling.add_done_callback(lambda _: exchange.answers.put_nowait(None))
    try:
        while (answer := await exchange.answers.get()) is not None:
            yield Answer(answer)
            exchange.taken.set()
        await handling
    finally:
        handling.cancel()


class _AbortedError(Exception):
    """The context has the status."""


class _Context:
    """What endpoints ask of the context of gRPC, where Serve's has it not, or otherwise."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def time_remaining(self) -> None:
        """Serve tells no deadline; its ingress cancels calls whose deadline has passed."""

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._context.set_trailing_metadata(list(metadata))

    async def abort(self, code: grpc.StatusCode, details: str, metadata: Any = ()) -> NoReturn:
        self._context.set_code(code)
        self._context.set_details(details)
        self.set_trailing_metadata(metadata)
        raise _AbortedError(details)


class _Exchange(_Context):
    """The same of a stream: requests are read from Serve, and an answer is written when Serve has taken it."""

    def __init__(self, context: Any, requests: AsyncIterator[bytes]) -> None:
        super().__init__(context)
        self._requests = requests
        self.answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.taken = asyncio.Event()

    async def read(self) -> Any:
        return await anext(self._requests, grpc.aio.EOF)

    async def write(self, answer: bytes) -> None:
        self.taken.clear()
        self.answers.put_nowait(answer)
        await self.taken.wait()
