"""Images as processors are given them, to the patches and grids of a batch."""

from __future__ import annotations

import base64
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.images import ImageProcessor, ProcessedImage
from mmpos.support.checks import IntArray, naming

__all__ = ["flat", "patches_of", "process", "read_base64", "read_text"]


def flat(images: Any, texts: int | None) -> tuple[list[tuple[str, Any]], IntArray | None]:
    """The images with their names, and how many are given for each text, where they are nested.

    Args:
        images: one image, a list of them for all texts, a list of such a list for each text, or None.
        texts: number of texts; None where there is no text.
    """
    if images is None:
        return [], None
    if not isinstance(images, list | tuple):
        return [("images", images)], None
    nested = [isinstance(each, list | tuple) for each in images]
    if not any(nested):
        return [(f"images[{i}]", image) for i, image in enumerate(images)], None
    if not all(nested):
        i = nested.index(not nested[0])
        raise InvalidInputError(f"images[{i}]: got {type(images[i]).__name__}, want all images in lists, or none")
    if texts is not None and len(images) != texts:
        raise InvalidInputError(f"images: got {len(images)} lists, want {texts}, one for each text")
    named = [(f"images[{i}][{n}]", image) for i, each in enumerate(images) for n, image in enumerate(each)]
    return named, np.fromiter(map(len, images), np.int64, len(images))


def process(
    named: list[tuple[str, Any]], images: ImageProcessor, temporal_patch_size: int | None
) -> list[ProcessedImage]:
    """What the image processor makes of each; its errors name the image."""
    found = []
    for name, image in named:
        read = read_text(name, image) if isinstance(image, str) else image
        with naming(name):
            found.append(images.process(read, temporal_patch_size=temporal_patch_size))
    return found


def patches_of(processed: list[ProcessedImage]) -> npt.NDArray[Any] | None:
    """The patches of all images in a row; None where they are known only by their sizes."""
    pixels = [image.patches for image in processed if image.patches is not None]
    if pixels and len(pixels) < len(processed):
        raise InvalidInputError("images: got images with and without pixels, want all of one sort")
    if len(pixels) == 1:
        return pixels[0]
    return np.concatenate(pixels) if pixels else None


def read_text(name: str, text: str) -> bytes:
    """The bytes of a data: URL; no other text stands for an image, since nothing is fetched or opened unasked."""
    head, comma, data = text.partition(",")
    if head[:5].lower() != "data:":
        raise InvalidInputError(
            f"{name}: got the text {text[:80]!r}, want bytes, pathlib.Path(...) for a file, or a data: URL"
        )
    if not comma or not data.isascii():
        raise InvalidInputError(f"{name}: got a broken data: URL, want data:image/...;base64,...")
    raw = unquote_to_bytes(data)
    return read_base64(name, raw) if head.lower().endswith(";base64") else raw


def read_base64(name: str, data: Any) -> bytes:
    """The bytes that base64 stands for."""
    try:
        return base64.b64decode(data, validate=True)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"{name}: got base64 that is broken ({error}), want base64") from error
