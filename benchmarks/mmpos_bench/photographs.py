"""The photographs that come with the package at any size, and what their patches should be."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import mmpos
from mmpos.images import ImageProcessor
from mmpos.images.decode import pillow, torchvision

__all__ = ["FRAMES", "UINT8", "as_pixel_values", "expected", "photographs"]

_PHOTOS = Path(mmpos.__file__).parent / "photos"

UINT8 = ImageProcessor(order="merged")
"""Patches as Qwen-VL wants them."""

FRAMES = 2
"""How often Qwen-VL's layout tells a still image."""


def photographs(width: int, height: int) -> list[bytes]:
    """The two photographs in another size, as JPEG files.

    Raises:
        ImportError: Pillow is not installed.
    """
    image, found = pillow(), []
    for name in ("chelsea", "coffee"):
        with image.open(_PHOTOS / f"{name}.jpg") as photo:
            sized = photo.convert("RGB").resize((width, height), image.Resampling.BICUBIC)
        file = io.BytesIO()
        sized.save(file, "JPEG", quality=90)
        found.append(file.getvalue())
    return found


def expected(data: bytes) -> npt.NDArray[np.uint8]:
    """The patches of a JPEG by torchvision's own functions, cut one at a time in a loop.

    Raises:
        ImportError: torchvision is not installed.
    """
    torch, functional = torchvision()
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    planes = torch.ops.image.decode_jpeg(encoded, 3, False).contiguous()
    size, bicubic = UINT8.fit(*planes.shape[1:]), functional.InterpolationMode.BICUBIC
    pixels = functional.resize(planes, list(size), bicubic, antialias=True).numpy()
    side, merge = UINT8.patch_size, UINT8.spatial_merge_size
    rows, columns = size[0] // side, size[1] // side
    patches = [
        pixels[:, i * side : (i + 1) * side, j * side : (j + 1) * side].transpose(1, 2, 0)
        for top in range(0, rows, merge)
        for left in range(0, columns, merge)
        for i in range(top, top + merge)
        for j in range(left, left + merge)
    ]
    return np.stack(patches)


def as_pixel_values(patches: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Patches in Transformers' layout, normalised in float64."""
    values = (patches / 255 - np.array(UINT8.mean)) / np.array(UINT8.std)
    planes = values.transpose(0, 3, 1, 2)[:, :, None]
    return np.repeat(planes, FRAMES, axis=2).reshape(len(patches), -1)
