"""Shared memory of clients on this machine: objects of a prefix, their regions, and regions that are registered."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock
from weakref import finalize

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos_server.listening import Listen, local

__all__ = ["Data", "Region", "Regions", "SharedMemory"]


Data = npt.NDArray[np.uint8]

MAX_REGIONS = 256
"""Most regions that are registered at once: each holds a file of this process open."""

MAX_NAME = 256
"""Most characters of the name of a region."""

_KEY = re.compile(r"/[A-Za-z0-9_.-]{1,254}")
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Region:
    """Range of bytes of a client's POSIX shared memory object, which is never removed here.

    The bytes are read and written through a descriptor, and not through a memory map: a client that shrinks its object
    while the server uses a map would end the server (SIGBUS), and mapped bytes could change after a check. The
    descriptor is closed when nobody holds the region any more.

    Args:
        name: name of the region in errors.
        key: name of the object, as shm_open takes it; a file of /dev/shm on Linux.
        offset: first byte of the region.
        byte_size: size of the region.

    Raises:
        InvalidInputError: the object does not exist, is smaller, or is of another user.
        LimitExceededError: this process or the machine has as many files open as it may.
    """

    def __init__(self, name: str, key: str, offset: int, byte_size: int) -> None:
        if offset < 0 or byte_size < 1:
            raise InvalidInputError(f"{name}: got offset {offset} and byte_size {byte_size}, want >= 0 and >= 1")
        self.key, self.offset, self.byte_size = key, offset, byte_size
        try:
            self._descriptor = os.open(f"/dev/shm{key}", os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise LimitExceededError(f"{name}: got {error.strerror} opening {key!r}, want fewer at once") from None
            raise InvalidInputError(
                f"{name}.key: got {key!r} ({error.strerror}), want an object that this server may open"
            ) from None
        self._close = finalize(self, os.close, self._descriptor)
        self._check(name)

    def close(self) -> None:
        """Close the object now, and not when nobody holds the region any more; nobody may use it afterwards."""
        self._close()

    def read(self, name: str, offset: int, byte_size: int) -> Data:
        """Read bytes of the region into a new array, which may be written to.

        Args:
            name: name of the bytes in errors.
            offset: first byte, counted from the start of the region.
            byte_size: number of bytes.

        Raises:
            InvalidInputError: the bytes are outside the region, or the object has shrunk.
        """
        at = self.within(name, offset, byte_size)
        self._check(name)  # before memory is taken for as many bytes as the client claims
        data = np.empty(byte_size, np.uint8)
        rest = data.data
        while rest:  # the system reads 2 GiB at once, at most
            done = os.preadv(self._descriptor, [rest], at)
            if not done:
                raise InvalidInputError(f"{name}: got an object {self.key!r} that shrinks, want one that stays")
            at, rest = at + done, rest[done:]
        return data

    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        """Write bytes into the region.

        Args:
            name: name of the bytes in errors.
            offset: first byte, counted from the start of the region.
            data: the bytes.

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
                raise LimitExceededError(f"{name}: got {error.strerror} writing {self.key!r}, want room") from None
            at, rest = at + done, rest[done:]

    def within(self, name: str, offset: int, byte_size: int) -> int:
        """Check that bytes are within the region, and return their offset in the object.

        Args:
            name: name of the bytes in errors.
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
            raise InvalidInputError(f"{name}.key: got {self.key!r}, want a plain object of this server's user")
        end = self.offset + self.byte_size
        if end > status.st_size:
            raise InvalidInputError(
                f"{name}: got bytes {self.offset} to {end} of {self.key!r}, want at most {status.st_size}, its size"
            )


@dataclass(frozen=True)
class SharedMemory:
    """Access of a server to shared memory of clients.

    Args:
        prefix: prefix of the names of objects, so that clients reach no other objects of the server's user; None
            allows no shared memory.

    Raises:
        InvalidInputError: names of objects cannot begin with the prefix.
    """

    prefix: str | None = None

    def __post_init__(self) -> None:
        if self.prefix is not None and not _PREFIX.fullmatch(self.prefix):
            raise InvalidInputError(
                f"shared-memory: got {self.prefix[:300]!r}, want 1 to 64 letters, digits, '_', '.' and '-'"
            )

    def check(self, listen: Listen) -> None:
        """Check that only clients on this machine can reach the server, if it uses shared memory.

        Raises:
            InvalidInputError: other machines can reach an address.
        """
        if self.prefix is not None and not local(listen):
            raise InvalidInputError(
                f"shared-memory: got host {listen.host!r}, want one that only this machine reaches, such as 127.0.0.1"
            )

    def open(self, name: str, key: str, offset: int, byte_size: int) -> Region:
        """Open a region of an object.

        Raises:
            UnsupportedError: this server takes no shared memory.
            InvalidInputError: the name has not the prefix, or Region refuses it.
        """
        if self.prefix is None:
            raise UnsupportedError(f"{name}: got shared memory, want a server started with --shared-memory")
        if not _KEY.fullmatch(key) or not key[1:].startswith(self.prefix) or key in ("/.", "/.."):
            raise InvalidInputError(
                f"{name}.key: got {key[:300]!r}, want '/{self.prefix}…' of letters, digits, '_', '.' and '-'"
            )
        return Region(name, key, offset, byte_size)


class Regions:
    """Regions that clients have registered by name; threads may share them.

    Args:
        memory: access of the server to shared memory.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._regions: dict[str, Region] = {}
        self._lock = Lock()

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register a region.

        Raises:
            UnsupportedError: this server takes no shared memory.
            InvalidInputError: the name is taken, or Region refuses the object.
            LimitExceededError: too many regions, or too long a name.
        """
        region = self._memory.open("region", key, offset, byte_size)
        if len(name) > MAX_NAME:
            raise LimitExceededError(f"region.name: got {len(name)} characters, want at most {MAX_NAME}")
        with self._lock:
            if not name or name in self._regions:
                raise InvalidInputError(f"region.name: got {name[:300]!r}, want one that is not registered")
            if len(self._regions) >= MAX_REGIONS:
                raise LimitExceededError(f"regions: got {MAX_REGIONS} and one more, want at most {MAX_REGIONS}")
            self._regions[name] = region

    def unregister(self, name: str) -> None:
        """Forget a region, or all regions if the name is empty; running reads go on."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def get(self, where: str, name: str) -> Region:
        """Return the region of a name.

        Args:
            where: name of the field in errors.
            name: name under which the region was registered.

        Raises:
            InvalidInputError: no region has this name.
        """
        region = self._regions.get(name)
        if region is None:
            raise InvalidInputError(f"{where}: got region {name[:300]!r}, want one that is registered")
        return region

    def __iter__(self) -> Iterator[tuple[str, Region]]:
        return iter(list(self._regions.items()))
