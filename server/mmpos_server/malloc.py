"""Configure the allocator, and return free memory to the system when the process is idle."""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from pathlib import Path
from time import process_time, sleep

__all__ = ["keep_large_blocks", "release_memory_when_idle"]


# These are from glibc's malloc.h, which allows thresholds up to 32 MiB on 64-bit systems.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MMAP_BYTES, _TRIM_BYTES, _ARENAS = 32 * 2**20, 256 * 2**20, 4

_IDLE_SECONDS, _IDLE_SHARE = 5.0, 0.05
"""A process is idle if it has used at most this share of a processor for this many seconds."""
_GROWN_BYTES = 32 * 2**20
"""Growth of resident memory, in bytes, above which free memory is returned."""


def keep_large_blocks() -> bool:
    """Let malloc serve blocks of up to 32 MiB from the heap and keep 256 MiB of it; for entry points only.

    Otherwise, page faults dominate the cost of large replies. Each arena keeps that much memory, and glibc creates up
    to eight arenas per core; a limit of four arenas bounds the total.

    Returns:
        whether the settings were applied; they exist only in glibc.
    """
    library = _glibc()
    if library is None:
        return False
    settings = {_M_MMAP_THRESHOLD: _MMAP_BYTES, _M_TRIM_THRESHOLD: _TRIM_BYTES, _M_ARENA_MAX: _ARENAS}
    return all(library.mallopt(name, value) for name, value in settings.items())


def release_memory_when_idle(seconds: float = _IDLE_SECONDS) -> bool:
    """Start a thread that returns free memory to the system when the process is idle; for entry points only.

    After a peak, much more memory is free than the arenas may keep, because that limit ignores free blocks between used
    blocks.

    Args:
        seconds: idle seconds after which memory is returned.

    Returns:
        whether the thread was started; only glibc can return memory.
    """
    library = _glibc()
    if library is None:
        return False
    threading.Thread(target=_keep_releasing, args=(library, seconds), name="mmpos-malloc", daemon=True).start()
    return True


def _keep_releasing(library: ctypes.CDLL, seconds: float) -> None:
    with suppress(OSError):  # a system without /proc
        least, used = _resident_bytes(), process_time()
        while True:
            sleep(seconds)
            before, used = used, process_time()
            if used - before <= _IDLE_SHARE * seconds and _resident_bytes() > least + _GROWN_BYTES:
                library.malloc_trim(0)  # releases the GIL
                least = _resident_bytes()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
        return library if hasattr(library, "gnu_get_libc_version") else None
    except (OSError, TypeError):  # there is no such library, as on Windows
        return None
