"""Walks through image files: the extension and Python find the same parts, in sound and broken files."""

from __future__ import annotations

import random

import hostile_images as hostile
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import broken, files

from mmpos.images.headers import FORMATS, MOST_CHUNKS, walk_in_python
from mmpos.support import native

MAGIC = {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n", "GIF": b"GIF89a", "WebP": b"RIFF\0\0\0\0WEBPVP8X"}
# Bytes that mean something to one of the formats; random ones hardly ever do.
ODD = [
    b"\xff",
    b"\xff\xda",
    b"\xff\xc2",
    b"\xff\xe1\0\x09Exif\0\0",
    b"\0",
    b"\1",
    b"!",
    b"!\xf9",
    b",",
    b"IHDR",
    b"IEND",
]
CORPUS = [
    *files(),
    *(make(9) for make in (hostile.padded_jpeg, hostile.jpeg_of_notes, hostile.gif_of_blocks, hostile.png_of_chunks)),
    hostile.webp_of_chunks(9),
    hostile.jpeg_of_scans(20),
]


def kind_of(data: bytes) -> int:
    return next((n for n, kind in enumerate(FORMATS) if data.startswith(MAGIC[kind][:3])), 0)


def assert_agree(data: bytes, number: int, most: int = MOST_CHUNKS) -> None:
    assert native.core is not None
    assert native.core.walk(data, number, most) == walk_in_python(data, number, most)


@pytest.mark.parametrize("number", range(len(CORPUS)))
def test_both_find_the_parts_of_a_file_and_of_each_beginning_of_it(number: int) -> None:
    data = CORPUS[number]
    end, parts = walk_in_python(data, kind_of(data), MOST_CHUNKS)
    assert end == 0 or (end == 1 and kind_of(data) == FORMATS.index("WebP"))
    assert len(parts) > 0
    for length in [*range(min(len(data), 700)), *range(700, len(data), 101)]:
        assert_agree(data[:length], kind_of(data))


@given(st.sampled_from(CORPUS), st.randoms(use_true_random=False), st.sampled_from([1, 2, 5, 12, MOST_CHUNKS]))
def test_both_agree_on_broken_files(data: bytes, chance: random.Random, most: int) -> None:
    assert_agree(broken(data, chance, CORPUS), kind_of(data), most)


@pytest.mark.slow
def test_both_agree_on_very_many_broken_files() -> None:
    chance = random.Random(0)
    for _ in range(100_000):
        data = chance.choice(CORPUS)
        assert_agree(broken(data, chance, CORPUS), kind_of(data), chance.choice([3, 12, MOST_CHUNKS]))


@given(st.sampled_from(FORMATS), st.lists(st.sampled_from(ODD) | st.binary(max_size=9), max_size=40))
def test_both_agree_on_bytes_that_are_no_file(kind: str, pieces: list[bytes]) -> None:
    assert_agree(MAGIC[kind] + b"".join(pieces), FORMATS.index(kind))


def test_what_is_no_file_is_declined() -> None:
    assert native.core is not None
    assert native.core.walk(b"GIF89a", len(FORMATS), 9) is None
    assert native.core.walk(b"GIF89a", -1, 9) is None
    assert native.core.walk(b"GIF89a", 2**70, 9) is None
    assert native.core.walk("GIF89a", 2, 9) is None  # type: ignore[arg-type]
    assert native.core.walk(np.zeros(9), 2, 9) is None  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="walk takes 3 arguments, got 1"):
        native.core.walk(b"")  # type: ignore[call-arg]
