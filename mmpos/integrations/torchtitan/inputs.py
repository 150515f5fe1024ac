"""What a loader hands to torchtitan's trainer: the table as a tensor, and the positions that its masks are made of."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.positions.columns import FIRST_SEGMENT, OFFSET
from mmpos.positions.table import PositionTable
from mmpos.rotary import DevicePositions, Rotary, cos_sin
from mmpos.support.checks import integer

__all__ = ["document_positions", "rope_cache", "table_tensor", "tokens_of"]


def table_tensor(positions: PositionTable, capacity: int | None = None) -> Tensor:
    """The table as one tensor of integers, which no mixed precision rounds and no stage of a pipeline slices.

    Its shape tells it from ids, which are (batch, seq), (tokens,), or either with an axis behind.

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
    """How far every token is behind the first of its document: what torchtitan reads documents and masks from.

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
    """The cache that torchtitan's ``apply_rotary_emb`` broadcasts over the heads, for the tokens of this batch alone.

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
    """(batch, seq), or (tokens,) without seq."""
    if seq is None:
        return (positions.num_tokens,)
    seq = integer("seq", seq, minimum=1)
    if positions.num_tokens % seq:
        raise InvalidInputError(f"seq: got {seq}, want a divisor of {positions.num_tokens}, the tokens of the table")
    return positions.num_tokens // seq, seq
