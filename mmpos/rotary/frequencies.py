"""Inverse frequencies θ_j = base^(−2j/d): the same formulas in exact decimals or in the float32 of Transformers."""

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
"""A scalar or an (n,) array of an arithmetic: floats, or Decimals in an array of objects."""
Power = Callable[[float, Float32Array], Float32Array]
"""base and (n,) float32 exponents to (n,) float32 base**exponents."""

PI = Decimal(
    "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798214808651"
)
MAX_INV_FREQ = 2.0**32
"""The largest inverse frequency in rad per position; turns below keep all of their 64 bits up to it."""

_CONTEXT = Context(prec=100, rounding=ROUND_HALF_EVEN)


class Arithmetic(ABC):
    """The numbers that a formula of frequencies is written in: scalars and arrays of pairs.

    Scalars go through ``number`` before they meet anything else, so that one formula serves both kinds.
    """

    pi: Number

    @abstractmethod
    def number(self, value: float) -> Number:
        """Convert a scalar; a float is its exact binary value."""

    @abstractmethod
    def array(self, values: Iterable[Number]) -> Number:
        """Convert numbers to an (n,) array."""

    @abstractmethod
    def log(self, value: Number) -> Number:
        """Take the natural logarithm of a scalar."""

    @abstractmethod
    def powers(self, theta: Number, dim: int, count: int | None = None) -> Number:
        """Compute (count,) theta^(2j/dim), by default dim/2: reciprocals of the unscaled inverse frequencies."""

    def context(self) -> AbstractContextManager[object]:
        """Return the context in which the formula must run."""
        return nullcontext()


class Exact(Arithmetic):
    """Decimals of 100 digits in arrays of objects; the caller's decimal context plays no part."""

    pi = PI

    def number(self, value: float) -> Decimal:
        return Decimal(value)

    def array(self, values: Iterable[Number]) -> Number:
        return np.array([Decimal(value) for value in values], object)

    def log(self, value: Decimal) -> Decimal:
        return value.ln()

    def powers(self, theta: Decimal, dim: int, count: int | None = None) -> Number:
        step = theta ** (Decimal(2) / dim)  # a root takes longer than all products, whose last digits are rounded
        powers = accumulate(repeat(step), mul, initial=Decimal(1))
        return np.array(list(islice(powers, _pairs(dim, count))), object)

    def context(self) -> AbstractContextManager[object]:
        return localcontext(_CONTEXT)


def rounded_power(base: float, exponents: Float32Array) -> Float32Array:
    """Compute base**exponents of float32 numbers, rounded once; float32 powers of libraries stray by an ulp."""
    return np.power(np.float64(np.float32(base)), exponents.astype(np.float64)).astype(np.float32)


@dataclass(frozen=True)
class Float32(Arithmetic):
    """The float32 arrays and double scalars of Transformers, operation by operation.

    Every operation is rounded as IEEE 754 has it and so is the same everywhere, but for the power: pass
    the one of the library to agree with.

    Args:
        power: computes theta^(2j/dim); by default rounded once.
    """

    power: Power = rounded_power
    pi = math.pi

    def number(self, value: float) -> float:
        return float(value)

    def array(self, values: Iterable[Number]) -> Float32Array:
        return np.array(list(values), np.float32)

    def log(self, value: float) -> float:
        return math.log(value)

    def powers(self, theta: float, dim: int, count: int | None = None) -> Float32Array:
        # As many powers at once as Transformers takes: those of torch depend on the place in its vectors.
        return self.power(theta, np.arange(0, 2 * _pairs(dim, count), 2).astype(np.float32) / np.float32(dim))


def fixed_point_turns(inv_freq: Iterable[Decimal]) -> UInt64Array:
    """Convert inverse frequencies to units of 2⁻⁶⁴ turn: inv_freq/2π as a 64-bit fraction, modulo one turn.

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
