"""Training data: examples into batches and packs, and tar shards into packed batches."""

from __future__ import annotations

from collections.abc import Iterator

from mmpos.support.extras import needed_for
from mmpos_bench.cases import Case, Later, Options

with needed_for("the data suite", extra="data"):
    import torch

    from mmpos_bench import collating, loaders, packing

__all__ = ["cases"]


def cases(options: Options) -> Iterator[Case | Later]:
    """Every case of the suite, with one thread in every process.

    Collating comes first: blocks that images leave behind in the C library would make it faster.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from collating.cases(options)
        yield from packing.cases(options)
        yield from loaders.cases(options)
    finally:
        torch.set_num_threads(threads)
