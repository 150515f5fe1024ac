"""The C library's allocator, told to keep large blocks: else page faults dominate replies of a megabyte."""

from __future__ import annotations

import ctypes

__all__ = ["keep_large_blocks"]

# From malloc.h of glibc. Its largest allowed threshold on 64 bits is 32 MiB.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MMAP_BYTES, _TRIM_BYTES, _ARENAS = 32 * 2**20, 256 * 2**20, 4


def keep_large_blocks() -> bool:
    """Serve blocks up to 32 MiB from the heap and keep 256 MiB of it; for a process's entry point only.

    Each arena keeps as much, and there are eight for each core unless told otherwise: four bound what is kept.

    Returns:
        whether it did: only glibc has these settings.
    """
    try:
        library = ctypes.CDLL(None)
        if not hasattr(library, "gnu_get_libc_version"):
            return False
        settings = {_M_MMAP_THRESHOLD: _MMAP_BYTES, _M_TRIM_THRESHOLD: _TRIM_BYTES, _M_ARENA_MAX: _ARENAS}
        return all(library.mallopt(name, value) for name, value in settings.items())
    except (OSError, TypeError, AttributeError):  # no such library, as on Windows
        return False
