"""Context-parallel shards: which tokens a rank has, of every document or of the whole sequence."""

from __future__ import annotations

from typing import Literal

import numpy as np

from mmpos.errors import InvalidInputError
from mmpos.positions.columns import FIRST_TOKEN, Columns
from mmpos.support.checks import INT32_MAX, IntArray, integer, one_of

Layout = Literal["zigzag", "contiguous", "zigzag-sequence", "contiguous-sequence"]

LAYOUTS = ("zigzag", "contiguous", "zigzag-sequence", "contiguous-sequence")
"""The first two cut every document, the others all of them as one sequence."""


def shard_ranges(table: Columns, rank: int, world_size: int, layout: Layout) -> tuple[IntArray, IntArray]:
    """Starts and stops of the token ranges of a rank, ascending; see PositionTable.shard."""
    one_of("layout", layout, LAYOUTS)
    world_size = integer("world_size", world_size, minimum=1, maximum=INT32_MAX)
    rank = integer("rank", rank, minimum=0, maximum=world_size - 1)
    # One rank alone holds everything, in any layout.
    blocks = [rank, 2 * world_size - 1 - rank] if layout.startswith("zigzag") and world_size > 1 else [rank]
    multiple = world_size * len(blocks)
    asked = f"want a multiple of {multiple} for world_size={world_size} and layout={layout!r}"
    if layout.endswith("sequence"):
        first, lengths = np.zeros(1, np.int64), np.array([table.num_tokens])
        _check_sequence(table, multiple, asked)
    else:
        first, lengths = table.documents[FIRST_TOKEN], table.lengths
        _check_documents(table, multiple, asked)
    block = lengths // multiple
    starts = (first + np.multiply.outer(blocks, block)).T.ravel()
    return starts, starts + np.repeat(block, len(blocks))


def _check_documents(table: Columns, multiple: int, asked: str) -> None:
    odd = table.lengths % multiple
    if odd.any():
        d = int((odd > 0).argmax())
        fit = -(-table.max_seqlen // multiple) * multiple
        raise InvalidInputError(
            f"documents[{d}]: got {table.lengths[d]} tokens, {asked}; pad first: positions.pad({fit}).shard(…)"
        )


def _check_sequence(table: Columns, multiple: int, asked: str) -> None:
    missing = -table.num_tokens % multiple
    if missing:
        last = int(table.lengths[-1]) + missing
        raise InvalidInputError(
            f"positions: got {table.num_tokens} tokens in all, {asked}; "
            f"pad the last document first: positions.pad([*positions.lengths[:-1], {last}]).shard(…)"
        )
