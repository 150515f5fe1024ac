"""Server inside this process, for tests, notebooks and examples."""

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
    """Serve while the context is open, and yield HOST:PORT, or the address of the unix socket if there is no port.

    >>> from mmpos_server.config import load
    >>> with running(load()) as address:
    ...     address.partition(":")[0]
    '127.0.0.1'

    Args:
        config: settings of the server; None uses the embedded ones.
        grace: seconds that running calls may take at the end.
        options: further arguments of Server; without ``listen`` a free port of 127.0.0.1.
    """
    server = Server(config or load(), **options)
    address, *_ = server.start()
    try:
        yield address
    finally:
        server.stop(grace)
