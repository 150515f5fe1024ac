"""Ctrl-C held back where it would leave half of a thing: an object in a store, or a pool of processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_interrupts"]


@contextmanager
def no_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block; processes that start meanwhile ignore it for good."""
    held: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    handled = callable(handler) and threading.current_thread() is threading.main_thread()
    if handled:  # a thread of a library may get what this one blocks, and the handler would still run here
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
