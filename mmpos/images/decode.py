"""From encoded bytes or a Pillow image to an array of samples, and from samples to RGB."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.images.backends import decode_jpeg
from mmpos.images.bare import bare_gif, bare_jpeg, bare_png
from mmpos.images.guard import guarded
from mmpos.images.headers import Header

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

__all__ = ["decode", "samples", "to_rgb"]

Samples = npt.NDArray[Any]  # (h, w, 1 | 3 | 4), uint8 or uint16


def decode(data: bytes, header: Header, backend: str) -> Samples:
    """The samples of a file as stored, before orientation.

    Args:
        data: the file.
        header: what `read_header` says of it.
        backend: torchvision decodes gray and RGB JPEGs; Pillow decodes everything else, without loss.

    Returns:
        A new array (h, w, 1 | 3 | 4), uint8 or uint16.

    Raises:
        InvalidInputError: the file is truncated or corrupt.
    """
    with guarded(f"{header.kind} file"):
        if header.kind == "JPEG" and header.channels in (1, 3) and backend == "torchvision":
            array: Samples = decode_jpeg(data)
        elif header.kind == "PNG" and header.channels and header.depth == 16:
            array = _deep_png(bare_png(data), header.channels)
        else:
            array = samples(_open(data, header))
    if array.shape[:2] != tuple(header.stored):
        raise InvalidInputError(f"image: got {array.shape[:2]} pixels, want {tuple(header.stored)} as in its header")
    return array


def samples(image: Image) -> Samples:
    """The samples of a Pillow image: uint16 of 16-bit gray, RGBA where some may be transparent, else RGB."""
    if image.mode.startswith("I;16"):
        gray = np.asarray(image).astype(np.uint16)[..., None]  # Pillow itself would clip it to 255
        return _keyed(gray, image.info.get("transparency"))
    if image.mode in ("I", "F"):
        raise InvalidInputError(f"image: got a Pillow image of mode {image.mode!r}, want samples of 8 or 16 bits")
    mode = "RGBA" if image.has_transparency_data else "RGB"
    return np.asarray(image if image.mode == mode else image.convert(mode))


def to_rgb(array: Samples, background: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Samples rounded to 8 bits, laid over the background by their alpha, gray repeated: (h, w, 3), maybe a view."""
    if array.dtype != np.uint8:
        array = ((array.astype(np.uint32) + 128) // 257).astype(np.uint8)  # v * 255 / 65535, rounded
    if array.shape[2] == 4:
        alpha = array[..., 3:].astype(np.uint16)
        blend = array[..., :3] * alpha + np.array(background, np.uint16) * (255 - alpha)
        array = ((blend + 127) // 255).astype(np.uint8)
    return array if array.shape[2] == 3 else np.broadcast_to(array, (*array.shape[:2], 3))


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


def _deep_png(data: bytes, colour: int) -> Samples:
    """The 16-bit samples of a colour PNG, of which Pillow gives the high bytes only.

    Told that the bytes are swapped it gives the low ones. Gray with alpha has four bytes a pixel, just like RGBA.
    """
    from PIL.PngImagePlugin import PngImageFile

    def read(layout: str) -> Samples:
        image = PngImageFile(io.BytesIO(data))
        image.tile = [tile._replace(args=layout) for tile in image.tile]
        return np.asarray(image).astype(np.uint16)

    if colour == 4:
        stored = read("RGBA")
        return (stored[..., ::2] << 8 | stored[..., 1::2])[..., [0, 0, 0, 1]]
    mode = "RGBA" if colour == 6 else "RGB"
    array = read(f"{mode};16B") << 8 | read(f"{mode};16L")
    return _keyed(array, PngImageFile(io.BytesIO(data)).info.get("transparency"))


def _keyed(array: Samples, key: Any) -> Samples:
    """RGBA in which one colour, the key, is transparent; the array itself where there is no key."""
    if key is None:
        return array
    opaque = np.any(array != np.array(key, np.uint16), axis=2, keepdims=True)
    rgb = np.broadcast_to(array, (*array.shape[:2], 3))
    return np.concatenate([rgb, opaque * np.uint16(65535)], axis=2)
