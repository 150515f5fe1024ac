"""What was measured of one property: yes, no, a number, or that it does not apply, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import getdoc
from typing import Any

from mmpos.errors import InvalidInputError

__all__ = ["Finding", "Property"]


@dataclass(frozen=True)
class Finding:
    """The value of one property.

    Args:
        value: True or False, a number, or None where the property does not apply.
        why: the smallest counterexample where the value is False, the reason where it is None; else empty.
    """

    value: bool | int | float | None
    why: str = ""

    def __post_init__(self) -> None:
        if (self.value is None or self.value is False) == (not self.why):
            want = "none" if self.why else "the reason"
            raise InvalidInputError(f"Finding.why: got {self.why!r} for {self.value}, want {want}")

    @property
    def cell(self) -> str:
        """The value as tables have it.

        >>> Finding(True).cell, Finding(False, "1x2").cell, Finding(None, "no text").cell
        ('✓', '✗', '–')
        >>> Finding(1153).cell, Finding(1.98).cell, Finding(0.34567).cell
        ('1,153', '2', '0.35')
        """
        if self.value is None or isinstance(self.value, bool):
            return {True: "✓", False: "✗", None: "–"}[self.value]
        return f"{self.value:,}" if isinstance(self.value, int) else f"{self.value:.2g}"


@dataclass(frozen=True)
class Property:
    """A column of the matrix.

    Args:
        name: for programs.
        title: for people, short.
        measure: finds the value for a scheme or an encoding; its docstring is the definition.
    """

    name: str
    title: str
    measure: Callable[[Any], Finding] = field(repr=False)

    @property
    def definition(self) -> str:
        """What the property is, in one paragraph."""
        return " ".join((getdoc(self.measure) or "").split())
