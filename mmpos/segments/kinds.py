"""Text and Grid, of which documents are written, and the kinds of segments that they become."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.support.checks import INT32_MAX, boolean, integer, written

__all__ = ["GRID", "PAD", "PATCH", "TEXT", "Grid", "Text", "fraction", "rational", "rationals"]

TEXT, GRID, PAD = 0, 1, 2
"""Kinds of segments."""

PATCH = 1
"""Token type of a patch; text, markers and row separators have type 0."""


@dataclass(frozen=True, slots=True)
class Text:
    """A run of text tokens; markers such as [IMG] are ordinary text.

    Args:
        length: number of tokens, at least 1.
    """

    length: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", integer("Text.length", self.length, minimum=1, maximum=INT32_MAX))

    @property
    def extents(self) -> tuple[int, int, int]:
        """Frames, height, width: a run of text is one row."""
        return (1, 1, self.length)


@dataclass(frozen=True, slots=True, init=False)
class Grid:
    """The patches of one image, or of a video with frames, in raster order (column fastest).

    Args:
        height: rows of patches after spatial merging, as the language model sees them.
        width: columns of patches after spatial merging.
        frames: frames of a video; 1 for a still image.
        row_separator: every row ends in one more token, as models that generate patch by patch want.
        seconds_per_frame: time between two frames in seconds, for schemes that place frames in time;
            a float is taken as the nearest fraction with a denominator up to 1,000,000.
    """

    height: int
    width: int
    frames: int
    row_separator: bool
    seconds_per_frame: Fraction | None

    def __init__(
        self,
        height: int,
        width: int,
        *surplus: int,
        frames: int = 1,
        row_separator: bool = False,
        seconds_per_frame: Fraction | float | None = None,
    ) -> None:
        if surplus:
            got = (height, width, *surplus)
            raise InvalidInputError(
                f"Grid: got {len(got)} positional values {got}, want (height, width); "
                "for (frames, height, width) use Grid.from_thw"
            )
        set_field = object.__setattr__
        set_field(self, "height", integer("Grid.height", height, minimum=1, maximum=INT32_MAX))
        set_field(self, "width", integer("Grid.width", width, minimum=1, maximum=INT32_MAX))
        set_field(self, "frames", integer("Grid.frames", frames, minimum=1, maximum=INT32_MAX))
        set_field(self, "row_separator", boolean("Grid.row_separator", row_separator))
        set_field(self, "seconds_per_frame", rational("Grid.seconds_per_frame", seconds_per_frame))

    @classmethod
    def from_thw(cls, thw: Iterable[int], **options: Any) -> Grid:
        """Make a grid from (frames, height, width), the order of Transformers' image_grid_thw."""
        values = tuple(thw) if isinstance(thw, Iterable) else ()
        if len(values) != 3:
            raise InvalidInputError(f"thw: got {thw!r}, want (frames, height, width)")
        return cls(values[1], values[2], frames=values[0], **options)

    @property
    def extents(self) -> tuple[int, int, int]:
        """Frames, height, width."""
        return (self.frames, self.height, self.width)

    @property
    def plain(self) -> bool:
        """Whether there is nothing to the grid but its extents."""
        return not self.row_separator and self.seconds_per_frame is None


def rational(name: str, value: Fraction | float | None) -> Fraction | None:
    """Convert a positive time to an exact fraction that fits a table; None stays None."""
    if value is None:
        return None
    exact = fraction(name, value)
    if exact <= 0:
        raise InvalidInputError(f"{name}: got {written(value)}, want > 0 (a float: >= 1e-06)")
    if max(exact.numerator, exact.denominator) > INT32_MAX:
        raise LimitExceededError(f"{name}: got {written(value)}, want a numerator and a denominator below 2**31")
    return exact


def rationals(name: str, values: Iterable[Fraction | float | None] | None) -> list[Fraction | None]:
    """Convert the times of a list, an array or a tensor; an empty list for None."""
    if values is None:
        return []
    try:
        return [rational(f"{name}[{i}]", value) for i, value in enumerate(values)]
    except TypeError:
        raise InvalidInputError(f"{name}: got {values!r}, want a list of seconds") from None


def fraction(name: str, value: Fraction | float) -> Fraction:
    """Convert seconds to an exact fraction; a float becomes the nearest with a denominator up to 1,000,000."""
    if isinstance(value, Fraction):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return Fraction(value)
    try:
        if isinstance(value, bool | np.bool_) or not math.isfinite(value):
            raise TypeError
        return Fraction(float(value)).limit_denominator(10**6)
    except (TypeError, ValueError, OverflowError):
        raise InvalidInputError(f"{name}: got {value!r}, want a number of seconds") from None
