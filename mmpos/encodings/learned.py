"""Encodings that are learned: rows of weights, and which row a position, or a pair of positions, takes."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.encodings.base import AdditiveTable, AttentionBias
from mmpos.encodings.inputs import Float64Array, IntArray
from mmpos.errors import InvalidInputError
from mmpos.support.checks import host_array, integer

__all__ = ["LearnedBias", "LearnedTable", "draw"]

STANDARD_DEVIATION = 0.02
"""Of weights that are drawn, as BERT's."""


class LearnedTable(AdditiveTable):
    """A table whose rows are weights."""

    weights: Float64Array
    """(rows, dim), read-only."""

    def __post_init__(self) -> None:
        _freeze(self, self.weights, "dim")

    @abstractmethod
    def index(self, positions: npt.ArrayLike) -> IntArray:
        """(...) row of every position."""

    def table(self, positions: npt.ArrayLike) -> Float64Array:
        return self.weights[self.index(positions)]


class LearnedBias(AttentionBias):
    """A bias whose numbers are weights, one column per head."""

    weights: Float64Array
    """(rows, num_heads), read-only."""

    def __post_init__(self) -> None:
        _freeze(self, self.weights, "num_heads")

    @abstractmethod
    def index(self, query_positions: npt.ArrayLike, key_positions: npt.ArrayLike) -> IntArray:
        """(n, m) row of every query (n,) with every key (m,)."""

    def bias(self, query_positions: npt.ArrayLike, key_positions: npt.ArrayLike) -> Float64Array:
        return np.ascontiguousarray(np.moveaxis(self.weights[self.index(query_positions, key_positions)], -1, 0))


def draw(rows: int, columns: int, seed: int) -> Float64Array:
    """(rows, columns) normal numbers as models have them before training."""
    return np.random.default_rng(integer("seed", seed, minimum=0)).normal(0, STANDARD_DEVIATION, (rows, columns))


def _freeze(encoding: Any, weights: Any, columns: str) -> None:
    """Keep a read-only copy of the weights, and the number of their columns under its name."""
    array = host_array("weights", weights)
    if array.ndim != 2 or not array.size or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
        want = f"finite numbers of shape (rows, {columns})"
        raise InvalidInputError(f"weights: got {array.dtype} of shape {array.shape}, want {want}")
    kept = array.astype(np.float64)
    kept.setflags(write=False)
    object.__setattr__(encoding, "weights", kept)
    object.__setattr__(encoding, columns, kept.shape[1])
