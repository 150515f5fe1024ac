"""Image sizes: what an image measures, and what it measures once it fits the patches and the budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

from mmpos.checks import INT32_MAX, integer
from mmpos.errors import InvalidInputError

__all__ = ["Budget", "ImageSize"]


@dataclass(frozen=True, slots=True)
class ImageSize:
    """An image known only by its size; unpacks into (height, width).

    Args:
        height: rows of pixels, at least 1, after EXIF orientation.
        width: columns of pixels, at least 1, after EXIF orientation.
    """

    height: int
    width: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "height", integer("image.height", self.height, minimum=1, maximum=INT32_MAX))
        object.__setattr__(self, "width", integer("image.width", self.width, minimum=1, maximum=INT32_MAX))

    def __iter__(self) -> Iterator[int]:
        return iter((self.height, self.width))


@dataclass(frozen=True, slots=True)
class Budget:
    """How many tokens of factor x factor pixels an image may become, and how thin it may be."""

    factor: int
    min_pixels: int
    max_pixels: int
    max_aspect_ratio: int

    def fit(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens for an image of height x width pixels."""
        short, long = sorted((height, width))
        if long > self.max_aspect_ratio * short:
            got = f"{height} x {width} pixels"
            raise InvalidInputError(f"image: got {got}, want a long side <= {self.max_aspect_ratio} short sides")
        a, b = self._grow(*self._scale(short, long), square=short == long)
        return (a, b) if height <= width else (b, a)

    def _scale(self, short: int, long: int) -> tuple[int, int]:
        """The nearest size in tokens; scaled down to the most or up to the least where it leaves the range.

        Square roots are taken of whole numbers, so that no float rounds over the maximum.
        """
        area, most = self.factor**2, self.max_pixels // self.factor**2
        a, b = max(1, round(short / self.factor)), max(1, round(long / self.factor))
        if a * b * area < self.min_pixels:
            a = _ceil_sqrt(short * self.min_pixels, long * area)
            b = _ceil_sqrt(long * self.min_pixels, short * area)
        if a * b > most:
            a = max(1, isqrt(short * self.max_pixels // (long * area)))
            b = isqrt(long * self.max_pixels // (short * area))
        # A thin image has its short side raised to one token: the long side alone must then keep the maximum.
        return a, min(b, most // a, self.max_aspect_ratio * a)

    def _grow(self, a: int, b: int, *, square: bool) -> tuple[int, int]:
        """Give back what rounding down took below the minimum, while the maximum allows; a square stays one."""
        most = self.max_pixels // self.factor**2
        least = min(most, -(-self.min_pixels // self.factor**2))
        if a * b >= least or square:
            return a, b
        # The long side first: one token more changes its length, and so the aspect ratio, the least.
        grown = self._lengthen(a, b, least, most)
        if grown[0] * grown[1] < least:
            other = self._lengthen(min(-(-least // b), most // b, b), b, least, most)
            grown = other if other[0] * other[1] >= least else grown
        return grown

    def _lengthen(self, a: int, b: int, least: int, most: int) -> tuple[int, int]:
        """The long side, then the short one, as far as the least needs and the most allows, until neither moves."""
        before = None
        while a * b < least and (a, b) != before:
            before = a, b
            b = min(-(-least // a), most // a, self.max_aspect_ratio * a)
            a = min(-(-least // b), most // b, b)
        return a, b


def _ceil_sqrt(numerator: int, denominator: int) -> int:
    """The square root of a positive fraction, rounded up."""
    return isqrt(-(-numerator // denominator) - 1) + 1
