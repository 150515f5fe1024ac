"""What a scaling is: a change of the ladder θ_j = base^(−2j/d), before any axis gets its share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Any, ClassVar

from mmpos.errors import InvalidInputError
from mmpos.rotary.frequencies import Arithmetic
from mmpos.rotary.values import finite
from mmpos.support.checks import integer

__all__ = ["Scaling"]


class Scaling(ABC):
    """A change of a ladder; subclass it as a frozen dataclass to add your own."""

    name: ClassVar[str]
    fewest_pairs: ClassVar[int] = 1

    @abstractmethod
    def inv_freq(self, a: Arithmetic, theta: float, dim: int, length: int | None) -> Any:
        """(dim/2,) scaled inverse frequencies of the ladder theta^(−2j/dim), in the numbers of the arithmetic."""

    def scaled_attention(self) -> float:
        """What cos and sin are multiplied by."""
        return 1.0

    def check(self, theta: float, dim: int) -> None:
        """Raise InvalidInputError if the scaling does not fit the ladder theta^(−2j/dim)."""
        if dim < 2 * self.fewest_pairs:
            name, least = type(self).__name__, self.fewest_pairs
            raise InvalidInputError(f"scaling: got {name} for {dim // 2} pairs, want at least {least}")

    def effective_length(self, length: int) -> int | None:
        """The one length that stands for all with the same frequencies; None is the original length."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """The parameters and the name as a JSON object."""
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
