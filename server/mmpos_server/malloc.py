"""The C library's allocator: keeps large blocks, else page faults dominate large replies, and gives back at rest."""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from pathlib import Path
from time import process_time, sleep
from typing import Any

__all__ = ["give_back_at_rest", "keep_large_blocks"]

# From malloc.h of glibc. Its largest allowed threshold on 64 bits is 32 MiB.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MMAP_BYTES, _TRIM_BYTES, _ARENAS = 32 * 2**20, 256 * 2**20, 4

_REST_SECONDS, _REST_SHARE = 5.0, 0.05
"""A process rests if for so long it took at most this share of a processor."""
_GROWN_BYTES = 32 * 2**20
"""Memory that is worth giving back."""


def keep_large_blocks() -> bool:
    """Serve blocks up to 32 MiB from the heap and keep 256 MiB of it; for a process's entry point only.

    Each arena keeps as much, and there are eight for each core unless told otherwise: four bound what is kept.

    Returns:
        whether it did: only glibc has these settings.
    """
    library = _glibc()
    if library is None:
        return False
    settings = {_M_MMAP_THRESHOLD: _MMAP_BYTES, _M_TRIM_THRESHOLD: _TRIM_BYTES, _M_ARENA_MAX: _ARENAS}
    return all(library.mallopt(name, value) for name, value in settings.items())


def give_back_at_rest(seconds: float = _REST_SECONDS) -> bool:
    """Give free memory back to the system whenever this process rests after it has grown; for its entry point only.

    What a peak leaves is far more than the arenas may keep: free blocks between others count for no threshold.

    Args:
        seconds: how long a rest is.

    Returns:
        whether a thread does so: only glibc can.
    """
    library = _glibc()
    if library is None:
        return False
    threading.Thread(target=_keep_giving_back, args=(library, seconds), name="mmpos-malloc", daemon=True).start()
    return True


def _keep_giving_back(library: Any, seconds: float) -> None:
    with suppress(OSError):  # a system that does not tell
        least, used = _resident_bytes(), process_time()
        while True:
            sleep(seconds)
            before, used = used, process_time()
            if used - before <= _REST_SHARE * seconds and _resident_bytes() > least + _GROWN_BYTES:
                library.malloc_trim(0)  # without the lock of Python
                least = _resident_bytes()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _glibc() -> Any:
    try:
        library = ctypes.CDLL(None)
        return library if hasattr(library, "gnu_get_libc_version") else None
    except (OSError, TypeError):  # no such library, as on Windows
        return None
