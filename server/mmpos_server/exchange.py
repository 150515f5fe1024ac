"""Tensors of one request that travel outside its messages: in shared memory, or put into the bytes of the answer."""

from __future__ import annotations

import secrets
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.descriptor import Descriptor

from mmpos.errors import LimitExceededError
from mmpos.rpc.errors import OutputError
from mmpos.rpc.tensors import aligned
from mmpos.rpc.v1 import tensor_pb2 as pb
from mmpos.support import native
from mmpos_server.shared_memory import Data, Region, SharedMemory

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from mmpos_server.config import Limits

__all__ = ["LEAST_BYTES", "NO_MEMORY", "Exchange", "Views", "claimed", "mentions"]

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
        self._mapped: Data | None = None  # first bytes of the output, where they are mapped
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
        try:
            return region.read(name, 0, shared.byte_size)
        finally:
            region.close()

    def view(self, name: str, shared: pb.SharedMemory) -> Data:
        """Map the bytes of a tensor of the request, for reading them once: the client may change them; or copy them.

        Raises:
            UnsupportedError, InvalidInputError: as ``get`` does.
        """
        region = self._memory.open(name, shared.key, shared.offset, shared.byte_size)
        try:
            data = region.map(name, shared.byte_size) if shared.byte_size >= LEAST_BYTES else None
            return region.read(name, 0, shared.byte_size) if data is None else data
        finally:
            region.close()

    def room(self, sizes: Sequence[int]) -> list[Data]:
        """Make room for the first tensors of the answer: where the client wants them, if that can be mapped.

        Args:
            sizes: bytes of each, which ``expect`` has seen.
        """
        begins = list(accumulate(sizes[:-1], lambda begin, size: aligned(begin + size), initial=0))
        if self._output is not None and sum(sizes) >= LEAST_BYTES:
            self._mapped = self._output.map(self._name, begins[-1] + sizes[-1])
        if self._mapped is None:
            return [np.empty(size, np.uint8) for size in sizes]
        return [self._mapped[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]

    def put(self, message: pb.Tensor, data: Data) -> bool:
        """Write a tensor of the answer to shared memory after the one before it; False if the message should hold it.

        A tensor that does not fit is counted only, and ``serialize`` refuses the answer. A large tensor that does not
        go to shared memory is kept for ``serialize``; nobody may write to its bytes afterwards.
        """
        if self._output is None:
            if data.size < LEAST_BYTES or self is NO_MEMORY:
                return False
            message.data = _MARK + _NUMBER.pack(len(self._large))
            self._large.append(data)
            return True
        begin = aligned(self._end)
        self._end = begin + data.size
        if self._end <= self._output.byte_size:
            if self._mapped is None or not np.may_share_memory(self._mapped, data):
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


@dataclass(frozen=True)
class Views:
    """Memory of an exchange whose tensors come as ``view`` has them; implements ``mmpos.rpc.tensors.Memory``."""

    exchange: Exchange

    def get(self, name: str, shared: pb.SharedMemory) -> Data:
        """View the bytes of a tensor of the request."""
        return self.exchange.view(name, shared)

    def put(self, message: pb.Tensor, data: Data) -> bool:
        """Take a tensor of the answer."""
        return self.exchange.put(message, data)


NO_MEMORY = Exchange()
"""Exchange of a call before its request is read and after its end, while a thread may be at work: it keeps nothing."""


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


Piece = bytes | memoryview

_VARINT, _FIXED64, _FIXED32 = 0, 1, 5  # low bits of a tag; anything else is followed by a length


def _filled(raw: bytes, begin: int, end: int, tensors: deque[tuple[int, Data]]) -> tuple[list[Piece], int]:
    """Return the pieces of a message, with tensors in place of their marks, and its size."""
    pieces: list[Piece] = []
    inner: list[Piece]
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
            stop = at + length
            if tensors[0][0] == at:
                data = tensors.popleft()[1]
                inner, grown = [data.data], data.size
            elif tensors[0][0] < stop:
                inner, grown = _filled(raw, at, stop, tensors)
            else:
                at = stop
                continue
            head = raw[kept:before] + _varint_bytes(grown)
            pieces += [head, *inner]
            size += len(head) + grown
            kept = at = stop
    return [*pieces, raw[kept:end]], size + end - kept


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
