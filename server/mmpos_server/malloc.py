"""Settings of the allocator, and memory that goes back to the system at rest."""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from pathlib import Path
from time import process_time, sleep

__all__ = ["give_back_at_rest", "keep_large_blocks"]


# From malloc.h of glibc. Its largest allowed threshold on 64 bits is 32 MiB.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MMAP_BYTES, _TRIM_BYTES, _ARENAS = 32 * 2**20, 256 * 2**20, 4

_REST_SECONDS, _REST_SHARE = 5.0, 0.05
"""A process is at rest after so many seconds with at most this share of a processor."""
_GROWN_BYTES = 32 * 2**20
"""Growth of memory above which it is given back."""


def keep_large_blocks() -> bool:
    """Let malloc serve blocks up to 32 MiB from the heap and keep 256 MiB of it; for a process's entry point only.

    Otherwise page faults dominate large replies. Each arena keeps as much, and there are eight per core by default;
    the limit of four arenas bounds the memory that is kept.

    Returns:
        Whether the settings were applied: only glibc has them.
    """
    library = _glibc()
    if library is None:
        return False
    settings = {_M_MMAP_THRESHOLD: _MMAP_BYTES, _M_TRIM_THRESHOLD: _TRIM_BYTES, _M_ARENA_MAX: _ARENAS}
    return all(library.mallopt(name, value) for name, value in settings.items())


def give_back_at_rest(seconds: float = _REST_SECONDS) -> bool:
    """Start a thread that returns free memory to the system when the process rests; for its entry point only.

    After a peak far more is free than the arenas may keep, since free blocks between others count for no threshold.

    Args:
        seconds: length of a rest.

    Returns:
        Whether the thread was started: only glibc can return memory.
    """
    library = _glibc()
    if library is None:
        return False
    threading.Thread(target=_keep_giving_back, args=(library, seconds), name="mmpos-malloc", daemon=True).start()
    return True


def _keep_giving_back(library: ctypes.CDLL, seconds: float) -> None:
    with suppress(OSError):  # a system without /proc
        least, used = _resident_bytes(), process_time()
        while True:
            sleep(seconds)
            before, used = used, process_time()
            if used - before <= _REST_SHARE * seconds and _resident_bytes() > least + _GROWN_BYTES:
                library.malloc_trim(0)  # without the lock of Python
                least = _resident_bytes()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
        return library if hasattr(library, "gnu_get_libc_version") else None
    except (OSError, TypeError):  # no such library, as on Windows
        return None
