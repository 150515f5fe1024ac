"""The C library's allocator, told to keep large blocks: else page faults dominate replies of a megabyte."""

from __future__ import annotations

import ctypes

__all__ = ["keep_large_blocks"]

# From malloc.h of glibc. Its largest allowed threshold on 64 bits is 32 MiB.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_BYTES, _TRIM_BYTES = 32 * 2**20, 256 * 2**20


def keep_large_blocks() -> bool:
    """Serve blocks up to 32 MiB from the heap and keep 256 MiB of it; for a process's entry point only.

    Returns:
        whether it did: only glibc has these settings.
    """
    try:
        library = ctypes.CDLL(None)
        if not hasattr(library, "gnu_get_libc_version"):
            return False
        return bool(library.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES) and library.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))
    except (OSError, TypeError, AttributeError):  # no such library, as on Windows
        return False
