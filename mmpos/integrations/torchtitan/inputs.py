"""Tensors that a loader hands to torchtitan's trainer: tables, document positions and context-parallel shards."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.positions.rows import FIRST_SEGMENT, OFFSET
from mmpos.positions.table import PositionTable
from mmpos.rotary import DevicePositions, Rotary, cos_sin
from mmpos.support.checks import INT32_MAX, integer, one_of

__all__ = ["LoadBalancer", "document_positions", "rope_cache", "shard", "shard_tensors", "table_tensor", "tokens_of"]


def table_tensor(positions: PositionTable, capacity: int | None = None) -> Tensor:
    """Pack the table into one tensor of integers, which no mixed precision rounds and no pipeline stage slices.

    Its shape differs from that of ids, which are (batch, seq), (tokens,), or either with an axis behind.

    Args:
        positions: the tokens of a batch, row after row; or those of a rank, from ``shard``.
        capacity: segments to reserve, so that every step has the same shape, as CUDA graphs ask;
            None reserves as many as there are.

    Returns:
        (1, 1, columns) int64, on the CPU: rows of (capacity + 1) columns, one after the other, the last of which no
        token uses.

    Raises:
        LimitExceededError: more segments than the capacity.
    """
    reserved = positions.num_segments if capacity is None else integer("capacity", capacity, minimum=1)
    if positions.num_segments > reserved:
        raise LimitExceededError(
            f"capacity: got {reserved}, want >= {positions.num_segments}, the segments of the table"
        )
    return DevicePositions.from_table(positions, "cpu", capacity=reserved + 1).table.reshape(1, 1, -1)


def document_positions(positions: PositionTable, seq: int | None = None) -> Tensor:
    """Count tokens from the first of their document, from which torchtitan reads documents and masks.

    Ids of images are no such thing: torchtitan takes every 0 for the start of a document. A run of padding is a
    document of its own, so that no token sees it.

    Args:
        positions: the tokens of a batch, row after row.
        seq: tokens of a row; None where torchtitan folds the batch.

    Returns:
        (batch, seq) int64, or (tokens,) without seq; a new tensor.
    """
    shape = tokens_of(positions, seq)
    begins = np.diff(positions.is_padding, prepend=False)
    begins[positions.documents[FIRST_SEGMENT][positions.lengths > 0]] = True
    starts = positions.table[OFFSET][begins]
    lengths = np.diff(starts, append=positions.num_tokens)
    return torch.from_numpy(np.arange(positions.num_tokens) - np.repeat(starts, lengths)).view(shape)


def rope_cache(rotary: Rotary, positions: PositionTable, seq: int | None = None) -> Tensor:
    """Compute the cache that torchtitan's ``apply_rotary_emb`` broadcasts over the heads, for this batch alone.

    Args:
        rotary: pairing "half" for CosSinRoPE, "adjacent" for ComplexRoPE.
        positions: the tokens of a batch, row after row.
        seq: tokens of a row; None where torchtitan folds the batch.

    Returns:
        (batch, seq, 1, 2·rotary_dim) float32 of cos then sin, or complex64 (batch, seq, 1, pairs) for adjacent pairs;
        without seq (tokens, 1, …).
    """
    shape = tokens_of(positions, seq)
    cache = cos_sin(rotary, positions, layout="torchtitan")
    assert isinstance(cache, Tensor)
    return cache.reshape(*shape, 1, cache.shape[-1])


def tokens_of(positions: PositionTable, seq: int | None) -> tuple[int, ...]:
    """Return (batch, seq), or (tokens,) without seq."""
    if seq is None:
        return (positions.num_tokens,)
    seq = integer("seq", seq, minimum=1)
    if positions.num_tokens % seq:
        raise InvalidInputError(f"seq: got {seq}, want a divisor of {positions.num_tokens}, the tokens of the table")
    return positions.num_tokens // seq, seq


LoadBalancer = Literal["headtail"]


def shard(
    positions: PositionTable,
    seq: int | None,
    rank: int,
    world_size: int,
    load_balancer: LoadBalancer | None = "headtail",
) -> PositionTable:
    """Cut out the tokens of one context-parallel rank. Source: torch's ``_HeadTailLoadBalancer``.

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
    """Stack the tables of all context-parallel ranks in one tensor, since a loader hands all ranks the same.

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
