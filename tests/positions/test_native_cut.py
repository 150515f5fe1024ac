"""Table operations in C return the same arrays and error messages as the plain reference."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from twins import both

from mmpos import Grid, MmposError, PositionTable, SegmentTable, Text, place
from mmpos.positions.table import LAYOUTS
from mmpos.segments import Clip

Cut = Callable[[PositionTable], object]
Random = np.random.Generator

SCHEMES = ["rope-tie", "rope-tie-v2", "rope-tie-fractional", "mrope", "flatten", "tmrope-qwen3", "v2pe"]
BEYOND = [-(2**63), -1, 2**31 - 1, 2**31, 2**62, 2**63 - 1]
LIMIT = 400
"""The number of tokens above which the random program continues with another table."""


def random_table(random: Random) -> PositionTable:
    """Place a few documents; some end between two ids or at the largest id."""
    scheme = random.choice(SCHEMES)
    documents: list[list[Any]] = []
    for _ in range(random.integers(0, 4)):
        grid = Grid(*random.integers(1, 5, 2).tolist(), frames=int(random.integers(1, 3)) if scheme == "mrope" else 1)
        parts = [Text(int(random.integers(1, 9))), grid, Text(int(random.integers(1, 4)))][: random.integers(1, 4)]
        if scheme == "tmrope-qwen3":
            parts.append(Clip(1, 2, frames=2, audio=1, seconds_per_frame=Fraction(1, int(random.choice([13, 26])))))
        documents.append(parts)
    start = int(random.choice([0, 7, -3, 2**31 - 60]))
    return place(SegmentTable.from_documents(documents), scheme, start, strict=False)


def numbers(random: Random, count: int, most: int) -> Any:
    """Draw integers, rarely outside 0 to ``most``, in one of the forms that users pass."""
    values = random.integers(0, max(most, 0) + 1, count).tolist()
    if count and random.random() < 0.04:
        values[random.integers(count)] = int(random.choice([*BEYOND, most + 1]))
    if random.random() < 0.01:
        values = [True] * count
    forms: list[Callable[[list[int]], Any]] = [
        list,
        tuple,
        np.array,
        lambda v: np.array(v, np.int64),
        lambda v: np.array(v + v, np.int64)[: len(v)][::-1],
    ]
    return forms[random.integers(len(forms))](values)


def ranges(random: Random, table: PositionTable) -> tuple[Any, Any]:
    """Draw token ranges, mostly ascending; some begin or end at a document boundary or one token before it."""
    edges = random.integers(0, table.num_tokens + 1, 2 * int(random.integers(0, 4)))
    if random.random() < 0.3:
        edges = np.maximum(random.choice(table.cu_seqlens, edges.size) - random.integers(0, 2, edges.size), 0)
    edges = np.sort(edges.reshape(-1, 2)).ravel() if random.random() < 0.2 else np.sort(edges)
    return edges[::2], edges[1::2] if random.random() < 0.5 else edges[1::2].tolist()


def random_cut(random: Random, table: PositionTable) -> Cut:
    """Draw a method and its arguments, which may be invalid."""
    tokens, count, longest = table.num_tokens, table.num_documents, table.max_seqlen
    start, stop = np.sort(random.integers(-1 if random.random() < 0.05 else 0, tokens + 1, 2)).tolist()
    windows = int(random.integers(0, 5)) if count else 0
    documents, first = numbers(random, windows, count - 1), numbers(random, windows, longest + 3)
    lengths, steps, widths = numbers(random, windows, 9), numbers(random, count, 3), numbers(random, count, longest + 2)
    world, layout, one = int(random.integers(1, 4)), random.choice(LAYOUTS), int(random.integers(-1, longest + 4))
    starts, stops = ranges(random, table)
    mask = random.random(tokens) < 0.7
    cuts: list[Cut] = [
        lambda t: t.slice(start, stop),
        lambda t: t.take(starts, stops),
        lambda t: t.take(first, lengths),
        lambda t: t.window(documents, first, lengths),
        lambda t: t.decode(steps),
        lambda t: t.decode(True if one == 1 else one % 4 - (one < 0)),
        lambda t: t.shard(int(random.integers(world)), world, layout),
        lambda t: t.pad(-(-longest // world) * world).shard(world - 1, world, layout),
        lambda t: t.pad(2 * world * -(-longest // (2 * world)), "left").shard(0, world, layout),
        lambda t: t.pad(widths, "left" if world == 1 else "right"),
        lambda t: t.pad(one, "left"),
        lambda t: t.pad(),
        lambda t: t.padded(side="left" if world == 1 else "right"),
        lambda t: t.keep(mask),
        lambda t: PositionTable.concatenate([t, t.decode(0)]),
        lambda t: t.updated(remove=documents, add=[t.slice(start, start)]),
        lambda t: t.updated(remove=documents[:1], replace={one: t.window([0], [0], [1])}, add=[t][world - 1 :]),
        lambda t: PositionTable(np.asfortranarray(t.table), t.documents[:, :], tokens, t.fractional, t.scheme),
    ]
    return cuts[random.integers(len(cuts))]


@pytest.mark.parametrize("steps", [5_000, pytest.param(15_000, marks=pytest.mark.slow)])
def test_random_sequences_of_operations_in_c_equal_the_reference(steps: int) -> None:
    random = np.random.default_rng(0)
    table, refused, cut_by_c = random_table(random), 0, 0
    for _ in range(steps):
        cut, state = random_cut(random, table), random.bit_generator.state

        def repeated(cut: Cut = cut, table: PositionTable = table, state: Any = state) -> Any:
            random.bit_generator.state = state
            return cut(table)

        result = both(repeated)
        refused += isinstance(result, MmposError)
        if isinstance(result, PositionTable):
            result = repeated()
            assert not result.table.flags.writeable
            assert not result.documents.flags.writeable
            cut_by_c += not result.table.flags.owndata
        restart = not isinstance(result, PositionTable) or random.random() < 0.1 or result.num_tokens > LIMIT
        table = random_table(random) if restart else result
    assert steps / 20 < refused < steps / 2
    assert cut_by_c > steps / 3


def test_a_segment_is_padding_only_if_its_origin_and_all_its_steps_are_0(way: str) -> None:
    table = np.concatenate([np.ones((5, 9), np.int64), np.eye(8, 9, dtype=np.int64)])
    table[0], table[1] = range(9), 0
    positions = PositionTable(table, np.array([[0], [0], [9], [0]]), 9, False, "by hand")
    assert positions.is_padding.tolist() == [False] * 8 + [True]
    assert positions.padded(10, "left")[1].tolist() == [[0, *[1] * 8, 0]]
