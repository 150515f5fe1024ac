"""From the bytes of photographs to batches, in this process and in workers, and collating alone; in one run.

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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torchvision
from bench_collate import equal, evenly, with_loops
from torch.utils.data import DataLoader

import mmpos
from mmpos.bench.machine import stamp
from mmpos.bench.photographs import photographs
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
from mmpos_server.malloc import keep_large_blocks

UINT8 = ImageProcessor(order="merged")

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
    photos = photographs(sizes.width, sizes.height)
    mean = sum(map(len, photos)) / len(photos)
    print(f"  {len(photos)} JPEG files of {sizes.width}×{sizes.height}, {mean:,.0f} bytes each")
    with tempfile.TemporaryDirectory() as folder:
        workers(corpus(Path(folder), photos, sizes), sizes)


def main() -> None:
    """Read the command line, say where and how this ran, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="toy sizes, every path once")
    sizes = QUICK if parser.parse_args().quick else Sizes()
    torch.set_num_threads(1)
    versions = f"torch {torch.__version__}, torchvision {torchvision.__version__}"
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
