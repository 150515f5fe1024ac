"""Images: from the bytes of photographs to patches, whole and stage by stage, over their size and over cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from mmpos.images import ImageProcessor
from mmpos.images.decode import decode_jpeg, resize, torchvision
from mmpos.images.patches import patchify
from mmpos.support.checks import counted
from mmpos_bench.cases import Case, Contestant, Options, Point, Role
from mmpos_bench.photographs import FRAMES, UINT8, as_pixel_values, expected, photographs
from mmpos_bench.proofs import close, equal
from mmpos_bench.timing import Budget

__all__ = ["cases"]

_FLOAT32 = ImageProcessor(order="merged", dtype="float32")
_OVER_SIZE = "JPEG to patches, over the size of images"
_SIZES = ((256, 192), (512, 384), (1024, 768), (2048, 1536), (4096, 3072))
_BUDGET, _CURVE = Budget(3.0, 21), Budget(1.5, 11)

# One level of uint8, normalised: theirs is computed in float32 in another order, ours may differ by rounding alone.
_ROUNDING = 1e-5

Make = Callable[[bytes], Any]


def cases(options: Options) -> Iterator[Case]:
    """Every case of the suite; one thread, but where threads are counted."""
    torch, _ = torchvision()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        width, height = (128, 96) if options.quick else (1024, 768)
        photos = photographs(width, height)
        name = f"2 JPEG files of {width}×{height}"
        yield to_bytes("JPEG to patches of uint8", name, photos, options, budget=_of(options, _BUDGET))
        yield to_floats("JPEG to patches of float32", name, photos, options)
        yield stages(f"a JPEG file of {width}×{height}", photos[0], options)
        for width, height in _SIZES[: 2 if options.quick else None]:
            point = Point("pixels of an image, decoded", width * height)
            found, size = photographs(width, height), f"{width}×{height}"
            yield to_bytes(
                "JPEG to patches, over the size of images", size, found, options, point, _of(options, _CURVE)
            )
        yield from over_threads(photos, options)
    finally:
        torch.set_num_threads(threads)


def to_bytes(
    group: str,
    name: str,
    photos: list[bytes],
    options: Options,
    point: Point | None = None,
    budget: Budget | None = None,
) -> Case:
    """Patches of bytes, which is what to send to the device that normalises them."""
    want = [expected(data) for data in photos]
    ours = Contestant("mmpos", partial(_each, _patches, photos), proof=partial(_proved, _patches, photos, want))
    contestants = [_copy(want), ours, *_peers(photos, want, options)]
    work = {"images": len(photos), "bytes": sum(patches.nbytes for patches in want)}
    work["pixels"] = sum(size.height * size.width for size in map(UINT8.inspect, photos))
    unit = "images" if point is None else "pixels"
    return Case(group, name, tuple(contestants), work, unit, point, budget)


def to_floats(group: str, name: str, photos: list[bytes], options: Options) -> Case:
    """Patches normalised on the host, in Transformers' layout and in ours."""
    patches = [expected(data) for data in photos]
    want = [as_pixel_values(found).astype(np.float32) for found in patches]
    plain = [values.reshape(len(values), 3, FRAMES, -1)[:, :, 0].swapaxes(1, 2) for values in want]
    plain = [values.reshape(found.shape) for values, found in zip(plain, patches, strict=True)]
    contestants = [
        _copy(want),
        Contestant(
            "mmpos, Transformers' layout",
            partial(_each, _same_layout, photos),
            proof=partial(_proved, _same_layout, photos, want, _ROUNDING),
        ),
        Contestant(
            "mmpos, each pixel once",
            partial(_each, _floats, photos),
            Role.PART,
            partial(_proved, _floats, photos, plain, _ROUNDING),
        ),
        *_peers(photos, patches, options),
    ]
    work = {"images": len(photos), "bytes": sum(values.nbytes for values in want)}
    return Case(group, name, tuple(contestants), work, "images", budget=_of(options, _BUDGET))


def stages(name: str, data: bytes, options: Options) -> Case:
    """Where the time of one image goes."""
    size = UINT8.inspect(data)
    fitted = UINT8.fit(size.height, size.width)
    side, merge = UINT8.patch_size, UINT8.spatial_merge_size
    decoded = decode_jpeg(data)
    pixels = resize(decoded, *fitted, "torchvision")
    want = expected(data)
    cut: Callable[[], Any] = partial(patchify, pixels, side, merge, "merged", None)

    def pixels_are_right(found: Any) -> None:
        equal(patchify(found, side, merge, "merged", None), want)

    def stage(stage_name: str, call: Callable[[], Any], proof: Callable[[], object]) -> Contestant:
        return Contestant(stage_name, call, Role.PART, proof)

    contestants = (
        _copy([want]),
        stage("header", partial(UINT8.inspect, data), lambda: equal([*UINT8.inspect(data)], decoded.shape[:2])),
        stage(
            "decode",
            partial(decode_jpeg, data),
            lambda: pixels_are_right(resize(decode_jpeg(data), *fitted, "torchvision")),
        ),
        stage(
            f"resize to {fitted[1]}×{fitted[0]}",
            partial(resize, decoded, *fitted, "torchvision"),
            lambda: pixels_are_right(resize(decoded, *fitted, "torchvision")),
        ),
        stage("patches", cut, lambda: equal(cut(), want)),
        stage(
            "Transformers' layout of patches",
            partial(UINT8.pixel_values, want),
            lambda: close(UINT8.pixel_values(want), as_pixel_values(want), _ROUNDING),
        ),
    )
    work = {"images": 1, "bytes": want.nbytes}
    return Case("stages of JPEG to patches", name, contestants, work, "images", budget=_of(options, _CURVE))


def over_threads(photos: list[bytes], options: Options) -> Iterator[Case]:
    """Many images in 1, 2, 4 ... threads, up to the cores: per image, and how many threads are worth one."""
    cores = os.cpu_count() or 1
    counts = sorted({cores, *(2**i for i in range(cores.bit_length()) if 2**i <= cores)})
    many = photos * (2 if options.quick else 4 * cores)
    want = [expected(data) for data in photos] * (len(many) // len(photos))
    for count in counts[:2] if options.quick else counts:
        with ThreadPoolExecutor(count) as pool:

            def run(pool: ThreadPoolExecutor = pool) -> list[Any]:
                return list(pool.map(_patches, many))

            def prove(pool: ThreadPoolExecutor = pool) -> None:
                for got, patches in zip(run(pool), want, strict=True):
                    equal(got, patches)

            work = {"images": len(many), "bytes": sum(patches.nbytes for patches in want)}
            name, point = counted(count, "thread"), Point("threads", count)
            contestants = (_copy(want), Contestant("mmpos", run, proof=prove))
            yield Case("JPEG to patches, over threads", name, contestants, work, "images", point, _of(options, _CURVE))


def _patches(data: bytes) -> Any:
    return UINT8.process(data).patches


def _floats(data: bytes) -> Any:
    return _FLOAT32.process(data).patches


def _same_layout(data: bytes) -> Any:
    return UINT8.process(data, temporal_patch_size=FRAMES).patches


def _each(make: Make, photos: list[bytes]) -> None:
    for data in photos:
        make(data)


def _proved(make: Make, photos: list[bytes], want: list[Any], at_most: float = 0) -> None:
    for data, values in zip(photos, want, strict=True):
        close(make(data), values, at_most)


def _copy(results: list[Any]) -> Contestant:
    """The limit: what every result takes to write, from the same bytes at hand."""
    targets = [np.empty_like(result) for result in results]

    def copy() -> None:
        for target, result in zip(targets, results, strict=True):
            np.copyto(target, result)

    return Contestant("copy of the patches", copy, Role.LIMIT)


def _peers(photos: list[bytes], patches: list[Any], options: Options) -> Iterator[Contestant]:
    """Transformers, whose floats must be ours within one level of uint8 each."""
    qwen = options.peers.get("Transformers", "qwen_images")
    if qwen is None:
        return
    want, level = [as_pixel_values(found) for found in patches], 1 / (255 * min(UINT8.std))
    for name, make in (("Pillow", qwen.by_pillow), ("torchvision", qwen.by_torchvision)):
        proof = partial(_proved, make, photos, want, level)
        yield Contestant(f"Transformers, {name}", partial(_each, make, photos), Role.PEER, proof)


def _of(options: Options, budget: Budget) -> Budget | None:
    """A budget of its own, but not where everything is quick."""
    return None if options.quick else budget
