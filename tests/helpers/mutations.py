"""Valid bytes with a few changes: messages, and image files in every supported format."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from hostile_images import encoded
from PIL import Image

_LARGEST = b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f"
"""2^63 - 1 as protobuf writes it."""


def mutate(raw: bytes, chance: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Return the bytes with one to four changes.

    Args:
        raw: bytes to change.
        chance: random source.
        others: byte strings from which to insert pieces; empty for ``raw`` itself.
    """
    data = bytearray(raw)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        kind = chance.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[at : at + chance.randint(1, 8)]
        elif kind == 2:
            data[at:at] = chance.randbytes(chance.randint(1, 8))
        elif kind == 3:
            data[at : at + 9] = _LARGEST
        elif kind == 4:
            data[at : at + 1] = chance.choice([b"\0", b"\x7f", b"\x80", b"\xff"])
        else:
            other = chance.choice(others) if others else bytes(data)
            start = chance.randrange(len(other) + 1)
            data[at:at] = other[start : start + chance.choice([4, 16, 64])]
    return bytes(data)


def image_files() -> list[bytes]:
    """Encode small image files in every format, using the features whose decoders contain the most code."""
    noise = np.random.default_rng(0).integers(0, 256, (24, 40, 4), np.uint8)
    color = Image.fromarray(noise).convert("RGB")
    upright = Image.Exif()
    upright[0x0112] = 6
    deep = Image.fromarray(noise[..., 0].astype(np.uint16) * 257)
    frames = [color.rotate(90 * turn) for turn in range(3)]
    return [
        encoded(color, "JPEG"),
        encoded(color, "JPEG", progressive=True, exif=upright),
        encoded(color.convert("L"), "JPEG", quality=10),
        encoded(color.convert("CMYK"), "JPEG"),
        encoded(color, "PNG"),
        encoded(color.convert("P"), "PNG", transparency=3),
        encoded(color.convert("1"), "PNG"),
        encoded(deep, "PNG"),
        encoded(Image.fromarray(noise), "PNG", optimize=True),
        encoded(color, "WEBP"),
        encoded(Image.fromarray(noise), "WEBP", lossless=True),
        encoded(color, "GIF"),
        encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
    ]
