"""Resolve image references in records: bytes, data URLs, paths inside a folder, and URLs fetched by a callable."""

from __future__ import annotations

import os
import re
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmpos.data.examples import RecordError
from mmpos.errors import InvalidInputError, ServiceError
from mmpos.images import ImageSize
from mmpos.images.decode import is_of, read_data_url
from mmpos.segments.kinds import Grid
from mmpos.support.files import local_path

__all__ = ["REFERENCE", "Images", "describe"]

REFERENCE = "a URL, a path, the bytes of a file, or a struct of bytes and path"
"""Description of valid image references for error messages."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


@dataclass(frozen=True)
class Images:
    """Sources of the images that records refer to. The defaults read no files and fetch no URLs.

    A reference is the bytes of a file, a struct of bytes and path (bytes take precedence), a ``data:`` URL, or a name,
    which is any other text. Decoded images (Pillow images, arrays, tensors; float tensors from 0 to 1) are accepted as
    well.

    Args:
        base: folder that paths are relative to. Relative and absolute paths must lead to a file inside it once all
            ``..`` and links are resolved. None refuses every path, so that records cannot choose files to read.
        resolver: called first with every name, including URLs; returns an image that SequenceBuilder accepts (the bytes
            of a file, a pathlib.Path to any location, a Pillow image, an array, an ImageSize …), or None for an unknown
            name. Its exceptions become RecordErrors.
        fetcher: called with http and https URLs that the resolver does not know; returns the bytes of the file.

    Raises:
        InvalidInputError: base is a URL or not a path, or resolver or fetcher is not callable.
    """

    base: str | os.PathLike[str] | None = None
    resolver: Callable[[str], object] | None = None
    fetcher: Callable[[str], bytes] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.base, str | os.PathLike | None):
            raise InvalidInputError(f"base: got {type(self.base).__name__}, want a folder or None")
        for name in ("resolver", "fetcher"):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise InvalidInputError(f"{name}: got {describe(getattr(self, name))}, want a callable or None")
        if self.base is not None:
            # Make the path absolute, since loader workers may run in another folder.
            object.__setattr__(self, "base", local_path("base", self.base).resolve())

    def resolve(self, name: str, reference: object, want: str = REFERENCE) -> object:
        """Resolve a reference to an image: bytes, a pathlib.Path, or an image that is already decoded.

        Raises:
            RecordError: the value is not a reference, or the image cannot or may not be read.
            ServiceError: raised by the resolver or the fetcher, and not an error of the record.
        """
        if isinstance(reference, Mapping):
            return self._struct(name, reference)
        if isinstance(reference, str | os.PathLike):
            return self._named(name, os.fsdecode(reference))
        image = _image(name, reference)
        if image is None:
            raise RecordError(f"{name}: got {describe(reference)}, want {want}")
        return image

    def _struct(self, name: str, struct: Mapping[str, object]) -> object:
        data, path = struct.get("bytes"), struct.get("path")
        if data is None and path is None:
            raise RecordError(f"{name}: got neither bytes nor path, want one of them")
        if data is None:
            if not isinstance(path, str):
                raise RecordError(f"{name}.path: got {describe(path)}, want text")
            return self._named(f"{name}.path", path)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise RecordError(f"{name}.bytes: got {describe(data)}, want bytes")
        return _image(f"{name}.bytes", data)

    def _named(self, name: str, text: str) -> object:
        if text[:5].lower() == "data:":
            try:
                return _image(name, read_data_url(name, text))
            except InvalidInputError as error:
                raise RecordError(str(error)) from error
        if self.resolver is not None:
            answer = _call(name, "resolver", self.resolver, text)
            if answer is not None:
                image = _image(name, answer)
                if image is None:
                    raise RecordError(f"{name}: got {describe(answer)} from the resolver, want an image or None")
                return image
        scheme = _SCHEME.match(text)
        return self._file(name, text) if scheme is None else self._fetched(name, text, scheme[1].lower())

    def _fetched(self, name: str, url: str, scheme: str) -> bytes:
        if scheme not in ("http", "https"):
            raise RecordError(f"{name}: got the URL {describe(url)}, want http or https, or a resolver that knows it")
        if self.fetcher is None:
            raise RecordError(
                f"{name}: got the URL {describe(url)}, want Images(fetcher=…) or Images(resolver=…); "
                "URLs are not fetched by default"
            )
        data = _call(name, "fetcher", self.fetcher, url)
        if not isinstance(data, bytes | bytearray | memoryview) or not data:
            raise RecordError(f"{name}: got {describe(data)} from the fetcher, want the bytes of a file")
        return bytes(data)

    def _file(self, name: str, text: str) -> Path:
        got = f"{name}: got the path {describe(text)}"
        if self.base is None:
            raise RecordError(
                f"{got}, want Images(base=…), Images(resolver=…) or --images-from; paths are not read by default"
            )
        try:
            path = Path(self.base, text).resolve()
            inside, readable = path.is_relative_to(self.base), path.is_file()
        except (OSError, RuntimeError, ValueError) as error:  # too long, a link loop, or a null byte
            raise RecordError(f"{got}, want a file inside {self.base} ({error})") from error
        if not inside:
            raise RecordError(f"{got}, want a path that stays inside {self.base}")
        if not readable:
            raise RecordError(f"{got}, want a file that exists inside {self.base}")
        return path


def describe(value: object) -> str:
    """Describe a value for an error message, briefly even if it is large."""
    if value is None:
        return "nothing"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{memoryview(value).nbytes} bytes"
    if isinstance(value, str | int | float | list | tuple | dict):
        short = reprlib.Repr()
        short.maxstring, short.maxlevel = 80, 3
        try:
            shown = short.repr(value)
            return shown if len(shown) <= 120 else f"{shown[:119]}…"
        except ValueError:  # an integer with too many digits to convert
            pass
    return type(value).__name__


def _image(name: str, value: object) -> object:
    """Return the value in a form that SequenceBuilder accepts, or None if it is not an image."""
    if isinstance(value, bytes | bytearray | memoryview):
        if not value:
            raise RecordError(f"{name}: got 0 bytes, want the bytes of a file")
        return bytes(value)
    if is_of("torch", "Tensor", value):
        return _levels(name, value)
    if isinstance(value, os.PathLike | ImageSize | Grid) or is_of("PIL.Image", "Image", value):
        return value
    return value if isinstance(value, np.ndarray) and value.ndim >= 2 else None


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


def _call(name: str, role: str, function: Callable[[str], object], text: str) -> object:
    """Call the user's function with a name; convert its exceptions to record errors."""
    try:
        return function(text)
    except ServiceError:
        raise
    except Exception as error:
        got = f"{type(error).__name__} ({str(error)[:200]}) from the {role}"
        raise RecordError(f"{name}: got {got} for {describe(text)}, want an image") from error
