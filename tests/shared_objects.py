"""Shared memory objects as clients of any language make them, for tests of the server's side."""

from __future__ import annotations

import _posixshmem
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path("/dev/shm")
"""Where Linux keeps them."""

PREFIX = f"mmpos-test-{os.getpid()}-"
"""Of the names of all objects of this process of tests."""


@contextmanager
def shared(data: bytes, name: str = "object") -> Iterator[str]:
    """An object that holds these bytes; gives its key. It must be there at the end: nobody else may remove it."""
    key = f"/{PREFIX}{name}"
    descriptor = _posixshmem.shm_open(key, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    try:
        os.write(descriptor, data)
        yield key
    finally:
        os.close(descriptor)
        _posixshmem.shm_unlink(key)


def content(key: str) -> bytes:
    """What an object holds."""
    return (FOLDER / key[1:]).read_bytes()


def names(prefix: str = PREFIX) -> set[str]:
    """Names of the objects that there are."""
    return {path.name for path in FOLDER.glob(f"{prefix}*")}
