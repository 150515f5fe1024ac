"""Wait for conditions and coroutines, read /proc, and find free ports."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
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


def free_port() -> int:
    """Find an unused port below the range from which Linux assigns ports itself, so that the port stays free."""
    while True:
        # not ``random``, which pytest plugins seed identically in every worker
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def read_proc(pid: int, name: str) -> bytes:
    """Read a file in /proc; return b"" if the process has ended, which may happen at any moment."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # ended before the file was opened, or after
        return b""


def descendants(pid: int) -> list[int]:
    """Return the pids of all descendants of a process."""
    children = [int(child) for child in read_proc(pid, f"task/{pid}/children").split()]
    return children + [descendant for child in children for descendant in descendants(child)]


def alive(pid: int) -> bool:
    """Return whether a process is still running; a zombie does not count."""
    _, _, state = read_proc(pid, "stat").rpartition(b") ")
    return state[:1] not in (b"", b"Z")
