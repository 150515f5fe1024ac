"""Images: from the bytes of photographs to patches, whole and stage by stage, over their size and over cores."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import mmpos
from mmpos.images import ImageProcessor
from mmpos.images.decode import decode_jpeg, pillow, resize, torchvision
from mmpos.images.patches import patchify
from mmpos.support.checks import counted
from mmpos_bench.proofs import close, equal
from mmpos_bench.results import Point
from mmpos_bench.suites import Case, Contestant, Lineup, Options, Role, giving
from mmpos_bench.timing import Budget, one_thread

__all__ = ["FRAMES", "UINT8", "as_pixel_values", "cases", "expected", "photographs"]

UINT8 = ImageProcessor(order="merged")
"""Patches as Qwen-VL wants them."""

FRAMES = 2
"""Frames of a still image in Qwen-VL's layout, all the same."""

_PHOTOS = Path(mmpos.__file__).parent / "photos"
_FLOAT32 = ImageProcessor(order="merged", dtype="float32")
_SIZES = ((256, 192), (512, 384), (1024, 768), (2048, 1536), (4096, 3072))
_BUDGET, _CURVE = Budget(3.0, 21), Budget(1.5, 11)

# One level of uint8, normalised: theirs is computed in float32 in another order, ours may differ by rounding alone.
_ROUNDING = 1e-5

Make = Callable[[bytes], Any]


def cases(options: Options) -> Iterator[Case]:
    """Every case of the suite; one thread, but where threads are counted."""
    torchvision()  # says which extra is missing
    with one_thread():
        width, height = (128, 96) if options.quick else (1024, 768)
        photos = photographs(width, height)
        name = f"2 JPEG files of {width}×{height}"
        line_up = partial(to_bytes, photos, options)
        yield Case("JPEG to patches of uint8", name, line_up, "images", budget=_BUDGET)
        yield Case("JPEG to patches of float32", name, partial(to_floats, photos, options), "images", budget=_BUDGET)
        name = f"a JPEG file of {width}×{height}"
        yield Case("stages of JPEG to patches", name, partial(stages, photos[0]), "images", budget=_CURVE)
        for width, height in _SIZES[: 2 if options.quick else None]:
            name, point = f"{width}×{height}", Point("pixels of an image, decoded", width * height)
            line_up = partial(to_bytes, photographs(width, height), options)
            yield Case("JPEG to patches, over the size of images", name, line_up, "pixels", point, _CURVE)
        yield from over_threads(photos, options)


def to_bytes(photos: list[bytes], options: Options) -> Lineup:
    """Patches of bytes, which is what to send to the device that normalises them."""
    want = [expected(data) for data in photos]
    work = {"images": len(photos), "bytes": sum(patches.nbytes for patches in want)}
    work["pixels"] = sum(size.height * size.width for size in map(UINT8.inspect, photos))
    return Lineup([_copy(want), _each("mmpos", _patches, photos, want), *_peers(photos, want, options)], work)


def to_floats(photos: list[bytes], options: Options) -> Lineup:
    """Patches normalised on the host, in Transformers' layout and in ours."""
    patches = [expected(data) for data in photos]
    want = [as_pixel_values(image).astype(np.float32) for image in patches]
    plain = [values.reshape(len(values), 3, FRAMES, -1)[:, :, 0].swapaxes(1, 2) for values in want]
    plain = [values.reshape(image.shape) for values, image in zip(plain, patches, strict=True)]
    contestants = [
        _copy(want),
        _each("mmpos, Transformers' layout", _same_layout, photos, want, at_most=_ROUNDING),
        _each("mmpos, each pixel once", _floats, photos, plain, Role.PART, _ROUNDING),
        *_peers(photos, patches, options),
    ]
    return Lineup(contestants, {"images": len(photos), "bytes": sum(values.nbytes for values in want)})


def stages(data: bytes) -> Lineup:
    """The stages of one image, each by itself."""
    size = UINT8.inspect(data)
    fitted = UINT8.fit(size.height, size.width)
    decoded = decode_jpeg(data)
    pixels = resize(decoded, *fitted, "torchvision")
    want = expected(data)

    def cut(image: Any) -> Any:
        return patchify(image, UINT8.patch_size, UINT8.spatial_merge_size, "merged", None)

    def finished(image: Any) -> Any:
        return cut(resize(image, *fitted, "torchvision"))

    layout = partial(UINT8.pixel_values, want)
    part = partial(giving, role=Role.PART)
    contestants = [
        _copy([want]),
        part("header", partial(UINT8.inspect, data), decoded.shape[:2], read=list),
        part("decode", partial(decode_jpeg, data), want, read=finished),
        part(f"resize to {fitted[1]}×{fitted[0]}", partial(resize, decoded, *fitted, "torchvision"), want, read=cut),
        part("patches", partial(cut, pixels), want),
        Contestant(
            "Transformers' layout of patches",
            layout,
            Role.PART,
            lambda: close(layout(), as_pixel_values(want), _ROUNDING),
        ),
    ]
    return Lineup(contestants, {"images": 1, "bytes": want.nbytes})


def over_threads(photos: list[bytes], options: Options) -> Iterator[Case]:
    """Many images in 1, 2, 4 ... threads, up to the cores: per image, and how many threads are worth one."""
    cores = os.cpu_count() or 1
    counts = sorted({cores, *(2**i for i in range(cores.bit_length()) if 2**i <= cores)})
    many = photos * (2 if options.quick else 4 * cores)
    for count in counts[:2] if options.quick else counts:
        with ThreadPoolExecutor(count) as pool:
            name, point = counted(count, "thread"), Point("threads", count)
            line_up = partial(_in_threads, pool, many, len(photos))
            yield Case("JPEG to patches, over threads", name, line_up, "images", point, _CURVE)


def _in_threads(pool: ThreadPoolExecutor, many: list[bytes], different: int) -> Lineup:
    want = [expected(data) for data in many[:different]] * (len(many) // different)

    def run() -> list[Any]:
        return list(pool.map(_patches, many))

    def prove() -> None:
        for got, patches in zip(run(), want, strict=True):
            equal(got, patches)

    work = {"images": len(many), "bytes": sum(patches.nbytes for patches in want)}
    return Lineup([_copy(want), Contestant("mmpos", run, proof=prove)], work)


def _patches(data: bytes) -> Any:
    return UINT8.process(data).patches


def _floats(data: bytes) -> Any:
    return _FLOAT32.process(data).patches


def _same_layout(data: bytes) -> Any:
    return UINT8.process(data, temporal_patch_size=FRAMES).patches


def _each(
    name: str, make: Make, photos: list[bytes], want: list[Any], role: Role = Role.OURS, at_most: float = 0
) -> Contestant:
    """A contestant that makes something of every photograph, one after the other."""

    def call() -> None:
        for data in photos:
            make(data)

    def prove() -> None:
        for data, values in zip(photos, want, strict=True):
            close(make(data), values, at_most)

    return Contestant(name, call, role, prove)


def _copy(results: list[Any]) -> Contestant:
    """The limit: what every result takes to write, from the same bytes at hand."""
    targets = [np.empty_like(result) for result in results]

    def copy() -> None:
        for target, result in zip(targets, results, strict=True):
            np.copyto(target, result)

    return Contestant("copy of the patches", copy, Role.LIMIT)


def _peers(photos: list[bytes], patches: list[Any], options: Options) -> Iterator[Contestant]:
    """Transformers, whose floats must be ours within one level of uint8 each."""
    qwen = options.peers.get("Transformers", partial(import_module, "mmpos_bench.peers.qwen"))
    if qwen is not None:
        want, level = [as_pixel_values(image) for image in patches], 1 / (255 * min(UINT8.std))
        yield _each("Transformers, Pillow", qwen.by_pillow, photos, want, Role.PEER, level)
        yield _each("Transformers, torchvision", qwen.by_torchvision, photos, want, Role.PEER, level)


def photographs(width: int, height: int) -> list[bytes]:
    """The two photographs in another size, as JPEG files.

    Raises:
        ImportError: Pillow is not installed.
    """
    pil, files = pillow(), []
    for name in ("chelsea", "coffee"):
        with pil.open(_PHOTOS / f"{name}.jpg") as photo:
            sized = photo.convert("RGB").resize((width, height), pil.Resampling.BICUBIC)
        file = io.BytesIO()
        sized.save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


def expected(data: bytes) -> npt.NDArray[np.uint8]:
    """The patches of a JPEG by torchvision's own functions, cut one at a time in a loop.

    Raises:
        ImportError: torchvision is not installed.
    """
    torch, functional = torchvision()
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    planes = torch.ops.image.decode_jpeg(encoded, 3, False).contiguous()
    size, bicubic = UINT8.fit(*planes.shape[1:]), functional.InterpolationMode.BICUBIC
    pixels = functional.resize(planes, list(size), bicubic, antialias=True).numpy()
    side, merge = UINT8.patch_size, UINT8.spatial_merge_size
    rows, columns = size[0] // side, size[1] // side
    patches = [
        pixels[:, i * side : (i + 1) * side, j * side : (j + 1) * side].transpose(1, 2, 0)
        for top in range(0, rows, merge)
        for left in range(0, columns, merge)
        for i in range(top, top + merge)
        for j in range(left, left + merge)
    ]
    return np.stack(patches)


def as_pixel_values(patches: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Patches in Transformers' layout, normalised in float64."""
    values = (patches / 255 - np.array(UINT8.mean)) / np.array(UINT8.std)
    planes = values.transpose(0, 3, 1, 2)[:, :, None]
    return np.repeat(planes, FRAMES, axis=2).reshape(len(patches), -1)
