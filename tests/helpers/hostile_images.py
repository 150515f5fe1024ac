"""Image files, some of which cost far more to decode than to send."""

from __future__ import annotations

import io
import struct
import zlib
from functools import lru_cache

from PIL import Image


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    """Encode an image in this file format."""
    target = io.BytesIO()
    image.save(target, kind, **options)
    return target.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    """Encode a PNG chunk."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def padded_jpeg(padding: int) -> bytes:
    """Encode an 8 x 8 pixel JPEG with ``padding`` bytes of padding before a marker."""
    data = encoded(Image.new("RGB", (8, 8), "red"), "JPEG")
    return data[:2] + b"\xff" * padding + data[2:]


def jpeg_of_notes(count: int) -> bytes:
    """Encode an 8 x 8 pixel JPEG with ``count`` empty comments."""
    data = encoded(Image.new("RGB", (8, 8), "red"), "JPEG")
    return data[:2] + b"\xff\xfe\0\2" * count + data[2:]


def gif_of_blocks(count: int) -> bytes:
    """Encode an 8 x 8 pixel GIF whose comment consists of ``count`` blocks of one byte."""
    data = encoded(Image.new("P", (8, 8), 1), "GIF")
    frame = data.index(b",", 13 + 3 * 256 if data[10] & 7 == 7 else 13 + (3 << (data[10] & 7) + 1))
    return data[:frame] + b"!\xfe" + b"\1x" * count + b"\0" + data[frame:]


def png_of_chunks(count: int, kind: bytes = b"teSt") -> bytes:
    """Encode an 8 x 8 pixel PNG with ``count`` empty chunks before the pixel data."""
    data = encoded(Image.new("RGB", (8, 8), "red"), "PNG")
    return data[:33] + chunk(kind, b"") * count + data[33:]


def webp_of_chunks(count: int) -> bytes:
    """Encode an 8 x 8 pixel WebP with ``count`` empty chunks."""
    exif = Image.Exif()
    exif[0x0112] = 1
    data = encoded(Image.new("RGB", (8, 8), "red"), "WEBP", lossless=True, exif=exif)
    assert data[12:16] == b"VP8X"
    size = (len(data) - 8 + 8 * count).to_bytes(4, "little")
    return data[:4] + size + data[8:30] + b"teSt\0\0\0\0" * count + data[30:]


@lru_cache
def jpeg_of_scans(count: int) -> bytes:
    """Encode a progressive 8 x 8 pixel JPEG with ``count`` scans by repeating the last scan."""
    data = encoded(Image.new("RGB", (8, 8), (200, 100, 50)), "JPEG", progressive=True, subsampling=0)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * (count - data.count(b"\xff\xda")) + data[-2:]


@lru_cache
def deep_png(side: int) -> bytes:
    """Encode ``side`` x ``side`` black pixels with four 16-bit channels as a PNG about a thousandth of their size."""
    squeeze = zlib.compressobj(1)
    rows = b"".join(squeeze.compress(bytes(1 + 8 * side)) for _ in range(side)) + squeeze.flush()
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 16, 6, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
