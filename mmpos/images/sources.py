"""Where images come from: files, their bytes, Pillow images, arrays and tensors, behind one small interface."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.images.decode import Samples, decode, samples
from mmpos.images.exif import orient, orientation
from mmpos.images.guard import guarded
from mmpos.images.headers import HEAD_BYTES, Header, read_header
from mmpos.images.sizes import ImageSize

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["File", "Source", "open_source"]

_WANT = (
    "a path, the bytes of a file, a Pillow image, a numpy array (h, w[, 1 | 3 | 4]), "
    "a torch tensor ([1 | 3 | 4,] h, w) or an ImageSize"
)


class Source(Protocol):
    """An image that is open, but not decoded."""

    @property
    def size(self) -> ImageSize:
        """The size after orientation."""

    def read(self, backend: str) -> tuple[Samples, str]:
        """The upright samples (h, w, 1 | 3 | 4), uint8 or uint16 and maybe a view, and their content hash."""


@contextmanager
def open_source(image: Any) -> Iterator[Source]:
    """The image as a source, its header read and checked.

    Raises:
        InvalidInputError: not an image, or one that cannot be read.
    """
    if isinstance(image, bytes | bytearray | memoryview):
        data = bytes(image)
        yield File(read_header(data), lambda: data)
    elif isinstance(image, os.PathLike):
        with _opened(image) as file:
            header = read_header(file.read(HEAD_BYTES), file.read)
            yield File(header, lambda: _all_of(file))
    elif isinstance(image, np.ndarray):
        yield _Array(_checked(image, (np.uint8, np.uint16), channels_last=True))
    elif _is("PIL.Image", "Image", image):
        yield _Pillow(image)
    elif _is("torch", "Tensor", image):
        yield _Array(_from_torch(image))
    elif isinstance(image, str):
        raise InvalidInputError(f"image: got the text {image[:80]!r}, want pathlib.Path(...) for a file")
    else:
        raise InvalidInputError(f"image: got {type(image).__name__}, want {_WANT}")


@dataclass(frozen=True, slots=True)
class File:
    """An encoded image.

    Args:
        header: of it.
        data: gives all of its bytes.
    """

    header: Header
    data: Callable[[], bytes]

    @property
    def size(self) -> ImageSize:
        """The size after orientation."""
        return self.header.size

    def read(self, backend: str) -> tuple[Samples, str]:
        """The upright samples, and the hash of the file."""
        data = self.data()
        array = orient(decode(data, self.header, backend), self.header.orientation)
        return array, hashlib.sha256(data).hexdigest()


def _all_of(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read()


@dataclass(frozen=True, slots=True)
class _Array:
    array: Samples

    @property
    def size(self) -> ImageSize:
        return ImageSize(*self.array.shape[:2])

    def read(self, backend: str) -> tuple[Samples, str]:
        array = self.array.astype(self.array.dtype.newbyteorder("<"), copy=False)
        digest = _digest((array.dtype.name, array.shape), np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return array.reshape(*array.shape[:2], -1), digest


@dataclass(frozen=True, slots=True)
class _Pillow:
    image: Image

    @property
    def orientation(self) -> int:
        return orientation(self.image.info.get("exif", b""))

    @property
    def size(self) -> ImageSize:
        width, height = self.image.size
        return ImageSize(width, height) if self.orientation >= 5 else ImageSize(height, width)

    def read(self, backend: str) -> tuple[Samples, str]:
        image, turn = self.image, self.orientation
        with guarded("Pillow image"):
            array = orient(samples(image), turn)
            palette = image.getpalette() if image.palette else None
            header = (image.mode, self.size, turn, palette, image.info.get("transparency"))
            return array, _digest(header, image.tobytes())


def _digest(header: tuple[Any, ...], pixels: Any) -> str:
    digest = hashlib.sha256(repr(header).encode())
    digest.update(pixels)
    return digest.hexdigest()


@contextmanager
def _opened(path: os.PathLike[Any]) -> Iterator[BinaryIO]:
    """The file, open; where it cannot be opened or read on, the path is at fault."""
    try:
        if "\0" in os.fsdecode(path):
            raise OSError("no path holds a null byte")
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise InvalidInputError(f"image: got {os.fspath(path)!r}, want a file that can be read ({error})") from error


def _is(module: str, name: str, image: Any) -> bool:
    """Whether image is a module.name, without importing the module: who has one has imported it."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(image, kind)


def _from_torch(tensor: Any) -> Samples:
    """The tensor as an array, channels last, with the same memory."""
    if tensor.device.type != "cpu" or str(tensor.layout) != "torch.strided":
        raise InvalidInputError(f"image: got a tensor on {tensor.device}, {tensor.layout}, want it dense on the host")
    if str(tensor.dtype) != "torch.uint8":
        raise InvalidInputError(f"image: got a tensor of {tensor.dtype}, want torch.uint8")
    array = _checked(tensor.numpy(), (np.uint8,), channels_last=False)
    return array if array.ndim == 2 else np.moveaxis(array, 0, 2)


def _checked(array: npt.NDArray[Any], dtypes: tuple[Any, ...], *, channels_last: bool) -> Samples:
    channels = array.shape[-1 if channels_last else 0] if array.ndim == 3 else 1
    if array.ndim not in (2, 3) or channels not in (1, 3, 4):
        want = "(h, w) or (h, w, 1 | 3 | 4)" if channels_last else "(h, w) or (1 | 3 | 4, h, w)"
        video = "; mmpos.Video takes frames" if array.ndim == 4 else ""
        raise InvalidInputError(f"image: got shape {array.shape}, want {want}{video}")
    if array.dtype.newbyteorder("=") not in dtypes:
        raise InvalidInputError(f"image: got dtype {array.dtype}, want uint8 or uint16")
    return array
