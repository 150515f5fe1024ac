"""TransformerConfig: checked access to the fields of a transformer's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.support.checks import finite, integer, integers

__all__ = ["TransformerConfig"]

_LARGEST = 2**20
"""Maximum value of an integer in a config."""


@dataclass(frozen=True)
class TransformerConfig:
    """Fields of a config.json; a field that is missing or null has the default value passed to the method.

    Args:
        values: mapping from field names to values.
    """

    values: Mapping[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field without checking it."""
        value = self.values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int, *, minimum: int = 1) -> int:
        """Return an integer."""
        return integer(f"config.{name}", self.get(name, default), minimum=minimum, maximum=_LARGEST)

    def number(self, name: str, default: float, *, minimum: float = 1) -> float:
        """Return a finite number."""
        return finite(f"config.{name}", self.get(name, default), minimum=minimum)

    def integers(self, name: str, default: tuple[int, ...], *, count: int | None = None) -> tuple[int, ...]:
        """Return ``count`` integers above 0, by default as many as ``default`` has."""
        values = integers(f"config.{name}", self.get(name, default), minimum=1)
        want = len(default) if count is None else count
        if len(values) != want:
            raise InvalidInputError(f"config.{name}: got {list(values)}, want {want} integers")
        return values

    def fraction(self, name: str, default: float) -> Fraction:
        """Return a number above 0 as the Fraction of its shortest decimal form: 2.2 is 11/5."""
        return _fraction(f"config.{name}", self.get(name, default))

    def fractions(self, name: str, default: tuple[float, ...]) -> list[Fraction]:
        """Return numbers above 0, as many as ``default`` has, each as the Fraction of its shortest decimal form."""
        values = self.get(name, default)
        if not isinstance(values, list | tuple) or len(values) != len(default):
            raise InvalidInputError(f"config.{name}: got {values!r}, want {len(default)} numbers")
        return [_fraction(f"config.{name}[{i}]", value) for i, value in enumerate(values)]

    def patch(self, name: str = "patch_size", default: int | tuple[int, ...] = (1, 2, 2)) -> tuple[int, int, int]:
        """Return frames, rows and columns of a patch; if the field is a single number, frames are patch_size_t or 1."""
        size = self.get(name, default)
        if isinstance(size, int):
            frames = self.integer("patch_size_t", 1) if name == "patch_size" else 1
            side = self.integer(name, size)
            return frames, side, side
        sides = integers(f"config.{name}", size, minimum=1)
        if len(sides) not in (2, 3):
            raise InvalidInputError(f"config.{name}: got {list(sides)}, want rows and columns, or frames before them")
        return (1, sides[0], sides[1]) if len(sides) == 2 else (sides[0], sides[1], sides[2])

    def want(self, name: str, default: object, *allowed: object) -> None:
        """Raise UnsupportedError unless a field has one of the allowed values."""
        value = self.get(name, default)
        if value not in allowed:
            raise UnsupportedError(f"config.{name}: got {value!r}, want {' or '.join(map(repr, allowed))}")


def _fraction(name: str, value: object) -> Fraction:
    return Fraction(str(finite(name, value, above=0)))
