"""Sync and async clients behind blocking calls, so that one test covers both kinds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mmpos.client import AsyncClient, Client
from mmpos.errors import MmposError

_END = object()


class Blocking:
    """An AsyncClient whose calls block and whose streams are iterators; its event loop runs only during calls."""

    def __init__(self, client: AsyncClient, runner: asyncio.Runner) -> None:
        self._client, self._runner = client, runner

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: object, **kwargs: object) -> Any:
            result = getattr(self._client, name)(*args, **kwargs)
            if isinstance(result, AsyncClient):
                return Blocking(result, self._runner)
            return self._items(result) if isinstance(result, AsyncIterator) else self._runner.run(result)

        return call

    def _items(self, results: Any) -> Iterator[object]:
        async def pull() -> object:
            return await anext(results, _END)

        try:
            while (item := self._runner.run(pull())) is not _END:
                yield item
        finally:
            self._runner.run(results.aclose())


@contextmanager
def open_client(kind: str, address: str, **options: Any) -> Iterator[Any]:
    """Open a client with blocking calls: "sync" opens a Client, "async" an AsyncClient with its own event loop."""
    if kind == "sync":
        with Client(address, **options) as client:
            yield client
        return
    with asyncio.Runner() as runner:
        client_ = AsyncClient(address, **options)
        try:
            yield Blocking(client_, runner)
        finally:
            runner.run(client_.close())


def failure(call: Callable[..., object], *args: object, **kwargs: object) -> tuple[type, str]:
    """Return the type and message of the error that a call raises."""
    with pytest.raises(MmposError) as caught:
        call(*args, **kwargs)
    return type(caught.value), str(caught.value)
