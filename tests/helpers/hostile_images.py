"""Image files, and those that cost far more to read than to send."""

from __future__ import annotations

import io
import struct
import zlib
from functools import lru_cache

from PIL import Image


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    """Write an image as a file of this kind."""
    target = io.BytesIO()
    image.save(target, kind, **options)
    return target.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    """Write a chunk of a PNG."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def padded_jpeg(padding: int) -> bytes:
    """A JPEG of 8 x 8 pixels with so many bytes of padding before a marker."""
    data = encoded(Image.new("RGB", (8, 8), "red"), "JPEG")
    return data[:2] + b"\xff" * padding + data[2:]


def jpeg_of_notes(count: int) -> bytes:
    """A JPEG of 8 x 8 pixels with so many empty comments."""
    data = encoded(Image.new("RGB", (8, 8), "red"), "JPEG")
    return data[:2] + b"\xff\xfe\0\2" * count + data[2:]


def gif_of_blocks(count: int) -> bytes:
    """A GIF of 8 x 8 pixels with a comment in blocks of a byte each."""
    data = encoded(Image.new("P", (8, 8), 1), "GIF")
    frame = data.index(b",", 13 + 3 * 256 if data[10] & 7 == 7 else 13 + (3 << (data[10] & 7) + 1))
    return data[:frame] + b"!\xfe" + b"\1x" * count + b"\0" + data[frame:]


def png_of_chunks(count: int, kind: bytes = b"teSt") -> bytes:
    """A PNG of 8 x 8 pixels with so many empty chunks before those of the pixels."""
    data = encoded(Image.new("RGB", (8, 8), "red"), "PNG")
    return data[:33] + chunk(kind, b"") * count + data[33:]


def webp_of_chunks(count: int) -> bytes:
    """A WebP of 8 x 8 pixels with so many empty chunks."""
    exif = Image.Exif()
    exif[0x0112] = 1
    data = encoded(Image.new("RGB", (8, 8), "red"), "WEBP", lossless=True, exif=exif)
    assert data[12:16] == b"VP8X"
    size = (len(data) - 8 + 8 * count).to_bytes(4, "little")
    return data[:4] + size + data[8:30] + b"teSt\0\0\0\0" * count + data[30:]


@lru_cache
def jpeg_of_scans(count: int, side: int = 8) -> bytes:
    """A progressive JPEG of side x side pixels with so many scans, the last one over and over again."""
    data = encoded(Image.new("RGB", (side, side), (200, 100, 50)), "JPEG", progressive=True, subsampling=0)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * (count - data.count(b"\xff\xda")) + data[-2:]


@lru_cache
def deep_png(side: int) -> bytes:
    """A PNG of side x side black pixels of four times 16 bits, a thousand times smaller than they are."""
    squeeze = zlib.compressobj(1)
    rows = b"".join(squeeze.compress(bytes(1 + 8 * side)) for _ in range(side)) + squeeze.flush()
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 16, 6, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
