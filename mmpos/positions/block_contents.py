"""What decides the keys and values of a block of tokens, as bytes: positions, ids, and the grids that it touches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmpos.positions.columns import FIRST_TOKEN
from mmpos.positions.table import PositionTable
from mmpos.segments.parts import GRID
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import IntArray

Bytes = npt.NDArray[np.uint8]


class Blocks(NamedTuple):
    """Blocks of documents, document after document.

    Args:
        size: tokens of a block.
        first: (documents,) first block of each document that is wanted.
        stop: (documents,) one past the last.
    """

    size: int
    first: IntArray
    stop: IntArray

    @property
    def counts(self) -> IntArray:
        """(documents,) blocks of each document."""
        return self.stop - self.first


class Touches(NamedTuple):
    """Every pair of a block and a grid with a token in it.

    Args:
        block: (pairs,) index of the block, ascending.
        grid: (pairs,) index of the grid.
        start: (pairs,) first token of the grid, counted from the block's first token.
    """

    block: IntArray
    grid: IntArray
    start: IntArray


def contents(
    segments: SegmentTable, positions: PositionTable, ids: IntArray | None, digests: Bytes | None, blocks: Blocks
) -> Iterator[bytes]:
    """What is hashed of each block, the same bytes on every machine.

    Little-endian, in this order: positions rounded down, (axes, tokens) int32; ids, (tokens,) int64, if given; two
    int64: 1 if any position is a fraction, else 0, and the number of grids; fractions in units of 2⁻⁶², (axes, tokens)
    int64, if there are any; for each grid five int64: its first token from the block's first, frames, height, width, 1
    if its rows end in separators, else 0; and the 32 bytes of its digest, if given. The numbers say how long the rest
    is, so blocks that differ give bytes that differ.

    Args:
        segments: the documents.
        positions: their table.
        ids: (tokens,) of the table.
        digests: (grids, 32) of the content of each grid.
        blocks: which blocks, at least one.
    """
    count = int(blocks.counts.sum())
    starts = positions.documents[FIRST_TOKEN] + blocks.first * blocks.size
    wanted = positions.take(starts, starts + blocks.counts * blocks.size)
    whole, fractions = _split(wanted)
    parts = [_by_block(whole.astype("<i4"), count)]
    if ids is not None:
        tokens = np.repeat(starts - wanted.documents[FIRST_TOKEN], wanted.lengths) + np.arange(wanted.num_tokens)
        parts.append(_by_block(ids[None, tokens].astype("<i8"), count))
    fine = _by_block(fractions.astype("<i8"), count)
    touches = _touches(segments, blocks)
    edges = touches.block.searchsorted(np.arange(count + 1))
    fractional = (fine != 0).any(axis=1)
    parts.append(_by_block(np.array([fractional, np.diff(edges)], "<i8"), count))
    fixed, grids = np.concatenate(parts, axis=1), _entries(segments, digests, touches)
    for b in range(count):
        rest = fine[b].tobytes() if fractional[b] else b""
        yield fixed[b].tobytes() + rest + grids[edges[b] : edges[b + 1]].tobytes()


def _split(positions: PositionTable) -> tuple[npt.NDArray[Any], IntArray]:
    """Ids of all tokens rounded down, and fractions: the same numbers, however a table writes them."""
    if not positions.fractional:
        return positions.dense(), np.zeros((0, positions.num_tokens), np.int64)
    numerators, denominators = positions.rationals()
    whole, rest = np.divmod(numerators, denominators)
    # 62 bits tell any two fractions with denominators below 2**31 apart; two steps stay within 64.
    high, rest = np.divmod(rest << 31, denominators)
    return whole, (high << 31) + (rest << 31) // denominators


def _by_block(values: npt.NDArray[Any], count: int) -> Bytes:
    """(blocks, bytes) of (rows, tokens) numbers: the rows of a block one after the other."""
    rows = values.reshape(len(values), count, values.shape[1] // count).transpose(1, 0, 2)
    return np.ascontiguousarray(rows.reshape(count, -1)).view(np.uint8)


def _touches(segments: SegmentTable, blocks: Blocks) -> Touches:
    (grid,) = (segments.kind == GRID).nonzero()
    lengths, offsets = segments.lengths, segments.segment_offsets
    before = lengths.cumsum() - lengths
    document = np.arange(blocks.first.size).repeat(np.diff(offsets))[grid]
    start = before[grid] - before[offsets[document]]
    first = np.maximum(start // blocks.size, blocks.first[document])
    stop = np.minimum((start + lengths[grid] - 1) // blocks.size + 1, blocks.stop[document])
    count = np.maximum(stop - first, 0)
    owner = np.arange(grid.size).repeat(count)
    block = np.arange(owner.size) - (count.cumsum() - count - first)[owner]
    counted = blocks.counts.cumsum() - blocks.counts - blocks.first  # from a document's blocks to those of all
    return Touches(block + counted[document[owner]], owner, start[owner] - block * blocks.size)


def _entries(segments: SegmentTable, digests: Bytes | None, touches: Touches) -> Bytes:
    """(pairs, bytes) what a key holds of each grid."""
    grids = segments.kind == GRID
    numbers = np.zeros((touches.grid.size, 5), "<i8")
    numbers[:, 0] = touches.start
    numbers[:, 1:4] = segments.extents[:, grids].T[touches.grid]
    if segments.row_separator is not None:
        numbers[:, 4] = segments.row_separator[grids][touches.grid]
    shapes = numbers.view(np.uint8)
    return shapes if digests is None else np.concatenate([shapes, digests[touches.grid]], axis=1)
