"""EXIF orientation: the number a camera wrote, and the turn it asks for."""

from __future__ import annotations

import struct
from typing import Any

import numpy.typing as npt

__all__ = ["orient", "orientation"]

_ORIENTATION, _SHORT = 0x0112, 3


def orientation(exif: bytes) -> int:
    """The orientation, 1 to 8, in an EXIF block; 1 where it has none or is damaged, as the pixels are fine either way.

    Read here and not by Pillow, which decodes the pixels of a PNG and warns of damage first.
    """
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (entries,) = struct.unpack_from(order + "H", tiff, start)
        for entry in range(start + 2, start + 2 + 12 * entries, 12):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", tiff, entry)
            if (tag, kind) == (_ORIENTATION, _SHORT):
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


def orient(pixels: npt.NDArray[Any], orientation: int) -> npt.NDArray[Any]:
    """A view of pixels (h, w, c) turned upright: 5 to 8 swap the sides, the rest mirrors them."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels
