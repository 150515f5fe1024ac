"""The size of an image, and the size that fits patches and budget."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mmpos.errors import InvalidInputError
from mmpos.support.checks import INT32_MAX, integer

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
    """The limits of an image: how many tokens of factor x factor pixels it may become, and how thin it may be."""

    factor: int
    min_pixels: int
    max_pixels: int
    max_aspect_ratio: int

    def fit(self, height: int, width: int) -> tuple[int, int]:
        """Fit an image of height x width pixels to rows and columns of tokens.

        Source: ``smart_resize`` of Qwen2-VL in Transformers, operation by operation, so that floats round alike. Only
        sizes that it leaves over the maximum, or without a row, are others.
        """
        short, long = sorted((height, width))
        if long > self.max_aspect_ratio * short:
            got = f"{height} x {width} pixels"
            raise InvalidInputError(f"image: got {got}, want a long side <= {self.max_aspect_ratio} short sides")
        factor, area = self.factor, self.factor**2
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * area < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * scale / factor), math.ceil(width * scale / factor)
        if rows * columns * area > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            rows, columns = math.floor(height / scale / factor), math.floor(width / scale / factor)
        most = self.max_pixels // area  # for the one row of an image so thin that it has rounded to none
        return min(max(1, rows), most), min(max(1, columns), most)
