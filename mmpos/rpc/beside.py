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
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import EncodeError, Message

from mmpos.errors import LimitExceededError
from mmpos.rpc.v1 import tensor_pb2 as pb
from mmpos.support import native

__all__ = ["LEAST_BYTES", "Beside"]

LEAST_BYTES = 2**16
"""Minimum size of a large tensor in bytes."""

Data = npt.NDArray[np.uint8]
Piece = bytes | memoryview
Fields = Mapping[int, tuple[str, "Fields | None"]]
"""Fields that hold messages: a repeated field's name, else "", and the fields of its messages that do so in turn.
Fields that hold the data or the shape of a tensor have None, and the latter its name.
"""

M = TypeVar("M", bound=Message)

# The mark replaces a tensor in a message, followed by the tensor's position and size; it is random, so that nobody can
# forge it.
_MARK = secrets.token_bytes(16)
_PLACE = struct.Struct("<QQ")
_MARK_BYTES = len(_MARK) + _PLACE.size

_MOST_FIELDS, _SHAPE_BYTES, _MOST_BYTES = 64, 80, 2**31 - 1
"""Maximum number of fields in a message of a request, apart from repeated messages, and sizes in bytes of the shape of
a tensor, 8 numbers of up to 10 bytes, and of a message. No encoder writes more.
"""


class Beside:
    """The large tensors of one call: those of the message that it writes, and of the message that it has read."""

    _raw = b""
    _large: tuple[Data, ...] = ()

    @property
    def size(self) -> int:
        """Total bytes of the tensors beside the message."""
        return sum(data.size for data in self._large)

    def put(self, message: pb.Tensor, data: Data) -> None:
        """Keep the bytes of a large tensor for ``serialize``; they must not change until then."""
        message.data = _MARK + _PLACE.pack(len(self._large), data.size)
        self._large = (*self._large, data)

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

    def marked(self, kind: type[Message], raw: bytes, most: Mapping[str, int] | None = None) -> bytes:
        """Return the bytes of a message with marks in place of its large tensors, which ``data`` then reads.

        Args:
            kind: type of the message.
            raw: bytes of the message; if they are fewer than LEAST_BYTES, they are returned unchanged.
            most: maximum number of messages in each repeated field, and of all other "fields"; None for an answer.

        Raises:
            LimitExceededError: the message has more. Protobuf would create up to 300 bytes for each two of them.
        """
        self._raw = raw
        if len(raw) < LEAST_BYTES:
            return raw
        search = _Search(raw, most)
        if not search.look(0, len(raw), _fields(kind.DESCRIPTOR)) or not search.tensors:
            return raw
        pieces, _ = _filled(raw, 0, len(raw), deque((at, _MARK + _PLACE.pack(at, size)) for at, size in search.tensors))
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
        whole: bytes | None = None if native.core is None else native.core.joined(tuple(pieces))
        return b"".join(pieces) if whole is None else whole


@lru_cache(maxsize=256)
def _fields(kind: Descriptor) -> Fields:
    """Return the fields of a message that hold messages, or the data and the shape of a tensor."""
    if kind is pb.Tensor.DESCRIPTOR:
        return {kind.fields_by_name["data"].number: ("", None), kind.fields_by_name["shape"].number: ("shape", None)}
    return {
        field.number: (field.name if field.is_repeated else "", _fields(field.message_type))
        for field in kind.fields
        if field.message_type is not None
    }


_VARINT, _FIXED64, _LENGTH, _GROUP, _END_GROUP, _FIXED32 = range(6)  # low bits of a tag


class _Search:
    """Search for large tensors in a message that counts what it passes, without creating an object per field."""

    def __init__(self, raw: bytes, most: Mapping[str, int] | None) -> None:
        self._raw, self._most, self._left = raw, most, dict(most or {})
        self.tensors: list[tuple[int, int]] = []  # offset and size of each

    def look(self, at: int, end: int, known: Fields, alone: bool = True) -> bool:
        """Look at the known fields of a message; return False if protobuf refuses it, or reads parts of it otherwise.

        Tensors are listed only if they are ``alone``, with no repeated field around them.
        """
        raw, whole, fields = self._raw, True, 0
        try:
            while at < end:
                tag, at = (raw[at], at + 1) if raw[at] < 128 else _varint(raw, at)
                kind, length, name = tag & 7, 0, ""
                if kind == _VARINT:
                    _, at = _varint(raw, at)
                elif kind == _LENGTH:
                    length, at = (raw[at], at + 1) if raw[at] < 128 else _varint(raw, at)
                elif kind in (_FIXED64, _FIXED32):
                    length = 8 if kind == _FIXED64 else 4
                elif kind in (_GROUP, _END_GROUP):
                    whole = False  # of an unknown field; what is inside is counted like what is outside
                else:
                    return False
                if at + length > end:
                    return False
                if kind == _LENGTH and tag >> 3 in known:
                    name, inner = known[tag >> 3]
                    if name:
                        self._count(name, length)
                    if inner:
                        whole &= self.look(at, at + length, inner, alone and not name)
                    elif inner is None and alone and not name and length >= LEAST_BYTES:
                        self.tensors.append((at, length))
                at += length
                if not name and self._most is not None:
                    self._count("fields")
                    fields += 1
                    if fields > _MOST_FIELDS:
                        raise LimitExceededError(f"fields: got over {_MOST_FIELDS} in one message, want packed numbers")
        except (IndexError, OverflowError):
            return False
        return whole

    def _count(self, name: str, size: int = 0) -> None:
        if self._most is None:
            return
        if name == "shape":
            if size > _SHAPE_BYTES:
                raise LimitExceededError(f"shape: got {size} bytes, want at most {_SHAPE_BYTES}, 8 axes")
        elif self._left[name] > 0:
            self._left[name] -= 1
        else:
            most = self._most[name]
            raise LimitExceededError(f"{name}: got over {most}, want at most {most} in one request to this server")


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
    """Parse a varint; return its value and the offset of its end, or raise an IndexError or OverflowError."""
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
