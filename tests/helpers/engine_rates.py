"""Measure the engines one after another on one machine: ``python tests/helpers/engine_rates.py --records 2000``."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import ray
from data_corpus import write_tar
from hostile_images import encoded
from PIL import Image
from waiting import descendants, read_proc

import mmpos
from mmpos.data import Pairs, Preprocess, shards, write_sequences

PHOTOS = Path(mmpos.__file__).with_name("photos")


def write_corpus(folder: Path, records: int, files: int) -> None:
    """Write tar files of captioned photos with sides of 400 to 800 pixels."""
    photos = [Image.open(PHOTOS / f"{name}.jpg").convert("RGB") for name in ("chelsea", "coffee")]
    rng = np.random.default_rng(0)
    for number in range(files):
        rows = []
        for i in range(number, records, files):
            width, height = map(int, rng.integers(400, 800, 2))
            jpeg = encoded(photos[i % 2].resize((width, height)), "jpeg", quality=88)
            rows.append({"id": f"{i:07}", "image": {"bytes": jpeg}, "text": "a photo of something " * 10})
        write_tar(folder / f"{number:03}.tar", rows)


@contextmanager
def peak_memory(name: bytes) -> Iterator[list[int]]:
    """Watch descendants of this process with ``name`` in their command line; yield their peak private memory in MiB."""
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            for process in descendants(os.getpid()):
                with suppress(OSError, IndexError, ValueError):
                    if name in read_proc(process, "cmdline"):
                        anonymous = read_proc(process, "status").split(b"RssAnon:")[1].split()[0]
                        peak[0] = max(peak[0], int(anonymous) // 1024)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    preprocess = Preprocess(Pairs(), mmpos.SequenceBuilder(images=mmpos.ImageProcessor("pillow")))
    ray.init(num_cpus=options.workers, include_dashboard=False, log_to_driver=False)
    workers = {"local": b"spawn_main", "ray": b"PartWriter"}
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder), options.records, options.files)
        for number in range(options.rounds):
            rates = {}
            for engine in ("local", "ray")[:: 1 if number % 2 else -1]:
                out = Path(folder, "out")
                with peak_memory(workers[engine]) as peak:
                    summary = write_sequences(
                        shards(f"{folder}/*.tar"),
                        out,
                        preprocess,
                        engine=engine,  # type: ignore[arg-type]
                        workers=options.workers,
                    )
                rates[engine] = summary.counts.documents / summary.seconds
                print(f"{engine:5} {rates[engine]:7.1f} records/s, {peak[0]} MiB in a worker", flush=True)
                shutil.rmtree(out)
            print(f"ray / local {rates['ray'] / rates['local']:.3f}", flush=True)


if __name__ == "__main__":
    main()
