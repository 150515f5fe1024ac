"""Hostile images: files whose parts, scans or pixels cost far more than their bytes are refused, or read at no cost."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import hostile_images as hostile
import numpy as np
import pytest
from mutations import broken, files
from PIL import Image

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.images import ImageProcessor, ImageSize
from mmpos.images.decode import bare_gif, bare_jpeg, bare_png
from mmpos.images.headers import read_header

MANY = 4 * 2**20
PROCESSOR = ImageProcessor("pillow", patch_size=4, spatial_merge_size=1, min_pixels=0)
CROWDED: dict[str, Callable[[int], bytes]] = {
    "JPEG": hostile.jpeg_of_notes,
    "GIF": hostile.gif_of_blocks,
    "PNG": hostile.png_of_chunks,
    "WebP": hostile.webp_of_chunks,
}


def steps(work: Callable[[], object]) -> int:
    """Calls of functions, of those in C too, that Python makes for this work."""
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


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", CROWDED)
def test_a_file_of_nothing_but_parts_is_refused(kind: str) -> None:
    with pytest.raises(LimitExceededError, match=f"got a {kind} of more than 65536 chunks, want at most so many"):
        PROCESSOR.inspect(CROWDED[kind](66_000))
    data = CROWDED[kind](60_000)
    assert PROCESSOR.inspect(data) == ImageSize(8, 8)
    np.testing.assert_array_equal(PROCESSOR.process(data).patches, PROCESSOR.process(CROWDED[kind](0)).patches)


@pytest.mark.usefixtures("way")
def test_padding_costs_python_no_steps() -> None:
    data = hostile.padded_jpeg(MANY)
    assert steps(lambda: PROCESSOR.inspect(data)) < 1000
    assert steps(lambda: PROCESSOR.process(data)) < 5000


def test_notes_and_cut_pixels_cost_the_decoder_no_steps() -> None:
    assert bare_gif(hostile.gif_of_blocks(60_000)) == bare_gif(hostile.gif_of_blocks(0))
    assert bare_jpeg(hostile.jpeg_of_notes(60_000)) == bare_jpeg(hostile.jpeg_of_notes(0))
    assert bare_png(hostile.png_of_chunks(60_000)) == bare_png(hostile.png_of_chunks(0))
    whole = hostile.png_of_chunks(0)
    start, end = whole.index(b"IDAT") + 4, whole.index(b"IEND") - 8
    pieces = b"".join(hostile.chunk(b"IDAT", whole[i : i + 1]) for i in range(start, end))
    assert bare_png(whole[: start - 8] + pieces + whole[end + 4 :]) == bare_png(whole)


@pytest.mark.usefixtures("way")
def test_scans_are_counted_before_they_are_decoded() -> None:
    assert read_header(hostile.jpeg_of_scans(100)).scans == 100
    assert PROCESSOR.process(hostile.jpeg_of_scans(100)).source_size == ImageSize(8, 8)
    for backend in ("pillow", "torchvision"):
        with pytest.raises(LimitExceededError, match=r"image: got a JPEG of 5000 scans, want <= 100$"):
            ImageProcessor(backend).process(hostile.jpeg_of_scans(5000))


def test_scans_are_counted_where_the_first_one_has_not_all_components() -> None:
    data = bytearray(hostile.jpeg_of_scans(101))
    data[data.index(b"\xff\xc2") + 1] = 0xC0  # sequential, which may have a scan for each component
    at = data.index(b"\xff\xda")
    data[at + 4] = 1
    with pytest.raises(LimitExceededError, match="got a JPEG of 101 scans"):
        PROCESSOR.inspect(data)


def test_a_plain_jpeg_is_looked_at_up_to_its_only_scan(tmp_path: Path) -> None:
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (800, 800, 3), np.uint8)
    Image.fromarray(noise).save(file, "JPEG", quality=95)
    data = file.getvalue()
    assert len(data) > 2**18

    def rest() -> bytes:
        raise AssertionError("the rest is not needed")

    assert read_header(data[: 2**18], rest).size == ImageSize(800, 800)
    (tmp_path / "photo").write_bytes(data)
    assert PROCESSOR.inspect(tmp_path / "photo") == ImageSize(800, 800)
    png = hostile.png_of_chunks(30_000)
    (tmp_path / "chunks").write_bytes(png)
    assert PROCESSOR.inspect(tmp_path / "chunks") == ImageSize(8, 8)


@pytest.mark.parametrize(("kind", "per_pixel"), [("JPEG", 9), ("PNG", 12), ("GIF", 9), ("WEBP", 18)])
def test_what_takes_too_much_memory_is_refused_by_its_header(kind: str, per_pixel: int) -> None:
    file = io.BytesIO()
    Image.new("RGB", (40, 30)).save(file, kind)
    need = per_pixel * 1200
    options = {"patch_size": 4, "spatial_merge_size": 1, "min_pixels": 0}
    enough = ImageProcessor("pillow", **options, max_decode_bytes=need)  # type: ignore[arg-type]
    assert enough.process(file.getvalue()).size == (32, 40)
    small = ImageProcessor("pillow", **options, max_decode_bytes=need - 1)  # type: ignore[arg-type]
    assert small.inspect(file.getvalue()) == ImageSize(30, 40)
    message = f"30 x 40 pixels, which may take {need} bytes to decode, want <= {need - 1} \\(max_decode_bytes\\)"
    with pytest.raises(LimitExceededError, match=message):
        small.process(file.getvalue())


def test_a_photograph_of_89_megapixels_may_be_decoded_by_default() -> None:
    side = 9459
    header = read_header(hostile.deep_png(8)[:16] + side.to_bytes(4) * 2 + hostile.deep_png(8)[24:])
    assert header.size == ImageSize(side, side)
    assert side**2 <= ImageProcessor().max_source_pixels
    assert header.decode_bytes <= ImageProcessor().max_decode_bytes


PEAKS = """
import io, json, sys
sys.path.insert(0, sys.argv[1])
import hostile_images as hostile
from PIL import Image
from mmpos.images import ImageProcessor
from mmpos.images.headers import read_header

def kib(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name))

def file(image, kind, **options):
    target = io.BytesIO()
    image.save(target, kind, **options)
    return target.getvalue()

side = 2000
opaque = Image.new("RGB", (side, side), (200, 100, 50))
clear = Image.new("RGBA", (side, side), (200, 100, 50, 128))
made = {
    "JPEG": (opaque, "JPEG", {}),
    "progressive JPEG": (opaque, "JPEG", {"progressive": True, "subsampling": 0}),
    "CMYK JPEG": (opaque.convert("CMYK"), "JPEG", {"progressive": True}),
    "PNG": (opaque, "PNG", {"compress_level": 1}),
    "PNG with alpha": (clear, "PNG", {"compress_level": 1}),
    "gray PNG of 16 bits": (Image.new("I;16", (side, side)), "PNG", {"compress_level": 1}),
    "GIF": (opaque.quantize(2), "GIF", {}),
    "WebP": (opaque, "WEBP", {"method": 0}),
    "WebP with alpha": (clear, "WEBP", {"lossless": True, "method": 0, "quality": 0}),
}
cases = {name: file(image, kind, **options) for name, (image, kind, options) in made.items()}
cases["PNG of 16 bits"] = hostile.deep_png(side)
processor = ImageProcessor("pillow")
for data in cases.values():  # loads the decoders
    read_header(data)
for image, kind, options in made.values():
    processor.process(file(image.resize((32, 32)), kind, **options))
peaks = {}
for name, data in cases.items():
    with open("/proc/self/clear_refs", "w") as forget:
        forget.write("5")
    before = kib("VmRSS")
    processor.process(data)
    peaks[name] = [1024 * (kib("VmHWM") - before), read_header(data).decode_bytes]
print(json.dumps(peaks))
"""


def test_decoding_takes_no_more_memory_than_the_header_says() -> None:
    command = [sys.executable, "-c", PEAKS, str(Path(__file__).parents[1] / "helpers")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peaks = json.loads(done.stdout)
    assert len(peaks) == 10
    room = 8 * 2**20  # of the allocator, of strips and of the file
    assert {name: peak for name, (peak, most) in peaks.items() if peak > most + room} == {}


def damaged(count: int) -> Iterator[bytes]:
    chance, whole = random.Random(1), [*files(), hostile.jpeg_of_scans(20), hostile.deep_png(8)]
    return (broken(chance.choice(whole), chance, whole) for _ in range(count))


@pytest.mark.parametrize("count", [400, pytest.param(40_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["pillow", "torchvision"])
def test_damage_gives_pixels_or_an_error_of_mmpos(backend: str, count: int) -> None:
    processor = ImageProcessor(backend, patch_size=4, spatial_merge_size=1, min_pixels=0, max_source_pixels=10**6)
    decoded = 0
    for data in damaged(count):
        with suppress(InvalidInputError, LimitExceededError):
            assert processor.process(data).grid == processor.grid(*processor.inspect(data))
            decoded += 1
    assert decoded > count // 20
