"""Compute inverse frequencies θ_j = base^(−2j/d), in exact decimals or in float32 as in Transformers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext
from itertools import accumulate, islice, repeat
from operator import mul
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
UInt64Array = npt.NDArray[np.uint64]
Number: TypeAlias = Any
"""A scalar or (n,) array in an Arithmetic: floats, or Decimals in an object array."""
Power = Callable[[float, Float32Array], Float32Array]
"""Function from a base and (n,) float32 exponents to (n,) float32 base**exponents."""

PI = Decimal(
    "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798214808651"
)
MAX_INV_FREQ = 2.0**32
"""Largest inverse frequency in rad per position; up to this limit, all 64 bits of ``fixed_point_turns`` are exact."""

_CONTEXT = Context(prec=100, rounding=ROUND_HALF_EVEN)


class Arithmetic(ABC):
    """Number type in which a frequency formula is evaluated: scalars and arrays over pairs.

    Formulas convert scalars with ``number`` before any arithmetic, so that one formula works in every Arithmetic.
    """

    pi: Number

    @abstractmethod
    def number(self, value: float) -> Number:
        """Convert a scalar; a float keeps its exact binary value."""

    @abstractmethod
    def array(self, values: Iterable[Number]) -> Number:
        """Convert numbers to an (n,) array."""

    @abstractmethod
    def log(self, value: Number) -> Number:
        """Compute the natural logarithm of a scalar."""

    @abstractmethod
    def powers(self, theta: Number, dim: int, count: int | None = None) -> Number:
        """Compute (count,) theta^(2j/dim), the reciprocals of unscaled inverse frequencies; count defaults to dim/2."""

    def context(self) -> AbstractContextManager[object]:
        """Return the context in which a formula must be evaluated."""
        return nullcontext()


class Exact(Arithmetic):
    """Decimals of 100 digits in object arrays, independent of the caller's decimal context."""

    pi = PI

    def number(self, value: float) -> Decimal:
        return Decimal(value)

    def array(self, values: Iterable[Number]) -> Number:
        return np.array([Decimal(value) for value in values], object)

    def log(self, value: Decimal) -> Decimal:
        return value.ln()

    def powers(self, theta: Decimal, dim: int, count: int | None = None) -> Number:
        step = theta ** (Decimal(2) / dim)  # one root and repeated products are faster than one root per power
        powers = accumulate(repeat(step), mul, initial=Decimal(1))
        return np.array(list(islice(powers, _pairs(dim, count))), object)

    def context(self) -> AbstractContextManager[object]:
        return localcontext(_CONTEXT)


@dataclass(frozen=True)
class Float32(Arithmetic):
    """Float32 arrays and double scalars, with the same sequence of operations as in Transformers.

    Every operation except the power is rounded according to IEEE 754 and gives the same bits on every machine. To
    reproduce the bits of a library, pass its power function.

    Args:
        power: computes theta^(2j/dim).
    """

    power: Power
    pi = math.pi

    def number(self, value: float) -> float:
        return float(value)

    def array(self, values: Iterable[Number]) -> Float32Array:
        return np.array(list(values), np.float32)

    def log(self, value: float) -> float:
        return math.log(value)

    def powers(self, theta: float, dim: int, count: int | None = None) -> Float32Array:
        # Compute as many powers per call as Transformers does: torch's results depend on the position within a vector.
        return self.power(theta, np.arange(0, 2 * _pairs(dim, count), 2).astype(np.float32) / np.float32(dim))


def fixed_point_turns(inv_freq: Iterable[Decimal]) -> UInt64Array:
    """Convert inverse frequencies to units of 2⁻⁶⁴ turns: inv_freq/2π modulo 1 as a 64-bit fraction.

    >>> int(fixed_point_turns([PI])[0]) == 2**63  # half a turn
    True

    Args:
        inv_freq: (pairs,) rad per position, at most MAX_INV_FREQ.

    Returns:
        (pairs,) uint64, rounded to nearest.
    """
    with localcontext(_CONTEXT):
        units = [(value * 2**63 / PI).to_integral_value() for value in inv_freq]
    return np.array([int(unit) % 2**64 for unit in units], np.uint64)


def _pairs(dim: int, count: int | None) -> int:
    return dim // 2 if count is None else count
