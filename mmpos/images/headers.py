"""Headers of JPEG, PNG, WebP and GIF files: what an image measures and how it lies, with no pixel decoded."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from mmpos.errors import InvalidInputError
from mmpos.images.exif import orientation
from mmpos.images.sizes import ImageSize

__all__ = ["Header", "jpeg_segments", "png_chunks", "read_exactly", "read_header"]

_END, _START_OF_SCAN, _APP1 = 0xD9, 0xDA, 0xE1
_EXIF_BYTES = 2**16  # as in a JPEG: longer blocks are cut, which leaves the orientation at their start
_STANDALONE = {0x01, *range(0xD0, 0xD9)}
_START_OF_FRAME = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of its image before the pixels.

    Args:
        kind: JPEG, PNG, WebP or GIF.
        stored: the size before orientation.
        orientation: EXIF's 1 to 8.
        channels: components of a JPEG, colour type of a PNG, 0 of the others.
        depth: bits in a sample.
    """

    kind: str
    stored: ImageSize
    orientation: int = 1
    channels: int = 0
    depth: int = 8

    @property
    def size(self) -> ImageSize:
        """The size after orientation."""
        height, width = self.stored
        return ImageSize(width, height) if self.orientation >= 5 else self.stored


def read_header(file: BinaryIO) -> Header:
    """The header of an encoded image."""
    magic = file.read(16)
    if not magic:
        raise InvalidInputError("image: got an empty file, want a JPEG, PNG, WebP or GIF")
    if magic.startswith(b"\xff\xd8\xff"):
        return _jpeg(file)
    if magic.startswith(b"\x89PNG\r\n\x1a\n"):
        return _png(file)
    if magic.startswith(b"RIFF") and magic[8:12] == b"WEBP":
        return _webp(file)
    if magic.startswith((b"GIF87a", b"GIF89a")):
        return _gif(file)
    raise InvalidInputError(f"image: got an unknown format starting with {magic!r}, want a JPEG, PNG, WebP or GIF")


def read_exactly(file: BinaryIO, count: int) -> bytes:
    """Exactly count bytes, or an error where the file ends."""
    data = file.read(count)
    if len(data) < count:
        raise InvalidInputError("image: got a truncated file, want a whole one")
    return data


def jpeg_segments(file: BinaryIO) -> Iterator[tuple[int, int, int]]:
    """Marker, start and length of each segment of a JPEG up to the first scan; the file stands at its start."""
    position = 2
    marker = -1
    while marker != _START_OF_SCAN:
        file.seek(position)
        # Damaged writers leave bytes between segments, and any marker may be padded with 0xff.
        while read_exactly(file, 1) != b"\xff":
            pass
        while (marker := read_exactly(file, 1)[0]) == 0xFF:
            pass
        position = file.tell()
        if marker in _STANDALONE or marker == 0:
            continue
        (length,) = struct.unpack(">H", read_exactly(file, 2)) if marker != _END else (0,)
        if length < 2:
            raise InvalidInputError("image: got a corrupt JPEG, want pixels before its end")
        yield marker, position + 2, length - 2
        position += length


def png_chunks(file: BinaryIO) -> Iterator[tuple[bytes, int, int]]:
    """Kind, start and length of each chunk of a PNG up to its end; the file stands at its start."""
    position = 8
    kind = b""
    while kind != b"IEND":
        file.seek(position)
        length, kind = struct.unpack(">I4s", read_exactly(file, 8))
        if (position == 8) != (kind == b"IHDR"):
            raise InvalidInputError(f"image: got a corrupt PNG with {kind!r} at byte {position}, want IHDR first, once")
        yield kind, position + 8, length
        position += 12 + length


def _jpeg(file: BinaryIO) -> Header:
    frame, exif = None, None
    for marker, _, length in jpeg_segments(file):
        if marker in _START_OF_FRAME:
            frame = struct.unpack(">BHHB", read_exactly(file, 6))
        elif marker == _APP1 and exif is None:
            block = read_exactly(file, length)
            exif = block if block.startswith(b"Exif\0\0") else None
    if frame is None:
        raise InvalidInputError("image: got a corrupt JPEG, want a frame header before the pixels")
    depth, height, width, channels = frame
    return Header("JPEG", ImageSize(height, width), orientation(exif or b""), channels, depth)


def _png(file: BinaryIO) -> Header:
    header, exif = b"", b""
    for kind, _, length in png_chunks(file):
        if kind == b"IHDR":
            header = read_exactly(file, 10)
        elif kind == b"eXIf":  # allowed on either side of the pixels, so the walk goes to the end
            exif = read_exactly(file, min(length, _EXIF_BYTES))
    width, height, depth, colour = struct.unpack(">IIBB", header)
    return Header("PNG", ImageSize(height, width), orientation(exif), colour, depth)


def _webp(file: BinaryIO) -> Header:
    file.seek(12)
    kind, data = read_exactly(file, 4), read_exactly(file, 14)[4:]
    if kind == b"VP8X":
        width, height = int.from_bytes(data[4:7], "little") + 1, int.from_bytes(data[7:10], "little") + 1
        return Header("WebP", ImageSize(height, width), orientation(_webp_exif(file)))
    if kind == b"VP8L" and data[0] == 0x2F:
        bits = int.from_bytes(data[1:5], "little")
        return Header("WebP", ImageSize((bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1))
    if kind == b"VP8 " and data[3:6] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 6)
        return Header("WebP", ImageSize(height & 0x3FFF, width & 0x3FFF))
    raise InvalidInputError(f"image: got a corrupt WebP starting with {kind!r}, want VP8, VP8L or VP8X")


def _webp_exif(file: BinaryIO) -> bytes:
    position = 12
    while True:
        file.seek(position)
        chunk = file.read(8)
        if len(chunk) < 8:
            return b""
        kind, length = struct.unpack("<4sI", chunk)
        if kind == b"EXIF":
            return read_exactly(file, min(length, _EXIF_BYTES))
        position += 8 + length + length % 2  # chunks are padded to even lengths


def _gif(file: BinaryIO) -> Header:
    """The canvas, or more where the first frame reaches over it."""
    file.seek(6)
    width, height, flags = struct.unpack("<HHB", read_exactly(file, 5))
    file.seek(13 + _palette_bytes(flags))
    while (block := read_exactly(file, 1)) != b",":
        if block != b"!":
            raise InvalidInputError("image: got a GIF with no frame, want at least one")
        file.seek(1, 1)
        while length := read_exactly(file, 1)[0]:
            file.seek(length, 1)
    left, top, columns, rows = struct.unpack("<HHHH", read_exactly(file, 8))
    return Header("GIF", ImageSize(max(height, top + rows), max(width, left + columns)))


def _palette_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0
