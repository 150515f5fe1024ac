"""The two libraries that can decode and resize: Pillow and torchvision, each imported when first needed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.support.extras import needed_for

__all__ = ["BACKENDS", "decode_jpeg", "pillow", "resize"]

BACKENDS = ("torchvision", "pillow")

Pixels = npt.NDArray[np.uint8]


def pillow() -> ModuleType:
    """PIL.Image."""
    with needed_for("images", extra="pillow"):
        from PIL import Image
    return Image


def torchvision() -> tuple[Any, Any]:
    """torch and torchvision.transforms.v2.functional."""
    with needed_for('backend="torchvision" (backend="pillow" works without torch)', extra="all"):
        import torch
        import torchvision.io  # noqa: F401 (registers decode_jpeg)
        from torchvision.transforms.v2 import functional
    return torch, functional


def decode_jpeg(data: bytes) -> Pixels:
    """The pixels (h, w, 3) of a gray or RGB JPEG, decoded by torchvision without EXIF orientation."""
    torch, _ = torchvision()
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)  # a copy, as torch warns of read-only bytes
    # The operator behind torchvision.io.decode_jpeg, which warns of its deprecation from 0.29 on; 3 is RGB.
    planes = torch.ops.image.decode_jpeg(encoded, 3, False)
    pixels: Pixels = planes.permute(1, 2, 0).numpy()  # its strides are those of rows of RGB: no copy
    return pixels


def resize(pixels: Pixels, height: int, width: int, backend: str) -> Pixels:
    """Pixels (h, w, 3) in the given size, bicubic with antialiasing; the same array where the size is right."""
    if pixels.shape[:2] == (height, width):
        return pixels
    if backend == "pillow":
        image = pillow().fromarray(np.ascontiguousarray(pixels))
        return np.asarray(image.resize((width, height), pillow().Resampling.BICUBIC))
    torch, functional = torchvision()
    # torch refuses negative strides and warns of read-only memory.
    tensor = torch.from_numpy(np.require(pixels, requirements=["C", "W"])).permute(2, 0, 1)
    bicubic = functional.InterpolationMode.BICUBIC
    resized: Pixels = functional.resize(tensor, [height, width], bicubic, antialias=True).permute(1, 2, 0).numpy()
    return resized
