"""Hostile images: files whose decoding would cost far more than their size suggests are refused or decoded cheaply."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import hostile_images as hostile
import numpy as np
import pytest
from mutations import image_files, mutate
from PIL import Image

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.images import ImageProcessor, ImageSize
from mmpos.images.decode import MOST_READS, MOST_SCANS

PROCESSOR = ImageProcessor("pillow", patch_size=4, spatial_merge_size=1, min_pixels=0)
CROWDED: dict[str, Callable[[int], bytes]] = {
    "padding": hostile.padded_jpeg,
    "JPEG": hostile.jpeg_of_notes,
    "GIF": hostile.gif_of_blocks,
    "PNG": hostile.png_of_chunks,
    "pixels": partial(hostile.png_of_chunks, kind=b"IDAT"),
}


def steps(work: Callable[[], object]) -> int:
    """Count the function calls that Python makes for this work, including C functions."""
    count = 0

    def profile(_frame: object, _event: str, _argument: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("kind", CROWDED)
def test_a_file_with_too_many_parts_is_refused_early(kind: str, tmp_path: Path) -> None:
    data = CROWDED[kind](200_000)
    (tmp_path / "file").write_bytes(data)

    def refused() -> None:
        for image in (data, tmp_path / "file"):
            with pytest.raises(LimitExceededError, match=f"got a file of over {MOST_READS} segments, chunks or blocks"):
                PROCESSOR.process(image)

    assert steps(refused) < 80 * MOST_READS
    few = PROCESSOR.process(CROWDED[kind](1000))
    np.testing.assert_array_equal(few.patches, PROCESSOR.process(CROWDED[kind](0)).patches)


def test_chunks_of_a_webp_are_read_in_c() -> None:
    data = hostile.webp_of_chunks(200_000)
    assert steps(lambda: PROCESSOR.process(data)) < 2000
    assert PROCESSOR.inspect(data) == ImageSize(8, 8)


def test_pixels_in_many_chunks_of_ordinary_size_are_read() -> None:
    side = 2800
    body = zlib.compress(bytes(side * (1 + 3 * side)), 0)
    cut = b"".join(hostile.chunk(b"IDAT", body[i : i + 4096]) for i in range(0, len(body), 4096))
    assert 3 * cut.count(b"IDAT") > MOST_READS
    whole = hostile.encoded(Image.new("RGB", (side, side)), "PNG")
    assert not PROCESSOR.pixels(whole[:33] + cut + hostile.chunk(b"IEND", b"")).any()


@pytest.mark.parametrize("backend", ["pillow", "torchvision"])
def test_scans_are_counted_before_decoding(backend: str) -> None:
    processor = ImageProcessor(backend)
    assert processor.process(hostile.jpeg_of_scans(MOST_SCANS)).source_size == ImageSize(8, 8)
    with pytest.raises(LimitExceededError, match=r"image: got a JPEG with 5000 scans, want <= 100$"):
        processor.process(hostile.jpeg_of_scans(5000))
    sequential = bytearray(hostile.jpeg_of_scans(MOST_SCANS + 1))
    sequential[sequential.index(b"\xff\xc2") + 1] = 0xC0  # a sequential JPEG may have one scan per component
    at = sequential.index(b"\xff\xda")
    sequential[at + 2 : at + 5] = b"\0\x08\1"
    with pytest.raises(LimitExceededError, match="got a JPEG with 101 scans"):
        processor.process(sequential)


def test_a_single_scan_jpeg_may_be_followed_by_any_bytes() -> None:
    data = hostile.encoded(Image.new("RGB", (8, 8), "red"), "JPEG")
    trailer = b"\xff\xda" * 1000
    np.testing.assert_array_equal(PROCESSOR.pixels(data + trailer), PROCESSOR.pixels(data))
    album = hostile.encoded(Image.new("RGB", (8, 8)), "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8))])
    with pytest.raises(
        LimitExceededError, match=r"got a JPEG with 100\d scans"
    ):  # the scans of all images in the file count
        PROCESSOR.pixels(album + trailer)


PEAKS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from hostile_images import deep_png, encoded
from PIL import Image
from mmpos.images import ImageProcessor

def kib(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name))

side = 2000
opaque = Image.new("RGB", (side, side), (200, 100, 50))
clear = Image.new("RGBA", (side, side), (200, 100, 50, 128))
cases = {
    "JPEG": encoded(opaque, "JPEG"),
    "progressive JPEG": encoded(opaque, "JPEG", progressive=True, subsampling=0),
    "CMYK JPEG": encoded(opaque.convert("CMYK"), "JPEG", progressive=True),
    "PNG with alpha": encoded(clear, "PNG", compress_level=1),
    "PNG of 16 bits": deep_png(side),
    "gray PNG of 16 bits": encoded(Image.new("I;16", (side, side)), "PNG", compress_level=1, transparency=0),
    "GIF": encoded(opaque.quantize(2), "GIF"),
    "WebP": encoded(opaque, "WEBP", method=0),
    "WebP with alpha": encoded(clear, "WEBP", lossless=True, method=0, quality=0),
}
processor = ImageProcessor("pillow")
for image, kind in ((opaque, "JPEG"), (clear, "PNG"), (opaque, "GIF"), (clear, "WEBP")):  # load the decoders
    processor.process(encoded(image.resize((32, 32)), kind))
peaks = {}
for name, data in cases.items():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = kib("VmRSS")
    processor.process(data)
    peaks[name] = 1024 * (kib("VmHWM") - before) / side**2
print(json.dumps(peaks))
"""


def test_an_image_requires_at_most_twenty_bytes_of_memory_per_pixel() -> None:
    command = [sys.executable, "-c", PEAKS, str(Path(__file__).parents[1] / "helpers")]
    at_once = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # memory kept from one image would hide the next one's
    peaks = json.loads(subprocess.run(command, env=at_once, capture_output=True, text=True, check=True).stdout)
    assert len(peaks) == 9
    assert min(peaks.values()) > 5, "memory is not measured"
    assert {name: peak for name, peak in peaks.items() if peak > 20} == {}


@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["pillow", "torchvision"])
def test_a_damaged_image_yields_pixels_or_an_mmpos_error(backend: str, count: int) -> None:
    processor = ImageProcessor(backend, patch_size=4, spatial_merge_size=1, min_pixels=0, max_source_pixels=10**6)
    chance, images = random.Random(1), [*image_files(), hostile.jpeg_of_scans(20), hostile.deep_png(8)]
    decoded = 0
    for _ in range(count):
        data = mutate(chance.choice(images), chance, images)
        with suppress(InvalidInputError, LimitExceededError):
            processed, size = processor.process(data), processor.inspect(data)
            assert (processed.grid, processed.size) == (processor.grid(*size), processor.fit(*size))
            decoded += 1
    assert decoded > count // 20
