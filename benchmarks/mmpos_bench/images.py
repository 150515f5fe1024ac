"""Images: convert encoded photographs to patches."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

import mmpos
from mmpos.images import ImageProcessor
from mmpos.images.decode import pillow, torchvision
from mmpos_bench.proofs import equal
from mmpos_bench.suites import Comparison, Contestant, Lineup, Role, SuiteOptions, limit
from mmpos_bench.timing import Budget, one_thread

UINT8 = ImageProcessor(order="merged")
"""Processor with the patch order of Qwen-VL."""

LEVEL = 1 / (255 * min(UINT8.std))
"""The largest difference that one uint8 level makes after normalising."""

PHOTOS = tuple(Path(mmpos.__file__).parent / "photos" / f"{name}.jpg" for name in ("chelsea", "coffee"))
"""Photographs of a cat and of a cup."""

_FRAMES = 2  # identical frames of a still image in Qwen-VL's layout
_BUDGET = Budget(3.0, 21)

Array = npt.NDArray[np.number]
Patches = npt.NDArray[np.uint8]
A = TypeVar("A", bound=np.generic)


def cases(options: SuiteOptions) -> Iterator[Comparison]:
    """Yield every case, running on one thread."""
    torchvision()  # raises the error that names the missing extra
    with one_thread():
        width, height = (128, 96) if options.quick else (1024, 768)
        photos = photographs(width, height)
        name = f"2 JPEG files of {width}×{height}"
        line_up = partial(to_bytes, photos, options)
        yield Comparison("JPEG to patches of uint8", name, line_up, "images", budget=_BUDGET)


def to_bytes(photos: list[bytes], options: SuiteOptions) -> Lineup:
    """Line up contestants that compute uint8 patches, for normalising on the device."""
    want = [expected(data) for data in photos]
    work = {"images": len(photos), "bytes": sum(patches.nbytes for patches in want)}
    ours = _each("mmpos", lambda data: UINT8.process(data).patches, photos, want)
    return Lineup([_copy(want), ours, *_peers(photos, want, options)], work)


def _each(
    name: str,
    make: Callable[[bytes], object],
    photos: list[bytes],
    want: list[npt.NDArray[A]],
    role: Role = Role.OURS,
    at_most: float = 0,
) -> Contestant:
    """Return a contestant that calls ``make`` for each photograph and discards the results."""

    def prove() -> None:
        equal(tuple(map(make, photos)), tuple(want), at_most)

    return Contestant(name, lambda: deque(map(make, photos), maxlen=0), prove, role)


def _copy(results: list[npt.NDArray[A]]) -> Contestant:
    """Return the limit, which is a copy of the finished patches."""
    targets = [np.empty_like(result) for result in results]
    return limit("copy of the patches", lambda: deque(map(np.copyto, targets, results), maxlen=0))


def _peers(photos: list[bytes], patches: list[Patches], options: SuiteOptions) -> Iterator[Contestant]:
    """Yield Transformers, whose values must equal ours within one uint8 level."""
    qwen = options.peer("Transformers", partial(import_module, "mmpos_bench.peers.qwen"))
    if qwen is not None:
        want = [as_pixel_values(image) for image in patches]
        yield _each("Transformers, Pillow", qwen.by_pillow, photos, want, Role.PEER, LEVEL)
        yield _each("Transformers, torchvision", qwen.by_torchvision, photos, want, Role.PEER, LEVEL)


def photographs(width: int, height: int) -> list[bytes]:
    """Resize the two photographs and encode them as JPEG files.

    Raises:
        ImportError: Pillow is not installed.
    """
    pil, files = pillow(), []
    for path in PHOTOS:
        with pil.open(path) as photo:
            sized = photo.convert("RGB").resize((width, height), pil.Resampling.BICUBIC)
        file = io.BytesIO()
        sized.save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


def expected(data: bytes) -> Patches:
    """Compute a JPEG's patches with torchvision's functions and a loop over patches.

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


def as_pixel_values(patches: Patches) -> npt.NDArray[np.float64]:
    """Convert patches to Transformers' layout, normalised in float64."""
    values = (patches / 255 - np.array(UINT8.mean)) / np.array(UINT8.std)
    planes = values.transpose(0, 3, 1, 2)[:, :, None]
    return np.repeat(planes, _FRAMES, axis=2).reshape(len(patches), -1)
