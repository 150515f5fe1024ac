"""Count the elements of a message before a parser, which cannot be interrupted, creates an object for each."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from mmpos.support import native

__all__ = ["count_elements"]

Schema = npt.NDArray[np.int32]
"""(types, field numbers) kind of each field; row 0 describes the message itself.

0 stands for a field without nested elements, 1 + row for a submessage, -1 for packed varints, and -4 or -8 for packed
numbers of 4 or 8 bytes each.
"""

_VARINT, _FIXED64, _BYTES, _BEGIN_GROUP, _END_GROUP, _FIXED32 = range(6)
_VARINTS = -1
_MAX_DEPTH = 100
"""Maximum nesting of messages and groups, the same as in protobuf's parsers."""

_LONGEST = 10
"""Maximum size of a varint in bytes."""

_FIXED = {
    FieldDescriptor.TYPE_DOUBLE: -8,
    FieldDescriptor.TYPE_FIXED64: -8,
    FieldDescriptor.TYPE_SFIXED64: -8,
    FieldDescriptor.TYPE_FLOAT: -4,
    FieldDescriptor.TYPE_FIXED32: -4,
    FieldDescriptor.TYPE_SFIXED32: -4,
}
_NO_NUMBERS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def count_elements(kind: type[Message], raw: bytes, most: int) -> int:
    """Count the fields and the packed numbers of a message, including nested messages.

    The time is bounded by ``most``, whatever the number of bytes, and the GIL is released meanwhile.

    Args:
        kind: type of the message.
        raw: bytes of the message.
        most: limit on the count; larger counts return ``most + 1``.

    Raises:
        DecodeError: the bytes are not a message. Strings are not checked.
    """
    schema = _schema(kind.DESCRIPTOR)
    count = _count(raw, schema, most) if native.core is None else native.core.elements(raw, schema, most)
    assert count is not None, "a schema is sound"
    if count < 0:
        raise DecodeError("the wire format is broken")
    return count


@lru_cache(maxsize=256)
def _schema(kind: Descriptor) -> Schema:
    kinds: list[Descriptor] = [kind]
    for message in kinds:  # the list grows during the loop
        inner = [field.message_type for field in message.fields if field.message_type is not None]
        kinds.extend(dict.fromkeys(kind for kind in inner if kind not in kinds))
    width = 1 + max((field.number for message in kinds for field in message.fields), default=0)
    schema = np.zeros((len(kinds), width), np.int32)
    for row, message in enumerate(kinds):
        for field in message.fields:
            schema[row, field.number] = _entry(field, kinds)
    return schema


def _entry(field: FieldDescriptor, kinds: list[Descriptor]) -> int:
    if field.message_type is not None:
        return 1 + kinds.index(field.message_type)
    if not field.is_repeated or field.type in _NO_NUMBERS:
        return 0
    return _FIXED.get(field.type, _VARINTS)


def _count(raw: bytes, schema: Schema, most: int) -> int:
    """Count like the extension's ``elements``; return -1 for bytes that are not a message."""
    try:
        return _walk(raw, schema.tolist(), most)
    except IndexError:  # the bytes end inside a number
        return -1


def _walk(raw: bytes, schema: list[list[int]], most: int) -> int:
    at, count = 0, 0
    end, group, fields = len(raw), 0, schema[0]
    outer: list[tuple[int, int, list[int]]] = []
    while True:
        while at == end:
            if group:
                return -1
            if not outer:
                return count
            end, group, fields = outer.pop()
        tag, at = _varint(raw, at, 5)
        field, wire = tag >> 3, tag & 7
        if at > end or field == 0 or tag >= 2**32:
            return -1
        count += 1
        if count > most:
            return count
        if wire == _VARINT:
            _, at = _varint(raw, at, _LONGEST)
        elif wire in (_FIXED64, _FIXED32):
            at += 8 if wire == _FIXED64 else 4
        elif wire == _BYTES:
            size, at = _varint(raw, at, _LONGEST)
            if size > end - at:
                return -1
            entry = fields[field] if field < len(fields) else 0
            if entry > 0:
                if len(outer) == _MAX_DEPTH:
                    return -1
                outer.append((end, group, fields))
                end, group, fields = at + size, 0, schema[entry - 1]
                continue
            if entry:
                numbers = _packed(raw, at, size, entry, most - count)
                if numbers < 0:
                    return -1
                count += numbers
                if count > most:
                    return most + 1
            at += size
        elif wire == _BEGIN_GROUP:
            if len(outer) == _MAX_DEPTH:
                return -1
            outer.append((end, group, fields))
            group, fields = field, []
        elif wire == _END_GROUP and group == field:
            end, group, fields = outer.pop()
        else:
            return -1
        if at > end:
            return -1


def _varint(raw: bytes, at: int, most: int) -> tuple[int, int]:
    """Read a varint of at most ``most`` bytes; return it and its end, which is beyond all bytes if it is longer.

    Raises:
        IndexError: the bytes end inside the varint.
    """
    value = 0
    for shift in range(0, 7 * most, 7):
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2**64 - 1), at
    return value, len(raw) + 1


def _packed(raw: bytes, at: int, size: int, entry: int, room: int) -> int:
    """Count packed numbers; return -1 if they are malformed, or any number above ``room`` if there are more."""
    if entry != _VARINTS:
        return -1 if size % -entry else size // -entry
    if size // _LONGEST > room:
        return room + 1
    ends = np.flatnonzero(np.frombuffer(raw, np.uint8, size, at) < 0x80)
    if size and (not ends.size or ends[-1] != size - 1 or np.diff(ends, prepend=-1).max() > _LONGEST):
        return -1
    return ends.size
