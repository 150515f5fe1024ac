"""Context-parallel shards: which tokens of every document a rank has."""

from __future__ import annotations

from typing import Literal

import numpy as np

from mmpos.checks import INT32_MAX, IntArray, integer, one_of
from mmpos.columns import FIRST_TOKEN, Columns
from mmpos.errors import InvalidInputError

Layout = Literal["zigzag", "contiguous"]


def shard_ranges(table: Columns, rank: int, world_size: int, layout: Layout) -> tuple[IntArray, IntArray]:
    """Starts and stops of the token ranges of a rank; see PositionTable.shard."""
    one_of("layout", layout, ("zigzag", "contiguous"))
    world_size = integer("world_size", world_size, minimum=1, maximum=INT32_MAX)
    rank = integer("rank", rank, minimum=0, maximum=world_size - 1)
    # One rank alone holds everything, in any layout.
    blocks = [rank, 2 * world_size - 1 - rank] if layout == "zigzag" and world_size > 1 else [rank]
    multiple = world_size * len(blocks)
    odd = table.lengths % multiple
    if odd.any():
        d = int((odd > 0).argmax())
        fit = -(-table.max_seqlen // multiple) * multiple
        raise InvalidInputError(
            f"documents[{d}]: got {table.lengths[d]} tokens, want a multiple of {multiple} for world_size="
            f"{world_size} and layout={layout!r}; pad first: positions.pad({fit}).shard(…)"
        )
    block = table.lengths // multiple
    starts = (table.documents[FIRST_TOKEN] + np.multiply.outer(blocks, block)).T.ravel()
    return starts, starts + np.repeat(block, len(blocks))
