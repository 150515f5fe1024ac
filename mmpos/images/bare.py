"""Files stripped to what makes their pixels: Pillow warns of, and stumbles over, damage in the notes beside them."""

from __future__ import annotations

import io
import struct
import zlib

from mmpos.errors import InvalidInputError
from mmpos.images.headers import jpeg_segments, png_chunks, read_exactly

__all__ = ["bare_jpeg", "bare_png"]

# Application segments and comments, save the two that say how colours are stored: JFIF (0) and Adobe (14).
_JPEG_NOTES = {*range(0xE0, 0xF0), 0xFE} - {0xE0, 0xEE}
_PNG_ANCILLARY = 0x20  # this bit of the first letter is set where a chunk may be ignored


def bare_jpeg(data: bytes) -> bytes:
    """The JPEG without notes such as EXIF."""
    parts, scan = [b"\xff\xd8"], 0
    for marker, start, length in jpeg_segments(io.BytesIO(data)):
        if marker not in _JPEG_NOTES:
            parts += [b"\xff", bytes([marker]), data[start - 2 : start + length]]
        scan = start + length
    return b"".join([*parts, data[scan:]])


def bare_png(data: bytes) -> bytes:
    """The PNG without notes, every checksum tested: Pillow skips those of the pixels."""
    parts, file = [data[:8]], io.BytesIO(data)
    for kind, start, length in png_chunks(file):
        if kind[0] & _PNG_ANCILLARY and kind != b"tRNS":
            continue
        body, (checksum,) = read_exactly(file, length), struct.unpack(">I", read_exactly(file, 4))
        if zlib.crc32(body, zlib.crc32(kind)) != checksum:
            raise InvalidInputError(f"image: got a corrupt PNG, want its {kind!r} to match its checksum")
        parts.append(data[start - 8 : start + length + 4])
    return b"".join(parts)
