"""From tar shards of photographs to packed batches: a loader in this process and in workers."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from mmpos.data import BatchDataset, PackedCollator, Packer, Pairs, Preprocess, shards
from mmpos.sequence.builder import SequenceBuilder
from mmpos_bench.cases import Case, Contestant, Later, Options, Role
from mmpos_bench.photographs import UINT8, as_pixel_values, expected, photographs
from mmpos_bench.proofs import close, equal, holds
from mmpos_bench.timing import Budget

__all__ = ["cases"]

_TOKENS, _BUFFER = 8192, 16
_BUDGET = Budget(4.0, 7)

Want = list[Any]


def cases(options: Options) -> Iterator[Later]:
    """One corpus, read by every loader."""
    width, height, files, records = (128, 96, 2, 2) if options.quick else (1024, 768, 4, 48)
    with TemporaryDirectory() as folder:
        photos = photographs(width, height)
        paths = _corpus(Path(folder), photos, files, records)
        group, name = "tar to packed batches", f"{files * records} JPEG files of {width}×{height}"
        yield Later(group, name, partial(_case, group, name, paths, photos, files * records, options))


def _case(group: str, name: str, paths: list[Path], photos: list[bytes], images: int, options: Options) -> Case:
    """An epoch of every loader; the workers of each live on, and wait while others run."""
    want = [expected(data) for data in photos]
    per_batch = max(1, _TOKENS // (len(want[0]) // UINT8.spatial_merge_size**2 + 16))
    cores = os.cpu_count() or 1
    counts = (0, 1) if options.quick else sorted({0, 1, min(2, cores), cores})
    copies = [np.empty_like(patches) for patches in want]

    def limit() -> None:
        for i in range(images):
            np.copyto(copies[i % len(want)], want[i % len(want)])

    contestants = [Contestant("copy of the patches", limit, Role.LIMIT)]
    for workers in counts:
        ours = _loader(paths, workers)
        prove = partial(_prove, partial(_mmpos, ours), want, images, 0)
        contestants.append(Contestant(f"mmpos, {_told(workers)}", partial(_epoch, ours), proof=prove))
    qwen = options.peers.get("Transformers", "qwen_loader")
    for workers in counts if qwen else ():
        theirs = qwen.loader(paths, per_batch, workers)
        floats, level = [as_pixel_values(patches) for patches in want], 1 / (255 * min(UINT8.std))
        prove = partial(_prove, partial(_transformers, theirs), floats, images, level)
        contestants.append(Contestant(f"Transformers, {_told(workers)}", partial(_epoch, theirs), Role.PEER, prove))
    work = {"images": images, "bytes": sum(want[i % len(want)].nbytes for i in range(images))}
    return Case(group, name, tuple(contestants), work, "images", budget=None if options.quick else _BUDGET)


def _loader(paths: list[Path], workers: int) -> DataLoader[Any]:
    preprocess = Preprocess(Pairs(), SequenceBuilder(images=UINT8))
    dataset = BatchDataset(shards(paths), preprocess, Packer(_TOKENS, buffer=_BUFFER), PackedCollator())
    return DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)


def _epoch(loader: Iterable[object]) -> None:
    for _ in loader:
        pass


def _mmpos(loader: DataLoader[Any]) -> Iterator[tuple[list[str], Any]]:
    for batch in loader:
        yield list(batch.keys), batch.patches


def _transformers(loader: DataLoader[Any]) -> Iterator[tuple[list[str], Any]]:
    for keys, patches, _ in loader:
        yield keys, patches


def _prove(batches: Callable[[], Iterator[tuple[list[str], Any]]], want: Want, images: int, at_most: float) -> None:
    """Every image came, with the patches that it should have."""
    found: list[str] = []
    first: dict[int, Any] = {}
    for keys, patches in batches():
        found += keys
        for key, part in zip(keys, np.split(np.asarray(patches), len(keys)), strict=True):
            photo = int(key) % len(want)
            if photo in first:  # the same file gives the same numbers, which is quickly seen
                equal(part, first[photo])
            else:
                close(part, want[photo], at_most)
                first[photo] = part.copy()
    per_shard = sorted(found)
    holds(len(found) == images, f"{len(found)} images", f"{images}")
    counts = {per_shard.count(key) for key in set(found)}
    holds(len(counts) == 1, f"{sorted(counts)} times the same key", "one number of times, once in every shard")


def _told(workers: int) -> str:
    return {0: "no worker", 1: "1 worker"}.get(workers, f"{workers} workers")


def _corpus(folder: Path, photos: list[bytes], files: int, records: int) -> list[Path]:
    """Shards of webdataset pairs, the photographs in turn."""
    paths = [folder / f"{shard:05}.tar" for shard in range(files)]
    for path in paths:
        with tarfile.open(path, "w") as tar:
            for i in range(records):
                for name, data in (("jpg", photos[i % len(photos)]), ("txt", b"A photograph.")):
                    member = tarfile.TarInfo(f"{i:06}.{name}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return paths
