"""Patches by Transformers' fast Qwen2-VL processor, from the bytes of a JPEG, in the two ways that its users decode."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

__all__ = ["by_pillow", "by_torchvision"]

_PROCESSOR: Any = Qwen2VLImageProcessor()


def by_pillow(data: bytes) -> Any:
    """What users of Hugging Face datasets do: a Pillow image, then the processor."""
    photo: Image.Image = Image.open(io.BytesIO(data))
    return _PROCESSOR([photo], return_tensors="pt")["pixel_values"].numpy()


def by_torchvision(data: bytes) -> Any:
    """What the processor's own loading of files does: a tensor, then the processor."""
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision would rather have torchcodec decode
        tensor = decode_image(encoded, mode=ImageReadMode.RGB, apply_exif_orientation=True)
    return _PROCESSOR([tensor], return_tensors="pt")["pixel_values"].numpy()
