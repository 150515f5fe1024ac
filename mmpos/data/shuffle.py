"""Orders that follow from numbers alone, so that any place in them is found again."""

from __future__ import annotations

import numpy as np

from mmpos.support.checks import IntArray

__all__ = ["record_order", "shard_order"]


def shard_order(num_shards: int, seed: int, epoch: int) -> IntArray:
    """(shards,) the order in which an epoch reads the shards, the same for every consumer."""
    return np.random.default_rng((seed, epoch)).permutation(num_shards)


def record_order(num_records: int, seed: int, epoch: int, consumer: int, window: int) -> IntArray:
    """(records,) the order of the records of one window of one consumer."""
    return np.random.default_rng((seed, epoch, consumer, window)).permutation(num_records)
