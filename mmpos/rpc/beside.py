"""Large tensors kept beside their messages, since protobuf would copy their bytes several times while holding the GIL.

The wire format is unchanged. To send a message, protobuf serializes it with marks instead of the large tensors, and
the bytes of the tensors then replace the marks. To read a message, large tensors are replaced with marks before
parsing, and are read directly from the received bytes.
"""

from __future__ import annotations

import secrets
import struct
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import EncodeError, Message

from mmpos.rpc.v1 import tensor_pb2 as pb
from mmpos.support import native

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LEAST_BYTES", "Beside"]

LEAST_BYTES = 2**16
"""Minimum size of a large tensor in bytes."""

Data = npt.NDArray[np.uint8]
Piece = bytes | memoryview
Paths = Mapping[int, "Paths | None"]
"""Fields by number: nested paths for messages that contain tensors, None for the data of a tensor."""

M = TypeVar("M", bound=Message)

# The mark replaces a tensor in a message, followed by the tensor's position and size; it is random, so that nobody can
# forge it.
_MARK = secrets.token_bytes(16)
_PLACE = struct.Struct("<QQ")
_MARK_BYTES = len(_MARK) + _PLACE.size

_MOST_FIELDS = 64
"""Maximum number of fields of a message that are searched for large tensors; a tensor itself has few fields."""

_MOST_BYTES = 2**31 - 1
"""Maximum size of a message in bytes."""


class Beside:
    """The large tensors of one call: those of the message that it writes, and of the message that it has read."""

    def __init__(self) -> None:
        self._raw = b""
        self._large: list[Data] = []

    @property
    def size(self) -> int:
        """Total bytes of the tensors beside the message."""
        return sum(data.size for data in self._large)

    def put(self, message: pb.Tensor, data: Data) -> bool:
        """Keep the bytes of a large tensor for ``serialize``; they must not change until then.

        Return False for a small tensor, whose bytes belong in the message.
        """
        if data.size < LEAST_BYTES:
            return False
        message.data = _MARK + _PLACE.pack(len(self._large), data.size)
        self._large.append(data)
        return True

    def data(self, message: pb.Tensor) -> bytes | memoryview:
        """Return the bytes of a received tensor, from its message or from the raw bytes."""
        data = message.data  # read it only once, since every access copies it
        if len(data) != _MARK_BYTES or not data.startswith(_MARK) or not self._raw:
            return data
        begin, size = _PLACE.unpack_from(data, len(_MARK))
        return memoryview(self._raw)[begin : begin + size]

    def parse(self, kind: type[M], raw: bytes) -> M:
        """Parse a message; ``data`` reads its large tensors.

        Raises:
            DecodeError: the bytes are not a message of this kind.
        """
        return kind.FromString(self.marked(kind, raw))

    def marked(self, kind: type[Message], raw: bytes) -> bytes:
        """Return the bytes of a message with marks in place of its large tensors, which ``data`` then reads."""
        self._raw = raw
        paths = _paths(kind.DESCRIPTOR) if len(raw) >= LEAST_BYTES else {}
        places = _large_of(raw, 0, len(raw), paths) if paths else []
        if not places:
            return raw
        marks: deque[tuple[int, Piece]] = deque((begin, _MARK + _PLACE.pack(begin, size)) for begin, size in places)
        pieces, _ = _filled(raw, 0, len(raw), marks)
        return b"".join(pieces)

    def serialize(self, message: Message) -> bytes:
        """Serialize a message with its large tensors; the GIL is released meanwhile.

        Raises:
            EncodeError: the message has 2 GiB or more.
        """
        raw = message.SerializeToString()
        if not self._large:
            return raw
        tensors: deque[tuple[int, Piece]] = deque()
        at = raw.find(_MARK)
        while at >= 0:
            number, _ = _PLACE.unpack_from(raw, at + len(_MARK))
            tensors.append((at, self._large[number].data))
            at = raw.find(_MARK, at + _MARK_BYTES)
        pieces, size = _filled(raw, 0, len(raw), tensors)
        if size > _MOST_BYTES:
            raise EncodeError("Failed to serialize proto")
        return _joined(pieces)


def _joined(pieces: Iterable[Piece]) -> bytes:
    whole: bytes | None = None if native.core is None else native.core.joined(tuple(pieces))
    return b"".join(pieces) if whole is None else whole


@lru_cache(maxsize=256)
def _paths(kind: Descriptor) -> Paths:
    """Return the fields of a message that contain tensors, except repeated ones."""
    if kind is pb.Tensor.DESCRIPTOR:
        return {kind.fields_by_name["data"].number: None}
    inner = {
        field.number: _paths(field.message_type)
        for field in kind.fields
        if field.message_type is not None and not field.is_repeated
    }
    return {number: paths for number, paths in inner.items() if paths}


_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # low bits of a tag


def _large_of(raw: bytes, begin: int, end: int, paths: Paths) -> list[tuple[int, int]]:
    """Find the large tensors of a message as (offset, size) pairs; return an empty list if the message is unusual."""
    places: list[tuple[int, int]] = []
    at = begin
    try:
        for _ in range(_MOST_FIELDS):
            if at == end:
                return places
            tag, at = _varint(raw, at)
            kind, length = tag & 7, 0
            if kind == _VARINT:
                _, at = _varint(raw, at)
            elif kind in (_FIXED64, _FIXED32):
                length = 8 if kind == _FIXED64 else 4
            elif kind == _LENGTH:
                length, at = _varint(raw, at)
            else:
                return []
            stop = at + length
            if stop > end:
                return []
            if kind == _LENGTH and length >= LEAST_BYTES and tag >> 3 in paths:
                inner = paths[tag >> 3]
                places += [(at, length)] if inner is None else _large_of(raw, at, stop, inner)
            at = stop
    except (IndexError, OverflowError):
        pass
    return []


def _filled(raw: bytes, begin: int, end: int, tensors: deque[tuple[int, Piece]]) -> tuple[list[Piece], int]:
    """Replace the fields that begin at certain offsets with other bytes; return the message's pieces and its size."""
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
                inner, grown = [data], len(data)
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
    """Parse a varint; return its value and the offset of its end.

    Raises:
        IndexError: the bytes end inside the varint.
        OverflowError: the varint is longer than a 64-bit value requires.
    """
    value = shift = 0
    while shift < 70:
        byte = raw[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
    raise OverflowError


def _varint_bytes(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])
