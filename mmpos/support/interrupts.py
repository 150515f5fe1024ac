"""Handle SIGTERM like Ctrl-C, and delay both while they would leave a stored object or a process pool incomplete."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Terminated", "no_interrupts", "stopped_by_sigterm"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM in a block of ``stopped_by_sigterm``."""


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Raise Terminated in the block on the first SIGTERM, and ignore later ones; do nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what cleans up is not interrupted again
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def no_interrupts() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end of the block; processes that start within it ignore both permanently."""
    held: list[int] = []
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    is_main = threading.current_thread() is threading.main_thread()
    handled = [number for number in _SIGNALS if callable(handlers[number])] if is_main else []
    for number in handled:  # a library's thread may receive a signal that is blocked here; the handler then runs here
        signal.signal(number, lambda number, frame: held.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number in handled:
            signal.signal(number, handlers[number])
        if held:
            signal.raise_signal(held[0])
