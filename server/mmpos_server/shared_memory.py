"""Shared memory of clients on this machine, and the tensors of one request that travel outside its messages."""

from __future__ import annotations

import _posixshmem
import errno
import os
import re
import secrets
import stat
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import Descriptor

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.rpc.errors import OutputError
from mmpos.rpc.tensors import aligned
from mmpos.rpc.v1 import tensor_pb2 as pb
from mmpos.support import native
from mmpos_server.listening import Listen, local

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from mmpos_server.config import Limits

__all__ = ["NO_MEMORY", "Exchange", "Region", "Regions", "SharedMemory", "claimed", "mentions"]


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
        key: name of the object, as shm_open takes it.
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
            self._descriptor = _posixshmem.shm_open(key, os.O_RDWR)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise LimitExceededError(f"{name}: got {error.strerror} opening {key!r}, want fewer at once") from None
            raise InvalidInputError(
                f"{name}.key: got {key!r} ({error.strerror}), want an object that this server may open"
            ) from None
        finalize(self, os.close, self._descriptor)
        self._check(name)

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
        rest = memoryview(data).cast("B")
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
        if self.offset + self.byte_size > status.st_size:
            raise InvalidInputError(
                f"{name}: got bytes {self.offset} to {self.offset + self.byte_size} of {self.key!r}, "
                f"want at most {status.st_size}, its size"
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


LEAST_BYTES = 2**16
"""Least size of a large tensor."""

# Stands in a message for a tensor; random, so that no client can send it.
_MARK = secrets.token_bytes(16)
_NUMBER = struct.Struct("<I")

_NONE = SharedMemory()


class Exchange:
    """Shared memory and large tensors of one request; implements ``mmpos.rpc.tensors.Memory``.

    Large tensors are kept out of their message, which protobuf would copy several times under the GIL.

    Args:
        memory: access of the server to shared memory.
        request: message that may name an object for the tensors of the answer; None names none.

    Raises:
        UnsupportedError: an object is named, and the server takes no shared memory.
        InvalidInputError: the object does not exist, or is too small.
    """

    def __init__(self, memory: SharedMemory | None = None, request: Message | None = None) -> None:
        self._memory = memory or _NONE
        self._output: Region | None = None
        self._name, self._end = "", 0
        self._large: list[Data] = []  # large tensors of the answer, outside its message
        if request is not None and (output := _output(request)) is not None:
            self._name, shared = output
            self._output = self._memory.open(self._name, shared.key, shared.offset, shared.byte_size)

    @property
    def answers(self) -> bool:
        """Whether the tensors of the answer go to shared memory."""
        return self._output is not None

    def get(self, name: str, shared: pb.SharedMemory) -> Data:
        """Read a copy of the bytes of a tensor of the request.

        Raises:
            UnsupportedError: the server takes no shared memory.
            InvalidInputError: the object does not exist, or is too small.
        """
        region = self._memory.open(name, shared.key, shared.offset, shared.byte_size)
        return region.read(name, 0, shared.byte_size)

    def put(self, message: pb.Tensor, data: Data) -> bool:
        """Write a tensor of the answer to shared memory after the one before it; False if the message should hold it.

        A tensor that does not fit is counted only, and ``serialize`` refuses the answer. A large tensor that does not
        go to shared memory is kept for ``serialize``; nobody may write to its bytes afterwards.
        """
        if self._output is None:
            if data.size < LEAST_BYTES:
                return False
            message.data = _MARK + _NUMBER.pack(len(self._large))
            self._large.append(data)
            return True
        begin = aligned(self._end)
        self._end = begin + data.size
        if self._end <= self._output.byte_size:
            self._output.write(self._name, begin, data.data)
            shared = message.shared
            shared.key, shared.offset, shared.byte_size = self._output.key, self._output.offset + begin, data.size
        return True

    def expect(self, sizes: Iterable[float]) -> None:
        """Check that tensors of these sizes fit into shared memory, before they are made.

        Raises:
            OutputError: they do not fit.
        """
        end = 0
        for size in sizes:
            end = aligned(end) + int(size)
        self._fit(end)

    def serialize(self, answer: Message) -> bytes:
        """Serialize the answer with its large tensors; other threads run meanwhile.

        Raises:
            OutputError: its tensors did not fit into shared memory; the error has the bytes they need.
        """
        self._fit(self._end)
        raw = answer.SerializeToString()
        if not self._large:
            return raw
        tensors: deque[tuple[int, Data]] = deque()
        at = raw.find(_MARK)
        while at >= 0:
            (number,) = _NUMBER.unpack_from(raw, at + len(_MARK))
            tensors.append((at, self._large[number]))
            at = raw.find(_MARK, at + len(_MARK))
        pieces, _ = _filled(raw, 0, len(raw), tensors)
        whole = None if native.core is None else native.core.joined(tuple(pieces))
        return b"".join(pieces) if whole is None else whole

    def _fit(self, end: int) -> None:
        if self._output is not None and end > self._output.byte_size:
            got = self._output.byte_size
            raise OutputError(f"{self._name}.byte_size: got {got}, want >= {end} for the answer", end)


NO_MEMORY = Exchange()
"""Exchange of a call before its request is read and after its answer is written."""


def mentions(raw: bytes, memory: SharedMemory) -> bool:
    """Check by its bytes whether a request may name shared memory: any key without the prefix is refused."""
    return memory.prefix is not None and b"/" + memory.prefix.encode() in raw


def claimed(message: Message, limits: Limits) -> int:
    """Sum the bytes of shared memory that a message names.

    Raises:
        LimitExceededError: more documents and parts than the limits allow.
    """
    size, entries, most = 0, 0, limits.documents + limits.segments
    waiting: list[Message] = [message]
    while waiting:
        current = waiting.pop()
        if isinstance(current, pb.SharedMemory):
            size += max(current.byte_size, 0)
            continue
        for name, repeated in _leading(current.DESCRIPTOR):
            if repeated:
                several = getattr(current, name)
                entries += len(several)
                if entries > most:
                    raise LimitExceededError(f"segments: got {entries} documents and parts, want at most {most}")
                waiting.extend(several)
            elif current.HasField(name):
                waiting.append(getattr(current, name))
    return size


@lru_cache(maxsize=256)
def _leading(kind: Descriptor) -> tuple[tuple[str, bool], ...]:
    """Return the fields of a message that may name shared memory, and whether each is repeated."""
    target = pb.SharedMemory.DESCRIPTOR
    return tuple(
        (field.name, field.is_repeated)
        for field in kind.fields
        if field.message_type is not None and (field.message_type is target or _leading(field.message_type))
    )


@lru_cache(maxsize=256)
def _holder(kind: Descriptor) -> str | None:
    """Return the field of a request whose message has ``output``: "query", "" for the request itself, or None."""
    if "output" in kind.fields_by_name:
        return ""
    query = kind.fields_by_name.get("query")
    inner = None if query is None else query.message_type
    return "query" if inner is not None and "output" in inner.fields_by_name else None


def _output(request: Any) -> tuple[str, pb.SharedMemory] | None:
    """Return the shared memory for the answer of a request, with its name in errors; None for none."""
    holder = _holder(request.DESCRIPTOR)
    if holder is None:
        return None
    message = getattr(request, holder) if holder else request
    return (f"{holder}.output".lstrip("."), message.output) if message.HasField("output") else None


_VARINT, _FIXED64, _FIXED32 = 0, 1, 5  # low bits of a tag; anything else is followed by a length

Piece = bytes | memoryview


def _filled(raw: bytes, begin: int, end: int, tensors: deque[tuple[int, Data]]) -> tuple[list[Piece], int]:
    """Return the pieces of a message, with tensors in place of their marks, and its size."""
    pieces: list[Piece] = []
    size, kept, at = 0, begin, begin
    while tensors and tensors[0][0] < end:
        tag, at = _varint(raw, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(raw, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            before, (length, at) = at, _varint(raw, at)
            first, stop = tensors[0][0], at + length
            if first < stop:
                inner, grown = _filled(raw, at, stop, tensors) if at < first else _tensor(tensors.popleft()[1])
                head = raw[kept:before] + _varint_bytes(grown)
                pieces += [head, *inner]
                size += len(head) + grown
                kept = stop
            at = stop
    return [*pieces, raw[kept:end]], size + end - kept


def _tensor(data: Data) -> tuple[list[Piece], int]:
    return [data.data], data.size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Parse a varint; returns its value and its end."""
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _varint_bytes(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])
