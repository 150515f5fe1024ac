"""Resolve image references in records: bytes, data URLs, paths inside a folder, and names for a callable."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmpos.data.examples import BrokenImage, RecordError
from mmpos.data.formats.fields import Field, called, check_options, describe
from mmpos.errors import InvalidInputError
from mmpos.images import ImageSize
from mmpos.images.decode import is_of, read_data_url
from mmpos.segments.kinds import Grid
from mmpos.support.files import local_path

__all__ = ["Images"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class Images:
    """Sources of the images that records refer to. The defaults read no files, and URLs are never fetched.

    A reference is the bytes of a file, a struct of bytes and path (bytes take precedence), a ``data:`` URL, or a name,
    which is any other text. Decoded images (Pillow images, arrays, tensors; float tensors from 0 to 1) are accepted as
    well.

    Args:
        base: folder that paths are relative to. Relative and absolute paths must lead to a file inside it once all
            ``..`` and links are resolved. None refuses every path, so that records cannot choose files to read.
        resolver: called first with every name, including URLs; returns an image that SequenceBuilder accepts (the bytes
            of a file, a pathlib.Path to any location, a Pillow image, an array, an ImageSize …), or None for an unknown
            name. Its exceptions become RecordErrors.

    Raises:
        InvalidInputError: base is a URL or not a path, or resolver is not callable.
    """

    base: str | os.PathLike[str] | None = None
    resolver: Callable[[str], object] | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.base is not None:
            # Make the path absolute, since loader workers may run in another folder.
            object.__setattr__(self, "base", local_path("base", self.base).resolve())

    def read(self, field: Field) -> object:
        """Resolve the image that a field refers to; return a BrokenImage if that fails."""
        try:
            return self.resolve(f"{field.record}: {field.name}", field.value)
        except RecordError as error:
            return BrokenImage(error)

    def resolve(self, name: str, reference: object) -> object:
        """Resolve a reference to an image: bytes, a pathlib.Path, or an image that is already decoded.

        Raises:
            RecordError: the value is not a reference, or the image cannot or may not be read.
            ServiceError: raised by the resolver, and not an error of the record.
        """
        if isinstance(reference, Mapping):
            data, reference = reference.get("bytes"), reference.get("path")
            if data is not None:
                return _bytes(f"{name}.bytes", data)
            if reference is None:
                raise RecordError(f"{name}: got neither bytes nor path, want one of them")
            name = f"{name}.path"
            if not isinstance(reference, str):
                raise RecordError(f"{name}: got {describe(reference)}, want text")
        if not isinstance(reference, str | os.PathLike):
            return _image(name, reference, "a URL, a path, the bytes of a file, or a struct of bytes and path")
        text = os.fsdecode(reference)
        if text[:5].lower() == "data:":
            try:
                return _bytes(name, read_data_url(name, text))
            except InvalidInputError as error:
                raise RecordError(str(error)) from error
        if self.resolver is not None:
            answer = called(name, f"the resolver for {describe(text)}", self.resolver, text, "an image")
            if answer is not None:
                return _image(name, answer, "an image or None", " from the resolver")
        return self._file(name, text)

    def _file(self, name: str, text: str) -> Path:
        """Return the path of a file inside the base."""
        if _URL.match(text):
            raise RecordError(f"{name}: got the URL {describe(text)}, want Images(resolver=…); no URL is fetched")
        got = f"{name}: got the path {describe(text)}"
        if self.base is None:
            want = "Images(base=…), Images(resolver=…) or --images-from; paths are not read by default"
            raise RecordError(f"{got}, want {want}")
        try:
            path = Path(self.base, text).resolve()
            inside, readable = path.is_relative_to(self.base), path.is_file()
        except (OSError, RuntimeError, ValueError) as error:  # too long, a link loop, or a null byte
            raise RecordError(f"{got}, want a file inside {self.base} ({error})") from error
        if not (inside and readable):
            want = "file that exists" if inside else "path that stays"
            raise RecordError(f"{got}, want a {want} inside {self.base}")
        return path


def _bytes(name: str, value: object, origin: str = "") -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview) or not value:
        raise RecordError(f"{name}: got {describe(value)}{origin}, want the bytes of a file")
    return bytes(value)


def _image(name: str, value: object, want: str, origin: str = "") -> object:
    """Return the value in a form that SequenceBuilder accepts."""
    if isinstance(value, bytes | bytearray | memoryview):
        return _bytes(name, value)
    if is_of("torch", "Tensor", value):
        return _levels(name, value)
    if isinstance(value, os.PathLike | ImageSize | Grid) or is_of("PIL.Image", "Image", value):
        return value
    if not (isinstance(value, np.ndarray) and value.ndim >= 2):
        raise RecordError(f"{name}: got {describe(value)}{origin}, want {want}")
    return value


def _levels(name: str, tensor: Any) -> object:
    """Convert floats from 0 to 1 to uint8, to exactly the levels that a decoder divided by 255."""
    if tensor.ndim < 2 or tensor.numel() == 0:
        raise RecordError(f"{name}: got a tensor of shape {tuple(tensor.shape)}, want an image")
    if not tensor.is_floating_point():
        return tensor
    low, high = float(tensor.min()), float(tensor.max())
    if not (low >= 0 and high <= 1):
        raise RecordError(f"{name}: got a float tensor from {low:g} to {high:g}, want 0 to 1, or uint8")
    return (tensor * 255).round().to(sys.modules["torch"].uint8)
