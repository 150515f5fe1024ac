"""Shared memory objects as clients of any language make them, for tests of the server's side."""

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
"""The folder in which Linux keeps them."""

PREFIX = f"mmpos-test-{os.getpid()}-"
"""Of the names of all objects of this process of tests."""


@contextmanager
def shared(data: bytes, name: str = "object") -> Iterator[str]:
    """An object that holds these bytes; gives its key. It must be there at the end: nobody else may remove it."""
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
def sealed(
    data: bytes, name: str = "memfd", seals: int = SHRINK, memfd: str | None = None
) -> Iterator[tuple[str, int]]:
    """A memfd that holds these bytes, and a link to it; gives its key and its descriptor. memfd: another name of it."""
    key = f"/{PREFIX}{name}"
    descriptor = os.memfd_create(key[1:] if memfd is None else memfd, os.MFD_ALLOW_SEALING)
    os.symlink(f"/proc/{os.getpid()}/fd/{descriptor}", f"{FOLDER}{key}")
    try:
        os.write(descriptor, data)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield key, descriptor
    finally:
        os.unlink(f"{FOLDER}{key}")
        os.close(descriptor)


def content(key: str) -> bytes:
    """Read all bytes of an object."""
    return (FOLDER / key[1:]).read_bytes()


class Objects(Beside):
    """All objects as a Memory of the wire: what a client needs to read an answer."""

    def get(self, name: str, shared: tensor_pb2.SharedMemory) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor."""
        part = content(shared.key)[shared.offset :][: shared.byte_size]
        assert len(part) == shared.byte_size, name
        return np.frombuffer(bytearray(part), np.uint8)

    def put(self, message: tensor_pb2.Tensor, data: npt.NDArray[np.uint8]) -> bool:
        """Nothing is taken."""
        return False


def names(prefix: str = PREFIX) -> set[str]:
    """Names of the objects that there are."""
    return {path.name for path in FOLDER.glob(f"{prefix}*")}
