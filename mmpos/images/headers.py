"""Headers of JPEG, PNG, WebP and GIF files: what an image measures, how it lies, and what it costs to decode."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.images.exif import orientation
from mmpos.images.sizes import ImageSize
from mmpos.images.walk import EXIF, FRAMES, SCAN, Parts, letters, walk

__all__ = ["HEAD_BYTES", "MOST_SCANS", "Header", "read_header"]

HEAD_BYTES = 2**18
"""Bytes in which most files have their header; only of others, and of PNGs, the rest is looked at."""

MOST_SCANS = 100
"""Scans of a JPEG; encoders write ten or so, and each goes over all pixels again."""

_HEAVY = 48_000_000
"""Pixels of a plain JPEG, or bytes, that a core decodes in about half a second."""

_EXIF_BYTES = 2**16  # as in a JPEG: longer blocks are cut, which leaves the orientation at their start


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of its image before the pixels.

    Args:
        kind: JPEG, PNG, WebP or GIF.
        stored: the size before orientation.
        orientation: EXIF's 1 to 8.
        channels: components of a JPEG, colour type of a PNG, 0 of the others.
        depth: bits in a sample.
        scans: of a JPEG that is decoded in several, else 0.
    """

    kind: str
    stored: ImageSize
    orientation: int = 1
    channels: int = 0
    depth: int = 8
    scans: int = 0

    @property
    def size(self) -> ImageSize:
        """The size after orientation."""
        height, width = self.stored
        return ImageSize(width, height) if self.orientation >= 5 else self.stored

    @property
    def deep(self) -> bool:
        """Whether it is a PNG of colours of 16 bits, which Pillow decodes twice."""
        return self.kind == "PNG" and self.depth == 16 and self.channels > 0

    @property
    def decode_bytes(self) -> int:
        """Memory that it takes at most to decode and resize the image, the file aside.

        Source: measured for each kind, see docs/service.md.
        """
        per_pixel = {"JPEG": 9, "PNG": 12, "GIF": 9, "WebP": 18}[self.kind]
        if self.scans:
            per_pixel = max(per_pixel, 5 + 2 * self.channels)  # all coefficients at once
        return per_pixel * self.stored.height * self.stored.width

    def heavy(self, file_bytes: int) -> bool:
        """Whether decoding a file of so many bytes may take a core more than half a second or so, whatever is in it."""
        per_pixel = {"JPEG": 1 + self.scans / 20, "PNG": 7 if self.deep else 4, "GIF": 1.5, "WebP": 4.5}[self.kind]
        return per_pixel * self.stored.height * self.stored.width + file_bytes > _HEAVY


def read_header(head: bytes, rest: Callable[[], bytes] = bytes) -> Header:
    """The header of an encoded image.

    Args:
        head: the file, or its first HEAD_BYTES.
        rest: gives the bytes behind them, if they are needed.

    Raises:
        InvalidInputError: no image, or a corrupt one.
        LimitExceededError: more parts or scans than a file may have.
    """
    if not head:
        raise InvalidInputError("image: got an empty file, want a JPEG, PNG, WebP or GIF")
    for magic, kind, read in _FORMATS:
        if head.startswith(magic) and (kind != "WebP" or head[8:12] == b"WEBP"):
            parts = walk(head, kind)
            if parts.short and (more := rest()):
                head += more
                parts = walk(head, kind)
            return read(head, parts)
    raise InvalidInputError(f"image: got an unknown format starting with {head[:16]!r}, want a JPEG, PNG, WebP or GIF")


def _jpeg(data: bytes, parts: Parts) -> Header:
    frames, scans = parts.where(*FRAMES), parts.where(SCAN)
    if not scans:
        raise _truncated()
    if not frames:
        raise InvalidInputError("image: got a corrupt JPEG, want a frame header before the pixels")
    if len(scans) > MOST_SCANS:
        raise LimitExceededError(f"image: got a JPEG of {len(scans)} scans, want <= {MOST_SCANS}")
    start, _ = frames[-1]
    depth, height, width, channels = struct.unpack_from(">BHHB", data, start)
    # The marker stands before the length: 2, 6, 10 and 14 are progressive. Or the first scan has not all components.
    several = data[start - 3] & 3 == 2 or data[scans[0][0] : scans[0][0] + 1] < bytes([channels])
    size, turn = ImageSize(height, width), _turn(data, parts, EXIF)
    return Header("JPEG", size, turn, channels, depth, len(scans) if several else 0)


def _png(data: bytes, parts: Parts) -> Header:
    if parts.short or len(data) < 26:
        raise _truncated()
    width, height, depth, colour = struct.unpack_from(">IIBB", data, 16)
    # Allowed on either side of the pixels, so the walk goes to the end; the last one counts.
    return Header("PNG", ImageSize(height, width), _turn(data, parts, letters(b"eXIf"), last=True), colour, depth)


def _webp(data: bytes, parts: Parts) -> Header:
    if len(data) < 30:
        raise _truncated()
    kind, body = data[12:16], data[20:30]
    if kind == b"VP8X":
        width, height = int.from_bytes(body[4:7], "little") + 1, int.from_bytes(body[7:10], "little") + 1
        return Header("WebP", ImageSize(height, width), _turn(data, parts, letters(b"EXIF")))
    if kind == b"VP8L" and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return Header("WebP", ImageSize((bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1))
    if kind == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", body, 6)
        return Header("WebP", ImageSize(height & 0x3FFF, width & 0x3FFF))
    raise InvalidInputError(f"image: got a corrupt WebP starting with {kind!r}, want VP8, VP8L or VP8X")


def _gif(data: bytes, parts: Parts) -> Header:
    """The canvas, or more where the first frame reaches over it."""
    if parts.short:
        raise _truncated()
    width, height = struct.unpack_from("<HH", data, 6)
    left, top, columns, rows = struct.unpack_from("<HHHH", data, parts.where(ord(","))[0][0])
    return Header("GIF", ImageSize(max(height, top + rows), max(width, left + columns)))


_FORMATS: tuple[tuple[bytes | tuple[bytes, ...], str, Callable[[bytes, Parts], Header]], ...] = (
    (b"\xff\xd8\xff", "JPEG", _jpeg),
    (b"\x89PNG\r\n\x1a\n", "PNG", _png),
    (b"RIFF", "WebP", _webp),
    ((b"GIF87a", b"GIF89a"), "GIF", _gif),
)


def _turn(data: bytes, parts: Parts, kind: int, *, last: bool = False) -> int:
    """The orientation in the first or last block of this kind."""
    blocks = parts.where(kind)
    if not blocks:
        return 1
    start, length = blocks[-1 if last else 0]
    length = min(length, _EXIF_BYTES)
    if start + length > len(data):
        raise _truncated()
    return orientation(data[start : start + length])


def _truncated() -> InvalidInputError:
    return InvalidInputError("image: got a truncated file, want a whole one")
