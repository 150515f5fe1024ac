"""The parts of an image file, found without decoding any: by the extension where it was built, and the same in Python.

A hostile file may be nothing but parts. Both ways look at a bounded number of them, and at each byte once at most.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.support import native

__all__ = ["EXIF", "FORMATS", "FRAMES", "MOST_PARTS", "SCAN", "Parts", "in_python", "letters", "palette_bytes", "walk"]

FORMATS = ("JPEG", "PNG", "GIF", "WebP")

MOST_PARTS = 2**16
"""Segments, chunks or blocks that are looked at; a PNG of so many, 8 KiB each as libpng makes them, has 512 MiB."""

FRAMES, SCAN, EXIF = (*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0)), 0xDA, 0xE1
_END, _GRAPHIC_CONTROL = 0xD9, 0xF9
# Application segments and comments, save the two that say how colours are stored: JFIF (0) and Adobe (14).
_NOTES = {*range(0xE0, 0xF0), 0xFE} - {0xE0, 0xEE}
# A marker with a length, or the end: it may be padded with 0xff, and damaged writers leave bytes before it.
_MARKER = re.compile(rb"\xff([^\xff\x00\x01\xd0-\xd8])", re.DOTALL)
_PNG_ANCILLARY = 0x20  # this bit of the first letter is set where a chunk may be ignored

_WHOLE, _SHORT, _CROWDED, _CORRUPT = range(4)


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a file that matter, in order.

    Of a JPEG: segments up to its first scan, without notes but with the first Exif; then its further scans, if it is
    progressive or its first scan has not all components. Of a PNG: chunks that no reader may ignore, tRNS and eXIf. Of
    a GIF: graphic control extensions, from their first byte, and the first image descriptor. Of a WebP: the first
    chunk, and EXIF.

    Args:
        table: (n, 3) int64: kind (a marker, or four letters as a number), start and length of the body in the file; the
            body may reach over its end.
        short: whether the file ended before the walk did.
    """

    table: npt.NDArray[np.int64]
    short: bool

    def where(self, *kinds: int) -> list[tuple[int, int]]:
        """Start and length of the parts of these kinds."""
        rows = (self.table[:, :1] == kinds).any(axis=1)
        return [(start, length) for start, length in self.table[rows, 1:].tolist()]


def walk(data: bytes, kind: str) -> Parts:
    """Find the parts of a file.

    Args:
        data: the file, or its beginning.
        kind: one of FORMATS.

    Raises:
        InvalidInputError: it cannot be a file of this kind.
        LimitExceededError: more than MOST_PARTS.
    """
    core, number = native.core, FORMATS.index(kind)
    found = None if core is None else core.walk(data, number, MOST_PARTS)
    end, triples = in_python(data, number, MOST_PARTS) if found is None else found
    table = native.int64(triples).reshape(-1, 3)
    if end == _CROWDED:
        raise LimitExceededError(f"image: got a {kind} of more than {MOST_PARTS} parts, want at most so many")
    if end == _CORRUPT:
        raise InvalidInputError(_corrupt(kind, table))
    return Parts(table, end == _SHORT)


def letters(name: bytes) -> int:
    """The kind of a chunk of this name."""
    return int.from_bytes(name)


def _corrupt(kind: str, table: npt.NDArray[np.int64]) -> str:
    if kind == "JPEG":
        return "image: got a corrupt JPEG, want pixels before its end"
    if kind == "GIF":
        return "image: got a GIF with no frame, want at least one"
    name, start, _ = table[-1].tolist()
    return f"image: got a corrupt PNG with {name.to_bytes(4)!r} at byte {start - 8}, want IHDR first, once"


Found = tuple[int, list[tuple[int, int, int]]]


def in_python(data: bytes, number: int, most: int) -> tuple[int, bytes]:
    """What ``walk`` of the extension gives: how the walk ended, and the table as bytes."""
    end, parts = _WALKS[number](data, most)
    return end, np.array(parts, np.int64).tobytes()


def _jpeg(data: bytes, most: int) -> Found:
    parts: list[tuple[int, int, int]] = []
    position, steps, components = 2, 0, -1
    several = scanning = turned = False
    while found := _MARKER.search(data, position):
        marker, position, steps = found[1][0], found.end(), steps + 1
        if steps > most:
            return _CROWDED, parts
        if marker == _END:
            return _WHOLE if scanning else _CORRUPT, parts
        start = position + 2
        if start > len(data):
            return _SHORT, parts
        length = int.from_bytes(data[position:start]) - 2
        if length < 0:
            return _CORRUPT, parts
        position = start + length
        part = (marker, start, length)
        if marker == SCAN:
            parts.append(part)
            if start >= len(data):
                return _SHORT, parts
            if not several and not scanning and data[start] >= components:
                return _WHOLE, parts
            scanning = True
        elif scanning:
            continue
        elif marker in FRAMES:
            if start + 6 > len(data):
                return _SHORT, parts
            components, several = data[start + 5], marker & 3 == 2
            parts.append(part)
        elif marker not in _NOTES:
            parts.append(part)
        elif marker == EXIF and not turned and data.startswith(b"Exif\0\0", start):
            parts.append(part)
            turned = True
    return _SHORT, parts


def _png(data: bytes, most: int) -> Found:
    parts: list[tuple[int, int, int]] = []
    position, steps = 8, 0
    while position + 8 <= len(data):
        name, start, steps = data[position + 4 : position + 8], position + 8, steps + 1
        if steps > most:
            return _CROWDED, parts
        corrupt = (position == 8) != (name == b"IHDR")
        part = (letters(name), start, int.from_bytes(data[position : position + 4]))
        if corrupt or not name[0] & _PNG_ANCILLARY or name in (b"tRNS", b"eXIf"):
            parts.append(part)
        if corrupt or name == b"IEND":
            return _CORRUPT if corrupt else _WHOLE, parts
        position = start + part[2] + 4
    return _SHORT, parts


def _gif(data: bytes, most: int) -> Found:
    parts: list[tuple[int, int, int]] = []
    if len(data) < 13:
        return _SHORT, parts
    position, steps = 13 + palette_bytes(data[10]), 0
    while position < len(data):
        begin, kind, steps = position, data[position], steps + 1
        if steps > most:
            return _CROWDED, parts
        if kind == ord(","):
            parts.append((kind, position + 1, 8))
            return _WHOLE if position + 9 <= len(data) else _SHORT, parts
        if kind != ord("!"):
            return _CORRUPT, parts
        position, length = position + 2, 1
        while length:
            if position >= len(data):
                return _SHORT, parts
            steps += 1
            if steps > most:
                return _CROWDED, parts
            length = data[position]
            position += 1 + length
        if data[begin + 1] == _GRAPHIC_CONTROL:
            parts.append((_GRAPHIC_CONTROL, begin, position - begin))
    return _SHORT, parts


def palette_bytes(flags: int) -> int:
    """Bytes of the palette of a GIF with these flags."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _webp(data: bytes, most: int) -> Found:
    parts: list[tuple[int, int, int]] = []
    position, steps = 12, 0
    extended = data.startswith(b"VP8X", position)
    while position + 8 <= len(data):
        name, start, steps = data[position : position + 4], position + 8, steps + 1
        if steps > most:
            return _CROWDED, parts
        length = int.from_bytes(data[position + 4 : start], "little")
        if position == 12 or name == b"EXIF":
            parts.append((letters(name), start, length))
        if not extended or name == b"EXIF":
            return _WHOLE, parts
        position = start + length + length % 2  # chunks are padded to even lengths
    return _SHORT, parts


_WALKS: tuple[Callable[[bytes, int], Found], ...] = (_jpeg, _png, _gif, _webp)
