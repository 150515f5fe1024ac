"""Server in a thread of this process, for tests, notebooks and examples."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mmpos_server.app import Server
from mmpos_server.config import load
from mmpos_server.listening import Listen

if TYPE_CHECKING:
    from mmpos_server.app import MethodsOf
    from mmpos_server.config import ServerConfig
    from mmpos_server.shared_memory import SharedMemory
    from mmpos_server.telemetry import Logs
    from mmpos_server.tracing import Tracing

__all__ = ["running"]


@contextmanager
def running(
    config: ServerConfig | None = None,
    *,
    listen: Listen | None = None,
    logs: Logs | None = None,
    shared_memory: SharedMemory | None = None,
    tracing: Tracing | None = None,
    methods: MethodsOf | None = None,
    grace: float | None = 5.0,
) -> Iterator[str]:
    """Serve in a thread while the context is open; yields HOST:PORT, or the address of a unix socket without a port.

    >>> from mmpos_server.config import load
    >>> with running(load()) as address:
    ...     address.partition(":")[0]
    '127.0.0.1'

    Args:
        config: settings of the server; None is the embedded ones.
        listen: addresses; None is a free port of 127.0.0.1.
        logs: log of the server; None writes errors only.
        shared_memory: access to shared memory of clients; None for none.
        tracing: source of OpenTelemetry spans; None for none.
        methods: methods of the server; None is all services of mmpos.
        grace: seconds that calls at work may take at the end.
    """
    server = Server(config or load(), listen, logs=logs, shared_memory=shared_memory, tracing=tracing, methods=methods)
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(_quiet)
    thread = threading.Thread(target=loop.run_forever, name="mmpos-server", daemon=True)
    thread.start()
    try:
        addresses = asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        try:
            yield addresses[0]
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(grace), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _quiet(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # With two event loops in a process, each is woken for events of the other and finds nothing to read.
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
