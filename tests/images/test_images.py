"""Images: exact sizes, correct decoding of every source and format, and early rejection of bad files."""

from __future__ import annotations

import hashlib
import io
import pickle
import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import skimage.data
import torch
from hostile_images import chunk, encoded
from hypothesis import given
from hypothesis import strategies as st
from mutations import image_files
from PIL import Image, ImageFile, ImageOps
from tolerance import assert_within, normalised
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional import resize

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.images import ImageProcessor, ImageSize, decode
from mmpos.segments.table import Grid

BACKENDS = ["torchvision", "pillow"]
PHOTOS = ["astronaut", "chelsea", "coffee"]
Pixels = npt.NDArray[Any]


def exact(backend: str = "pillow", **options: Any) -> ImageProcessor:
    """Return a processor that keeps sides that are multiples of 4."""
    return ImageProcessor(backend, **{"patch_size": 4, "spatial_merge_size": 1, "min_pixels": 0} | options)


def pixels(image: object, backend: str = "pillow", **options: Any) -> Pixels:
    """Process an image, and reassemble its pixels from 4 x 4 patches."""
    processed: Any = exact(backend, **options).process(image)
    rows = processed.patches.reshape(processed.grid.height, processed.grid.width, 4, 4, 3)
    return rows.swapaxes(1, 2).reshape(processed.grid.height * 4, processed.grid.width * 4, 3)


def photo(name: str = "chelsea", size: tuple[int, int] = (64, 48)) -> Image.Image:
    return Image.open(Path(skimage.data.__file__).parent / f"{name}.png").convert("RGB").resize(size)


def exif(orientation: int) -> bytes:
    block = Image.Exif()
    block[0x0112] = orientation
    return block.tobytes()


def png(samples: Pixels, colour: int, depth: int, *, before: bytes = b"", after: bytes = b"") -> bytes:
    """Encode samples as a PNG, since Pillow writes neither 16-bit colour nor damaged files."""
    height, width = samples.shape[:2]
    big = samples.astype(">u2") if depth == 16 else samples
    bits = np.unpackbits(big.view(np.uint8).reshape(height, -1, 1), axis=2)
    packed = np.packbits(bits[..., -min(depth, 8) :].reshape(height, -1), axis=1)
    rows = b"".join(b"\0" + row.tobytes() for row in packed)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + before + chunk(b"IDAT", zlib.compress(rows)) + after + chunk(b"IEND", b"")


GRADIENT = np.arange(4 * 8 * 3, dtype=np.uint8).reshape(4, 8, 3) * 2


# Sizes


PLAIN, SMALL = ImageProcessor(), ImageProcessor(max_tokens=16)


@pytest.mark.parametrize(
    ("processor", "size", "want"),
    [
        (PLAIN, (42, 70), (56, 56)),  # 1.5 and 2.5 tokens: halves round to even
        (PLAIN, (14, 300), (28, 280)),  # half a token high, rounded to 0: scaled up to the minimum
        (PLAIN, (19, 76), (56, 140)),  # floats are rounded; exact numbers give 28 x 112
        # The short side of a thin image shrinks to one token to keep the budget.
        (SMALL, (10, 1900), (28, 16 * 28)),
        (SMALL, (1900, 10), (16 * 28, 28)),
        (ImageProcessor(max_tokens=1), (3000, 4000), (28, 28)),
        # The maximum takes precedence if rounding cannot satisfy both limits, here 97 tokens: a prime.
        (exact(min_pixels=16 * 97, max_pixels=16 * 97), (300, 400), (32, 44)),
        (exact(min_pixels=16 * 100, max_pixels=16 * 100), (300, 300), (40, 40)),
    ],
)
def test_fit_returns_known_sizes(processor: ImageProcessor, size: tuple[int, int], want: tuple[int, int]) -> None:
    assert processor.fit(*size) == want


@st.composite
def processors_and_sizes(draw: st.DrawFn) -> tuple[ImageProcessor, int, int]:
    patch, merge = draw(st.integers(1, 16)), draw(st.integers(1, 3))
    most = draw(st.integers((patch * merge) ** 2, 40 * (patch * merge) ** 2))
    processor = ImageProcessor(
        patch_size=patch,
        spatial_merge_size=merge,
        min_pixels=draw(st.integers(0, most)),
        max_pixels=most,
        max_tokens=draw(st.none() | st.integers(1, 50)),
    )
    short = draw(st.integers(1, 500))
    long = draw(st.integers(short, short * draw(st.sampled_from([1, 2, 7, 200]))))
    return (processor, short, long) if draw(st.booleans()) else (processor, long, short)


@given(processors_and_sizes())
def test_fit_respects_multiples_and_maxima_and_is_symmetric(case: tuple[ImageProcessor, int, int]) -> None:
    processor, height, width = case
    fitted = processor.fit(height, width)
    factor = processor.patch_size * processor.spatial_merge_size
    tokens = fitted[0] // factor * (fitted[1] // factor)
    assert fitted[0] % factor == fitted[1] % factor == 0
    assert 0 < fitted[0] * fitted[1] <= processor.max_pixels
    assert processor.max_tokens is None or tokens <= processor.max_tokens
    assert processor.fit(width, height) == fitted[::-1]
    assert processor.grid(height, width) == Grid(fitted[0] // factor, fitted[1] // factor)


def size_or_none(fit: Callable[..., tuple[int, int]], *arguments: int) -> tuple[int, int] | None:
    """Return the size of an image, or None if the image is refused."""
    try:
        return fit(*arguments)
    except ValueError:
        return None


QWENS = {
    "Qwen2-VL": ImageProcessor(),
    "Qwen2.5-VL": ImageProcessor(max_pixels=12_845_056),
    "Qwen3-VL": ImageProcessor(patch_size=16, min_pixels=65_536, max_pixels=16_777_216),
    "200 tokens": ImageProcessor(max_pixels=200 * 28**2),
}


@pytest.mark.parametrize("model", QWENS)
@pytest.mark.parametrize("step", [97, pytest.param(5, marks=pytest.mark.slow)])
def test_sizes_of_all_shapes_equal_those_of_transformers(model: str, step: int) -> None:
    modeling: Any = pytest.importorskip("transformers.models.qwen2_vl.image_processing_qwen2_vl")
    processor = QWENS[model]
    options = processor.patch_size * processor.spatial_merge_size, processor.min_pixels, processor.max_pixels
    # Every side up to 120, where rounding matters most, and a dense series of longer sides.
    sides = [*range(1, 121, max(step // 20, 1)), *range(121, 2000, 4 * step), *range(2000, 30_000, 47 * step)]
    for height in sides:
        for width in sides:
            want = size_or_none(modeling.smart_resize, height, width, *options)
            assert size_or_none(processor.fit, height, width) == want, (height, width)


# Sources

SAME = {
    "RGB array": GRADIENT,
    "strided array": np.repeat(GRADIENT, 2, axis=1)[:, ::2],
    "Pillow image": Image.fromarray(GRADIENT),
    "tensor": torch.from_numpy(GRADIENT.copy()).permute(2, 0, 1),
    "PNG bytes": encoded(Image.fromarray(GRADIENT), "PNG"),
    "bytearray": bytearray(encoded(Image.fromarray(GRADIENT), "PNG")),
    "memoryview": memoryview(encoded(Image.fromarray(GRADIENT), "PNG")),
    "uint16 array": GRADIENT.astype(np.uint16) * 257,
    "big-endian array": (GRADIENT.astype(np.uint16) * 257).astype(">u2"),
    "RGBA array": np.dstack([GRADIENT, np.full((4, 8), 255, np.uint8)]),
    "RGBA tensor": torch.from_numpy(np.dstack([GRADIENT, np.full((4, 8), 255, np.uint8)])).permute(2, 0, 1),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SAME)
def test_every_source_gives_the_same_pixels(name: str, backend: str) -> None:
    np.testing.assert_array_equal(pixels(SAME[name], backend), GRADIENT)
    assert exact(backend).inspect(SAME[name]) == ImageSize(4, 8)
    patches: Any = exact(backend).process(SAME[name]).patches
    assert patches.flags.c_contiguous
    patches[...] = 9  # which belong to the caller
    np.testing.assert_array_equal(pixels(SAME[name], backend), GRADIENT)


def test_hashes_depend_on_the_bytes_of_a_file_and_on_type_shape_and_content_of_pixels(tmp_path: Path) -> None:
    def digest(image: object) -> str | None:
        return exact().process(image).content_hash

    zeros = np.zeros((4, 8), np.uint8)
    palette = Image.new("P", (8, 4))
    palette.putpalette([9, 9, 9])
    rotated = Image.new("L", (8, 4))
    rotated.info["exif"] = exif(3)
    different = [zeros, zeros.reshape(8, 4), zeros + 1, np.zeros((4, 4), np.uint16), Image.new("L", (8, 4))]
    different += [palette, Image.new("P", (8, 4)), rotated, torch.zeros(3, 4, 8, dtype=torch.uint8)]
    assert len({digest(image) for image in different}) == len(different)
    assert digest(np.zeros((4, 8, 3), np.uint8)) == digest(torch.zeros(3, 4, 8, dtype=torch.uint8))
    assert digest(np.full((4, 4), 5, ">u2")) == digest(np.full((4, 4), 5, "<u2"))
    assert digest(zeros) == hashlib.sha256(b"('uint8', (4, 8))" + bytes(32)).hexdigest()
    data, path = encoded(photo(), "JPEG"), tmp_path / "photo.bin"
    path.write_bytes(data)
    assert digest(path) == digest(data) == hashlib.sha256(data).hexdigest()
    assert exact().inspect(path) == ImageSize(48, 64)


def test_an_image_given_only_by_its_size_has_a_grid_but_no_patches() -> None:
    processed = ImageProcessor().process(ImageSize(768, 1024))
    assert processed.patches is None
    assert processed.content_hash is None
    assert (processed.grid, processed.size, processed.source_size) == (Grid(27, 37), (756, 1036), ImageSize(768, 1024))
    assert ImageProcessor().inspect(ImageSize(3, 4)) == ImageSize(3, 4)


# Formats

RGBA = np.dstack([GRADIENT, np.arange(32, dtype=np.uint8).reshape(4, 8) * 8])
NOISE = np.random.default_rng(1).integers(0, 65536, (8, 8, 4), dtype=np.uint16)


def over(rgb: Pixels, alpha: Pixels, background: tuple[int, int, int] = (255, 255, 255)) -> Pixels:
    part = alpha[..., None] / 255
    return np.rint(rgb * part + np.array(background) * (1 - part)).astype(np.uint8)


def gray(levels: Pixels) -> Pixels:
    return np.dstack([levels] * 3)


def eight(samples: Pixels) -> Pixels:
    return np.rint(samples * 255.0 / 65535).astype(np.uint8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("background", [(255, 255, 255), (0, 100, 200)])
def test_transparent_pixels_show_the_background(backend: str, background: tuple[int, int, int]) -> None:
    want = over(GRADIENT, RGBA[..., 3], background)
    image = Image.fromarray(RGBA)
    for source in (RGBA, image, encoded(image, "PNG"), encoded(image, "WEBP", lossless=True, exact=True)):
        np.testing.assert_array_equal(pixels(source, backend, background=background), want)


def test_palette_gray_and_bilevel_images_are_decoded_with_transparency() -> None:
    palette = Image.fromarray(np.tile(np.arange(4, dtype=np.uint8), (4, 1)))
    palette = Image.frombytes("P", (4, 4), palette.tobytes())
    palette.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 9, 9])
    row = [[255, 0, 0], [0, 255, 0], [0, 0, 255], [9, 9, 9]]
    opaque = np.array([row] * 4)
    keyed = np.array([[row[0], [255] * 3, row[2], row[3]]] * 4)
    half = np.array([[[255, 127, 127], [0, 255, 0], [255] * 3, row[3]]] * 4)
    np.testing.assert_array_equal(pixels(encoded(palette, "PNG")), opaque)
    np.testing.assert_array_equal(pixels(encoded(palette, "PNG", transparency=1)), keyed)
    np.testing.assert_array_equal(pixels(encoded(palette, "PNG", transparency=b"\x80\xff\x00")), half)
    np.testing.assert_array_equal(pixels(encoded(palette, "GIF", transparency=1)), keyed)
    gray_alpha = Image.fromarray(RGBA).convert("LA")
    level, alpha = (np.asarray(band) for band in gray_alpha.split())
    np.testing.assert_array_equal(pixels(encoded(gray_alpha, "PNG")), over(gray(level), alpha))
    bilevel = Image.fromarray(np.eye(4, dtype=np.uint8) * 255).convert("1")
    np.testing.assert_array_equal(pixels(encoded(bilevel, "PNG")), gray(np.eye(4) * 255))


@pytest.mark.parametrize(("depth", "step"), [(1, 255), (2, 85), (4, 17), (8, 1)])
def test_low_bit_gray_is_stretched_and_one_level_may_be_transparent(depth: int, step: int) -> None:
    levels = np.arange(16, dtype=np.uint8).reshape(4, 4) & 2**depth - 1
    want = gray(levels * step)
    np.testing.assert_array_equal(pixels(png(levels, 0, depth)), want)
    keyed = png(levels, 0, depth, before=chunk(b"tRNS", b"\0\1"))
    want[levels == 1] = 0
    np.testing.assert_array_equal(pixels(keyed, background=(0, 0, 0)), want)


GRAY, LEVELS = GRADIENT[..., 0], np.arange(65536, dtype=np.uint16).reshape(256, 256)
COLOUR, KEY = NOISE[..., :3], struct.pack(">HHH", *NOISE[0, 0, :3])
KEYED = np.where(np.arange(64).reshape(8, 8), 255, 0)
"""Alpha of an image whose first colour, the key, is transparent."""


@pytest.mark.parametrize(
    ("source", "want"),
    [
        *((source, gray(GRAY)) for source in (GRAY, GRAY[..., None], torch.tensor(GRAY), torch.tensor(GRAY)[None],
                                              Image.fromarray(GRAY))),
        (COLOUR, eight(COLOUR)),
        (png(COLOUR, 2, 16), COLOUR >> 8),
        (png(NOISE, 6, 16), over(COLOUR >> 8, NOISE[..., 3] >> 8)),
        (png(NOISE[..., 2:], 4, 16), over(gray(NOISE[..., 2] >> 8), NOISE[..., 3] >> 8)),
        *((source, gray(eight(LEVELS))) for source in (LEVELS, png(LEVELS, 0, 16), Image.fromarray(LEVELS))),
        (png(COLOUR, 2, 16, before=chunk(b"tRNS", KEY)), over(COLOUR >> 8, KEYED)),
        (png(NOISE[..., 0], 0, 16, before=chunk(b"tRNS", KEY[:2])), over(gray(eight(NOISE[..., 0])), KEYED)),
    ],
    ids=count(),
)  # fmt: skip
def test_gray_and_16_bit_samples_become_colours_of_8_bits(source: object, want: Pixels) -> None:
    np.testing.assert_array_equal(pixels(source), want)


ANIMATED: dict[str, Any] = {"save_all": True, "append_images": [Image.new("RGB", (64, 48))]}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "options"),
    [("JPEG", options) for options in ({}, {"progressive": True}, {"subsampling": 0}, {"keep_rgb": True})]
    + [("MPO", ANIMATED), ("WEBP", {}), ("WEBP", {"lossless": True}), ("WEBP", ANIMATED), ("GIF", ANIMATED)],
)
def test_first_frames_are_decoded_as_by_pillow(kind: str, options: dict[str, Any], backend: str) -> None:
    for mode in {"GIF": ("P",), "JPEG": ("RGB", "L", "CMYK")}.get(kind, ("RGB", "L")):
        source = photo().convert(mode)
        data = encoded(source, kind, **options)
        want = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
        assert np.abs(want - np.asarray(source.convert("RGB"))).mean() < 10, "as a negative, for example"
        assert np.abs(pixels(data, backend) - want).max() <= (3 if kind in ("JPEG", "MPO") else 0)
        assert exact(backend).inspect(data) == ImageSize(48, 64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "before", "after"])
def test_orientation_is_applied_wherever_pillow_finds_it(kind: str, orientation: int, backend: str) -> None:
    block, xmp = exif(orientation), b'<rdf:Description tiff:Orientation="%d"/>' % orientation
    profile = b"Raw profile type exif\0\nexif\n%8d\n%b\n" % (len(block), block.hex().encode())  # of ImageMagick
    chunks = {b"eXIf": block[6:], b"iTXt": b"XML:com.adobe.xmp" + 5 * b"\0" + xmp, b"tEXt": profile}
    if kind in ("JPEG", "WEBP"):
        images = [encoded(photo(), kind, lossless=True, **stored) for stored in ({"exif": block}, {"xmp": xmp})]
    else:
        images = [png(GRADIENT, 2, 8, **{kind: chunk(*named)}) for named in chunks.items()]
    for data in images:
        upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data)))).astype(int)
        assert (upright.shape[0] > upright.shape[1]) == (orientation >= 5)
        for source in (data, Image.open(io.BytesIO(data)), Image.open(io.BytesIO(data)).copy()):
            assert exact(backend).inspect(source) == ImageSize(*upright.shape[:2])
            got = pixels(source, backend)
            assert np.abs(got - upright).max() <= (3 if kind == "JPEG" else 0)
            resized, want = (ImageProcessor(backend).process(image).patches for image in (source, got))
            np.testing.assert_array_equal(resized, want)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("block", [b"", b"Exif\0\0", b"Exif\0\0II*\0\xff\0\0\0", exif(6)[:20], b"?", exif(9), exif(0)])
def test_damaged_exif_is_ignored(block: bytes) -> None:
    for kind in ("JPEG", "PNG"):
        assert exact().process(encoded(photo(), kind, exif=block, dpi=(72, 72))).source_size == ImageSize(48, 64)


# Bad files


WHOLE = [*image_files()[:-1], png(NOISE, 6, 16)]  # the last image file has several frames


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", range(len(WHOLE)))
def test_a_truncated_file_is_always_refused(number: int, backend: str) -> None:
    data = WHOLE[number]
    end = len(data) - (30 if data.startswith(b"\x89PNG") else 3)  # a PNG ends with checksums and IEND
    for length in [*range(1, end, 1 + len(data) // 40), end]:
        with pytest.raises(InvalidInputError, match=r"^image: got "):
            exact(backend).process(data[:length])
    half = data[: len(data) // 2]
    with pytest.raises(InvalidInputError, match="truncated"):
        exact(backend).process(half)
    if number == 0:
        with pytest.raises(InvalidInputError, match="truncated or corrupt Pillow image"):
            exact(backend).process(Image.open(io.BytesIO(half)))


def test_decoder_errors_other_than_memory_errors_become_mmpos_errors() -> None:
    with pytest.raises(LimitExceededError, match="above Pillow's own limit"), decode.guarded("file"):
        raise Image.DecompressionBombError("bomb")
    with pytest.raises(InvalidInputError, match="truncated or corrupt file"), decode.guarded("file"):
        raise struct.error("short")
    reason = r"want a whole one \(Image is incomplete\)$"
    with pytest.raises(InvalidInputError, match=reason), decode.guarded("file"):
        raise RuntimeError("decode_jpeg, /builds/csrc/decode_jpeg.cpp:171, Image is incomplete\nException raised from")
    with pytest.raises(MemoryError), decode.guarded("file"):
        raise MemoryError


def test_pixels_that_contradict_the_header_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "decode_jpeg", lambda _: GRADIENT)
    with pytest.raises(InvalidInputError, match=r"got \(4, 8\) pixels, want \(48, 64\) as in its header"):
        exact("torchvision").process(encoded(photo(), "JPEG"))


VALID = png(GRADIENT, 2, 8)
DAMAGED = "with a damaged header, or with a width or height of 0, want"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("photo.jpg", "got the text 'photo.jpg', want pathlib.Path"),
        (None, "image: got NoneType, want a path"),
        ([[1]], "image: got list, want a path"),
        (np.zeros((4, 4, 2), np.uint8), r"got shape \(4, 4, 2\), want \(h, w\) or \(h, w, 1 \| 3 \| 4\)"),
        (np.zeros((3, 4, 4, 1), np.uint8), r"got shape \(3, 4, 4, 1\), want .*; mmpos\.Video takes frames"),
        (np.zeros((4, 4)), "got dtype float64, want uint8 or uint16"),
        (np.zeros((4, 4), bool), "got dtype bool"),
        (np.zeros((0, 4), np.uint8), r"image\.height: got 0, want >= 1"),
        (Image.new("RGB", (0, 4)), r"image\.width: got 0, want >= 1"),
        (Image.new("F", (4, 4)), "mode 'F', want 8-bit or 16-bit samples"),
        (Image.new("I", (4, 4)), "mode 'I'"),
        (torch.zeros(5, 4, 3, dtype=torch.uint8), r"got shape \(5, 4, 3\), want \(h, w\) or \(1 \| 3 \| 4, h, w\)"),
        (torch.zeros(3, 4, 4), "got a tensor of torch.float32, want torch.uint8"),
        (torch.zeros(3, 4, 4, dtype=torch.uint8, device="meta"), "got a tensor on meta"),
        (torch.zeros(4, 4, dtype=torch.uint8).to_sparse(), "got a tensor on cpu, torch.sparse_coo"),
        (Path("/no/such/file"), "'/no/such/file', want a file that can be read .*No such file"),
        (Path("/"), "Is a directory"),
        (Path("a\0b"), "null byte"),
        (b"", "got an empty file"),
        (b"not a photo", "got a file that starts with b'not a photo', want a whole JPEG, PNG, WebP or GIF"),
        *(
            (encoded(Image.new("RGB", (4, 4)), kind), "got a file that starts")
            for kind in ("BMP", "TIFF", "ICO", "PPM")
        ),
        (VALID[:8] + chunk(b"IDAT", b""), f"got a PNG {DAMAGED}"),
        (VALID[:60] + b"~" + VALID[61:], "truncated or corrupt PNG file"),
        (png(GRADIENT, 5, 8), f"got a PNG {DAMAGED}"),
        (VALID[:8] + chunk(b"IHDR", bytes(13)) + chunk(b"IEND", b""), f"got a PNG {DAMAGED}"),
        (b"\xff\xd8\xff\xd9", f"got a JPEG {DAMAGED}"),
        (b"\xff\xd8\xff\xda\0\2", f"got a JPEG {DAMAGED}"),
        (b"RIFF\0\0\0\0WEBPVP8?" + bytes(20), "got a file that starts with"),
        (b"GIF89a\4\0\4\0\0\0\0;", f"got a GIF {DAMAGED}"),
        (b"GIF89a\4\0\4\0\0\0\0,\0\0\0\0\4\0\4\0\0", f"got a GIF {DAMAGED}"),
    ],
)
def test_invalid_images_and_corrupt_files_are_refused(image: object, message: str, backend: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        exact(backend).process(image)


def huge(kind: str, side: int) -> bytes:
    """Return a small file whose header claims side x side pixels."""
    image = Image.new("RGB", (8, 8), "red")
    if kind == "PNG":
        head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        return VALID[:8] + chunk(b"IHDR", head) + VALID[33:]
    if kind == "JPEG":
        return encoded(image, kind).replace(b"\0\x11\x08\0\x08\0\x08", b"\0\x11\x08" + side.to_bytes(2) * 2)
    size = side.to_bytes(2, "little") * 2
    if kind == "GIF":
        data = encoded(image, kind)
        return data[:6] + size + data[10:]
    if kind == "frame of a GIF":
        return encoded(image, "GIF").replace(b",\0\0\0\0\x08\0\x08\0", b",\0\0\0\0" + size)
    data = encoded(image, "WEBP", lossless=kind == "VP8L")
    if kind == "VP8L":
        return data[:21] + (side - 1 | side - 1 << 14).to_bytes(4, "little") + data[25:]
    return data[:26] + size + data[30:]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "frame of a GIF", "VP8L", "VP8"])
def test_a_decompression_bomb_is_refused_from_its_header_alone(kind: str) -> None:
    for side, message in (
        (9460, "got 9460 x 9460 = 89491600 pixels, want <= 89478485"),
        (16383, "above Pillow's own limit"),
    ):
        for call in (exact().process, exact().inspect, exact("torchvision").process):
            with pytest.raises(LimitExceededError, match=message):
                call(huge(kind, side))
    assert exact(max_source_pixels=9460**2).inspect(huge(kind, 9460)) == ImageSize(9460, 9460)


@pytest.mark.parametrize("image", [GRADIENT, Image.fromarray(GRADIENT), ImageSize(4, 8)])
def test_the_pixel_limit_applies_to_arrays_and_sizes(image: object) -> None:
    assert exact(max_source_pixels=32).process(image).grid == Grid(1, 2)
    with pytest.raises(LimitExceededError, match="got 4 x 8 = 32 pixels, want <= 31"):
        exact(max_source_pixels=31).process(image)


# The processor as a whole


@pytest.mark.parametrize("name", PHOTOS)
def test_backends_agree_on_photos_within_a_few_levels(name: str) -> None:
    data = encoded(photo(name, (1024, 768)), "JPEG", quality=90)
    one, other = list[Any](ImageProcessor(backend).process(data) for backend in BACKENDS)
    assert one.grid == other.grid == ImageProcessor().grid(768, 1024) == Grid(27, 37)
    assert one.size == (756, 1036)
    assert one.patches.shape == (27 * 37 * 4, 14, 14, 3)
    difference = np.abs(one.patches.astype(int) - other.patches)
    assert (difference > 3).mean() < 1e-5
    assert difference.max() <= 5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("max_tokens", "decoded"), [(None, (1024, 768)), (361, (1024, 768)), (150, (512, 384)), (3, (128, 96))]
)
def test_scaled_decoding_reads_fewer_pixels_if_they_suffice_for_the_image(
    backend: str, max_tokens: int | None, decoded: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = []

    def recording_resize(pixels: Pixels, *others: Any) -> Pixels:
        shapes.append(pixels.shape[:2])
        return original_resize(pixels, *others)

    original_resize = decode.resize
    monkeypatch.setattr("mmpos.images.processor.resize", recording_resize)
    data = encoded(photo(size=(1024, 768)), "JPEG", quality=90, exif=exif(6))
    processor = ImageProcessor(backend, max_tokens=max_tokens)
    scaled = replace(processor, scaled_decoding=True)
    want, got = list[Any](one.process(data) for one in (processor, scaled))
    assert shapes == [(1024, 768), decoded]
    for name in ("grid", "size", "source_size", "content_hash"):
        assert getattr(got, name) == getattr(want, name)
    difference = np.abs(got.patches.astype(int) - want.patches)
    assert difference.max() <= (0 if decoded == (1024, 768) else 30)
    assert difference.mean() <= 1.5
    assert scaled.pixels(data).shape == (1024, 768, 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scaled_decoding_changes_only_jpegs(backend: str) -> None:
    processor = ImageProcessor(backend, max_tokens=3)
    scaled = replace(processor, scaled_decoding=True)
    for image in (photo(size=(512, 384)), encoded(photo(size=(512, 384)), "PNG")):
        np.testing.assert_array_equal(scaled.process(image).patches, processor.process(image).patches)


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_pixel_values_equal_those_of_transformers(frames: int) -> None:
    pytest.importorskip("transformers")
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    image = photo("coffee", (320, 256))
    theirs = Qwen2VLImageProcessor(temporal_patch_size=frames)([image], return_tensors="pt")
    processor = ImageProcessor(order="merged")
    ours: Any = processor.process(image)
    assert theirs["image_grid_thw"].tolist() == [[1, 2 * ours.grid.height, 2 * ours.grid.width]]
    values = processor.pixel_values(ours.patches, temporal_patch_size=frames)
    assert values.dtype == np.float32
    assert_within(values, theirs["pixel_values"].numpy(), normalised(processor.mean, processor.std))


def test_an_image_may_be_processed_to_pixel_values() -> None:
    image, plain = photo(), ImageProcessor(order="merged")
    patches: Any = plain.process(image).patches
    for processor in (plain, replace(plain, dtype="float32")):
        got = processor.process(image, temporal_patch_size=3).patches
        np.testing.assert_array_equal(got, plain.pixel_values(patches, temporal_patch_size=3))


def test_each_backend_resizes_with_its_own_library() -> None:
    image = np.asarray(photo())
    by_pillow = Image.fromarray(image).resize((28, 20), Image.Resampling.BICUBIC)
    by_torch = resize(torch.tensor(image).permute(2, 0, 1), [20, 28], InterpolationMode.BICUBIC, antialias=True)
    options = {"max_pixels": 600}
    np.testing.assert_array_equal(pixels(image, "pillow", **options), by_pillow)
    np.testing.assert_array_equal(pixels(image, "torchvision", **options), by_torch.permute(1, 2, 0))
    assert np.any(np.asarray(by_pillow) != by_torch.permute(1, 2, 0).numpy())


def test_inspect_decodes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [encoded(photo(), kind, exif=exif(6)) for kind in ("JPEG", "PNG", "WEBP")]
    bare = encoded(photo(), "PNG")
    opened = [Image.open(io.BytesIO(data)) for data in (images[1], bare)]
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)
    for image in (*images, opened[0]):
        assert ImageProcessor().inspect(image) == ImageSize(64, 48)
    for image in (bare, opened[1]):
        assert ImageProcessor().inspect(image) == ImageSize(48, 64)


def test_a_processor_can_be_pickled_and_compares_by_value() -> None:
    processor = ImageProcessor("pillow", mean=np.array([0, 0.5, 1]), max_tokens=np.int64(9))  # type: ignore[arg-type]
    copy = pickle.loads(pickle.dumps(processor))
    assert copy == processor == ImageProcessor("pillow", mean=(0.0, 0.5, 1.0), max_tokens=9)
    assert hash(copy) == hash(processor)
    image = pickle.loads(pickle.dumps(copy.process(GRADIENT)))
    np.testing.assert_array_equal(image.patches, processor.process(GRADIENT).patches)
    assert tuple(pickle.loads(pickle.dumps(ImageSize(3, 4)))) == (3, 4)


THIN = encoded(Image.new("L", (201, 1)), "PNG")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((partial(ImageProcessor, **options), message) for options, message in (
            ({"backend": "opencv"}, "backend: got 'opencv', want one of 'torchvision', 'pillow'"),
            ({"order": "column"}, "order: got 'column'"),
            ({"dtype": "float16"}, "dtype: got 'float16'"),
            ({"patch_size": 0}, "patch_size: got 0, want >= 1"),
            ({"spatial_merge_size": 1.0}, r"spatial_merge_size: got 1\.0, want an integer"),
            ({"min_pixels": -1}, "min_pixels: got -1, want >= 0"),
            ({"max_pixels": 783}, "max_pixels: got 783, want >= 3136"),
            ({"min_pixels": 0, "max_pixels": 783}, "max_pixels: got 783, want >= 784"),
            ({"max_tokens": 0}, "max_tokens: got 0, want >= 1"),
            ({"max_source_pixels": 0}, "max_source_pixels: got 0, want >= 1"),
            ({"mean": (1, 2)}, r"mean: got \(1, 2\), want three finite numbers"),
            ({"mean": 0.5}, r"mean: got 0\.5, want three finite numbers"),
            ({"mean": (0, 0, float("nan"))}, "mean: got"),
            ({"std": (1, 0, 1)}, r"std: got \(1, 0, 1\), want three finite numbers > 0"),
            ({"std": (1, float("inf"), 1)}, "std: got"),
            ({"background": (0, 0, 256)}, "background: got 256, want <= 255"),
            ({"background": (0, 0.5, 0)}, r"background: got 0\.5, want an integer"),
        )),
        (lambda: PLAIN.fit(0, 5), r"image\.height: got 0, want >= 1"),
        (lambda: PLAIN.grid(5, -1), r"image\.width: got -1, want >= 1"),
        (lambda: PLAIN.fit(5, 5.0), r"image\.width: got 5\.0, want an integer"),  # type: ignore[arg-type]
        *((call, "image: got 1 x 201 pixels, want a long side <= 200 short sides")
          for call in (lambda: PLAIN.fit(1, 201), lambda: PLAIN.process(THIN), lambda: PLAIN.inspect(THIN))),
        (lambda: PLAIN.process(GRADIENT, temporal_patch_size=0), "temporal_patch_size: got 0, want >= 1"),
        (lambda: PLAIN.pixel_values([1]), "patches: got list, want a numpy array or a torch tensor"),  # type: ignore[type-var]
        (lambda: PLAIN.pixel_values(np.zeros((1, 14, 14, 3))), "patches: got float64, want uint8"),
        (lambda: PLAIN.pixel_values(torch.zeros(1, 14, 14, 3)), "patches: got torch.float32, want uint8"),
        (lambda: PLAIN.pixel_values(np.zeros((1, 3, 14, 14), np.uint8)), r"patches: got shape \(1, 3, 14, 14\), want"),
        (lambda: PLAIN.pixel_values(np.zeros((14, 14, 3), np.uint8)), r"patches: got shape \(14, 14, 3\), want"),
    ],
)  # fmt: skip
def test_arguments_are_checked(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        call()


def test_a_missing_library_is_reported_with_its_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    decode.torchvision.cache_clear()
    decode.pillow.cache_clear()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        ImportError, match=r'\(backend="pillow" works without torch\): torch is .* "multimodal-positions\[all\]" '
    ):
        ImageProcessor("torchvision").process(GRADIENT)
    np.testing.assert_array_equal(pixels(GRADIENT, "torchvision"), GRADIENT)  # the size fits, so nothing is resized
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r'pip install "multimodal-positions\[pillow\]"'):
        ImageProcessor("pillow").process(SAME["PNG bytes"])
