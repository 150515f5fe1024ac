"""Run a server inside this process, for tests, notebooks and examples."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread
from typing import TYPE_CHECKING, Any

from mmpos_server.app import Server
from mmpos_server.config import load

if TYPE_CHECKING:
    from mmpos_server.config import ServerConfig

__all__ = ["running", "started"]


@contextmanager
def running(config: ServerConfig | None = None, *, grace: float = 5.0, **options: Any) -> Iterator[str]:
    """Serve while the context is open and yield HOST:PORT, or the unix socket's address if there is no port.

    >>> from mmpos_server.config import load
    >>> with running(load()) as address:
    ...     address.partition(":")[0]
    '127.0.0.1'

    Args:
        config: the server's settings; None uses the embedded settings, but never refuses calls for overload, since the
            caller's code may keep the server waiting.
        grace: seconds that running calls may take to finish at the end.
        options: further arguments of Server; without ``listen``, the server listens on a free port of 127.0.0.1.
    """
    with started(config or replace(load(), overload_ms=60_000), grace=grace, **options) as (_, address):
        yield address


@contextmanager
def started(config: ServerConfig, *, grace: float = 5.0, **options: Any) -> Iterator[tuple[Server, str]]:
    """Serve as ``running`` does, and yield the server and its first address."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, name="mmpos-server", daemon=True)
    thread.start()
    try:
        server = Server(config, **options)
        address, *_ = asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        try:
            yield server, address
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(grace), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
