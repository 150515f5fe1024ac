"""Open and decode images: files, their bytes, Pillow images, arrays and tensors to samples, and samples to RGB pixels.

Pillow and torchvision decode and resize, each imported when first needed. Pillow warns of, and labours over, what lies
beside the pixels of a file, so it gets files stripped of that.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError, MmposError
from mmpos.images.headers import (
    EXIF,
    HEAD_BYTES,
    SCAN,
    Header,
    ImageSize,
    letters,
    orient,
    orientation,
    palette_bytes,
    read_header,
    walk,
)
from mmpos.support.checks import Array
from mmpos.support.extras import needed_for

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile
    from torch import Tensor

__all__ = [
    "BACKENDS",
    "File",
    "Source",
    "bare_gif",
    "bare_jpeg",
    "bare_png",
    "decode",
    "decode_jpeg",
    "guarded",
    "open_source",
    "pillow",
    "resize",
    "samples",
    "to_rgb",
]

Samples = Array  # (h, w, 1 | 3 | 4), uint8 or uint16
Pixels = npt.NDArray[np.uint8]  # (h, w, 3)

BACKENDS = ("torchvision", "pillow")

_STRIP_PIXELS = 2**17

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
        """Read the upright samples (h, w, 1 | 3 | 4), uint8 or uint16 and maybe a view, and their content hash."""


@contextmanager
def open_source(image: object) -> Iterator[Source]:
    """Open an image, reading and checking its header only.

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
        yield _Pillow(cast("Image", image))
    elif _is("torch", "Tensor", image):
        yield _Array(_from_torch(cast("Tensor", image)))
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
        """Decode the upright samples, and hash the file."""
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
        digest = _digest((array.dtype.name, array.shape), np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
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


def _digest(header: tuple[object, ...], pixels: bytes | memoryview) -> str:
    digest = hashlib.sha256(repr(header).encode())
    digest.update(pixels)
    return digest.hexdigest()


@contextmanager
def _opened(path: os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file; where it cannot be opened or read on, the error names the path."""
    try:
        if "\0" in os.fsdecode(path):
            raise OSError("no path holds a null byte")
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise InvalidInputError(f"image: got {os.fspath(path)!r}, want a file that can be read ({error})") from error


def _is(module: str, name: str, image: object) -> bool:
    """Check whether image is a module.name, without importing the module: a caller who has one has imported it."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(image, kind)


def _from_torch(tensor: Tensor) -> Samples:
    """Turn a tensor into an array, channels last, with the same memory."""
    if tensor.device.type != "cpu" or str(tensor.layout) != "torch.strided":
        raise InvalidInputError(f"image: got a tensor on {tensor.device}, {tensor.layout}, want it dense on the host")
    if str(tensor.dtype) != "torch.uint8":
        raise InvalidInputError(f"image: got a tensor of {tensor.dtype}, want torch.uint8")
    array = _checked(tensor.numpy(), (np.uint8,), channels_last=False)
    return array if array.ndim == 2 else np.moveaxis(array, 0, 2)


def _checked(array: Array, dtypes: tuple[type[np.generic], ...], *, channels_last: bool) -> Samples:
    channels = array.shape[-1 if channels_last else 0] if array.ndim == 3 else 1
    if array.ndim not in (2, 3) or channels not in (1, 3, 4):
        want = "(h, w) or (h, w, 1 | 3 | 4)" if channels_last else "(h, w) or (1 | 3 | 4, h, w)"
        video = "; mmpos.Video takes frames" if array.ndim == 4 else ""
        raise InvalidInputError(f"image: got shape {array.shape}, want {want}{video}")
    if array.dtype.newbyteorder("=") not in dtypes:
        raise InvalidInputError(f"image: got dtype {array.dtype}, want uint8 or uint16")
    return array


def decode(data: bytes, header: Header, backend: str) -> Samples:
    """Decode the samples of a file as stored, before orientation.

    Args:
        data: the file.
        header: as `read_header` gives it.
        backend: torchvision decodes gray and RGB JPEGs that are not heavy; Pillow decodes everything else, without
            loss but for colours of 16 bits, which are rounded.

    Returns:
        A new array (h, w, 1 | 3 | 4), uint8 or uint16.

    Raises:
        InvalidInputError: the file is truncated or corrupt.
    """
    with guarded(f"{header.kind} file"):
        if (
            backend == "torchvision"
            and header.kind == "JPEG"
            and header.channels in (1, 3)
            and not header.heavy(len(data))
        ):
            array: Samples = decode_jpeg(data)
        elif header.deep:
            array = _deep_png(bare_png(data), header.stored, header.channels)
        else:
            array = samples(_open(data, header))
    if array.shape[:2] != tuple(header.stored):
        raise InvalidInputError(f"image: got {array.shape[:2]} pixels, want {tuple(header.stored)} as in its header")
    return array


def samples(image: Image) -> Samples:
    """Read the samples of a Pillow image: uint16 of 16-bit gray, RGBA where some may be transparent, else RGB."""
    if image.mode.startswith("I;16"):
        gray = np.asarray(image).astype(np.uint16, copy=False)[..., None]  # Pillow itself would clip it to 255
        return _keyed(gray, image.info.get("transparency"))
    if image.mode in ("I", "F"):
        raise InvalidInputError(f"image: got a Pillow image of mode {image.mode!r}, want samples of 8 or 16 bits")
    mode = "RGBA" if image.has_transparency_data else "RGB"
    image.load()  # which may change the size, as of icons
    array = np.empty((image.height, image.width, len(mode)), np.uint8)
    for rows, strip in _strips(image):
        array[rows] = np.asarray(strip if strip.mode == mode else strip.convert(mode))
    return array


def to_rgb(
    array: Samples, background: tuple[int, ...], out: npt.NDArray[np.uint8] | None = None
) -> npt.NDArray[np.uint8]:
    """Turn samples into RGB pixels (h, w, 3): rounded to 8 bits, over the background by alpha, gray repeated.

    Returns:
        out, filled; without one a new array, or a view where nothing is to be computed.
    """
    height, width, channels = array.shape
    if out is None and array.dtype == np.uint8 and channels != 4:
        return array if channels == 3 else np.broadcast_to(array, (height, width, 3))
    pixels = np.empty((height, width, 3), np.uint8) if out is None else out
    ground = np.array(background, np.uint16)
    for rows in _rows(height, width):
        strip = array[rows]
        if strip.dtype != np.uint8:
            strip = _eight(strip)
        if channels == 4:
            alpha = strip[..., 3:].astype(np.uint16)
            strip = (strip[..., :3] * alpha + ground * (255 - alpha) + 127) // 255
        pixels[rows] = strip
    return pixels


def _rows(height: int, width: int) -> Iterator[slice]:
    """Yield the rows of an image in strips, so that temporaries stay in the cache."""
    step = max(1, _STRIP_PIXELS // width)
    return (slice(top, min(top + step, height)) for top in range(0, height, step))


def _strips(image: Image) -> Iterator[tuple[slice, Image]]:
    """Yield an image in strips, each with its rows."""
    for rows in _rows(image.height, image.width):
        whole = rows.stop - rows.start == image.height
        yield rows, image if whole else image.crop((0, rows.start, image.width, rows.stop))


def _open(data: bytes, header: Header) -> ImageFile:
    """Open a file by the Pillow plugin of its format: PIL.Image.open would guess, and check a limit of its own."""
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


def _deep_png(data: bytes, size: ImageSize, colour: int) -> Samples:
    """Decode a 16-bit colour PNG, rounded to 8 bits: Pillow gives the high bytes of samples only.

    With the layout of swapped bytes it gives the low ones. Gray with alpha has four bytes a pixel, just like RGBA.
    """
    from PIL.PngImagePlugin import PngImageFile

    def read(layout: str) -> Image:
        image = PngImageFile(io.BytesIO(data))
        image.tile = [tile._replace(args=layout) for tile in image.tile]
        image.load()
        return image

    if colour == 4:
        array = np.empty((*size, 4), np.uint8)
        for rows, strip in _strips(read("RGBA")):
            pairs = np.asarray(strip).astype(np.uint16)
            array[rows] = _eight(pairs[..., ::2] << 8 | pairs[..., 1::2])[..., [0, 0, 0, 1]]
        return array
    mode, key = "RGBA" if colour == 6 else "RGB", PngImageFile(io.BytesIO(data)).info.get("transparency")
    array = np.empty((*size, len(mode) if key is None else 4), np.uint8)
    colours = array[..., : len(mode)]
    # One image after the other, as each has four bytes a pixel; the high bytes wait where the samples go.
    for rows, strip in _strips(read(f"{mode};16B")):
        colours[rows] = np.asarray(strip)
    for rows, strip in _strips(read(f"{mode};16L")):
        array[rows] = _eight(_keyed(colours[rows].astype(np.uint16) << 8 | np.asarray(strip), key))
    return array


def _eight(deep: Samples) -> npt.NDArray[np.uint8]:
    """Round samples of 16 bits to 8: v * 255 / 65535."""
    return ((deep.astype(np.uint32) + 128) // 257).astype(np.uint8)


def _keyed(array: Samples, key: object) -> Samples:
    """Make one colour, the key, transparent in RGBA; gives the array itself where there is no key."""
    if key is None:
        return array
    height, width, _ = array.shape
    rgba = np.empty((height, width, 4), np.uint16)
    for rows in _rows(height, width):
        rgba[rows, :, :3] = array[rows]
        rgba[rows, :, 3] = np.any(array[rows] != np.array(key, np.uint16), axis=2) * np.uint16(65535)
    return rgba


def bare_jpeg(data: bytes) -> bytes:
    """Strip a JPEG of notes such as EXIF."""
    pieces, end = [b"\xff\xd8"], 0
    for kind, start, length in walk(data, "JPEG").table.tolist():
        if kind != EXIF:
            pieces.append(data[start - 4 : start + length])  # from the marker on
            end = start + length
        if kind == SCAN:
            break
    return b"".join([*pieces, data[end:]])


def bare_png(data: bytes) -> bytes:
    """Strip a PNG of notes, and test every checksum: Pillow skips those of the pixels.

    Chunks of pixels become one, since Pillow reads each in Python.
    """
    pieces, pixels = [data[:8]], letters(b"IDAT")
    run: list[bytes] = []
    for kind, start, length in walk(data, "PNG").table.tolist():
        name, body, after = data[start - 4 : start], data[start : start + length], start + length
        if after + 4 > len(data):
            raise InvalidInputError("image: got a truncated file, want a whole one")
        if kind == letters(b"eXIf"):
            continue
        if zlib.crc32(body, zlib.crc32(name)) != int.from_bytes(data[after : after + 4]):
            raise InvalidInputError(f"image: got a corrupt PNG, want its {name!r} to match its checksum")
        if kind == pixels:
            run.append(body)
            continue
        pieces += _chunk(b"IDAT", b"".join(run)) if run else []
        pieces += _chunk(name, body)
        run = []
    return b"".join(pieces)


def bare_gif(data: bytes) -> bytes:
    """Strip a GIF of comments and extensions of applications, up to its first frame."""
    pieces = [data[: 13 + palette_bytes(data[10])]]
    *extensions, (_, frame, _) = walk(data, "GIF").table.tolist()
    pieces += [data[start : start + length] for _, start, length in extensions]
    return b"".join([*pieces, data[frame - 1 :]])


def _chunk(name: bytes, body: bytes) -> list[bytes]:
    return [len(body).to_bytes(4), name, body, zlib.crc32(body, zlib.crc32(name)).to_bytes(4)]


def pillow() -> ModuleType:
    """Import PIL.Image."""
    with needed_for("images", extra="pillow"):
        from PIL import Image
    return Image


def torchvision() -> tuple[ModuleType, ModuleType]:
    """Import torch and torchvision.transforms.v2.functional."""
    with needed_for('backend="torchvision" (backend="pillow" works without torch)', extra="all"):
        import torch
        import torchvision.io  # noqa: F401 (registers decode_jpeg)
        from torchvision.transforms.v2 import functional
    return torch, functional


def decode_jpeg(data: bytes) -> Pixels:
    """Decode a gray or RGB JPEG to pixels (h, w, 3) by torchvision, without EXIF orientation."""
    torch, _ = torchvision()
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)  # a copy, as torch warns of read-only bytes
    # The operator behind torchvision.io.decode_jpeg, which warns of its deprecation from 0.29 on; 3 is RGB.
    planes = torch.ops.image.decode_jpeg(encoded, 3, False)
    pixels: Pixels = planes.permute(1, 2, 0).numpy()  # its strides are those of rows of RGB: no copy
    return pixels


def resize(pixels: Pixels, height: int, width: int, backend: str) -> Pixels:
    """Resize pixels (h, w, 3), bicubic with antialiasing; gives the same array where the size is right."""
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


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Have Pillow refuse truncated files in this block, and turn errors of any decoder into errors of mmpos.

    Any exception is the file's fault: decoders raise OSError, SyntaxError, ValueError, struct.error and more over it.
    """
    image_module = pillow()
    try:
        with _whole_images:
            yield
    except (MmposError, ImportError, MemoryError):
        raise
    except (image_module.DecompressionBombError, image_module.DecompressionBombWarning) as error:
        raise LimitExceededError(f"image: got a {what} over Pillow's own limit ({error})") from error
    except Exception as error:
        raise InvalidInputError(f"image: got a truncated or corrupt {what}, want a whole one ({error})") from error


class _WholeImages:
    """Turns PIL.ImageFile.LOAD_TRUNCATED_IMAGES off while a thread is inside: it would let half-grey images pass.

    Pillow has this one global switch only, so the first thread in turns it off and the last one out restores it.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, False

    def __enter__(self) -> None:
        from PIL import ImageFile

        with self._lock:
            if not self._inside:
                self._before = ImageFile.LOAD_TRUNCATED_IMAGES
                ImageFile.LOAD_TRUNCATED_IMAGES = False
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        from PIL import ImageFile

        with self._lock:
            self._inside -= 1
            if not self._inside:
                ImageFile.LOAD_TRUNCATED_IMAGES = self._before


_whole_images = _WholeImages()
