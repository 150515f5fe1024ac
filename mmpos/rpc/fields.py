"""Reading fields of messages: what is missing, unknown or of the wrong length is named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message

from mmpos.errors import InvalidInputError
from mmpos.rpc.v1.table_pb2 import Rational
from mmpos.support import native
from mmpos.support.checks import IntArray

T = TypeVar("T")


def path(name: str, field: str) -> str:
    """The name of a field of a message; the message of a call itself has no name."""
    return f"{name}.{field}" if name else field


def required(name: str, message: Message, field: str) -> Any:
    """A submessage, if it is set."""
    if not message.HasField(field):
        raise InvalidInputError(f"{path(name, field)}: got none, want a {type(getattr(message, field)).__name__}")
    return getattr(message, field)


def chosen(name: str, message: Message, oneof: str) -> str:
    """The name of the field of a oneof that is set."""
    field = message.WhichOneof(oneof)
    if field is None:
        options = [option.name for option in message.DESCRIPTOR.oneofs_by_name[oneof].fields]
        raise InvalidInputError(f"{name or oneof}: got none, want one of {', '.join(options)}")
    return str(field)


def optional(message: Message, field: str) -> Any:
    """The value of a field, or None if it is not set."""
    return getattr(message, field) if message.HasField(field) else None


def enum(name: str, message: Message, field: str, meanings: Mapping[Any, T]) -> T:
    """What the value of an enum field stands for."""
    value = getattr(message, field)
    if value not in meanings:
        values: Any = message.DESCRIPTOR.fields_by_name[field].enum_type
        values = values.values_by_number
        got = values[value].name if value in values else value
        want = ", ".join(values[number].name for number in meanings)
        raise InvalidInputError(f"{path(name, field)}: got {got}, want one of {want}")
    return meanings[value]


def integers(values: Iterable[int], *, columns: int | None = None, name: str = "") -> IntArray:
    """(n,) int64 of a repeated field, or (n, columns) if its numbers stand in groups."""
    array = np.array(list(values), np.int64)  # a list is read faster than a field
    return array if columns is None else in_columns(name, array, columns)


def in_columns(name: str, array: IntArray, columns: int) -> IntArray:
    """(n, columns) of numbers that stand in groups."""
    if array.size % columns:
        raise InvalidInputError(f"{name}: got {array.size} numbers, want {columns} for each")
    return array.reshape(-1, columns)


def integer_lists(message: Message, *fields: str) -> list[IntArray]:
    """(n,) int64 of each of these repeated fields: read off the bytes of the message, without an object per number.

    Args:
        message: one without much else in it, which is written once more for this.
        fields: their names.
    """
    if native.core is not None:
        found = native.core.integers(message.SerializeToString(), _numbers(message.DESCRIPTOR, fields))
        if found is not None:
            return [native.int64(data) for data in found]
    return [integers(getattr(message, field)) for field in fields]


@lru_cache(maxsize=64)
def _numbers(kind: Any, fields: tuple[str, ...]) -> bytes:
    """The numbers of fields."""
    return bytes(kind.fields_by_name[field].number for field in fields)


def put_integers(field: Any, values: Any) -> None:
    """Fill a repeated field with the numbers of an array, in order."""
    field.extend(np.asarray(values).ravel().tolist())


def get_seconds(name: str, values: Sequence[Rational]) -> list[Fraction | None] | None:
    """Times; None if the field is empty, and None for each of numerator 0."""
    if not values:
        return None
    return [None if value.numerator == 0 else get_rational(f"{name}[{i}]", value) for i, value in enumerate(values)]


def get_rational(name: str, value: Rational) -> Fraction:
    """An exact number."""
    if value.denominator < 1:
        raise InvalidInputError(f"{path(name, 'denominator')}: got {value.denominator}, want >= 1")
    return Fraction(value.numerator, value.denominator)


def put_rational(message: Rational, value: Fraction | int | None) -> None:
    """An exact number, or 0 for None."""
    exact = Fraction(0 if value is None else value)
    message.numerator, message.denominator = exact.numerator, exact.denominator
