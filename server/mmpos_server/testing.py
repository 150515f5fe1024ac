"""Run a server inside this process, for tests, notebooks and examples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mmpos_server.app import Server
from mmpos_server.config import load

if TYPE_CHECKING:
    from mmpos_server.config import ServerConfig

__all__ = ["running"]


@contextmanager
def running(config: ServerConfig | None = None, *, grace: float | None = 5.0, **options: Any) -> Iterator[str]:
    """Serve while the context is open and yield HOST:PORT, or the unix socket's address if there is no port.

    >>> from mmpos_server.config import load
    >>> with running(load()) as address:
    ...     address.partition(":")[0]
    '127.0.0.1'

    Args:
        config: the server's settings; None uses the embedded settings.
        grace: seconds that running calls may take to finish at the end.
        options: further arguments of Server; without ``listen``, the server listens on a free port of 127.0.0.1.
    """
    server = Server(config or load(), **options)
    address, *_ = server.start()
    try:
        yield address
    finally:
        server.stop(grace)
