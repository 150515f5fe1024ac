"""Checks of the numbers that a rotation is described with: each returns the checked value or says what it wants."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from mmpos.checks import integer
from mmpos.errors import InvalidInputError

__all__ = ["even", "finite", "integers", "numbers"]


def finite(name: str, value: Any, *, minimum: float | None = None, above: float | None = None) -> float:
    """A float from anything that is a finite real number (never a bool), within bounds."""
    want = "a finite number"
    if minimum is not None or above is not None:
        want += f" >= {minimum:g}" if minimum is not None else f" > {above:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidInputError(f"{name}: got {value!r}, want {want}")
    number = float(value)
    low = (minimum is not None and number < minimum) or (above is not None and number <= above)
    if low or not math.isfinite(number):
        raise InvalidInputError(f"{name}: got {value!r}, want {want}")
    return number


def even(name: str, value: Any) -> int:
    """An even integer >= 2."""
    number = integer(name, value, minimum=2)
    if number % 2:
        raise InvalidInputError(f"{name}: got {number}, want an even number")
    return number


def integers(name: str, values: Any) -> tuple[int, ...]:
    """Integers >= 0 from any sequence of them."""
    return tuple(integer(f"{name}[{i}]", value, minimum=0) for i, value in enumerate(_listed(name, values)))


def numbers(name: str, values: Any, minimum: float) -> tuple[float, ...]:
    """Finite numbers from any sequence of them."""
    return tuple(finite(f"{name}[{i}]", value, minimum=minimum) for i, value in enumerate(_listed(name, values)))


def _listed(name: str, values: Any) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise InvalidInputError(f"{name}: got {values!r}, want a sequence of numbers") from None
