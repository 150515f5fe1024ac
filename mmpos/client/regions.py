"""Shared memory objects of this process, taken by calls and given back."""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from contextlib import suppress
from weakref import finalize

import numpy as np

from mmpos.errors import LimitExceededError

LEAST = 65_536
"""Smallest object; below, a message is as good."""


class Region:
    """A POSIX shared memory object, mapped; only its user may open it.

    It is removed when nobody holds it any more, or at exit, and by nobody but the process that made it. Who has opened
    it meanwhile goes on with what is then no longer anybody else's.

    Args:
        prefix: how its name begins.
        size: its bytes.

    Raises:
        LimitExceededError: the machine does not give as many.
    """

    def __init__(self, prefix: str, size: int) -> None:
        import _posixshmem  # not everywhere, and clients without shared memory are

        self.key, self.size = f"/{prefix}{os.getpid()}-{secrets.token_hex(8)}", size
        try:
            descriptor = _posixshmem.shm_open(self.key, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
            # The name goes away also if what follows fails.
            self.remove = finalize(self, _remove, self.key, os.getpid())
            try:
                # All pages now: a machine without room says so, instead of ending who writes to the map (SIGBUS).
                os.posix_fallocate(descriptor, 0, size)
                pages = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise LimitExceededError(
                f"shared_memory: got no object of {size} bytes ({error.strerror}), want a machine with room for it"
            ) from None
        self.data = np.frombuffer(pages, np.uint8)


def _remove(key: str, process: int) -> None:
    import _posixshmem

    if os.getpid() == process:  # a forked child has a copy of all this, and no say in it
        with suppress(FileNotFoundError):
            _posixshmem.shm_unlink(key)


class Regions:
    """The regions of one process: those in use, and those kept for the next call; threads may share them.

    Args:
        prefix: how their names begin.
        budget: most bytes of all of them.
    """

    def __init__(self, prefix: str, budget: int) -> None:
        self._prefix, self._budget = prefix, budget
        self._lock = threading.Lock()
        self._idle: list[Region] = []
        self._used = 0
        self._closed = False

    @property
    def free(self) -> int:
        """Bytes that no call uses."""
        return max(self._budget - self._used, 0)

    def take(self, size: int) -> Region:
        """A region of at least so many bytes.

        Raises:
            LimitExceededError: beyond the budget, or the machine does not give as many.
        """
        with self._lock:
            fitting = [region for region in self._idle if size <= region.size <= max(2 * size, 4 * LEAST)]
            if fitting:
                found = min(fitting, key=lambda region: region.size)
                self._idle.remove(found)
            else:
                found = self._new(size)
            self._used += found.size
        return found

    def give(self, region: Region, *, keep: bool) -> None:
        """Give a region back.

        Args:
            region: one that was taken.
            keep: whether the next call may have it; otherwise it is removed, as somebody may still write to it.
        """
        with self._lock:
            self._used -= region.size
            if keep and not self._closed:
                self._idle.append(region)
                return
        region.remove()

    def close(self) -> None:
        """Remove all regions, those in use when they are given back."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for region in idle:
            region.remove()

    def _new(self, size: int) -> Region:
        if self._used + size > self._budget:
            raise LimitExceededError(
                f"shared_memory: got {size} bytes besides {self._used} in use, want at most {self._budget} in all"
            )
        # Sizes in steps of an eighth or so: calls that are nearly alike use the same regions.
        step = max(LEAST, 1 << max(size.bit_length() - 3, 0))
        size = min(-(-size // step) * step, self._budget - self._used)
        while self._idle and self._used + sum(region.size for region in self._idle) + size > self._budget:
            self._idle.pop(0).remove()
        return Region(self._prefix, size)
