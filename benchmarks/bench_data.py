"""From the bytes of photographs to patches and batches, against Transformers' fast Qwen2-VL processor; in one run.

python benchmarks/bench_data.py            with the C library's own malloc, then with the one that the server tunes
python benchmarks/bench_data.py --quick    every path once on toy sizes
"""

import argparse
import io
import os
import shlex
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
import transformers
from bench_collate import equal, evenly, with_loops
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.io import ImageReadMode, decode_image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

import mmpos
from mmpos.bench.machine import stamp
from mmpos.bench.timing import Budget, Timing, compare
from mmpos.data import (
    Batch,
    BatchDataset,
    Example,
    PackedCollator,
    Packer,
    PaddedCollator,
    Pairs,
    Preprocess,
    shards,
)
from mmpos.images import ImageProcessor
from mmpos.images.backends import decode_jpeg, resize
from mmpos.images.patches import patchify
from mmpos_server.malloc import keep_large_blocks

PHOTOS = Path(mmpos.__file__).parent / "photos"
UINT8 = ImageProcessor(order="merged")
FLOAT32 = ImageProcessor(order="merged", dtype="float32")
THEIRS = Qwen2VLImageProcessor()
PIL_THEIRS, TENSOR_THEIRS = "Transformers, decoded by Pillow", "Transformers, decoded by torchvision"

Make = Callable[[bytes], Any]
Calls = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Sizes:
    """How large and how long everything is."""

    width: int = 1024
    height: int = 768
    seconds: float = 3.0
    rounds: int = 21
    shards: int = 4
    records: int = 48
    epochs: int = 7
    batch: tuple[int, int, int, int] = (32, 8192, 16, 16)  # documents, their tokens, images and sides


QUICK = Sizes(128, 96, 0.0, 2, 2, 2, 2, (4, 64, 2, 4))
COLLATE_SECONDS = 5e-3


def photographs(sizes: Sizes) -> list[bytes]:
    """The two photographs that come with the package, enlarged, as JPEG files."""
    found = []
    for name in ("chelsea", "coffee"):
        with Image.open(PHOTOS / f"{name}.jpg") as photo:
            large = photo.convert("RGB").resize((sizes.width, sizes.height), Image.Resampling.BICUBIC)
        file = io.BytesIO()
        large.save(file, "JPEG", quality=90)
        found.append(file.getvalue())
    return found


def by_pillow(data: bytes) -> Any:
    """What users of datasets.Image do: a Pillow image, then the processor."""
    photo: Image.Image = Image.open(io.BytesIO(data))
    return THEIRS([photo], return_tensors="pt")["pixel_values"]


def by_torchvision(data: bytes) -> Any:
    """What the processor's own loading of files does: a tensor, then the processor."""
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision would rather have torchcodec decode
        tensor = decode_image(encoded, mode=ImageReadMode.RGB, apply_exif_orientation=True)
    return THEIRS([tensor], return_tensors="pt")["pixel_values"]


def same_layout(data: bytes) -> Any:
    """Ours, laid out as theirs."""
    return UINT8.pixel_values(UINT8.process(data).patches)


OURS: dict[str, tuple[Make, float | None]] = {
    "mmpos, patches of uint8": (UINT8.process, 3.0),
    "mmpos, patches of float32": (FLOAT32.process, None),
    "mmpos, Transformers' float32 layout": (same_layout, 1.8),
}
"""How ours is called, and what is to be reached."""


def prove(photos: list[bytes]) -> str:
    """Equality before timing: every sample of theirs against ours, in each form."""
    mean, std = np.array(UINT8.mean), np.array(UINT8.std)
    level, furthest = float((1 / (255 * std)).max()), 0.0
    for data in photos:
        ours = UINT8.process(data).patches
        assert ours is not None
        for make in (by_pillow, by_torchvision):
            theirs = make(data).numpy()
            values = same_layout(data)
            assert (values.shape, values.dtype) == (theirs.shape, theirs.dtype)
            furthest = max(furthest, float(np.abs(values - theirs).max()))
            frames = theirs.reshape(len(ours), 3, 2, 14, 14).transpose(2, 0, 3, 4, 1)
            assert (np.rint((frames * std + mean) * 255) == ours).all(), "uint8: got other pixels"
            assert np.abs(frames - FLOAT32.process(data).patches).max() <= 1e-5, "float32: got other pixels"
    assert furthest <= level, f"float32 layout: got values {furthest:.1e} apart, want at most {level:.1e}"
    return f"patches equal before timing, float32 within {furthest:.1e} (one level of uint8 is {level:.1e})"


def images(photos: list[bytes], sizes: Sizes) -> None:
    """Images per second and core of all contestants."""
    makers = {PIL_THEIRS: by_pillow, TENSOR_THEIRS: by_torchvision, **{name: make for name, (make, _) in OURS.items()}}

    def each(make: Make) -> None:
        for data in photos:
            make(data)

    calls: Calls = {name: partial(each, make) for name, make in makers.items()}
    times = compare(calls, Budget(sizes.seconds, sizes.rounds))
    print(f"  {'one core, µs per image':<38} {'':>28} {'images/s':>9}  over Pillow's, over torchvision's")
    for name, total in times.items():
        count = len(photos)
        one = Timing(total.median / count, total.p20 / count, total.p80 / count, total.turns)
        ratios = [times[base].median / total.median for base in (PIL_THEIRS, TENSOR_THEIRS)]
        target = OURS[name][1] if name in OURS else None
        cells = [judged(ratio, target) for ratio in ratios] if name in OURS else []
        print(f"  {name:<38} {one.micros:>28} {1 / one.median:>9.0f}  {'; '.join(cells)}".rstrip())


def judged(ratio: float, target: float | None) -> str:
    """A ratio of medians beside its target."""
    met = "" if target is None else f", target at least {target:g}×: {'met' if ratio >= target else 'missed'}"
    return f"{ratio:.2f}×{met}"


def stages(data: bytes, sizes: Sizes) -> None:
    """Where our time goes."""
    size = UINT8.fit(sizes.height, sizes.width)
    decoded = decode_jpeg(data)
    pixels = resize(decoded, *size, "torchvision")
    patches = patchify(pixels, 14, 2, "merged", None)
    calls: Calls = {
        "header": partial(UINT8.inspect, data),
        "decode": partial(decode_jpeg, data),
        f"resize to {size[1]}×{size[0]}": partial(resize, decoded, *size, "torchvision"),
        "patches of uint8": partial(patchify, pixels, 14, 2, "merged", None),
        "float32 layout": partial(UINT8.pixel_values, patches),
    }
    times = compare(calls, Budget(sizes.seconds / 5, sizes.rounds))
    print("  stages, µs:", ", ".join(f"{name} {t.median * 1e6:,.0f}" for name, t in times.items()))


def corpus(folder: Path, photos: list[bytes], sizes: Sizes) -> list[Path]:
    """Shards of webdataset pairs, the photographs in turn."""
    paths = [folder / f"{shard:05}.tar" for shard in range(sizes.shards)]
    for path in paths:
        with tarfile.open(path, "w") as tar:
            for i in range(sizes.records):
                for name, data in (("jpg", photos[i % len(photos)]), ("txt", b"A photograph.")):
                    member = tarfile.TarInfo(f"{i:06}.{name}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return paths


def workers(paths: list[Path], sizes: Sizes) -> None:
    """Images per second from tar shards to packed batches, in this process and in one and two workers."""
    builder = mmpos.SequenceBuilder(images=UINT8)
    packer = Packer(8192, buffer=16)
    dataset = BatchDataset(shards(paths), Preprocess(Pairs(), builder), packer, PackedCollator())
    loaders = {
        count: DataLoader(dataset, batch_size=None, num_workers=count, persistent_workers=count > 0)
        for count in (0, 1, 2)
    }
    spent: dict[int, list[float]] = {count: [] for count in loaders}
    for epoch in range(sizes.epochs + 1):
        for count, loader in loaders.items():
            begin = time.perf_counter()
            found = sum(len(batch.grid_thw) for batch in loader)
            assert found == sizes.shards * sizes.records, f"{count} workers: got {found} images"
            if epoch:  # the first starts the workers
                spent[count].append((time.perf_counter() - begin) / found)
    print("  tar to packed batches, µs per image")
    times = {count: Timing.of(values) for count, values in spent.items()}
    for count, one in times.items():
        ratio = f"{times[1].median / one.median:.2f}× one worker" if count == 2 else ""
        name = ("no worker", "1 worker", "2 workers")[count]
        print(f"  {name:<38} {one.micros:>28} {1 / one.median:>9.0f}  {ratio}".rstrip())


def collate(sizes: Sizes) -> None:
    """A batch of documents known by their tokens and grids, equal to that of a plain loop; no pixels are copied."""
    documents, tokens, *_ = sizes.batch
    examples = evenly(*sizes.batch)
    collators: dict[str, Callable[[list[Example]], Batch]] = {"packed": PackedCollator(), "padded": PaddedCollator()}
    for collator in collators.values():
        equal(collator(examples), with_loops(examples))
    calls: Calls = {name: partial(collator, examples) for name, collator in collators.items()}
    print("  collate, µs per batch")
    for name, one in compare(calls, Budget(sizes.seconds, sizes.rounds)).items():
        met = "met" if one.median < COLLATE_SECONDS else "missed"
        told = f"{documents} × {tokens:,} tokens, {name}"
        print(f"  {told:<38} {one.micros:>28}  target below {COLLATE_SECONDS * 1e6:,.0f}: {met}")


def measure(sizes: Sizes) -> None:
    """Prove equality, measure and print; collate first, since blocks that images leave behind would make it faster."""
    collate(sizes)
    photos = photographs(sizes)
    mean = sum(map(len, photos)) / len(photos)
    print(f"  {len(photos)} JPEG files of {sizes.width}×{sizes.height}, {mean:,.0f} bytes each; {prove(photos)}")
    images(photos, sizes)
    stages(photos[0], sizes)
    with tempfile.TemporaryDirectory() as folder:
        workers(corpus(Path(folder), photos, sizes), sizes)


def main() -> None:
    """Read the command line, say where and how this ran, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="toy sizes, every path once")
    sizes = QUICK if parser.parse_args().quick else Sizes()
    torch.set_num_threads(1)
    versions = (
        f"torch {torch.__version__}, torchvision {torchvision.__version__}, transformers {transformers.__version__}"
    )
    print(f"{stamp('default')}, {os.cpu_count()} cores, {versions}, one thread per process")
    print(f"python {shlex.join(sys.argv)}; medians (20th–80th percentile), all contestants in turn")
    for malloc in ("default", "tuned"):
        if malloc == "tuned" and not keep_large_blocks():
            print("\nmalloc tuned: only with glibc")
            continue
        print(f"\nmalloc {malloc}, for all contestants")
        measure(sizes)


if __name__ == "__main__":
    main()
