"""Extend the context: scale the frequency ladder θ_j = base^(−2j/d) before its allocation to axes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from mmpos.errors import InvalidInputError
from mmpos.rotary.frequencies import MAX_INV_FREQ, Arithmetic, Number
from mmpos.support.checks import boolean, finite, integer

__all__ = [
    "NTK",
    "SCALINGS",
    "DynamicNTK",
    "Linear",
    "Linspace",
    "Llama3",
    "LongRoPE",
    "PRoPE",
    "Scaling",
    "YaRN",
    "scaling_from_dict",
]


class Scaling(ABC):
    """Scaling of a frequency ladder; subclass it as a frozen dataclass to add your own."""

    name: ClassVar[str]
    fewest_pairs: ClassVar[int] = 1

    @abstractmethod
    def inv_freq(self, a: Arithmetic, theta: float, dim: int, length: int | None) -> Number:
        """Compute the (dim/2,) scaled inverse frequencies of theta^(−2j/dim) in an Arithmetic's numbers."""

    def scaled_attention(self) -> float:
        """Return the factor by which cos and sin are multiplied."""
        return 1.0

    def check(self, theta: float, dim: int) -> None:
        """Raise InvalidInputError if the scaling cannot be applied to the ladder theta^(−2j/dim)."""
        if dim < 2 * self.fewest_pairs:
            name, least = type(self).__name__, self.fewest_pairs
            raise InvalidInputError(f"scaling: got {name} for {dim // 2} pairs, want at least {least}")

    def effective_length(self, length: int) -> int | None:
        """Return a canonical length that has the same frequencies; None means the original length."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the type name and parameters as a JSON object."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {"type": self.name, **{key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}}

    def _finite(
        self, *names: str, minimum: float | None = None, above: float | None = None, optional: bool = False
    ) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None or not optional:
                value = finite(f"{type(self).__name__}.{name}", value, minimum=minimum, above=above)
            object.__setattr__(self, name, value)

    def _length(self, minimum: int = 1) -> None:
        name = "original_max_position"
        value = integer(f"{type(self).__name__}.{name}", getattr(self, name), minimum=minimum)
        object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Linear(Scaling):
    """Position interpolation: θ / factor (Chen et al., 2023).

    Args:
        factor: ratio of the new to the original length; >= 1.
    """

    factor: float
    name: ClassVar[str] = "linear"

    def __post_init__(self) -> None:
        self._finite("factor", minimum=1)

    def inv_freq(self, a: Arithmetic, theta: float, dim: int, length: int | None) -> Number:
        return 1 / a.powers(a.number(theta), dim) / a.number(self.factor)


@dataclass(frozen=True)
class Linspace(Scaling):
    """Increasing ladder: factor · theta^(j/(n−1)) rad per id for pair j of n, up to factor · theta.

    LTX uses this ladder: its ids are fractions of a reference size such as 2048 pixels, and its fastest pair rotates by
    15,708 rad per id. Source: LTXVideoRotaryPosEmbed of diffusers.

    Args:
        factor: rad per id of the slowest pair; > 0; π/2 for LTX.
    """

    factor: float
    name: ClassVar[str] = "linspace"
    fewest_pairs: ClassVar[int] = 2

    def __post_init__(self) -> None:
        self._finite("factor", above=0)

    def check(self, theta: float, dim: int) -> None:
        super().check(theta, dim)
        most = MAX_INV_FREQ / theta
        if self.factor > most:
            raise InvalidInputError(f"Linspace.factor: got {self.factor}, want <= {most:.3g} for base {theta}")

    def inv_freq(self, a: Arithmetic, theta: float, dim: int, length: int | None) -> Number:
        return a.powers(a.number(theta), dim - 2, dim // 2) * a.number(self.factor)


@dataclass(frozen=True)
class NTK(Scaling):
    """NTK-aware scaling: base' = base · factor^(d/(d−2)) slows the slowest pair by the factor (bloc97, 2023).

    Args:
        factor: ratio of the new to the original length; > 0 and possibly below 1: Cosmos uses 20/24 for frames.
    """

    factor: float
    name: ClassVar[str] = "ntk"
    fewest_pairs: ClassVar[int] = 2

    def __post_init__(self) -> None:
        self._finite("factor", above=0)

    def check(self, theta: float, dim: int) -> None:
        super().check(theta, dim)
        least = theta ** (2 / dim - 1)  # base' is 1 there
        if self.factor < least:
            raise InvalidInputError(
                f"NTK.factor: got {self.factor}, want >= {least:.3g} for base {theta} of {dim} channels"
            )

    def inv_freq(self, a: Arithmetic, theta: float, dim: int, length: int | None) -> Number:
        return 1 / a.powers(_stretched(a, theta, a.number(self.factor), dim), dim)


@dataclass(frozen=True)
class DynamicNTK(Scaling):
    """NTK-aware scaling by a factor that depends on length L: factor·L/L0 − (factor − 1) (emozilla, 2023).

    Args:
        factor: >= 1.
        original_max_position: L0; shorter lengths are not scaled.
    """

    factor: float
    original_max_position: int
    name: ClassVar[str] = "dynamic"
    fewest_pairs: ClassVar[int] = 2

    def __post_init__(self) -> None:
        self._finite("factor", minimum=1)
        self._length()

    def effective_length(self, length: int) -> int | None:
        """Return the length itself if it exceeds the original length, else None."""
        return length if length > self.original_max_position else None

    def inv_freq(self, a: Arithmetic, theta: float, dim: int, length: int | None) -> Number:
        original, factor = a.number(self.original_max_position), a.number(self.factor)
        stretch = factor * (length or self.original_max_position) / original - (factor - 1)
        return 1 / a.powers(_stretched(a, theta, stretch, dim), dim)


@dataclass(frozen=True)
class Llama3(Scaling):
    """Scaling of Llama 3.1 and 4: divide the frequencies of long wavelengths by the factor.

    Wavelengths above L0/low_freq_factor are scaled, those below L0/high_freq_factor are kept, and those in between are
    interpolated.

    Args:
        factor: >= 1.
        low_freq_factor: > 0.
        high_freq_factor: >= low_freq_factor; if both are equal, nothing is interpolated.
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
        self._finite("high_freq_factor", minimum=self.low_freq_factor)
        self._length()

    def inv_freq(self, a: Arithmetic, theta: float, dim: int, length: int | None) -> Number:
        original, factor = a.number(self.original_max_position), a.number(self.factor)
        low, high = a.number(self.low_freq_factor), a.number(self.high_freq_factor)
        plain = 1 / a.powers(a.number(theta), dim)
        # Take the reciprocal, then the product: torch divides a number by a tensor this way, which affects float32
        # results.
        wavelength = 1 / plain * (2 * a.pi)
        scaled = np.where(wavelength > original / low, plain / factor, plain)
        if self.high_freq_factor == self.low_freq_factor:
            return scaled
        smooth = (1 / wavelength * original - low) / (high - low)
        blended = (1 - smooth) * scaled / factor + smooth * scaled
        between = (wavelength >= original / high) & (wavelength <= original / low)
        return np.where(between, blended, scaled)


@dataclass(frozen=True)
class PRoPE(Scaling):
    """p-RoPE: do not rotate the slowest pairs, from ⌊p·d/2⌋ on, and keep θ for the others (Barbero et al., 2024).

    This is rope_type "proportional" in Transformers. It differs from partial_rotary_factor, which shortens the ladder.

    Args:
        p: fraction of the pairs that are rotated, from 0 to 1; the product p·d/2 is computed in double precision.
        factor: divisor of the remaining frequencies.
    """

    p: float
    factor: float = 1.0
    name: ClassVar[str] = "p-rope"

    def __post_init__(self) -> None:
        self._finite("p", minimum=0)
        if self.p > 1:
            raise InvalidInputError(f"PRoPE.p: got {self.p}, want <= 1")
        self._finite("factor", minimum=1)

    def inv_freq(self, a: Arithmetic, theta: float, dim: int, length: int | None) -> Number:
        rotated = int(self.p * dim // 2)
        zeros = [a.number(0)] * (dim // 2 - rotated)
        return a.array([*(1 / a.powers(a.number(theta), dim, rotated)), *zeros]) / a.number(self.factor)


@dataclass(frozen=True)
class YaRN(Scaling):
    """YaRN: keep fast pairs, divide the frequencies of slow pairs by the factor, and interpolate linearly in between.

    The index of the pair that makes n turns over L0 is (d/2)·ln(L0/2πn)/ln base. The attention factor, which scales cos
    and sin, is 0.1·ln factor + 1. Source: Peng et al., 2023, and Transformers for mscale and truncate.

    Args:
        factor: >= 1.
        original_max_position: L0.
        beta_fast: number of turns over L0 above which a pair is kept.
        beta_slow: number of turns over L0 below which a pair's frequency is divided by the factor.
        attention_factor: factor by which cos and sin are multiplied; None means the formula above.
        mscale: with mscale_all_dim, the attention factor is (0.1·mscale·ln factor + 1) / (0.1·mscale_all_dim·ln factor
            + 1).
        mscale_all_dim: see mscale.
        truncate: whether the ramp begins and ends at integer pair indices.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    name: ClassVar[str] = "yarn"

    def __post_init__(self) -> None:
        self._finite("factor", minimum=1)
        self._finite("beta_slow", above=0)
        self._finite("beta_fast", minimum=self.beta_slow)
        self._finite("attention_factor", "mscale", "mscale_all_dim", minimum=0, optional=True)
        self._length()
        object.__setattr__(self, "truncate", boolean("YaRN.truncate", self.truncate))

    def scaled_attention(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        scales = (self.mscale, self.mscale_all_dim) if self.mscale and self.mscale_all_dim else (1.0, 0.0)
        above, below = (0.1 * scale * math.log(self.factor) + 1.0 for scale in scales)
        return above / below

    def check(self, theta: float, dim: int) -> None:
        if theta == 1:
            raise InvalidInputError("theta: got 1.0, want > 1 for YaRN, which divides by its logarithm")

    def ramp(self, a: Arithmetic, theta: float, dim: int) -> tuple[Number, Number]:
        """Return the pair indices where the ramp begins and ends."""
        original = a.number(self.original_max_position)
        low, high = (
            (dim * a.log(original / (a.number(turns) * 2 * a.pi))) / (2 * a.log(a.number(theta)))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, dim - 1)

    def inv_freq(self, a: Arithmetic, theta: float, dim: int, length: int | None) -> Number:
        powers = a.powers(a.number(theta), dim)
        low, high = self.ramp(a, theta, dim)
        if low == high:
            high = high + a.number(0.001)
        kept = 1 - np.clip((a.array(range(dim // 2)) - low) / (high - low), 0, 1)
        return 1 / (a.number(self.factor) * powers) * (1 - kept) + 1 / powers * kept


@dataclass(frozen=True)
class LongRoPE(Scaling):
    """LongRoPE: divide every θ by its own factor, with separate factors up to L0 and beyond (Ding et al., 2024).

    Args:
        short_factor: (dim/2,) divisors for lengths up to L0.
        long_factor: (dim/2,) divisors for longer lengths.
        original_max_position: L0.
        factor: ratio of the model's maximum length to L0; it affects only the attention factor. None means 1.
        attention_factor: factor by which cos and sin are multiplied; None means √(1 + ln factor / ln L0).
    """

    short_factor: Sequence[float]
    long_factor: Sequence[float]
    original_max_position: int
    factor: float | None = None
    attention_factor: float | None = None
    name: ClassVar[str] = "longrope"

    def __post_init__(self) -> None:
        for field in ("short_factor", "long_factor"):
            values = getattr(self, field)
            if isinstance(values, str) or not isinstance(values, Sequence):
                raise InvalidInputError(f"LongRoPE.{field}: got {values!r}, want a list of numbers")
            checked = [finite(f"LongRoPE.{field}[{j}]", value, minimum=1e-6) for j, value in enumerate(values)]
            object.__setattr__(self, field, tuple(checked))
        self._length(minimum=2)
        self._finite("factor", "attention_factor", above=0, optional=True)

    def scaled_attention(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor is None or self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position))

    def check(self, theta: float, dim: int) -> None:
        for field in ("short_factor", "long_factor"):
            got = len(getattr(self, field))
            if got != dim // 2:
                raise InvalidInputError(f"LongRoPE.{field}: got {got} numbers, want {dim // 2}, one per frequency")

    def effective_length(self, length: int) -> int | None:
        """Return the original length + 1 for every longer length, else None."""
        return self.original_max_position + 1 if length > self.original_max_position else None

    def inv_freq(self, a: Arithmetic, theta: float, dim: int, length: int | None) -> Number:
        return 1 / (a.array(self.long_factor if length else self.short_factor) * a.powers(a.number(theta), dim))


def _stretched(a: Arithmetic, theta: float, stretch: Number, dim: int) -> Number:
    return a.number(theta) * stretch ** (a.number(dim) / a.number(dim - 2))


SCALINGS: Mapping[str, type[Scaling]] = MappingProxyType(
    {scaling.name: scaling for scaling in (Linear, NTK, DynamicNTK, YaRN, Llama3, LongRoPE, PRoPE, Linspace)}
)
"""Scalings by name."""


def scaling_from_dict(values: Mapping[str, Any]) -> Scaling:
    """Create a scaling from the JSON object that ``to_dict`` returns.

    >>> scaling_from_dict({"type": "linear", "factor": 2})
    Linear(factor=2.0)
    """
    if not isinstance(values, Mapping) or values.get("type") not in list(SCALINGS):  # a list: types may be unhashable
        got = values.get("type") if isinstance(values, Mapping) else values
        raise InvalidInputError(f"scaling.type: got {got!r}, want one of {', '.join(map(repr, SCALINGS))}")
    kind = SCALINGS[values["type"]]
    try:
        return kind(**{key: value for key, value in values.items() if key != "type"})
    except TypeError as error:
        want = f"the parameters of {kind.__name__}"
        raise InvalidInputError(f"scaling: got {dict(values)!r}, want {want} ({error})") from None
