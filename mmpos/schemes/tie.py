"""The RoPE-Tie family (Su Jianlin, kexue.fm 10040 and 10352): grids symmetric between the texts before and after."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from mmpos.errors import InvalidInputError
from mmpos.schemes.base import Grids, Placement, Scheme, Steps
from mmpos.support.checks import IntArray, integer, one_of


@dataclass(frozen=True)
class _Tie(Scheme):
    """A grid centred on every axis between the text ids L before it and K = L + E + 1 after it.

    With n_a tokens along axis a, counted i = 1..n_a, and E ids consumed, the id on axis a is
    (L + K)/2 + γ_a·(i − (n_a + 1)/2). Subclasses define E and the strides γ.
    """

    axes: int = 2
    centred = False
    """Whether the strides leave slack on both sides: γ(n + 1) < E + 1."""
    strict = True
    timed = False
    row_separators = True

    def __post_init__(self) -> None:
        if integer(f"{type(self).__name__}.axes", self.axes) not in (2, 3):
            raise InvalidInputError(f"{type(self).__name__}.axes: got {self.axes!r}, want 2 or 3")
        object.__setattr__(self, "frames", self.axes == 3)

    @abstractmethod
    def consumed(self, sides: IntArray) -> IntArray:
        """Return the number of ids consumed E, (grids,), for sides n_a, (axes, grids)."""

    @abstractmethod
    def strides(self, sides: IntArray) -> tuple[IntArray, IntArray | int]:
        """Return the strides γ as numerators, (axes, grids), and a denominator that makes every id exact."""

    def advance(self, grids: Grids) -> IntArray:
        return self.consumed(grids.extents[3 - self.axes :])

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        sides = grids.extents[3 - self.axes :]
        stride, denominator = self.strides(sides)
        origin = (cursor - 1) * denominator + stride
        if self.centred:
            # The centre (L + K)/2 minus γ(n + 1)/2; the difference is even in every subclass.
            origin += (denominator * (self.consumed(sides) + 1) - stride * (sides + 1)) // 2
        rows = list(stride)
        step = [[0] * axis + [rows[axis]] + [0] * (self.axes - 1 - axis) for axis in range(self.axes)]
        return Placement(list(origin), step[0] if self.axes == 3 else None, step[-2], step[-1], denominator)


@dataclass(frozen=True)
class RopeTie(_Tie):
    """RoPE-Tie: patch (i, j) at (L + (w+1)·i, L + (h+1)·j), next text at L + (w+1)(h+1).

    Source: kexue.fm 10040, (h+1)s = (w+1)t with the simplest integers s = w+1, t = h+1.

    Args:
        axes: 2, or 3 with a frame axis; each stride is then the product of the other two sides, each plus one.
    """

    name: ClassVar[str] = "rope-tie"
    linear_in = ("cursor",)

    def consumed(self, sides: IntArray) -> IntArray:
        return np.multiply.reduce(sides + 1) - 1

    def strides(self, sides: IntArray) -> tuple[IntArray, IntArray | int]:
        return np.multiply.reduce(sides + 1) // (sides + 1), 1


@dataclass(frozen=True)
class RopeTieFractional(_Tie):
    """RoPE-Tie in which an image of h × w patches consumes h·w ids: s = (wh+1)/(h+1), t = (wh+1)/(w+1).

    Source: kexue.fm 10040, the form with fractional ids. Denominators are lcm(h+1, w+1).

    Args:
        axes: 2, or 3 with a frame axis.
    """

    name: ClassVar[str] = "rope-tie-fractional"
    linear_in = ("cursor",)
    fractional = True

    def consumed(self, sides: IntArray) -> IntArray:
        return np.multiply.reduce(sides)

    def strides(self, sides: IntArray) -> tuple[IntArray, IntArray | int]:
        denominator = np.lcm.reduce(sides + 1)
        return (np.multiply.reduce(sides) + 1) * (denominator // (sides + 1)), denominator


@dataclass(frozen=True)
class RopeTieLcm(_Tie):
    """RoPE-Tie with the smallest integer strides that keep the symmetry: lcm(h+1, w+1)/(n+1).

    The number of ids consumed, lcm − 1, varies widely with the size of the grid: 24 for 24×24, 649 for 24×25.
    Source: the smallest integer solution of (h+1)s = (w+1)t in kexue.fm 10040.

    Args:
        axes: 2, or 3 with a frame axis.
    """

    name: ClassVar[str] = "rope-tie-lcm"
    linear_in = ("cursor",)

    def consumed(self, sides: IntArray) -> IntArray:
        return np.lcm.reduce(sides + 1) - 1

    def strides(self, sides: IntArray) -> tuple[IntArray, IntArray | int]:
        return np.lcm.reduce(sides + 1) // (sides + 1), 1


@dataclass(frozen=True)
class RopeTieV2(_Tie):
    """RoPE-Tie-v2: centred grids with strides of one that consume h·w ids; ids are multiples of 1/2.

    Source: kexue.fm 10352; used by HunyuanImage-3.0, which truncates the ids to integers.

    Args:
        axes: 2, or 3 with a frame axis.
        rounding: None, or "floor" for checkpoints trained on truncated ids, which are not symmetric for every size.
    """

    name: ClassVar[str] = "rope-tie-v2"
    linear_in = ("cursor",)
    centred = True
    fractional = True
    rounding: Literal["floor"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("RopeTieV2.rounding", self.rounding, (None, "floor"))
        object.__setattr__(self, "fractional", self.rounding is None)

    def consumed(self, sides: IntArray) -> IntArray:
        return np.multiply.reduce(sides)

    def strides(self, sides: IntArray) -> tuple[IntArray, IntArray | int]:
        return np.full_like(sides, 2), 2

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        exact = super().place(grids, cursor)
        if self.rounding is None:
            return exact

        def half(steps: Steps | None) -> Steps | None:
            return None if steps is None else [step // 2 for step in steps]

        origin = [value // 2 for value in exact.origin]
        return Placement(origin, half(exact.step_frame), half(exact.step_row), half(exact.step_col))
