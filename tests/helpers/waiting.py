"""Waits for conditions, processes and what Linux says of them, and ports and environments of servers."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def eventually(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether something becomes so in time."""
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return holds


def without_torch(folder: Path) -> dict[str, str]:
    """The environment of programs without torch, which takes seconds to import."""
    lines = ["import sys", "sys.modules['torch'] = sys.modules['torchvision'] = None"]
    (folder / "sitecustomize.py").write_text("\n".join(lines))
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def free_port() -> int:
    """A port that nobody listens on, below those that systems give to others by themselves until it is bound."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)  # not by random, which plugins of pytest seed alike in all workers
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def read_proc(pid: int, name: str) -> bytes:
    """A file of /proc; empty once the process has ended, which may be at any moment."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # before the file is opened, or after
        return b""


def descendants(pid: int) -> list[int]:
    """Children of a process, and theirs."""
    found = [int(child) for child in read_proc(pid, f"task/{pid}/children").split()]
    return found + [each for child in found for each in descendants(child)]


def alive(pid: int) -> bool:
    """Whether a process still runs; one that nobody buries does not."""
    _, _, state = read_proc(pid, "stat").rpartition(b") ")
    return state[:1] not in (b"", b"Z")
