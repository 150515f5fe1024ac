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
from pathlib import Path

import numpy as np
import pytest
from hostile_images import chunk, deep_png, encoded
from mutations import image_files, mutate
from PIL import Image

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.images import ImageProcessor, ImageSize
from mmpos.images.decode import MOST_READS, MOST_SCANS

PROCESSOR = ImageProcessor("pillow", patch_size=4, spatial_merge_size=1, min_pixels=0)
RED = Image.new("RGB", (8, 8), "red")
JPEG, GIF, PNG = (encoded(RED, kind) for kind in ("JPEG", "GIF", "PNG"))
FRAME = GIF.index(b",\0\0\0\0\x08\0\x08\0")
CROWDED: dict[str, Callable[[int], bytes]] = {
    "padding": lambda count: JPEG[:2] + b"\xff" * count + JPEG[2:],
    "comments": lambda count: JPEG[:2] + b"\xff\xfe\0\2" * count + JPEG[2:],
    "blocks of a comment": lambda count: GIF[:FRAME] + b"!\xfe" + b"\1x" * count + b"\0" + GIF[FRAME:],
    "chunks": lambda count: PNG[:33] + chunk(b"teSt", b"") * count + PNG[33:],
    "chunks of pixels": lambda count: PNG[:33] + chunk(b"IDAT", b"") * count + PNG[33:],
}


def jpeg_of_scans(count: int) -> bytes:
    """Encode a progressive 8 x 8 pixel JPEG with this number of scans by repeating the last scan."""
    data = encoded(Image.new("RGB", (8, 8), (200, 100, 50)), "JPEG", progressive=True, subsampling=0)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * (count - data.count(b"\xff\xda")) + data[-2:]


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
    webp, count = encoded(RED, "WEBP", lossless=True, xmp=b"<x/>"), 200_000
    assert webp[12:16] == b"VP8X"
    data = (
        webp[:4] + (len(webp) - 8 + 8 * count).to_bytes(4, "little") + webp[8:30] + b"teSt\0\0\0\0" * count + webp[30:]
    )
    assert steps(lambda: PROCESSOR.process(data)) < 2000
    assert PROCESSOR.inspect(data) == ImageSize(8, 8)


def test_pixels_in_many_chunks_of_ordinary_size_are_read() -> None:
    side = 2800
    body = zlib.compress(bytes(side * (1 + 3 * side)), 0)
    cut = b"".join(chunk(b"IDAT", body[i : i + 4096]) for i in range(0, len(body), 4096))
    assert 3 * cut.count(b"IDAT") > MOST_READS
    whole = encoded(Image.new("RGB", (side, side)), "PNG")
    assert not PROCESSOR.pixels(whole[:33] + cut + chunk(b"IEND", b"")).any()


@pytest.mark.parametrize("backend", ["pillow", "torchvision"])
def test_scans_are_counted_before_decoding(backend: str) -> None:
    processor = ImageProcessor(backend)
    assert processor.process(jpeg_of_scans(MOST_SCANS)).source_size == ImageSize(8, 8)
    with pytest.raises(LimitExceededError, match=r"image: got a JPEG with 5000 scans, want <= 100$"):
        processor.process(jpeg_of_scans(5000))
    sequential = bytearray(jpeg_of_scans(MOST_SCANS + 1))
    sequential[sequential.index(b"\xff\xc2") + 1] = 0xC0  # a sequential JPEG may have one scan per component
    at = sequential.index(b"\xff\xda")
    sequential[at + 2 : at + 5] = b"\0\x08\1"
    with pytest.raises(LimitExceededError, match="got a JPEG with 101 scans"):
        processor.process(sequential)


def test_a_single_scan_jpeg_may_be_followed_by_any_bytes() -> None:
    trailer = b"\xff\xda" * 1000
    np.testing.assert_array_equal(PROCESSOR.pixels(JPEG + trailer), PROCESSOR.pixels(JPEG))
    album = encoded(RED, "MPO", save_all=True, append_images=[RED])
    with pytest.raises(LimitExceededError, match=r"got a JPEG with 100\d scans"):  # those of all images count
        PROCESSOR.pixels(album + trailer)


PEAKS = """
import ctypes, json, sys
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: huge pages would round the numbers up
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
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # so that freed memory is returned, not reused
    peaks = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)
    assert len(peaks) == 9
    assert min(peaks.values()) > 5, "memory is not measured"
    assert {name: peak for name, peak in peaks.items() if peak > 20} == {}


@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["pillow", "torchvision"])
def test_a_damaged_image_yields_pixels_or_an_mmpos_error(backend: str, count: int) -> None:
    processor = ImageProcessor(backend, patch_size=4, spatial_merge_size=1, min_pixels=0, max_source_pixels=10**6)
    chance, images = random.Random(1), [*image_files(), jpeg_of_scans(20), deep_png(8)]
    decoded = 0
    for _ in range(count):
        data = mutate(chance.choice(images), chance, images)
        with suppress(InvalidInputError, LimitExceededError):
            processed, size = processor.process(data), processor.inspect(data)
            assert (processed.grid, processed.size) == (processor.grid(*size), processor.fit(*size))
            decoded += 1
    assert decoded > count // 20
