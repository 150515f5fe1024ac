"""Read headers of JPEG, PNG, WebP and GIF files: an image's size and orientation, and its cost to decode.

The chunks of a file are found without decoding any, by the extension where it was built, and the same in Python. A
hostile file may be nothing but chunks: both look at a bounded number of them, and at each byte once at most.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.support import native
from mmpos.support.checks import INT32_MAX, Array, integer

__all__ = [
    "EXIF",
    "FORMATS",
    "FRAMES",
    "HEAD_BYTES",
    "MOST_CHUNKS",
    "MOST_SCANS",
    "SCAN",
    "Chunks",
    "Header",
    "ImageSize",
    "letters",
    "orient",
    "orientation",
    "palette_bytes",
    "read_header",
    "walk",
    "walk_in_python",
]


HEAD_BYTES = 2**18
"""Bytes in which most files have their header; only of others, and of PNGs, the rest is looked at."""

MOST_SCANS = 100
"""Scans of a JPEG; encoders write ten or so, and each goes over all pixels again."""

_HEAVY = 48_000_000
"""Pixels of a plain JPEG, or bytes, that a core decodes in about half a second."""

_EXIF_BYTES = 2**16  # as in a JPEG: longer blocks are cut, which leaves the orientation at their start


@dataclass(frozen=True, slots=True)
class ImageSize:
    """An image known only by its size; unpacks into (height, width).

    Args:
        height: rows of pixels, at least 1, after EXIF orientation.
        width: columns of pixels, at least 1, after EXIF orientation.
    """

    height: int
    width: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "height", integer("image.height", self.height, minimum=1, maximum=INT32_MAX))
        object.__setattr__(self, "width", integer("image.width", self.width, minimum=1, maximum=INT32_MAX))

    def __iter__(self) -> Iterator[int]:
        return iter((self.height, self.width))


@dataclass(frozen=True, slots=True)
class Header:
    """The header of an image file.

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
    """Read the header of an encoded image.

    Args:
        head: the file, or its first HEAD_BYTES.
        rest: gives the bytes behind them, if they are needed.

    Raises:
        InvalidInputError: no image, or a corrupt one.
        LimitExceededError: more chunks or scans than a file may have.
    """
    if not head:
        raise InvalidInputError("image: got an empty file, want a JPEG, PNG, WebP or GIF")
    for magic, kind, read in _FORMATS:
        if head.startswith(magic) and (kind != "WebP" or head[8:12] == b"WEBP"):
            chunks = walk(head, kind)
            if chunks.short and (more := rest()):
                head += more
                chunks = walk(head, kind)
            return read(head, chunks)
    raise InvalidInputError(f"image: got an unknown format starting with {head[:16]!r}, want a JPEG, PNG, WebP or GIF")


def _jpeg_header(data: bytes, chunks: Chunks) -> Header:
    frames, scans = chunks.where(*FRAMES), chunks.where(SCAN)
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
    size, turn = ImageSize(height, width), _turn(data, chunks, EXIF)
    return Header("JPEG", size, turn, channels, depth, len(scans) if several else 0)


def _png_header(data: bytes, chunks: Chunks) -> Header:
    if chunks.short or len(data) < 26:
        raise _truncated()
    width, height, depth, colour = struct.unpack_from(">IIBB", data, 16)
    # Allowed on either side of the pixels, so the walk goes to the end; the last one counts.
    return Header("PNG", ImageSize(height, width), _turn(data, chunks, letters(b"eXIf"), last=True), colour, depth)


def _webp_header(data: bytes, chunks: Chunks) -> Header:
    if len(data) < 30:
        raise _truncated()
    kind, body = data[12:16], data[20:30]
    if kind == b"VP8X":
        width, height = int.from_bytes(body[4:7], "little") + 1, int.from_bytes(body[7:10], "little") + 1
        return Header("WebP", ImageSize(height, width), _turn(data, chunks, letters(b"EXIF")))
    if kind == b"VP8L" and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return Header("WebP", ImageSize((bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1))
    if kind == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", body, 6)
        return Header("WebP", ImageSize(height & 0x3FFF, width & 0x3FFF))
    raise InvalidInputError(f"image: got a corrupt WebP starting with {kind!r}, want VP8, VP8L or VP8X")


def _gif_header(data: bytes, chunks: Chunks) -> Header:
    """Read the size of the canvas, or more where the first frame reaches over it."""
    if chunks.short:
        raise _truncated()
    width, height = struct.unpack_from("<HH", data, 6)
    left, top, columns, rows = struct.unpack_from("<HHHH", data, chunks.where(ord(","))[0][0])
    return Header("GIF", ImageSize(max(height, top + rows), max(width, left + columns)))


_FORMATS: tuple[tuple[bytes | tuple[bytes, ...], str, Callable[[bytes, Chunks], Header]], ...] = (
    (b"\xff\xd8\xff", "JPEG", _jpeg_header),
    (b"\x89PNG\r\n\x1a\n", "PNG", _png_header),
    (b"RIFF", "WebP", _webp_header),
    ((b"GIF87a", b"GIF89a"), "GIF", _gif_header),
)


def _turn(data: bytes, chunks: Chunks, kind: int, *, last: bool = False) -> int:
    """Read the orientation in the first or last block of this kind."""
    blocks = chunks.where(kind)
    if not blocks:
        return 1
    start, length = blocks[-1 if last else 0]
    length = min(length, _EXIF_BYTES)
    if start + length > len(data):
        raise _truncated()
    return orientation(data[start : start + length])


def _truncated() -> InvalidInputError:
    return InvalidInputError("image: got a truncated file, want a whole one")


FORMATS = ("JPEG", "PNG", "GIF", "WebP")

MOST_CHUNKS = 2**16
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
class Chunks:
    """The chunks of a file that matter, in order.

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
        """Give start and length of the chunks of these kinds."""
        rows = (self.table[:, :1] == kinds).any(axis=1)
        return [(start, length) for start, length in self.table[rows, 1:].tolist()]


def walk(data: bytes, kind: str) -> Chunks:
    """Find the chunks of a file.

    Args:
        data: the file, or its beginning.
        kind: one of FORMATS.

    Raises:
        InvalidInputError: it cannot be a file of this kind.
        LimitExceededError: more than MOST_CHUNKS.
    """
    core, number = native.core, FORMATS.index(kind)
    walked = None if core is None else core.walk(data, number, MOST_CHUNKS)
    end, triples = walk_in_python(data, number, MOST_CHUNKS) if walked is None else walked
    table = native.int64(triples).reshape(-1, 3)
    if end == _CROWDED:
        raise LimitExceededError(f"image: got a {kind} of more than {MOST_CHUNKS} chunks, want at most so many")
    if end == _CORRUPT:
        raise InvalidInputError(_corrupt(kind, table))
    return Chunks(table, end == _SHORT)


def letters(name: bytes) -> int:
    """Give the kind of a chunk of this name."""
    return int.from_bytes(name)


def _corrupt(kind: str, table: npt.NDArray[np.int64]) -> str:
    if kind == "JPEG":
        return "image: got a corrupt JPEG, want pixels before its end"
    if kind == "GIF":
        return "image: got a GIF with no frame, want at least one"
    name, start, _ = table[-1].tolist()
    return f"image: got a corrupt PNG with {name.to_bytes(4)!r} at byte {start - 8}, want IHDR first, once"


Walk = tuple[int, list[tuple[int, int, int]]]


def walk_in_python(data: bytes, number: int, most: int) -> tuple[int, bytes]:
    """Walk as the extension does: how the walk ended, and the table as bytes."""
    end, chunks = _WALKS[number](data, most)
    return end, np.array(chunks, np.int64).tobytes()


def _jpeg(data: bytes, most: int) -> Walk:
    chunks: list[tuple[int, int, int]] = []
    position, steps, components = 2, 0, -1
    several = scanning = turned = False
    while match := _MARKER.search(data, position):
        marker, position, steps = match[1][0], match.end(), steps + 1
        if steps > most:
            return _CROWDED, chunks
        if marker == _END:
            return _WHOLE if scanning else _CORRUPT, chunks
        start = position + 2
        if start > len(data):
            return _SHORT, chunks
        length = int.from_bytes(data[position:start]) - 2
        if length < 0:
            return _CORRUPT, chunks
        position = start + length
        chunk = (marker, start, length)
        if marker == SCAN:
            chunks.append(chunk)
            if start >= len(data):
                return _SHORT, chunks
            if not several and not scanning and data[start] >= components:
                return _WHOLE, chunks
            scanning = True
        elif scanning:
            continue
        elif marker in FRAMES:
            if start + 6 > len(data):
                return _SHORT, chunks
            components, several = data[start + 5], marker & 3 == 2
            chunks.append(chunk)
        elif marker not in _NOTES:
            chunks.append(chunk)
        elif marker == EXIF and not turned and data.startswith(b"Exif\0\0", start):
            chunks.append(chunk)
            turned = True
    return _SHORT, chunks


def _png(data: bytes, most: int) -> Walk:
    chunks: list[tuple[int, int, int]] = []
    position, steps = 8, 0
    while position + 8 <= len(data):
        name, start, steps = data[position + 4 : position + 8], position + 8, steps + 1
        if steps > most:
            return _CROWDED, chunks
        corrupt = (position == 8) != (name == b"IHDR")
        chunk = (letters(name), start, int.from_bytes(data[position : position + 4]))
        if corrupt or not name[0] & _PNG_ANCILLARY or name in (b"tRNS", b"eXIf"):
            chunks.append(chunk)
        if corrupt or name == b"IEND":
            return _CORRUPT if corrupt else _WHOLE, chunks
        position = start + chunk[2] + 4
    return _SHORT, chunks


def _gif(data: bytes, most: int) -> Walk:
    chunks: list[tuple[int, int, int]] = []
    if len(data) < 13:
        return _SHORT, chunks
    position, steps = 13 + palette_bytes(data[10]), 0
    while position < len(data):
        begin, kind, steps = position, data[position], steps + 1
        if steps > most:
            return _CROWDED, chunks
        if kind == ord(","):
            chunks.append((kind, position + 1, 8))
            return _WHOLE if position + 9 <= len(data) else _SHORT, chunks
        if kind != ord("!"):
            return _CORRUPT, chunks
        position, length = position + 2, 1
        while length:
            if position >= len(data):
                return _SHORT, chunks
            steps += 1
            if steps > most:
                return _CROWDED, chunks
            length = data[position]
            position += 1 + length
        if data[begin + 1] == _GRAPHIC_CONTROL:
            chunks.append((_GRAPHIC_CONTROL, begin, position - begin))
    return _SHORT, chunks


def palette_bytes(flags: int) -> int:
    """Count the bytes of the palette of a GIF with these flags."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _webp(data: bytes, most: int) -> Walk:
    chunks: list[tuple[int, int, int]] = []
    position, steps = 12, 0
    extended = data.startswith(b"VP8X", position)
    while position + 8 <= len(data):
        name, start, steps = data[position : position + 4], position + 8, steps + 1
        if steps > most:
            return _CROWDED, chunks
        length = int.from_bytes(data[position + 4 : start], "little")
        if position == 12 or name == b"EXIF":
            chunks.append((letters(name), start, length))
        if not extended or name == b"EXIF":
            return _WHOLE, chunks
        position = start + length + length % 2  # chunks are padded to even lengths
    return _SHORT, chunks


_WALKS: tuple[Callable[[bytes, int], Walk], ...] = (_jpeg, _png, _gif, _webp)


_ORIENTATION_TAG, _SHORT_TYPE = 0x0112, 3


def orientation(exif: bytes) -> int:
    """Read the orientation, 1 to 8, in an EXIF block; 1 where it has none or is damaged, as the pixels are fine anyway.

    Read here and not by Pillow, which decodes the pixels of a PNG and warns of damage first.
    """
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (entries,) = struct.unpack_from(order + "H", tiff, start)
        for entry in range(start + 2, start + 2 + 12 * entries, 12):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", tiff, entry)
            if (tag, kind) == (_ORIENTATION_TAG, _SHORT_TYPE):
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


def orient(pixels: Array, orientation: int) -> Array:
    """Turn pixels (h, w, c) upright, as a view: 5 to 8 swap the sides, the rest mirrors them."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels
