"""Shared memory of clients on this machine: found by name, checked, and read and written within its bounds."""

from __future__ import annotations

import _posixshmem
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import finalize

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos_server.listening import Listen, local

__all__ = ["Region", "Regions", "SharedMemory"]

MAX_REGIONS = 256
"""Most that are registered at once: each holds a file of this process open."""

MAX_NAME = 300
"""Most characters of the name under which one is registered, since it is kept."""

_KEY = re.compile(r"/[A-Za-z0-9_.-]{1,254}")
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Region:
    """A part of a POSIX shared memory object of a client; its object is never removed here.

    It is read and written through its descriptor and not through a map of it: a client that shrinks its object while
    the server touches a map of it would end the server (SIGBUS), and what is checked in place could change afterwards.
    The descriptor is closed when nobody holds the region any more.

    Args:
        name: what errors call it.
        key: name of the object, as shm_open takes it.
        offset: first byte of the part.
        byte_size: its bytes.

    Raises:
        InvalidInputError: no such object, one of another user, or one that is smaller.
    """

    def __init__(self, name: str, key: str, offset: int, byte_size: int) -> None:
        if offset < 0 or byte_size < 1:
            raise InvalidInputError(f"{name}: got offset {offset} and byte_size {byte_size}, want >= 0 and >= 1")
        self.key, self.offset, self.byte_size = key, offset, byte_size
        try:
            self._descriptor = _posixshmem.shm_open(key, os.O_RDWR)
        except OSError as error:
            raise InvalidInputError(
                f"{name}.key: got {key!r} ({error.strerror}), want an object that this server may open"
            ) from None
        finalize(self, os.close, self._descriptor)
        self._check(name)

    def read(self, name: str, offset: int, byte_size: int) -> bytes:
        """A copy of bytes of the part.

        Args:
            name: what errors call them.
            offset: first of them, counted from that of the part.
            byte_size: how many.

        Raises:
            InvalidInputError: bytes outside the part, or of an object that has shrunk.
        """
        at = self._within(name, offset, byte_size)
        self._check(name)  # before memory is taken for as many bytes as the client claims
        data = os.pread(self._descriptor, byte_size, at)
        if len(data) != byte_size:
            raise InvalidInputError(f"{name}: got {len(data)} bytes of {self.key!r}, want {byte_size}")
        return data

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Copy bytes of the part, as many as there is room for.

        Args:
            name: what errors call them.
            offset: first of them, counted from that of the part.
            buffer: where they go.

        Raises:
            InvalidInputError: bytes outside the part, or of an object that has shrunk.
        """
        at = self._within(name, offset, len(buffer))
        self._check(name)
        while buffer:  # the system reads 2 GiB at once, at most
            done = os.preadv(self._descriptor, [buffer], at)
            if not done:
                raise InvalidInputError(f"{name}: got an object {self.key!r} that shrinks, want one that stays")
            at, buffer = at + done, buffer[done:]

    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        """Put bytes into the part.

        Args:
            name: what errors call them.
            offset: where the first one goes, counted from the part's.
            data: the bytes.

        Raises:
            InvalidInputError: bytes outside the part, or of an object that has shrunk.
            LimitExceededError: the machine has no memory left for the object.
        """
        rest = memoryview(data).cast("B")
        at = self._within(name, offset, len(rest))
        self._check(name)
        while rest:
            try:
                done = os.pwrite(self._descriptor, rest, at)
            except OSError as error:
                raise LimitExceededError(f"{name}: got {error.strerror} writing {self.key!r}, want room") from None
            at, rest = at + done, rest[done:]

    def _check(self, name: str) -> None:
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise InvalidInputError(f"{name}.key: got {self.key!r}, want a plain object of this server's user")
        if self.offset + self.byte_size > found.st_size:
            raise InvalidInputError(
                f"{name}: got bytes {self.offset} to {self.offset + self.byte_size} of {self.key!r}, "
                f"want at most {found.st_size}, its size"
            )

    def _within(self, name: str, offset: int, byte_size: int) -> int:
        """The place in the object."""
        if offset < 0 or byte_size < 0 or offset + byte_size > self.byte_size:
            raise InvalidInputError(
                f"{name}: got bytes {offset} to {offset + byte_size}, want 0 to {self.byte_size} of its region"
            )
        return self.offset + offset


@dataclass(frozen=True)
class SharedMemory:
    """What a server takes of shared memory.

    Args:
        prefix: how names of objects must begin, so that clients reach nothing else of the server's user; None takes
            no shared memory.

    Raises:
        InvalidInputError: a prefix that names of objects cannot have.
    """

    prefix: str | None = None

    def __post_init__(self) -> None:
        if self.prefix is not None and not _PREFIX.fullmatch(self.prefix):
            raise InvalidInputError(
                f"shared-memory: got {self.prefix[:300]!r}, want 1 to 64 letters, digits, '_', '.' and '-'"
            )

    def check(self, listen: Listen) -> None:
        """Refuse to take shared memory from where others than this machine can ask for it.

        Raises:
            InvalidInputError: such an address.
        """
        if self.prefix is not None and not local(listen):
            raise InvalidInputError(
                f"shared-memory: got host {listen.host!r}, want one that only this machine reaches, such as 127.0.0.1"
            )

    def open(self, name: str, key: str, offset: int, byte_size: int) -> Region:
        """A part of an object, checked.

        Raises:
            UnsupportedError: this server takes no shared memory.
            InvalidInputError: another name, or what Region refuses.
        """
        if self.prefix is None:
            raise UnsupportedError(f"{name}: got shared memory, want a server started with --shared-memory")
        if not _KEY.fullmatch(key) or not key[1:].startswith(self.prefix) or key in ("/.", "/.."):
            raise InvalidInputError(
                f"{name}.key: got {key[:300]!r}, want '/{self.prefix}…' of letters, digits, '_', '.' and '-'"
            )
        return Region(name, key, offset, byte_size)


class Regions:
    """Regions that clients have registered by name; used from the event loop only.

    Args:
        memory: what this server takes.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Take a region.

        Raises:
            UnsupportedError: this server takes no shared memory.
            InvalidInputError: a name that is taken, or what Region refuses.
            LimitExceededError: too many regions.
        """
        region = self._memory.open("region", key, offset, byte_size)
        if not 0 < len(name) <= MAX_NAME:
            raise InvalidInputError(f"region.name: got {len(name)} characters, want 1 to {MAX_NAME}")
        if name in self._regions:
            raise InvalidInputError(f"region.name: got {name!r}, want one that is not registered")
        if len(self._regions) >= MAX_REGIONS:
            raise LimitExceededError(f"regions: got {MAX_REGIONS} and one more, want at most {MAX_REGIONS}")
        self._regions[name] = region

    def unregister(self, name: str) -> None:
        """Forget a region, or all of them if the name is empty; what reads it goes on."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def get(self, where: str, name: str) -> Region:
        """The region of a name.

        Args:
            where: what errors call it.
            name: under which it was registered.

        Raises:
            InvalidInputError: there is none.
        """
        if name not in self._regions:
            raise InvalidInputError(f"{where}: got region {name[:300]!r}, want one that is registered")
        return self._regions[name]

    def __iter__(self) -> Iterator[tuple[str, Region]]:
        return iter(self._regions.items())
