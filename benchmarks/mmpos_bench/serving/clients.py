"""Client processes that load a server together."""

from __future__ import annotations

import pickle
import subprocess
import sys
from contextlib import ExitStack
from typing import Any, Self

from mmpos.errors import ServiceError
from mmpos_bench.serving.orders import Done, Order

__all__ = ["Clients"]


class Clients:
    """Client processes that take orders; a context manager.

    Not those of multiprocessing, which would run the caller's program again in each.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        words = [sys.executable, "-m", "mmpos_bench.serving.client"]
        for _ in range(self.count):
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            # On leaving it first closes the pipes, at whose end the process ends, and then waits for it.
            self._processes.append(self._stack.enter_context(process))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, order: Order, count: int | None = None) -> list[Done]:
        """Have so many of them do this at once; None is all.

        Raises:
            NotEqualError: an answer is not the one that was ordered, or none came.
            ServiceError: a client ended.
        """
        chosen = self._processes[:count]
        for process in chosen:
            _send(process, order)
        found = [_receive(process) for process in chosen]
        for done in found:
            if isinstance(done, Exception):
                raise done
        return found


def _send(process: subprocess.Popen[bytes], order: Order) -> None:
    assert process.stdin is not None
    try:
        pickle.dump(order, process.stdin)
        process.stdin.flush()
    except BrokenPipeError:
        raise ServiceError("got a client process that ended, want one that takes orders") from None


def _receive(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    try:
        return pickle.load(process.stdout)
    except EOFError:
        raise ServiceError("got a client process that ended, want what it did") from None
