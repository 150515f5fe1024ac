"""Large tensors of an answer, which stay out of its message: protobuf copies them often, and all threads wait."""

from __future__ import annotations

import secrets
import struct
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mmpos.rpc.v1 import tensor_pb2 as pb
from mmpos.support import native

if TYPE_CHECKING:
    from google.protobuf.message import Message

__all__ = ["LargeTensors"]

LEAST_BYTES = 2**20
"""Of a tensor that is large."""

# Stands in a message for a tensor; nobody outside of this process has ever seen it.
_MARK = secrets.token_bytes(16)
_NUMBER = struct.Struct("<I")

_VARINT, _FIXED64, _FIXED32 = 0, 1, 5  # the low bits of a tag: what follows, if not so many bytes

Data = npt.NDArray[np.uint8]
Piece = bytes | memoryview
Place = tuple[int, Data]


class LargeTensors:
    """The large tensors of one answer."""

    def __init__(self) -> None:
        self._tensors: list[Data] = []

    def put(self, message: pb.Tensor, data: Data) -> bool:
        """Keep the bytes of a tensor, if they are many; nobody may write to them any more."""
        if data.size < LEAST_BYTES:
            return False
        message.data = _MARK + _NUMBER.pack(len(self._tensors))
        self._tensors.append(data)
        return True

    def serialize(self, message: Message) -> bytes:
        """The bytes of a message, with the large tensors that were put into it; other threads run meanwhile."""
        raw = message.SerializeToString()
        if not self._tensors:
            return raw
        places: deque[Place] = deque()
        at = raw.find(_MARK)
        while at >= 0:
            (number,) = _NUMBER.unpack_from(raw, at + len(_MARK))
            places.append((at, self._tensors[number]))
            at = raw.find(_MARK, at + len(_MARK))
        pieces, _ = _filled(raw, 0, len(raw), places)
        whole = None if native.core is None else native.core.joined(tuple(pieces))
        return b"".join(pieces) if whole is None else whole


def _filled(raw: bytes, begin: int, end: int, places: deque[Place]) -> tuple[list[Piece], int]:
    """The pieces of a message in these bytes, with tensors in their places and sizes that say so; and their size."""
    pieces: list[Piece] = []
    size, kept, at = 0, begin, begin
    while places and places[0][0] < end:
        tag, at = _varint(raw, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(raw, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            before, (length, at) = at, _varint(raw, at)
            first, stop = places[0][0], at + length
            if first < stop:
                inner, grown = _filled(raw, at, stop, places) if at < first else _tensor(places.popleft()[1])
                head = raw[kept:before] + _varint_bytes(grown)
                pieces += [head, *inner]
                size += len(head) + grown
                kept = stop
            at = stop
    return [*pieces, raw[kept:end]], size + end - kept


def _tensor(data: Data) -> tuple[list[Piece], int]:
    return [data.data], data.size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """A varint, and where it ends."""
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _varint_bytes(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
