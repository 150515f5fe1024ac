"""Waits for conditions of servers, and ports and environments for these."""

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
