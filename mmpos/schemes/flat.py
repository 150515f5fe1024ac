"""Schemes with one axis: patches in raster order, one id or a fraction of an id apart."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import ClassVar

import numpy as np

from mmpos.schemes.base import Grids, Placement, Scheme
from mmpos.support.checks import IntArray, integer


@dataclass(frozen=True)
class Flatten(Scheme):
    """Plain RoPE-1D: one id per token, patches in raster order.

    Source: Fuyu, DeepSeek-VL, Emu2, as described in kexue.fm 10040.
    """

    name: ClassVar[str] = "flatten"
    linear_in = ("cursor",)
    axes = 1
    row_separators = True

    def advance(self, grids: Grids) -> IntArray:
        return grids.tokens

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        row = grids.row_tokens
        return Placement([cursor], [grids.height * row], [row], [1])


@dataclass(frozen=True)
class V2PE(Scheme):
    """Patches are δ = stride/256 of a text step apart; text continues at the next integer.

    Source: InternVL3 (V2PE): p + δ per patch, then ⌈last⌉ + 1.

    Args:
        stride: δ in units of 1/256, from 1 to 256.
    """

    name: ClassVar[str] = "v2pe"
    linear_in = ("cursor",)
    axes = 1
    fractional = True
    stride: int = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "stride", integer("V2PE.stride", self.stride, minimum=1, maximum=256))

    def advance(self, grids: Grids) -> IntArray:
        return -(-grids.tokens * self.stride // 256)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        common = gcd(self.stride, 256)
        step, denominator = self.stride // common, 256 // common
        row = step * grids.width
        return Placement(
            [(cursor - 1) * denominator + step],
            [row * grids.height],
            [row],
            [np.full_like(cursor, step)],
            denominator,
        )
