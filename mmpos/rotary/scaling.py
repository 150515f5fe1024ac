"""Context extension: how each scaling changes the ladder θ_j = base^(−2j/d)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from mmpos.errors import InvalidInputError
from mmpos.rotary.frequencies import Arithmetic
from mmpos.rotary.scaling_attention import LongRoPE, YaRN
from mmpos.rotary.scaling_base import Scaling

__all__ = [
    "NTK",
    "SCALINGS",
    "DynamicNTK",
    "Linear",
    "Llama3",
    "LongRoPE",
    "PRoPE",
    "Scaling",
    "YaRN",
    "scaling_from_dict",
]


@dataclass(frozen=True)
class Linear(Scaling):
    """Position interpolation: θ / factor (Chen et al., 2023).

    Args:
        factor: how many times the original length; >= 1.
    """

    factor: float
    name: ClassVar[str] = "linear"

    def __post_init__(self) -> None:
        self._finite("factor", minimum=1)

    def inv_freq(self, a: Arithmetic, theta: float, dim: int, length: int | None) -> Any:
        """(dim/2,) scaled inverse frequencies."""
        return 1 / a.powers(a.number(theta), dim) / a.number(self.factor)


@dataclass(frozen=True)
class NTK(Scaling):
    """NTK-aware: base' = base · factor^(d/(d−2)), which stretches the slowest pair by the factor (bloc97, 2023).

    Args:
        factor: how many times the original length; >= 1.
    """

    factor: float
    name: ClassVar[str] = "ntk"
    fewest_pairs: ClassVar[int] = 2

    def __post_init__(self) -> None:
        self._finite("factor", minimum=1)

    def inv_freq(self, a: Arithmetic, theta: float, dim: int, length: int | None) -> Any:
        """(dim/2,) scaled inverse frequencies."""
        return 1 / a.powers(_stretched(a, theta, a.number(self.factor), dim), dim)


@dataclass(frozen=True)
class DynamicNTK(Scaling):
    """NTK-aware with the factor that a length L asks for: factor·L/L0 − (factor − 1) (emozilla, 2023).

    Args:
        factor: >= 1.
        original_max_position: L0, up to which nothing changes.
    """

    factor: float
    original_max_position: int
    name: ClassVar[str] = "dynamic"
    fewest_pairs: ClassVar[int] = 2

    def __post_init__(self) -> None:
        self._finite("factor", minimum=1)
        self._length()

    def effective_length(self, length: int) -> int | None:
        """The length itself, once it is past the original."""
        return length if length > self.original_max_position else None

    def inv_freq(self, a: Arithmetic, theta: float, dim: int, length: int | None) -> Any:
        """(dim/2,) scaled inverse frequencies."""
        original, factor = a.number(self.original_max_position), a.number(self.factor)
        stretch = factor * (length or self.original_max_position) / original - (factor - 1)
        return 1 / a.powers(_stretched(a, theta, stretch, dim), dim)


@dataclass(frozen=True)
class Llama3(Scaling):
    """Wavelengths beyond L0/low are divided by the factor, below L0/high kept, blended between (Llama 3.1).

    Args:
        factor: >= 1.
        low_freq_factor: > 0.
        high_freq_factor: above the low one.
        original_max_position: L0.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int
    name: ClassVar[str] = "llama3"

    def __post_init__(self) -> None:
        self._finite("factor", minimum=1)
        self._finite("low_freq_factor", above=0)
        self._finite("high_freq_factor", above=self.low_freq_factor)
        self._length()

    def inv_freq(self, a: Arithmetic, theta: float, dim: int, length: int | None) -> Any:
        """(dim/2,) scaled inverse frequencies."""
        original, factor = a.number(self.original_max_position), a.number(self.factor)
        low, high = a.number(self.low_freq_factor), a.number(self.high_freq_factor)
        plain = 1 / a.powers(a.number(theta), dim)
        # A reciprocal, then a product: torch divides a number by a tensor so, and float32 shows it.
        wavelength = 1 / plain * (2 * a.pi)
        scaled = np.where(wavelength > original / low, plain / factor, plain)
        smooth = (1 / wavelength * original - low) / (high - low)
        blended = (1 - smooth) * scaled / factor + smooth * scaled
        between = (wavelength >= original / high) & (wavelength <= original / low)
        return np.where(between, blended, scaled)


@dataclass(frozen=True)
class PRoPE(Scaling):
    """p-RoPE: the slowest pairs, from ⌊p·d/2⌋ on, do not turn; the others keep their θ (Barbero et al., 2024).

    That is rope_type "proportional" of Transformers and not its partial_rotary_factor, which shortens the ladder.

    Args:
        p: the share of pairs that turn, 0 to 1; the floor is that of the product of doubles.
        factor: divides what is left.
    """

    p: float
    factor: float = 1.0
    name: ClassVar[str] = "p-rope"

    def __post_init__(self) -> None:
        self._finite("p", minimum=0)
        if self.p > 1:
            raise InvalidInputError(f"PRoPE.p: got {self.p}, want <= 1")
        self._finite("factor", minimum=1)

    def inv_freq(self, a: Arithmetic, theta: float, dim: int, length: int | None) -> Any:
        """(dim/2,) scaled inverse frequencies."""
        turning = int(self.p * dim // 2)
        still = [a.number(0)] * (dim // 2 - turning)
        return a.array([*(1 / a.powers(a.number(theta), dim, turning)), *still]) / a.number(self.factor)


SCALINGS: Mapping[str, type[Scaling]] = MappingProxyType(
    {scaling.name: scaling for scaling in (Linear, NTK, DynamicNTK, YaRN, Llama3, LongRoPE, PRoPE)}
)
"""Every scaling by its name."""


def scaling_from_dict(values: Mapping[str, Any]) -> Scaling:
    """The scaling that ``to_dict`` described.

    >>> scaling_from_dict({"type": "linear", "factor": 2})
    Linear(factor=2.0)
    """
    if not isinstance(values, Mapping) or values.get("type") not in list(SCALINGS):  # in a dict, {} would need a hash
        got = values.get("type") if isinstance(values, Mapping) else values
        raise InvalidInputError(f"scaling.type: got {got!r}, want one of {', '.join(map(repr, SCALINGS))}")
    kind = SCALINGS[values["type"]]
    try:
        return kind(**{key: value for key, value in values.items() if key != "type"})
    except TypeError as error:
        want = f"the parameters of {kind.__name__}"
        raise InvalidInputError(f"scaling: got {dict(values)!r}, want {want} ({error})") from None


def _stretched(a: Arithmetic, theta: float, stretch: Any, dim: int) -> Any:
    return a.number(theta) * stretch ** (a.number(dim) / a.number(dim - 2))
