"""From encoded bytes or a Pillow image to an array of samples, and from samples to RGB."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.images.backends import decode_jpeg
from mmpos.images.bare import bare_gif, bare_jpeg, bare_png
from mmpos.images.guard import guarded
from mmpos.images.headers import Header
from mmpos.images.sizes import ImageSize

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

__all__ = ["decode", "samples", "to_rgb"]

Samples = npt.NDArray[Any]  # (h, w, 1 | 3 | 4), uint8 or uint16

_STRIP_PIXELS = 2**17


def decode(data: bytes, header: Header, backend: str) -> Samples:
    """The samples of a file as stored, before orientation.

    Args:
        data: the file.
        header: what `read_header` says of it.
        backend: torchvision decodes gray and RGB JPEGs that are not heavy; Pillow decodes everything else, without
            loss but for colours of 16 bits, which are rounded.

    Returns:
        A new array (h, w, 1 | 3 | 4), uint8 or uint16.

    Raises:
        InvalidInputError: the file is truncated or corrupt.
    """
    with guarded(f"{header.kind} file"):
        if (
            backend == "torchvision"
            and header.kind == "JPEG"
            and header.channels in (1, 3)
            and not header.heavy(len(data))
        ):
            array: Samples = decode_jpeg(data)
        elif header.deep:
            array = _deep_png(bare_png(data), header.stored, header.channels)
        else:
            array = samples(_open(data, header))
    if array.shape[:2] != tuple(header.stored):
        raise InvalidInputError(f"image: got {array.shape[:2]} pixels, want {tuple(header.stored)} as in its header")
    return array


def samples(image: Image) -> Samples:
    """The samples of a Pillow image: uint16 of 16-bit gray, RGBA where some may be transparent, else RGB."""
    if image.mode.startswith("I;16"):
        gray = np.asarray(image).astype(np.uint16, copy=False)[..., None]  # Pillow itself would clip it to 255
        return _keyed(gray, image.info.get("transparency"))
    if image.mode in ("I", "F"):
        raise InvalidInputError(f"image: got a Pillow image of mode {image.mode!r}, want samples of 8 or 16 bits")
    mode = "RGBA" if image.has_transparency_data else "RGB"
    image.load()  # which may change the size, as of icons
    array = np.empty((image.height, image.width, len(mode)), np.uint8)
    for rows, strip in _strips(image):
        array[rows] = np.asarray(strip if strip.mode == mode else strip.convert(mode))
    return array


def to_rgb(
    array: Samples, background: tuple[int, ...], out: npt.NDArray[np.uint8] | None = None
) -> npt.NDArray[np.uint8]:
    """Samples rounded to 8 bits, laid over the background by their alpha, gray repeated: (h, w, 3).

    Returns:
        out, filled; without one a new array, or a view where nothing is to be computed.
    """
    height, width, channels = array.shape
    if out is None and array.dtype == np.uint8 and channels != 4:
        return array if channels == 3 else np.broadcast_to(array, (height, width, 3))
    found = np.empty((height, width, 3), np.uint8) if out is None else out
    ground = np.array(background, np.uint16)
    for rows in _rows(height, width):
        strip = array[rows]
        if strip.dtype != np.uint8:
            strip = _eight(strip)
        if channels == 4:
            alpha = strip[..., 3:].astype(np.uint16)
            strip = (strip[..., :3] * alpha + ground * (255 - alpha) + 127) // 255
        found[rows] = strip
    return found


def _rows(height: int, width: int) -> Iterator[slice]:
    """Rows of an image in strips: what is computed of one stays in the cache, and takes no memory to speak of."""
    step = max(1, _STRIP_PIXELS // width)
    return (slice(top, min(top + step, height)) for top in range(0, height, step))


def _strips(image: Image) -> Iterator[tuple[slice, Image]]:
    """An image in strips, each with its rows."""
    for rows in _rows(image.height, image.width):
        whole = rows.stop - rows.start == image.height
        yield rows, image if whole else image.crop((0, rows.start, image.width, rows.stop))


def _open(data: bytes, header: Header) -> ImageFile:
    """The file in the plugin of its format: PIL.Image.open would guess, and check a limit of its own."""
    from PIL import GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

    if header.kind == "JPEG":
        return JpegImagePlugin.JpegImageFile(io.BytesIO(bare_jpeg(data)))
    if header.kind == "GIF":
        return GifImagePlugin.GifImageFile(io.BytesIO(bare_gif(data)))
    if header.kind == "WebP":
        return WebPImagePlugin.WebPImageFile(io.BytesIO(data))
    image = PngImagePlugin.PngImageFile(io.BytesIO(bare_png(data)))
    if image.mode == "L" and "transparency" in image.info:
        # Pillow stretches gray of 2 and 4 bits to 8, but not the level that is transparent.
        image.info["transparency"] *= 255 // (2**header.depth - 1)
    return image


def _deep_png(data: bytes, size: ImageSize, colour: int) -> Samples:
    """The samples of a 16-bit colour PNG, rounded to 8 bits: Pillow gives their high bytes only.

    Told that the bytes are swapped it gives the low ones. Gray with alpha has four bytes a pixel, just like RGBA.
    """
    from PIL.PngImagePlugin import PngImageFile

    def read(layout: str) -> Image:
        image = PngImageFile(io.BytesIO(data))
        image.tile = [tile._replace(args=layout) for tile in image.tile]
        image.load()
        return image

    if colour == 4:
        array = np.empty((*size, 4), np.uint8)
        for rows, strip in _strips(read("RGBA")):
            pairs = np.asarray(strip).astype(np.uint16)
            array[rows] = _eight(pairs[..., ::2] << 8 | pairs[..., 1::2])[..., [0, 0, 0, 1]]
        return array
    mode, key = "RGBA" if colour == 6 else "RGB", PngImageFile(io.BytesIO(data)).info.get("transparency")
    array = np.empty((*size, len(mode) if key is None else 4), np.uint8)
    colours = array[..., : len(mode)]
    # One image after the other, as each has four bytes a pixel; the high bytes wait where the samples go.
    for rows, strip in _strips(read(f"{mode};16B")):
        colours[rows] = np.asarray(strip)
    for rows, strip in _strips(read(f"{mode};16L")):
        array[rows] = _eight(_keyed(colours[rows].astype(np.uint16) << 8 | np.asarray(strip), key))
    return array


def _eight(deep: Samples) -> npt.NDArray[np.uint8]:
    """Samples of 16 bits as the nearest of 8: v * 255 / 65535, rounded."""
    return ((deep.astype(np.uint32) + 128) // 257).astype(np.uint8)


def _keyed(array: Samples, key: Any) -> Samples:
    """RGBA in which one colour, the key, is transparent; the array itself where there is no key."""
    if key is None:
        return array
    height, width, _ = array.shape
    found = np.empty((height, width, 4), np.uint16)
    for rows in _rows(height, width):
        found[rows, :, :3] = array[rows]
        found[rows, :, 3] = np.any(array[rows] != np.array(key, np.uint16), axis=2) * np.uint16(65535)
    return found
