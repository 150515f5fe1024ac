"""Collating and packing: milliseconds per batch against plain loops, and how full packs of a realistic mix are.

The mix: text of log-normal length (median 500 tokens, sigma 1), cut at random places by 0 to 8 images (uniform) of
64 to 1024 tokens (log-uniform, with two markers each). Images are known by size alone: no pixels are copied.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch

from mmpos import Grid, PositionTable, SequenceBuilder
from mmpos.bench.machine import stamp
from mmpos.bench.timing import Budget, Call, compare
from mmpos.data.batches.batch import Batch
from mmpos.data.batches.collate import PackedCollator, PaddedCollator
from mmpos.data.batches.packing import PackCounts, Packer, first_fit_decreasing
from mmpos.data.examples import IGNORE_INDEX, Example

ROW = "{:<44} {:>26} {:>8}"
COUNTS = "{:<20} {:>8} {:>7} {:>7} {:>10} {:>5} {:>12}"
BUILDER = SequenceBuilder()


def labelled(key: str, parts: Sequence[object]) -> Example:
    """An example whose text is all trained on."""
    sequence = BUILDER.build(list(parts))
    return Example(key, sequence, np.where(sequence.token_type_ids == 1, IGNORE_INDEX, sequence.input_ids))


def evenly(documents: int, tokens: int, images: int, side: int) -> list[Example]:
    """Documents of equal length with square images spread evenly between texts."""
    text = np.arange(tokens - images * (side * side + 2)) % 250
    parts = [part for piece in np.array_split(text, images + 1) for part in (piece, Grid(side, side))][:-1]
    return [labelled(f"d{i}", parts) for i in range(documents)]


def mix(documents: int, seed: int = 0) -> Iterator[Example]:
    """The realistic mix; every document is its own, and the same for the same seed."""
    rng = np.random.default_rng(seed)
    for i in range(documents):
        text = rng.integers(0, 250, max(1, int(rng.lognormal(np.log(500), 1.0))))
        tokens = np.exp(rng.uniform(np.log(64), np.log(1024), rng.integers(0, 9)))
        sides = [(int(n**0.5), int(n / int(n**0.5))) for n in tokens]
        cuts = np.sort(rng.integers(0, text.size + 1, len(sides)))
        parts: list[object] = [text[: cuts[0]] if sides else text]
        for (height, width), piece in zip(sides, np.split(text, cuts)[1:], strict=True):
            parts += [Grid(height, width), piece]
        yield labelled(f"m{i}", parts)


def packed_counts(examples: Sequence[Example], max_tokens: int, split_text: bool) -> tuple[PackCounts, int]:
    """Pack with the default buffer; without splitting, longer documents are truncated. Returns the peak buffer too."""
    packer = Packer(max_tokens, split_text=split_text, overlong="truncate")
    held = 0
    for example in examples:
        packer.add(example)
        held = max(held, len(packer.pending))
    return packer.counts, held


def with_loops(examples: Sequence[Example]) -> tuple[torch.Tensor, ...]:
    """A packed batch as a plain loop makes it, with the dense ids of every document."""
    ids, labels, positions, cu_seqlens = [], [], [], [0]
    for example in examples:
        ids.append(torch.from_numpy(example.sequence.input_ids))
        labels.append(torch.tensor(example.labels))
        labels[-1][0] = IGNORE_INDEX
        positions.append(torch.from_numpy(example.sequence.positions.dense()))
        cu_seqlens.append(cu_seqlens[-1] + example.num_tokens)
    return torch.cat(ids), torch.cat(labels), torch.cat(positions, dim=1), torch.tensor(cu_seqlens, dtype=torch.int32)


def equal(batch: Batch, loops: tuple[torch.Tensor, ...]) -> None:
    """Refuse to time what differs."""
    found = (batch.input_ids.view(-1), batch.labels.view(-1), batch.position_ids().flatten(1), batch.cu_seqlens)
    for got, want in zip(found, loops, strict=True):
        if not torch.equal(got, want):
            raise SystemExit("the batch differs from that of the plain loop")


def collating(documents: int, tokens: int, images: int, side: int, seconds: float) -> None:
    """Milliseconds per batch."""
    examples = evenly(documents, tokens, images, side)
    packed, padded = PackedCollator(), PaddedCollator()
    loops = with_loops(examples)
    equal(packed(examples), loops)
    equal(padded(examples), loops)
    calls: dict[str, Call] = {
        "packed": partial(packed, examples),
        "packed, and ids": lambda: packed(examples).position_ids(),
        "padded": partial(padded, examples),
        "plain loop, and ids": partial(with_loops, examples),
        "of packed: tables joined": partial(PositionTable.concatenate, [e.sequence.positions for e in examples]),
    }
    whole = PackedCollator(multiple_of=4)(examples)
    calls["one of two context-parallel shards"] = partial(whole.shard, 0, 2)
    print(
        f"\n{documents} documents of {tokens:,} tokens, {images} images of {side}×{side} each: milliseconds per batch"
    )
    print(ROW.format("", "median (20th–80th pct.)", "target"))
    for name, timing in compare(calls, Budget(seconds)).items():
        cell = f"{timing.median * 1e3:.2f} ({timing.p20 * 1e3:.2f}–{timing.p80 * 1e3:.2f})"
        target = "< 5" if name in ("packed", "padded") else ""
        print(ROW.format(name, cell, target))


def packing(documents: int, sizes: Sequence[int]) -> None:
    """Fill of packs, with the tail that stays in the buffer not counted, and documents per second."""
    examples = list(mix(documents))
    lengths = np.array([example.num_tokens for example in examples])
    median, longest = np.median(lengths), lengths.max()
    print(f"\n{documents:,} documents of the mix, {median:,.0f} tokens in the median, {longest:,} at most")
    print(COUNTS.format("max_tokens, mode", "fill", "packs", "splits", "truncated", "held", "documents/s"))
    for max_tokens in sizes:
        for split_text in (False, True):
            begin = time.perf_counter()
            counts, held = packed_counts(examples, max_tokens, split_text)
            rate = documents / (time.perf_counter() - begin)
            name, shown = f"{max_tokens:,}, {'text split' if split_text else 'whole'}", f"{counts.fill:.2%}"
            print(COUNTS.format(name, shown, counts.packs, counts.splits, counts.truncated, held, round(rate)))
    many = np.minimum(np.random.default_rng(0).choice(lengths, 100_000), sizes[0])
    begin = time.perf_counter()
    groups = first_fit_decreasing(many, sizes[0])
    spent = time.perf_counter() - begin
    fill = many.sum() / (len(groups) * sizes[0])
    print(f"first-fit decreasing, 100,000 lengths at once, {sizes[0]:,}: {spent:.2f} s, fill {fill:.2%}")


def main() -> None:
    """Read the command line, say where this runs, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="toy sizes, every path once")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)  # as in the workers of a DataLoader
    print(f"{stamp('default')}, {os.cpu_count()} cores, torch {torch.__version__} on one thread")
    print(f"python {shlex.join(sys.argv)}")
    collating(*((4, 256, 2, 4, 0.02) if quick else (32, 8192, 16, 16, 2.0)))
    packing(200 if quick else 20_000, (8192, 4096, 32768))


if __name__ == "__main__":
    main()
