"""Context extension that scales attention too, by a factor on cos and sin: YaRN and LongRoPE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mmpos.errors import InvalidInputError
from mmpos.rotary.frequencies import Arithmetic
from mmpos.rotary.scaling_base import Scaling
from mmpos.rotary.values import finite
from mmpos.support.checks import boolean

__all__ = ["LongRoPE", "YaRN"]


@dataclass(frozen=True)
class YaRN(Scaling):
    """Pairs that turn often are kept, those that turn less than once are divided by the factor, a ramp between.

    The pair that turns n times over L0 is (d/2)·ln(L0/2πn)/ln base; cos and sin are scaled by 0.1·ln factor + 1.
    Source: Peng et al., 2023, and Transformers for mscale and truncate.

    Args:
        factor: >= 1.
        original_max_position: L0.
        beta_fast: turns above which a pair is kept.
        beta_slow: turns below which a pair is divided.
        attention_factor: None for the one above.
        mscale: with mscale_all_dim, the attention factor is (0.1·mscale·ln factor + 1) over the same of the other.
        mscale_all_dim: see mscale.
        truncate: whether the ramp begins and ends at whole pairs.
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
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        scales = (self.mscale, self.mscale_all_dim) if self.mscale and self.mscale_all_dim else (1.0, 0.0)
        above, below = (0.1 * scale * math.log(self.factor) + 1.0 for scale in scales)
        return above / below

    def check(self, theta: float, dim: int) -> None:
        """Raise InvalidInputError if the scaling does not fit the ladder theta^(−2j/dim)."""
        if theta == 1:
            raise InvalidInputError("theta: got 1.0, want more for YaRN, which divides by its logarithm")

    def ramp(self, a: Arithmetic, theta: float, dim: int) -> tuple[Any, Any]:
        """The pairs where the ramp begins and ends."""
        original = a.number(self.original_max_position)
        low, high = (
            (dim * a.log(original / (a.number(turns) * 2 * a.pi))) / (2 * a.log(a.number(theta)))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, dim - 1)

    def inv_freq(self, a: Arithmetic, theta: float, dim: int, length: int | None) -> Any:
        """(dim/2,) scaled inverse frequencies."""
        powers = a.powers(a.number(theta), dim)
        low, high = self.ramp(a, theta, dim)
        if low == high:
            high = high + a.number(0.001)
        kept = 1 - np.clip((a.array(range(dim // 2)) - low) / (high - low), 0, 1)
        return 1 / (a.number(self.factor) * powers) * (1 - kept) + 1 / powers * kept


@dataclass(frozen=True)
class LongRoPE(Scaling):
    """Every θ divided by a factor of its own, from one list up to L0 and another beyond (Ding et al., 2024).

    Args:
        short_factor: (dim/2,) divisors up to the original length.
        long_factor: (dim/2,) divisors beyond it.
        original_max_position: L0.
        factor: how many times L0 the model serves; it sets the attention factor only. None is 1.
        attention_factor: None for √(1 + ln factor / ln L0).
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
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor is None or self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position))

    def check(self, theta: float, dim: int) -> None:
        """Raise InvalidInputError if the scaling does not fit the ladder theta^(−2j/dim)."""
        for field in ("short_factor", "long_factor"):
            got = len(getattr(self, field))
            if got != dim // 2:
                raise InvalidInputError(f"LongRoPE.{field}: got {got} numbers, want {dim // 2}, one per frequency")

    def effective_length(self, length: int) -> int | None:
        """One more than the original length for every longer one."""
        return self.original_max_position + 1 if length > self.original_max_position else None

    def inv_freq(self, a: Arithmetic, theta: float, dim: int, length: int | None) -> Any:
        """(dim/2,) scaled inverse frequencies."""
        return 1 / (a.array(self.long_factor if length else self.short_factor) * a.powers(a.number(theta), dim))
