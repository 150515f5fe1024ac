"""Shared memory objects as clients in any language create them, for server tests."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mmpos.rpc.beside import Beside
from mmpos.rpc.v1 import tensor_pb2

FOLDER = Path("/dev/shm")
"""Folder in which Linux keeps shared memory objects."""

PREFIX = f"mmpos-test-{os.getpid()}-"
"""Prefix of the names of all objects of this test process."""


@contextmanager
def shared(data: bytes, name: str = "object") -> Iterator[str]:
    """Create an object that holds these bytes, and yield its key; only this function may remove the object."""
    key = f"/{PREFIX}{name}"
    descriptor = os.open(f"{FOLDER}{key}", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.write(descriptor, data)
        yield key
    finally:
        os.close(descriptor)
        os.unlink(f"{FOLDER}{key}")


SHRINK = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@contextmanager
def sealed(data: bytes, name: str = "memfd", seals: int = SHRINK) -> Iterator[tuple[str, int]]:
    """Create a sealed memfd that holds these bytes, and a link to it; yield the key and the descriptor."""
    key = f"/{PREFIX}{name}"
    descriptor = os.memfd_create(key[1:], os.MFD_ALLOW_SEALING)
    os.symlink(f"/proc/{os.getpid()}/fd/{descriptor}", f"{FOLDER}{key}")
    try:
        os.write(descriptor, data)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield key, descriptor
    finally:
        os.unlink(f"{FOLDER}{key}")
        os.close(descriptor)


def content(key: str) -> bytes:
    """Read an object's bytes."""
    return (FOLDER / key[1:]).read_bytes()


class Objects(Beside):
    """Reader of any object, as a client needs to decode an answer."""

    def get(self, name: str, shared: tensor_pb2.SharedMemory) -> npt.NDArray[np.uint8]:
        """Return a tensor's bytes."""
        part = content(shared.key)[shared.offset :][: shared.byte_size]
        assert len(part) == shared.byte_size, name
        return np.frombuffer(bytearray(part), np.uint8)

    def put(self, message: tensor_pb2.Tensor, data: npt.NDArray[np.uint8]) -> bool:
        """Accept no data."""
        return False


def names(prefix: str = PREFIX) -> set[str]:
    """Return the names of the existing objects."""
    return {path.name for path in FOLDER.glob(f"{prefix}*")}
