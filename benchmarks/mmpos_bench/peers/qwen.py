"""Compute patches of JPEG files with Transformers' fast Qwen2-VL processor."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

_PROCESSOR: Any = Qwen2VLImageProcessor()

Floats = npt.NDArray[np.float32]


def by_pillow(data: bytes) -> Floats:
    """Process a Pillow image, as users of Hugging Face datasets do."""
    photo: Image.Image = Image.open(io.BytesIO(data))
    return _PROCESSOR([photo], return_tensors="pt")["pixel_values"].numpy()


def by_torchvision(data: bytes) -> Floats:
    """Process a decoded tensor, as the processor does when it loads files."""
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision warns and recommends torchcodec
        tensor = decode_image(encoded, mode=ImageReadMode.RGB, apply_exif_orientation=True)
    return _PROCESSOR([tensor], return_tensors="pt")["pixel_values"].numpy()
