"""Argument checks: each returns the checked value or raises an error with the name, the value and what was expected."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import TypeVar

from mmpos.errors import InvalidInputError

T = TypeVar("T")

INT32_MAX = 2**31 - 1


def integer(name: str, value: object, minimum: int, maximum: int = INT32_MAX) -> int:
    """Check that a value is an integer within bounds; bools and floats are refused."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]  # its TypeError is the check
    except TypeError:
        raise InvalidInputError(f"{name}: got {value!r}, want an integer") from None
    if not minimum <= number <= maximum:
        want = f">= {minimum}" if number < minimum else f"<= {maximum}"
        raise InvalidInputError(f"{name}: got {number}, want {want}")
    return number


def boolean(name: str, value: object) -> bool:
    """Check that a value is a bool, not just truthy or falsy."""
    if not isinstance(value, bool):
        raise InvalidInputError(f"{name}: got {value!r}, want True or False")
    return value


def one_of(name: str, value: T, options: Collection[object]) -> T:
    """Check that a value is one of the options."""
    if value not in options:
        raise InvalidInputError(f"{name}: got {value!r}, want one of {', '.join(map(repr, options))}")
    return value
