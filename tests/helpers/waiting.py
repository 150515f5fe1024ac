"""Wait for conditions and coroutines, read /proc, and find free ports."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

P = ParamSpec("P")


def eventually(condition: Callable[[], bool]) -> bool:
    """Wait until a condition holds; return False if it does not hold within five minutes."""
    end = time.monotonic() + 300
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return holds


def bounded(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an asynchronous test in an event loop of its own, for at most five minutes."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 300))

    return run


_HELD = list[socket.socket]()


def free_port() -> int:
    """Reserve a port until this process ends: only servers, which reuse ports, can bind it."""
    _HELD.append(socket.socket())
    _HELD[-1].bind(("127.0.0.1", 0))
    _HELD[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return int(_HELD[-1].getsockname()[1])


def read_proc(pid: int, name: str) -> bytes:
    """Read a file in /proc; return b"" if the process has ended, which may happen at any moment."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # ended before the file was opened, or after
        return b""


def children(pid: int) -> list[int]:
    """Return the pids of the children of a process."""
    return [int(child) for child in read_proc(pid, f"task/{pid}/children").split()]


def descendants(pid: int) -> list[int]:
    """Return the pids of all descendants of a process."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


def alive(pid: int) -> bool:
    """Return whether a process is still running; a zombie does not count."""
    _, _, state = read_proc(pid, "stat").rpartition(b") ")
    return state[:1] not in (b"", b"Z")
