"""Delay Ctrl-C while it would leave a stored object or a process pool incomplete."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_interrupts"]


@contextmanager
def no_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block; processes that start within the block ignore it permanently."""
    held: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    handled = callable(handler) and threading.current_thread() is threading.main_thread()
    if handled:  # a library's thread may receive the signal that is blocked in this thread; the handler then runs here
        signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if handled:
            signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)
