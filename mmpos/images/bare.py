"""Files stripped to what makes their pixels: Pillow warns of, and labours over, what lies beside them.

Chunks of pixels of a PNG become one, since Pillow reads each in Python.
"""

from __future__ import annotations

import zlib

from mmpos.errors import InvalidInputError
from mmpos.images.walk import EXIF, SCAN, letters, palette_bytes, walk

__all__ = ["bare_gif", "bare_jpeg", "bare_png"]


def bare_jpeg(data: bytes) -> bytes:
    """The JPEG without notes such as EXIF."""
    parts, end = [b"\xff\xd8"], 0
    for kind, start, length in walk(data, "JPEG").table.tolist():
        if kind != EXIF:
            parts.append(data[start - 4 : start + length])  # from the marker on
            end = start + length
        if kind == SCAN:
            break
    return b"".join([*parts, data[end:]])


def bare_png(data: bytes) -> bytes:
    """The PNG without notes, every checksum tested: Pillow skips those of the pixels."""
    parts, pixels = [data[:8]], letters(b"IDAT")
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
        parts += _chunk(b"IDAT", b"".join(run)) if run else []
        parts += _chunk(name, body)
        run = []
    return b"".join(parts)


def bare_gif(data: bytes) -> bytes:
    """The GIF without comments and extensions of applications, as far as its first frame."""
    parts = [data[: 13 + palette_bytes(data[10])]]
    *extensions, (_, frame, _) = walk(data, "GIF").table.tolist()
    parts += [data[start : start + length] for _, start, length in extensions]
    return b"".join([*parts, data[frame - 1 :]])


def _chunk(name: bytes, body: bytes) -> list[bytes]:
    return [len(body).to_bytes(4), name, body, zlib.crc32(body, zlib.crc32(name)).to_bytes(4)]
