"""Checks of the numbers that a rotation is described with: each returns the checked value or says what it wants."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from mmpos.errors import InvalidInputError
from mmpos.support.checks import integer, written

__all__ = ["MAX_HEAD_DIM", "even", "finite", "integers", "numbers"]

MAX_HEAD_DIM = 2**16
"""Most channels of a head."""


def finite(name: str, value: Any, *, minimum: float | None = None, above: float | None = None) -> float:
    """A float from anything that is a finite real number (never a bool), within bounds."""
    want = "a finite number"
    if minimum is not None or above is not None:
        want += f" >= {minimum:g}" if minimum is not None else f" > {above:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidInputError(f"{name}: got {value!r}, want {want}")
    try:
        number = float(value)
    except OverflowError:
        raise InvalidInputError(f"{name}: got {written(value)}, want {want}") from None
    low = (minimum is not None and number < minimum) or (above is not None and number <= above)
    if low or not math.isfinite(number):
        raise InvalidInputError(f"{name}: got {value!r}, want {want}")
    return number


def even(name: str, value: Any, *, maximum: int | None = None) -> int:
    """An even integer >= 2."""
    number = integer(name, value, minimum=2, maximum=maximum)
    if number % 2:
        raise InvalidInputError(f"{name}: got {number}, want an even number")
    return number


def integers(name: str, values: Any, *, maximum: int | None = None) -> tuple[int, ...]:
    """Integers >= 0 from any sequence of them."""
    listed = enumerate(_listed(name, values))
    return tuple(integer(f"{name}[{i}]", value, minimum=0, maximum=maximum) for i, value in listed)


def numbers(name: str, values: Any, minimum: float) -> tuple[float, ...]:
    """Finite numbers from any sequence of them."""
    return tuple(finite(f"{name}[{i}]", value, minimum=minimum) for i, value in enumerate(_listed(name, values)))


def _listed(name: str, values: Any) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise InvalidInputError(f"{name}: got {values!r}, want a sequence of numbers") from None
