"""Context parallel as torchtitan has it: every row of the batch is cut, wherever its documents end."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mmpos.errors import InvalidInputError
from mmpos.integrations.torchtitan.inputs import table_tensor, tokens_of
from mmpos.positions.table import PositionTable
from mmpos.support.checks import INT32_MAX, integer, one_of

__all__ = ["LoadBalancer", "shard", "shard_tensors"]

LoadBalancer = Literal["headtail"]


def shard(
    positions: PositionTable,
    seq: int | None,
    rank: int,
    world_size: int,
    load_balancer: LoadBalancer | None = "headtail",
) -> PositionTable:
    """The tokens of one context-parallel rank. Source: torch's ``_HeadTailLoadBalancer``, whose indices these are.

    Args:
        positions: the tokens of a batch, row after row.
        seq: tokens of a row; None where torchtitan folds the batch and cuts it as one sequence.
        rank: 0 to world_size − 1.
        world_size: context-parallel ranks C.
        load_balancer: "headtail", torchtitan's default, gives rank r the blocks r and 2C−1−r of 2C; None gives
            it block r of C. ("ptrr" cuts by a mask that is known on the device only: cut dense ids there instead.)

    Returns:
        A view: documents stay, and may become empty or lose their middle.

    Raises:
        InvalidInputError: seq is not a multiple of 2C, or of C.
    """
    one_of("load_balancer", load_balancer, ("headtail", None))
    *batch, length = tokens_of(positions, seq)
    world_size = integer("world_size", world_size, minimum=1, maximum=INT32_MAX)
    multiple = 2 * world_size if load_balancer and world_size > 1 else world_size
    if length % multiple:
        raise InvalidInputError(f"seq: got {length}, want a multiple of {multiple} for world_size={world_size}")
    row = positions.slice(0, min(length, positions.num_tokens))
    starts, stops = row.shard_ranges(rank, world_size, "zigzag-sequence" if load_balancer else "contiguous-sequence")
    first = np.arange(batch[0] if batch else 1) * length
    return positions.take(np.add.outer(first, starts).ravel(), np.add.outer(first, stops).ravel())


def shard_tensors(
    positions: PositionTable,
    seq: int | None,
    world_size: int,
    load_balancer: LoadBalancer | None = "headtail",
    capacity: int | None = None,
) -> Tensor:
    """The tables of all context-parallel ranks in one tensor, since a loader hands all ranks the same.

    Args:
        positions: the tokens of a batch, row after row.
        seq: tokens of a row; None where torchtitan folds the batch and cuts it as one sequence.
        world_size: context-parallel ranks.
        load_balancer: as for ``shard``.
        capacity: segments to reserve for every rank; None reserves what the fullest rank has.

    Returns:
        (world_size, 1, 1, columns) int64, on the CPU: the ``table_tensor`` of every rank.

    Raises:
        InvalidInputError: as for ``shard``.
        LimitExceededError: more segments than the capacity.
    """
    world_size = integer("world_size", world_size, minimum=1, maximum=INT32_MAX)
    shards = [shard(positions, seq, rank, world_size, load_balancer) for rank in range(world_size)]
    capacity = max(1, *(part.num_segments for part in shards)) if capacity is None else capacity
    return torch.stack([table_tensor(part, capacity) for part in shards])
