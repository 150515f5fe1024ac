"""Access the shared memory of clients on this machine: objects with a prefix, their regions, and registered regions."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from weakref import finalize

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos_server.listening import Listen, local

__all__ = ["Data", "Region", "Regions", "SharedMemory"]


Data = npt.NDArray[np.uint8]

MAX_REGIONS = 256
"""Maximum number of registered regions, which is limited because each keeps a file open."""

MAX_NAME = 256
"""Maximum number of characters in a region's name."""

_KEY = re.compile(r"/[A-Za-z0-9_.-]{1,254}")
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MEMFD = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}")


class Region:
    """Range of bytes in a client's POSIX shared memory object; the server never removes the object.

    The bytes are read and written through a descriptor because a client that shrinks a mapped object would crash the
    server (SIGBUS), and mapped bytes could change after a check. ``map`` maps objects that cannot shrink, for uses that
    do not depend on a check. The descriptor is closed when the region is garbage-collected.

    Args:
        name: name of the region in error messages.
        key: name of the object for shm_open: on Linux, a file in /dev/shm, or a link in /dev/shm to a memfd of the same
            name.
        offset: first byte of the region.
        byte_size: size of the region.

    Raises:
        InvalidInputError: the object does not exist, is too small, or belongs to another user.
        LimitExceededError: this process or the machine has too many open files.
    """

    def __init__(self, name: str, key: str, offset: int, byte_size: int) -> None:
        if offset < 0 or byte_size < 1:
            raise InvalidInputError(
                f"{name}: got offset {offset} and byte_size {byte_size}, want offset >= 0 and byte_size >= 1"
            )
        self.key, self.offset, self.byte_size = key, offset, byte_size
        try:
            self._descriptor = _opened(key)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise LimitExceededError(
                    f"{name}: got {error.strerror} when opening {key!r}, want fewer open files"
                ) from None
            raise InvalidInputError(
                f"{name}.key: got {key!r} ({error.strerror}), want an object that this server may open"
            ) from None
        self._close = finalize(self, os.close, self._descriptor)
        self._check(name)

    def close(self) -> None:
        """Close the object immediately; the region must not be used afterwards."""
        self._close()

    def read(self, name: str, offset: int, byte_size: int) -> Data:
        """Read bytes of the region into a new writable array.

        Args:
            name: name of the bytes in error messages.
            offset: first byte, counted from the start of the region.
            byte_size: number of bytes.

        Raises:
            InvalidInputError: the bytes are outside the region, or the object has shrunk.
        """
        at = self.within(name, offset, byte_size)
        self._check(name)  # check before allocating memory of the claimed size
        data = np.empty(byte_size, np.uint8)
        rest = data.data
        while rest:  # the system reads at most 2 GiB per call
            done = os.preadv(self._descriptor, [rest], at)
            if not done:
                raise InvalidInputError(f"{name}: the object {self.key!r} shrank while it was read")
            at, rest = at + done, rest[done:]
        return data

    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        """Write bytes into the region.

        Args:
            name: name of the bytes in error messages.
            offset: first byte, counted from the start of the region.
            data: bytes to write.

        Raises:
            InvalidInputError: the bytes are outside the region, or the object has shrunk.
            LimitExceededError: the machine has no memory left for the object.
        """
        rest = memoryview(data)
        at = self.within(name, offset, len(rest))
        self._check(name)
        while rest:
            try:
                done = os.pwrite(self._descriptor, rest, at)
            except OSError as error:
                raise LimitExceededError(
                    f"{name}: got {error.strerror} when writing {self.key!r}, want more memory"
                ) from None
            at, rest = at + done, rest[done:]

    def map(self, name: str, byte_size: int) -> Data | None:
        """Map the first bytes of the region, which the client may change but cannot remove while they are in use.

        Args:
            name: name of the bytes in error messages.
            byte_size: number of bytes.

        Returns:
            the bytes, readable and writable in place; None if the client could shrink the object.

        Raises:
            InvalidInputError: the bytes are outside the region, or the object has shrunk.
        """
        at = self.within(name, 0, byte_size)
        if not _cannot_shrink(self._descriptor, at + byte_size):
            return None
        self._check(name)  # check after the seals, since an earlier check could be outdated
        begin = at - at % mmap.ALLOCATIONGRANULARITY
        try:
            pages = mmap.mmap(
                self._descriptor, at + byte_size - begin, mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=begin
            )
        except OSError:  # for example, the object is read-only
            return None
        return np.frombuffer(pages, np.uint8, byte_size, at - begin)

    def within(self, name: str, offset: int, byte_size: int) -> int:
        """Check that bytes are within the region, and return their offset in the object.

        Args:
            name: name of the bytes in error messages.
            offset: first byte, counted from the start of the region.
            byte_size: number of bytes.

        Raises:
            InvalidInputError: the bytes are outside the region.
        """
        if offset < 0 or byte_size < 0 or offset + byte_size > self.byte_size:
            raise InvalidInputError(
                f"{name}: got bytes {offset} to {offset + byte_size}, want 0 to {self.byte_size} of its region"
            )
        return self.offset + offset

    def _check(self, name: str) -> None:
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise InvalidInputError(f"{name}.key: got {self.key!r}, want a regular object owned by this server's user")
        end = self.offset + self.byte_size
        if end > status.st_size:
            raise InvalidInputError(
                f"{name}: got bytes {self.offset} to {end} of {self.key!r}, want at most {status.st_size}, its size"
            )


def _opened(key: str) -> int:
    """Open the object with this name.

    Raises:
        OSError: the object does not exist, or is neither a file in /dev/shm nor a link to a memfd of the same name.
    """
    path = f"/dev/shm{key}"
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP or not _MEMFD.fullmatch(target := os.readlink(path)):
            raise
        # Use O_PATH because opening a device or a FIFO would have side effects; the file behind the handle cannot be
        # replaced.
        handle = os.open(target, os.O_PATH)
        try:
            if os.readlink(f"/proc/self/fd/{handle}") != f"/memfd:{key[1:]} (deleted)":
                raise
            return os.open(f"/proc/self/fd/{handle}", os.O_RDWR)
        finally:
            os.close(handle)


def _cannot_shrink(descriptor: int, size: int) -> bool:
    """Return whether no client can remove the first bytes of an object, which must be a sealed memfd without holes.

    The system replaces pages that a client frees, unless memory overcommit is off.
    """
    status = os.fstat(descriptor)
    try:
        if status.st_dev != _device_of_memfd() or 512 * status.st_blocks < size:
            return False
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        return bool(sealed) and Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip() != "2"
    except OSError:  # the process may not create memfds or read the system settings
        return False


@cache
def _device_of_memfd() -> int:
    """Return the device of all memfds except those with huge pages, of which the system may run out."""
    descriptor = os.memfd_create("mmpos")
    try:
        return os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class SharedMemory:
    """A server's access to its clients' shared memory.

    Args:
        prefix: required prefix of object names, so that clients cannot reach other objects of the server's user; None
            disables shared memory.

    Raises:
        InvalidInputError: the prefix is not allowed in an object name.
    """

    prefix: str | None = None

    def __post_init__(self) -> None:
        if self.prefix is not None and not _PREFIX.fullmatch(self.prefix):
            raise InvalidInputError(
                f"shared-memory: got {self.prefix[:300]!r}, want 1 to 64 letters, digits, '_', '.' and '-'"
            )

    def check(self, listen: Listen) -> None:
        """Check that only clients on this machine can reach the server if it uses shared memory.

        Raises:
            InvalidInputError: other machines can reach an address.
        """
        if self.prefix is not None and not local(listen):
            raise InvalidInputError(f"shared-memory: got host {listen.host!r}, want a loopback host such as 127.0.0.1")

    def open(self, name: str, key: str, offset: int, byte_size: int) -> Region:
        """Open a region in an object.

        Raises:
            UnsupportedError: shared memory is disabled.
            InvalidInputError: the name lacks the prefix, or Region refuses the object.
        """
        if self.prefix is None:
            raise UnsupportedError(f"{name}: shared memory requires a server started with --shared-memory")
        if not _KEY.fullmatch(key) or not key[1:].startswith(self.prefix) or key in ("/.", "/.."):
            raise InvalidInputError(
                f"{name}.key: got {key[:300]!r}, want '/{self.prefix}…' of letters, digits, '_', '.' and '-'"
            )
        return Region(name, key, offset, byte_size)


class Regions:
    """Thread-safe registry of the regions that clients have registered by name.

    Args:
        memory: the server's access to shared memory.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._regions: dict[str, Region] = {}
        self._lock = Lock()

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register a region.

        Raises:
            UnsupportedError: shared memory is disabled.
            InvalidInputError: the name is empty or in use, or Region refuses the object.
            LimitExceededError: too many regions are registered, or the name is too long.
        """
        region = self._memory.open("region", key, offset, byte_size)
        if not name:
            raise InvalidInputError("region.name: got '', want a name")
        if len(name) > MAX_NAME:
            raise LimitExceededError(f"region.name: got {len(name)} characters, want at most {MAX_NAME}")
        with self._lock:
            if name in self._regions:
                raise InvalidInputError(f"region.name: {name[:300]!r} is already registered")
            if len(self._regions) >= MAX_REGIONS:
                raise LimitExceededError(
                    f"regions: got {MAX_REGIONS + 1}, want at most {MAX_REGIONS} registered regions"
                )
            self._regions[name] = region

    def unregister(self, name: str) -> None:
        """Unregister a region, or all regions if the name is empty; reads in progress continue."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def get(self, where: str, name: str) -> Region:
        """Return the region registered under a name.

        Args:
            where: name of the field in error messages.
            name: name under which the region was registered.

        Raises:
            InvalidInputError: no region has this name.
        """
        region = self._regions.get(name)
        if region is None:
            raise InvalidInputError(f"{where}: got region {name[:300]!r}, want a registered region")
        return region

    def __iter__(self) -> Iterator[tuple[str, Region]]:
        return iter(list(self._regions.items()))
