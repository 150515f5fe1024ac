"""Base classes of encodings: an additive table or an attention bias, learned or not."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.rotary.frequencies import Float64Array
from mmpos.support.checks import Array, IntArray, host_array

__all__ = ["AdditiveTable", "AttentionBias", "Encoding", "LearnedBias"]

DIM, NUM_HEADS, HEAD_DIM = 48, 4, 12
"""Default sizes of all encodings. The channels of a head can be divided into pairs for one, two or three axes."""

_HALF = 2**62  # the difference of two positions within ±2⁶² fits in int64
_INT64_MAX = 2**63 - 1

STANDARD_DEVIATION = 0.02
"""Standard deviation of randomly drawn weights, as in BERT."""


class Encoding:
    """Base class of all position encodings; there is one subclass for each of the three kinds."""


class AdditiveTable(Encoding, ABC):
    """An encoding that adds vectors to the embeddings."""

    dim: int
    """Number of channels."""

    @abstractmethod
    def table(self, positions: npt.ArrayLike) -> Float64Array:
        """Return the vectors for the given positions.

        Args:
            positions: integers of any shape (...), or floats if the encoding accepts fractions.

        Returns:
            (..., dim) float64, new.

        Raises:
            InvalidInputError: the encoding does not accept a position; the message contains the index of that position.
        """


class AttentionBias(Encoding, ABC):
    """An encoding that adds values to the attention scores q·k/√d."""

    num_heads: int
    """Number of heads; each has its own bias."""

    @abstractmethod
    def bias(self, query_positions: npt.ArrayLike, key_positions: npt.ArrayLike) -> Float64Array:
        """Compute the bias for every pair of query and key.

        Args:
            query_positions: (n,) positions of the queries.
            key_positions: (m,) positions of the keys.

        Returns:
            (num_heads, n, m) float64, new.

        Raises:
            InvalidInputError: the positions have the wrong shape, type or range.
        """


class LearnedBias(AttentionBias):
    """A bias with learned rows and one column per head."""

    weights: Float64Array
    """(rows, num_heads), read-only."""

    def __post_init__(self) -> None:
        freeze(self, self.weights, "num_heads")

    @abstractmethod
    def index(self, query_positions: npt.ArrayLike, key_positions: npt.ArrayLike) -> IntArray:
        """Return the row for each query and key, (n, m)."""

    def bias(self, query_positions: npt.ArrayLike, key_positions: npt.ArrayLike) -> Float64Array:
        return np.ascontiguousarray(np.moveaxis(self.weights[self.index(query_positions, key_positions)], -1, 0))


def draw(rows: int, columns: int) -> Float64Array:
    """Draw normally distributed weights of shape (rows, columns), as in an untrained model; always the same ones."""
    return np.random.default_rng(0).normal(0, STANDARD_DEVIATION, (rows, columns))


def freeze(encoding: Encoding, weights: object, columns: str) -> None:
    """Store a read-only copy of the weights, and the number of columns in the attribute ``columns``."""
    array = host_array("weights", weights)
    if array.ndim != 2 or not array.size or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
        want = f"finite numbers of shape (rows, {columns})"
        raise InvalidInputError(f"weights: got {array.dtype} of shape {array.shape}, want {want}")
    kept = array.astype(np.float64)
    kept.setflags(write=False)
    object.__setattr__(encoding, "weights", kept)
    object.__setattr__(encoding, columns, kept.shape[1])


def real_positions(name: str, value: object, ndim: int | None = None) -> Float64Array:
    """Check that an array of ``ndim`` dimensions (None: any) holds finite numbers; return a new float64 array."""
    array = _shaped(name, value, ndim)
    if array.dtype.kind not in "iuf" and array.size:
        raise InvalidInputError(f"{name}: got dtype {array.dtype}, want integers or floats")
    numbers = array.astype(np.float64)
    _refuse(name, numbers, ~np.isfinite(numbers), "a finite number")
    return numbers


def distances(query_positions: object, key_positions: object) -> IntArray:
    """Compute j − i, (n, m) int64, for all queries i (n,) and keys j (m,), integers within ±2⁶²."""
    queries = whole_positions("query_positions", query_positions, 1, minimum=-_HALF, below=_HALF)
    return whole_positions("key_positions", key_positions, 1, minimum=-_HALF, below=_HALF) - queries[:, None]


def whole_positions(
    name: str, value: object, ndim: int | None = None, *, minimum: int | None = None, below: int | None = None
) -> IntArray:
    """Check that an array of ``ndim`` dimensions (None: any) holds integers in [minimum, below); return new int64."""
    array = _shaped(name, value, ndim)
    if array.dtype.kind not in "iu" and array.size:
        raise InvalidInputError(f"{name}: got dtype {array.dtype}, want integers")
    _refuse(name, array, array > _INT64_MAX, f"<= {_INT64_MAX}")
    positions = array.astype(np.int64)
    if minimum is not None:
        _refuse(name, positions, positions < minimum, f">= {minimum}")
    if below is not None:
        _refuse(name, positions, positions >= below, f"< {below}")
    return positions


def _shaped(name: str, value: object, ndim: int | None) -> Array:
    array = host_array(name, value)
    if ndim is not None and array.ndim != ndim:
        raise InvalidInputError(f"{name}: got shape {array.shape}, want {ndim} dimension{'s' * (ndim != 1)}")
    return array


def _refuse(name: str, values: Array, wrong: npt.NDArray[np.bool_], want: str) -> None:
    """Raise an error for the first wrong position, and include the index of that position."""
    if not wrong.any():
        return
    at = tuple(int(i) for i in np.unravel_index(int(wrong.argmax()), wrong.shape))
    index = f"[{', '.join(map(str, at))}]" if at else ""
    raise InvalidInputError(f"{name}{index}: got {values[at]}, want {want}")
