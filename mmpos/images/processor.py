"""ImageProcessor: convert any image to patches for a vision encoder and their grid."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.images.decode import BACKENDS, ImageSize, open_source, resize, to_rgb
from mmpos.images.patches import ORDERS, Factors, patchify, pixel_values
from mmpos.segments.table import Grid
from mmpos.support.checks import INT32_MAX, Array, boolean, integer, one_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ImageProcessor", "ProcessedImage"]

Patches = TypeVar("Patches", Array, "Tensor")

# Mean and standard deviation of the training images of OpenAI's CLIP, which Qwen-VL and others use.
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

_MAX_ASPECT_RATIO = 200
"""Largest ratio of the long side to the short side before resizing, as in Qwen-VL."""


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedImage:
    """Result of `ImageProcessor.process`.

    Args:
        patches: (patches, patch_size, patch_size, 3), uint8 or float32, owned by the caller; or the result of
            `pixel_values`; None for an ImageSize.
        grid: grid of tokens after merging; each token covers spatial_merge_size**2 patches.
        size: (height, width) in pixels after resizing; None if only the grid is known.
        source_size: size after orientation and before resizing; None if only the grid is known.
        content_hash: SHA-256 in hex. For paths and bytes, it is the hash of the file contents, so both agree. For
            pixels, it covers a header (dtype and shape with channels last; for Pillow images, their mode, size,
            orientation, palette and transparency) and the pixel bytes, so equal pixels from a file and from an array
            have different hashes. None for an ImageSize.
    """

    patches: Array | None
    grid: Grid
    size: tuple[int, int] | None
    source_size: ImageSize | None
    content_hash: str | None


@dataclass(frozen=True)
class ImageProcessor:
    """Decode, resize and cut images into patches; compute their grids from the size alone.

    An image is a pathlib.Path or the bytes of a JPEG, PNG, WebP or GIF (first frame), a Pillow image, a numpy array
    (h, w) or (h, w, 1 | 3 | 4) of uint8 or uint16, a torch tensor (h, w) or (1 | 3 | 4, h, w) of uint8 on the host,
    or an `ImageSize`. Orientation in EXIF or XMP is applied to the first three.

    Args:
        backend: "torchvision" (fast) or "pillow"; their pixels differ by a few levels.
        patch_size: side of a patch in pixels.
        spatial_merge_size: side, in patches, of the square that becomes one token.
        min_pixels: images with fewer pixels are scaled up to this number. An image scaled down to max_pixels may end up
            with fewer.
        max_pixels: largest number of pixels after resizing.
        max_tokens: largest number of tokens after merging; None applies no limit other than max_pixels.
        order: "raster" for patches row by row; "merged" for the patches of each token in sequence, as in Qwen-VL.
        dtype: "uint8" for unchanged values, or "float32" for (x / 255 - mean) / std.
        mean: mean of red, green and blue, 0 to 1.
        std: standard deviation of red, green and blue, 0 to 1.
        background: red, green and blue of the colour behind transparent pixels, 0 to 255.
        max_source_pixels: largest number of pixels before resizing; larger images are refused before any memory is
            allocated. Pillow has its own limit for files: it warns above PIL.Image.MAX_IMAGE_PIXELS and refuses files
            with twice as many.
        small_images: how a side shorter than a token is enlarged: "qwen-vl" enlarges only that side; "glm-v" scales
            both sides and rounds down; "paddleocr-vl" scales both sides and rounds to the nearest pixel.
        scaled_decoding: whether to decode a JPEG at a half, a quarter or an eighth of its size if that is not smaller
            than its size after resizing. This is faster, but pixels differ by a few levels.

    Raises:
        InvalidInputError: an argument is of the wrong type or out of range.
    """

    backend: str = "torchvision"
    _: KW_ONLY
    patch_size: int = 14
    spatial_merge_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 14 * 14 * 4 * 1280
    max_tokens: int | None = None
    order: str = "raster"
    dtype: str = "uint8"
    mean: tuple[float, float, float] = _CLIP_MEAN
    std: tuple[float, float, float] = _CLIP_STD
    background: tuple[int, int, int] = (255, 255, 255)
    max_source_pixels: int = 89_478_485
    small_images: str = "qwen-vl"
    scaled_decoding: bool = False

    def __post_init__(self) -> None:
        one_of("backend", self.backend, BACKENDS)
        one_of("order", self.order, ORDERS)
        one_of("dtype", self.dtype, ("uint8", "float32"))
        one_of("small_images", self.small_images, ("qwen-vl", "glm-v", "paddleocr-vl"))
        boolean("scaled_decoding", self.scaled_decoding)
        checked = {
            name: integer(name, getattr(self, name), minimum=1, maximum=INT32_MAX)
            for name in ("patch_size", "spatial_merge_size", "max_source_pixels")
        }
        factor = checked["patch_size"] * checked["spatial_merge_size"]
        checked["min_pixels"] = integer("min_pixels", self.min_pixels, minimum=0)
        least = max(factor**2, checked["min_pixels"])
        checked["max_pixels"] = integer("max_pixels", self.max_pixels, minimum=least, maximum=INT32_MAX)
        if self.max_tokens is not None:
            checked["max_tokens"] = integer("max_tokens", self.max_tokens, minimum=1)
        background = _three("background", self.background)
        colours = {
            "mean": tuple(map(float, _three("mean", self.mean))),
            "std": tuple(map(float, _three("std", self.std, above=0))),
            "background": tuple(integer("background", level, minimum=0, maximum=255) for level in background),
        }
        for name, value in (checked | colours).items():
            object.__setattr__(self, name, value)

    def fit(self, height: int, width: int) -> tuple[int, int]:
        """Compute the size of an image after resizing, from its size alone.

        Both sides become the nearest multiples of patch_size * spatial_merge_size. If the result is outside the range
        from min_pixels to max_pixels (or max_tokens), both sides are scaled by the same factor and rounded so that they
        stay inside it. This is ``smart_resize`` of Qwen-VL in Transformers, except that the maximum always holds and a
        side always has at least one token.

        Args:
            height: rows of pixels.
            width: columns of pixels.

        Returns:
            (height, width) in pixels.

        Raises:
            InvalidInputError: a side is below 1, or the aspect ratio is above 200.
        """
        return self._in_pixels(self.grid(height, width))

    def grid(self, height: int, width: int) -> Grid:
        """Compute the grid of tokens after merging from the size of an image.

        Source: ``smart_resize`` of Qwen2-VL, GLM-4V and PaddleOCR-VL in Transformers, copied operation by operation so
            that floats are rounded in the same way. Results differ only if the original exceeds the maximum or returns
            no rows.

        Returns:
            The grid that `process` returns for any image of this size; arguments and errors are as for `fit`.
        """
        factor = self.patch_size * self.spatial_merge_size
        source = ImageSize(height, width)
        height, width = source.height, source.width
        if min(height, width) < factor and self.small_images != "qwen-vl":
            height, width = self._enlarged(height, width, factor)
        short, long = sorted((height, width))
        if long > _MAX_ASPECT_RATIO * short:
            got = f"{source.height} x {source.width} pixels"
            raise InvalidInputError(f"image: got {got}, want a long side <= {_MAX_ASPECT_RATIO} short sides")
        area = factor**2
        max_pixels = self.max_pixels if self.max_tokens is None else min(self.max_pixels, self.max_tokens * area)
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * area < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * scale / factor), math.ceil(width * scale / factor)
        if rows * columns * area > max_pixels:
            scale = math.sqrt(height * width / max_pixels)
            rows, columns = math.floor(height / scale / factor), math.floor(width / scale / factor)
        most = max_pixels // area  # for a thin image whose only row was rounded down to none
        return Grid(min(max(1, rows), most), min(max(1, columns), most))

    def _enlarged(self, height: int, width: int, factor: int) -> tuple[int, int]:
        """Scale both sides of an image of which one is shorter than a token."""
        if self.small_images == "glm-v":
            scale = max(factor / height, factor / width)
            return int(height * scale), int(width * scale)
        if height < factor:
            height, width = factor, round(width * factor / height)
        if width < factor:
            height, width = round(height * factor / width), factor
        return height, width

    def inspect(self, image: object) -> ImageSize:
        """Read the size of an image, after orientation, from its header without decoding pixels.

        Args:
            image: any image that the class supports.

        Returns:
            The height and width of the image in pixels.

        Raises:
            InvalidInputError: the argument is not an image, or the image is unreadable, has no pixels or is too thin.
            LimitExceededError: the image has more than max_source_pixels, or its file has too many segments, chunks or
                blocks.
        """
        if isinstance(image, ImageSize):
            size = image
        else:
            with open_source(image) as source:
                size = source.size
        self._admitted_grid(size)
        return size

    def process(self, image: object, *, temporal_patch_size: int | None = None) -> ProcessedImage:
        """Decode, resize and cut an image into patches.

        Args:
            image: any image that the class supports; it is not changed.
            temporal_patch_size: number of frames in a patch; the patches are then the result of `pixel_values`. None
                returns plain patches.

        Returns:
            New patches, or None instead of patches for an `ImageSize`; the grid is `grid(*inspect(image))`.

        Raises:
            InvalidInputError: the argument is not an image, or the image is unreadable, has no pixels, or is too thin,
                truncated or corrupt.
            LimitExceededError: for the same reasons as `inspect`, or because a JPEG has more than 100 scans.
            ImportError: the backend is not installed.
        """
        frames = None if temporal_patch_size is None else integer("temporal_patch_size", temporal_patch_size, minimum=1)
        if isinstance(image, ImageSize):
            grid = self._admitted_grid(image)
            return ProcessedImage(None, grid, self._in_pixels(grid), image, None)
        samples, size, grid, content_hash = self._read(image, self.scaled_decoding)
        fitted = self._in_pixels(grid)
        pixels = resize(to_rgb(samples, self.background), *fitted, self.backend)
        cut = (pixels, self.patch_size, self.spatial_merge_size, self.order)
        if frames is None:
            patches = patchify(*cut, None if self.dtype == "uint8" else self._factors)
        else:
            patches = self.pixel_values(patchify(*cut, None), temporal_patch_size=frames)
        return ProcessedImage(patches, grid, fitted, size, content_hash)

    def pixels(self, image: object) -> npt.NDArray[np.uint8]:
        """Decode an image to upright pixels (h, w, 3) without resizing, under the same limits as `process`.

        Args:
            image: any image that the class supports, except an `ImageSize`; it is not changed.

        Raises:
            MmposError: for the same reasons as `process`.
        """
        return to_rgb(self._read(image)[0], self.background)

    def pixel_values(self, patches: Patches, *, temporal_patch_size: int = 2) -> Patches:
        """Normalise patches for vision encoders in Transformers; order "merged" matches the Qwen-VL processors.

        Args:
            patches: (n, patch_size, patch_size, 3) uint8, a numpy array, or a torch tensor on any device. Moving uint8
                patches to a device transfers 1 / (4 * temporal_patch_size) as many bytes as moving the result.
            temporal_patch_size: number of frames in a patch; the image is repeated for each frame.

        Returns:
            New float32 (n, 3 * temporal_patch_size * patch_size**2) in the same library and on the same device:
            (x / 255 - mean) / std, ordered by colour, then frame, then row.

        Raises:
            InvalidInputError: patches have the wrong type or shape.
        """
        frames = integer("temporal_patch_size", temporal_patch_size, minimum=1)
        return cast(Patches, pixel_values(patches, self.patch_size, frames, *self._factors))

    @property
    def _factors(self) -> Factors:
        """Factor and offset per colour that compute (x / 255 - mean) / std."""
        mean, std = np.array(self.mean), np.array(self.std)
        return (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)

    def _read(self, image: object, scaled: bool = False) -> tuple[Array, ImageSize, Grid, str]:
        """Return the upright samples, size, grid and content hash of an image, and close its decoder."""
        with open_source(image) as source:
            size = source.size
            grid = self._admitted_grid(size)
            samples, content_hash = source.read(self.backend, self._in_pixels(grid) if scaled else None)
            return samples, size, grid, content_hash

    def _admitted_grid(self, size: ImageSize) -> Grid:
        """Compute the grid of an image; raise an error if it is too large to decode."""
        if size.height * size.width > self.max_source_pixels:
            got = f"{size.height} x {size.width} = {size.height * size.width} pixels"
            raise LimitExceededError(f"image: got {got}, want <= {self.max_source_pixels} (max_source_pixels)")
        return self.grid(size.height, size.width)

    def _in_pixels(self, grid: Grid) -> tuple[int, int]:
        """Compute the height and width of a grid in pixels."""
        factor = self.patch_size * self.spatial_merge_size
        return grid.height * factor, grid.width * factor


def _three(name: str, values: object, *, above: float = -math.inf) -> list[Real]:
    """Check that values are three finite numbers, one per colour."""
    numbers = list(values) if isinstance(values, Iterable) else []
    reals = [number for number in numbers if isinstance(number, Real) and above < float(number) < math.inf]
    if not len(numbers) == len(reals) == 3:
        want = "three finite numbers" + (f" > {above}" if above > -math.inf else "")
        raise InvalidInputError(f"{name}: got {values!r}, want {want}")
    return reals
