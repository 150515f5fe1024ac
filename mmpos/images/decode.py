"""Open images (files, bytes, Pillow images, arrays and tensors), decode them to samples, and convert these to RGB.

Pillow opens files, so that sizes can be read without decoding pixels. Either Pillow or torchvision decodes and resizes
images; each package is imported on first use.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, BinaryIO, Protocol, cast
from urllib.parse import unquote_to_bytes

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError, MmposError
from mmpos.support.checks import INT32_MAX, Array, integer
from mmpos.support.extras import needed_for

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile
    from torch import Tensor

__all__ = [
    "BACKENDS", "MOST_READS", "MOST_SCANS", "ImageSize", "Source", "decode_jpeg", "guarded", "is_of", "open_source",
    "pillow", "read_data_url", "resize", "samples", "to_rgb", "torchvision",
]  # fmt: skip

Samples = Array  # (h, w, 1 | 3 | 4), uint8 or uint16
Pixels = npt.NDArray[np.uint8]  # (h, w, 3)

BACKENDS = ("torchvision", "pillow")

MOST_READS = 2**14
"""Maximum number of reads before the pixels. Pillow reads each segment, chunk or block in Python; files have dozens."""

MOST_SCANS = 100
"""Maximum number of scans in a JPEG. Encoders write about ten; a decoder passes over all pixels once per scan."""

_FORMATS = ("JPEG", "PNG", "GIF", "WEBP")

_SIGNATURES = {b"\xff\xd8\xff": "JPEG", b"\x89PNG\r\n\x1a\n": "PNG", b"GIF8": "GIF"}
"""First bytes of the formats of which Pillow refuses a damaged header without a reason."""

_STRIP_PIXELS = 2**17

_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")

_WANT = (
    "a path, the bytes of a file, a Pillow image, a numpy array (h, w[, 1 | 3 | 4]), "
    "a torch tensor ([1 | 3 | 4,] h, w) or an ImageSize"
)


@dataclass(frozen=True, slots=True)
class ImageSize:
    """An image known only by its size; unpacks into (height, width).

    Args:
        height: rows of pixels, at least 1, after orientation.
        width: columns of pixels, at least 1, after orientation.
    """

    height: int
    width: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "height", integer("image.height", self.height, minimum=1, maximum=INT32_MAX))
        object.__setattr__(self, "width", integer("image.width", self.width, minimum=1, maximum=INT32_MAX))

    def __iter__(self) -> Iterator[int]:
        return iter((self.height, self.width))


class Source(Protocol):
    """An opened image that has not been decoded yet."""

    @property
    def size(self) -> ImageSize:
        """Image size after orientation."""

    def read(self, backend: str, least: tuple[int, int] | None = None) -> tuple[Samples, str]:
        """Return the upright samples (h, w, 1 | 3 | 4) as uint8 or uint16, possibly as a view, and the content hash.

        Args:
            backend: one of BACKENDS.
            least: smallest (height, width) to which a JPEG may be reduced while it is decoded; None decodes at full
                size.
        """


def read_data_url(name: str, url: str) -> bytes:
    """Decode an image in a data: URL (RFC 2397), percent-encoded or in base64.

    Args:
        name: name of the image in error messages.
        url: URL that begins with "data:" in upper or lower case.

    Raises:
        InvalidInputError: the URL is malformed or does not contain an image.
    """
    head, comma, payload = url[5:].partition(",")
    media, *parameters = head.split(";")
    got = f"{name}: got the data URL {url[:80]!r}"
    if not comma:
        raise InvalidInputError(f"{got}, want a comma before the data")
    if media and not media.lower().startswith("image/"):
        raise InvalidInputError(f"{got}, want an image/… media type")
    if not payload.isascii() or _BROKEN_ESCAPE.search(payload):
        raise InvalidInputError(f"{got}, want ASCII, and two hex digits after each %")
    data = unquote_to_bytes(payload)
    if not parameters or parameters[-1].lower() != "base64":
        return data
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise InvalidInputError(f"{got}, want base64 ({error})") from error


@contextmanager
def open_source(image: object) -> Iterator[Source]:
    """Open an image; only its header is read and checked.

    Raises:
        InvalidInputError: the argument is not an image or cannot be read.
        LimitExceededError: a file has more than MOST_READS pieces, or more pixels than Pillow accepts.
    """
    if isinstance(image, bytes | bytearray | memoryview):
        data = bytes(image)
        yield _open_file(io.BytesIO(data), lambda: data)
    elif isinstance(image, os.PathLike):
        with _opened(image) as file:
            yield _open_file(file, Path(image).read_bytes)
    elif isinstance(image, np.ndarray):
        yield _Array(_checked(image, (np.uint8, np.uint16), channels_last=True))
    elif is_of("PIL.Image", "Image", image):
        stored = getattr(image, "fp", None)  # the file of an image that Pillow has not decoded yet
        yield _Pillow(cast("Image", image), _orientation(cast("Image", image), stored and _Reader(stored)))
    elif is_of("torch", "Tensor", image):
        yield _Array(_from_torch(cast("Tensor", image)))
    elif isinstance(image, str):
        raise InvalidInputError(f"image: got the text {image[:80]!r}, want pathlib.Path(...) for a file")
    else:
        raise InvalidInputError(f"image: got {type(image).__name__}, want {_WANT}")


class _Reader:
    """A file for Pillow that limits the number of reads.

    Args:
        file: file to read.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._read, self.seek, self.tell = file.read, file.seek, file.tell
        self._left = MOST_READS

    def read(self, size: int = -1) -> bytes:
        """Read bytes. Ordinary files contain few segments, chunks or blocks; malicious files contain millions."""
        self._left -= 1
        if self._left < 0:
            raise LimitExceededError(f"image: got a file of over {MOST_READS} segments, chunks or blocks, want fewer")
        return self._read(size)

    def allow(self, pixels: int) -> None:
        """Allow reads for this many bytes of pixel data: encoders write chunks of 8 KiB, each read in three calls."""
        self._left += pixels // 1024


def _open_file(file: BinaryIO, data: Callable[[], bytes]) -> _File:
    """Open a file and read it up to its pixels; ``data`` returns the whole content."""
    reader, image_module = _Reader(file), pillow()
    with guarded("file"):
        try:
            image = image_module.open(cast("IO[bytes]", reader), formats=_FORMATS)
        except image_module.UnidentifiedImageError as error:
            file.seek(0)
            start = file.read(16)
            got = f"a file that starts with {start!r}" if start else "an empty file"
            for signature, kind in _SIGNATURES.items():
                if start.startswith(signature):
                    got = f"a {kind} with a damaged header, or with a width or height of 0"
            raise InvalidInputError(f"image: got {got}, want a whole JPEG, PNG, WebP or GIF") from error
        header, orientation = reader.tell(), _orientation(image, reader)
        return _File(image, reader, data, header, orientation, _upright(image.size, orientation))


@dataclass(frozen=True, slots=True)
class _File:
    """An opened image file.

    Args:
        image: image opened by Pillow.
        reader: reader for the file.
        data: function that returns all bytes of the file.
        header: number of bytes before the pixels, which Pillow has read.
        orientation: orientation in EXIF or XMP, 1 to 8.
        size: size after orientation.
    """

    image: ImageFile
    reader: _Reader
    data: Callable[[], bytes]
    header: int
    orientation: int
    size: ImageSize

    def read(self, backend: str, least: tuple[int, int] | None = None) -> tuple[Samples, str]:
        data, image = self.data(), self.image
        whole = image.size
        self.reader.allow(len(data))
        is_jpeg = image.format in ("JPEG", "MPO")  # MPO: a JPEG followed by other JPEGs
        if is_jpeg and (scans := self._count_scans(data)) > MOST_SCANS:
            raise LimitExceededError(f"image: got a JPEG with {scans} scans, want <= {MOST_SCANS}")
        if is_jpeg and least is not None:
            # Divide the size by 2, 4 or 8, but not below this size.
            image.draft(None, least if self.orientation >= 5 else least[::-1])
        width, height = image.size
        with guarded(f"{image.format} file"):
            if is_jpeg and backend == "torchvision" and image.mode in ("L", "RGB") and image.size == whole:
                array: Samples = decode_jpeg(data)
            else:
                if image.format == "PNG":
                    _fit_transparency(image, depth=data[24])
                array = samples(image)
        if array.shape[:2] != (height, width):
            raise InvalidInputError(f"image: got {array.shape[:2]} pixels, want {(height, width)} as in its header")
        return _orient(array, self.orientation), hashlib.sha256(data).hexdigest()

    def _count_scans(self, data: bytes) -> int:
        """Count the scans of a JPEG; most have a single scan with all components."""
        bands = len(self.image.getbands())
        start = b"\xff\xda" + (6 + 2 * bands).to_bytes(2) + bytes([bands])
        if "progressive" not in self.image.info and data.startswith(start, max(0, self.header - 8 - 2 * bands)):
            return 1
        return 1 + data.count(b"\xff\xda", self.header)


def _fit_transparency(image: ImageFile, *, depth: int) -> None:
    """Convert the transparent level or colour of a PNG to 8 bits, because Pillow converts only the samples."""
    key = image.info.get("transparency")
    if image.mode == "L" and isinstance(key, int):
        image.info["transparency"] = key * 255 // (2**depth - 1)
    elif image.mode == "RGB" and isinstance(key, tuple) and depth == 16:
        image.info["transparency"] = tuple(level >> 8 for level in key)


@dataclass(frozen=True, slots=True)
class _Array:
    array: Samples

    @property
    def size(self) -> ImageSize:
        return ImageSize(*self.array.shape[:2])

    def read(self, backend: str, least: tuple[int, int] | None = None) -> tuple[Samples, str]:
        array = self.array.astype(self.array.dtype.newbyteorder("<"), copy=False)
        digest = _digest((array.dtype.name, array.shape), np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return array.reshape(*array.shape[:2], -1), digest


@dataclass(frozen=True, slots=True)
class _Pillow:
    image: Image
    orientation: int

    @property
    def size(self) -> ImageSize:
        return _upright(self.image.size, self.orientation)

    def read(self, backend: str, least: tuple[int, int] | None = None) -> tuple[Samples, str]:
        image, size, turn = self.image, self.size, self.orientation
        with guarded("Pillow image"):
            array = _orient(samples(image), turn)
            palette = image.getpalette() if image.palette else None
            header = (image.mode, size, turn, palette, image.info.get("transparency"))
            return array, _digest(header, image.tobytes())


def _digest(header: tuple[object, ...], pixels: bytes | memoryview) -> str:
    digest = hashlib.sha256(repr(header).encode())
    digest.update(pixels)
    return digest.hexdigest()


def _orientation(image: Image, file: _Reader | None = None) -> int:
    """Read the orientation in EXIF or XMP, 1 to 8; return 1 if it is missing or damaged.

    ``file`` is the file of an image that has not been decoded, whose metadata after the pixels Pillow does not know.
    """
    try:
        if file is not None and image.format == "PNG":
            image = _with_late_chunks(image, file)
        orientation = pillow().Image.getexif(image).get(0x0112, 1)  # the method of the class of PNGs decodes pixels
    except LimitExceededError:
        raise
    except Exception:  # Pillow raises errors of various types for damaged data
        return 1
    return int(orientation) if orientation in range(1, 9) else 1


def _with_late_chunks(image: Image, file: _Reader) -> Image:
    """Return a PNG that has the same metadata before its pixels as ``image`` has before and after them."""
    place, at, kept = file.tell(), 8, [b"\x89PNG\r\n\x1a\n"]
    file.allow(file.seek(0, os.SEEK_END))
    while True:
        file.seek(at)
        head = file.read(8)
        length, kind = int.from_bytes(head[:4]), head[4:]
        if len(head) < 8 or kind == b"IEND":
            break
        if kind in (b"IHDR", b"eXIf", b"iTXt", b"tEXt", b"zTXt"):
            kept.append(head + file.read(length + 4))
        at += 12 + length
    file.seek(place)
    return pillow().open(io.BytesIO(b"".join([*kept, bytes(4), b"IDAT"]))) if len(kept) > 2 else image


def _upright(size: tuple[int, int], orientation: int) -> ImageSize:
    """Return the size that an image of size (width, height) has after orientation."""
    return ImageSize(*size) if orientation >= 5 else ImageSize(*size[::-1])


def _orient(pixels: Array, orientation: int) -> Array:
    """Return an upright view of pixels (h, w, c): orientations 5 to 8 swap the axes, and the others mirror them."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


@contextmanager
def _opened(path: os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file; errors raised while it is opened or read contain the path."""
    try:
        if "\0" in os.fsdecode(path):
            raise OSError("a path cannot contain a null byte")
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise InvalidInputError(f"image: got {os.fspath(path)!r}, want a file that can be read ({error})") from error


def is_of(module: str, name: str, image: object) -> bool:
    """Return whether an image is an instance of ``module.name``, without importing the module."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(image, kind)


def _from_torch(tensor: Tensor) -> Samples:
    """Return an array with channels last that shares the memory of a tensor."""
    if tensor.device.type != "cpu" or str(tensor.layout) != "torch.strided":
        raise InvalidInputError(
            f"image: got a tensor on {tensor.device}, {tensor.layout}, want a dense tensor on the host"
        )
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


def samples(image: Image) -> Samples:
    """Return the samples of a Pillow image: uint16 for 16-bit gray, RGBA if it may be transparent, otherwise RGB."""
    if image.mode.startswith("I;16"):
        gray = np.asarray(image).astype(np.uint16, copy=False)[..., None]  # Pillow would clip the samples to 255
        key = image.info.get("transparency")
        if key is None:
            return gray
        return np.concatenate([gray, gray, gray, (gray != key) * np.uint16(65535)], axis=2)
    if image.mode in ("I", "F"):
        raise InvalidInputError(f"image: got a Pillow image of mode {image.mode!r}, want 8-bit or 16-bit samples")
    mode = "RGBA" if image.has_transparency_data else "RGB"
    image.load()  # may change the size, for example if the file is an icon
    array = np.empty((image.height, image.width, len(mode)), np.uint8)
    for rows in _strips(image.height, image.width):
        whole = rows.stop - rows.start == image.height
        strip = image if whole else image.crop((0, rows.start, image.width, rows.stop))
        array[rows] = np.asarray(strip if strip.mode == mode else strip.convert(mode))
    return array


def to_rgb(array: Samples, background: tuple[int, ...]) -> Pixels:
    """Convert samples to RGB pixels (h, w, 3): round to 8 bits, blend alpha with the background, repeat gray.

    Returns:
        A new array, or a view if nothing needs computing.
    """
    height, width, channels = array.shape
    if array.dtype == np.uint8 and channels != 4:
        return array if channels == 3 else np.broadcast_to(array, (height, width, 3))
    pixels = np.empty((height, width, 3), np.uint8)
    ground = np.array(background, np.uint16)
    for rows in _strips(height, width):
        strip = array[rows]
        if strip.dtype != np.uint8:
            strip = ((strip.astype(np.uint32) + 128) // 257).astype(np.uint8)  # v * 255 / 65535, rounded
        if channels == 4:
            alpha = strip[..., 3:].astype(np.uint16)
            strip = (strip[..., :3] * alpha + ground * (255 - alpha) + 127) // 255
        pixels[rows] = strip
    return pixels


def _strips(height: int, width: int) -> Iterator[slice]:
    """Yield the rows of an image in strips, so that temporary arrays stay in the cache."""
    step = max(1, _STRIP_PIXELS // width)
    return (slice(top, min(top + step, height)) for top in range(0, height, step))


@cache
def pillow() -> ModuleType:
    """Import PIL.Image with the plugins of all supported formats."""
    with needed_for("images", extra="pillow"):
        from PIL import Image, WebPImagePlugin  # noqa: F401 (registers WebP; Pillow itself would import every format)
    return Image


@cache
def torchvision() -> tuple[ModuleType, ModuleType]:
    """Import torch and torchvision.transforms.v2.functional."""
    with needed_for('backend="torchvision" (backend="pillow" works without torch)', extra="all"):
        import torch
        import torchvision.io  # noqa: F401 (registers decode_jpeg)
        from torchvision.transforms.v2 import functional
    return torch, functional


def decode_jpeg(data: bytes) -> Pixels:
    """Decode a gray or RGB JPEG to pixels (h, w, 3) with torchvision, ignoring EXIF orientation."""
    torch, _ = torchvision()
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)  # a copy, because torch warns about read-only bytes
    # Call the operator behind torchvision.io.decode_jpeg, which raises a deprecation warning from 0.29 on; 3 is RGB.
    planes = torch.ops.image.decode_jpeg(encoded, 3, False)
    pixels: Pixels = planes.permute(1, 2, 0).numpy()  # already stored as rows of RGB, so this needs no copy
    return pixels


def resize(pixels: Pixels, height: int, width: int, backend: str) -> Pixels:
    """Resize pixels (h, w, 3) with antialiased bicubic interpolation; return the same array if the size is right."""
    if pixels.shape[:2] == (height, width):
        return pixels
    if backend == "pillow":
        image = pillow().fromarray(np.ascontiguousarray(pixels))
        return np.asarray(image.resize((width, height), pillow().Resampling.BICUBIC))
    torch, functional = torchvision()
    # torch does not support negative strides and warns about read-only memory.
    tensor = torch.from_numpy(np.require(pixels, requirements=["C", "W"])).permute(2, 0, 1)
    bicubic = functional.InterpolationMode.BICUBIC
    resized: Pixels = functional.resize(tensor, [height, width], bicubic, antialias=True).permute(1, 2, 0).numpy()
    return resized


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Convert decoder errors raised in the block to mmpos errors.

    Every exception is treated as a damaged file, since decoders raise OSError, SyntaxError, ValueError, struct.error
    and others.
    """
    try:
        yield
    except (MmposError, ImportError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, pillow().DecompressionBombError | pillow().DecompressionBombWarning):
            raise LimitExceededError(f"image: got a {what} above Pillow's own limit ({error})") from error
        # torchvision's errors contain paths of the machine that built it: "decode_jpeg, /…/decode_jpeg.cpp:171, …".
        reason = re.sub(r"^\w+, \S+:\d+, ", "", str(error)).partition("\n")[0]
        raise InvalidInputError(f"image: got a truncated or corrupt {what}, want a whole one ({reason})") from error
