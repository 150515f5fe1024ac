"""Kinds of encodings: a table beside the embeddings, a bias of the scores, or a rotation of q and k; learned or not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.rotary import Rotary
from mmpos.rotary.allocation import MAX_HEAD_DIM
from mmpos.rotary.frequencies import Float64Array
from mmpos.support.checks import Array, IntArray, host_array, integer

__all__ = ["AdditiveTable", "AttentionBias", "Encoding", "LearnedBias", "LearnedTable", "Rotation"]


DIM, NUM_HEADS, HEAD_DIM = 48, 4, 12
"""A block of attention that every encoding fits by default: a head's channels are pairs for one, two or three axes."""

MAX_CHANNELS = MAX_HEAD_DIM
"""Most channels, or heads, of an encoding that has no weights."""


_HALF = 2**62  # the difference of two positions below it is an int64
_INT64_MAX = 2**63 - 1

STANDARD_DEVIATION = 0.02
"""Of weights that are drawn, as BERT's."""


class Encoding(ABC):
    """A way for attention to know positions; one of the three kinds below."""

    name: ClassVar[str]


class AdditiveTable(Encoding):
    """An encoding by vectors that are added to the embeddings, or stand beside them."""

    dim: int
    """Channels of a vector."""

    @abstractmethod
    def table(self, positions: npt.ArrayLike) -> Float64Array:
        """Look up or compute the vectors of positions.

        Args:
            positions: integers, or floats where the encoding knows fractions, of any shape (...).

        Returns:
            (..., dim) float64, new.

        Raises:
            InvalidInputError: a position that the encoding does not have, with its index.
        """


class AttentionBias(Encoding):
    """An encoding by numbers that are added to the scores q·k/√d of attention."""

    num_heads: int
    """Heads, each with a bias of its own."""

    @abstractmethod
    def bias(self, query_positions: npt.ArrayLike, key_positions: npt.ArrayLike) -> Float64Array:
        """Compute the bias of the scores of every query with every key.

        Args:
            query_positions: (n,).
            key_positions: (m,).

        Returns:
            (num_heads, n, m) float64, new.

        Raises:
            InvalidInputError: queries or keys that are no positions.
        """


class Rotation(Encoding):
    """An encoding that turns pairs of channels of q and k by angles proportional to positions.

    Pair j turns by [[cos, −sin], [sin, cos]] (*corrected*: a source prints its transpose for RoPE).
    Frequencies, axes and pairs of channels are those of ``rotary``.
    """

    def __post_init__(self) -> None:
        _ = self.rotary  # refuses what does not fit

    @property
    @abstractmethod
    def rotary(self) -> Rotary:
        """The rotation, as ``mmpos.rotary.apply_rotary`` takes it."""

    @property
    def axes(self) -> int:
        """Position axes."""
        return self.rotary.axes

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a query or a key: (head_dim,), or (heads, head_dim) where heads have axes of their own."""
        heads = self.rotary.own_heads
        return (heads, self.rotary.head_dim) if heads else (self.rotary.head_dim,)

    @property
    def pair_channels(self) -> tuple[IntArray, IntArray]:
        """(pairs,) first and (pairs,) second channel of every pair."""
        pair = np.arange(self.rotary.num_pairs)
        if self.rotary.pairing == "adjacent":
            return 2 * pair, 2 * pair + 1
        return pair, pair + pair.size

    def angles(self, positions: npt.ArrayLike) -> Float64Array:
        """Compute the angles by which pairs turn.

        Args:
            positions: (axes, n), or (n,) where all axes have the same.

        Returns:
            (n, pairs) float64 rad, or (n, heads, pairs) where heads have axes of their own; new.
        """
        ids = real_positions("positions", positions)
        if ids.ndim not in (1, 2) or (ids.ndim == 2 and ids.shape[0] != self.axes):
            raise InvalidInputError(f"positions: got shape {ids.shape}, want (n,) or ({self.axes}, n)")
        per_axis = np.broadcast_to(ids, (self.axes, ids.shape[-1]))
        return np.moveaxis(self.rotary.pair_ids(per_axis), -1, 0) * self.rotary.inv_freq_array

    def rotate(self, x: npt.ArrayLike, positions: npt.ArrayLike) -> Float64Array:
        """Turn queries or keys.

        Args:
            x: (n, head_dim), or (n, heads, head_dim) where heads have axes of their own; channels past rotary_dim stay.
            positions: (axes, n), or (n,) where all axes have the same.

        Returns:
            float64 of the shape of x, new.
        """
        angles = self.angles(positions)
        turned, want = real_positions("x", x, angles.ndim), (len(angles), *self.shape)
        if turned.shape != want:
            raise InvalidInputError(f"x: got shape {turned.shape}, want {want}")
        cos, sin = self.rotary.attention_factor * np.cos(angles), self.rotary.attention_factor * np.sin(angles)
        first, second = self.pair_channels
        a, b = turned[..., first], turned[..., second]
        turned[..., first], turned[..., second] = a * cos - b * sin, a * sin + b * cos
        return turned


class LearnedTable(AdditiveTable):
    """A table whose rows are weights."""

    weights: Float64Array
    """(rows, dim), read-only."""

    def __post_init__(self) -> None:
        _freeze(self, self.weights, "dim")

    @abstractmethod
    def index(self, positions: npt.ArrayLike) -> IntArray:
        """Return the (...) row of every position."""

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
        """Return the (n, m) row of every query (n,) with every key (m,)."""

    def bias(self, query_positions: npt.ArrayLike, key_positions: npt.ArrayLike) -> Float64Array:
        return np.ascontiguousarray(np.moveaxis(self.weights[self.index(query_positions, key_positions)], -1, 0))


def draw(rows: int, columns: int, seed: int) -> Float64Array:
    """Draw (rows, columns) normal numbers, like the weights of an untrained model."""
    return np.random.default_rng(integer("seed", seed, minimum=0)).normal(0, STANDARD_DEVIATION, (rows, columns))


def _freeze(encoding: Encoding, weights: object, columns: str) -> None:
    """Keep a read-only copy of the weights, and the number of their columns under its name."""
    array = host_array("weights", weights)
    if array.ndim != 2 or not array.size or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
        want = f"finite numbers of shape (rows, {columns})"
        raise InvalidInputError(f"weights: got {array.dtype} of shape {array.shape}, want {want}")
    kept = array.astype(np.float64)
    kept.setflags(write=False)
    object.__setattr__(encoding, "weights", kept)
    object.__setattr__(encoding, columns, kept.shape[1])


def real_positions(name: str, value: object, ndim: int | None = None) -> Float64Array:
    """Check finite numbers of any shape, or of ``ndim`` dimensions, and return a new float64 array."""
    array = _shaped(name, value, ndim)
    if array.dtype.kind not in "iuf" and array.size:
        raise InvalidInputError(f"{name}: got dtype {array.dtype}, want integers or floats")
    numbers = array.astype(np.float64)
    _refuse(name, numbers, ~np.isfinite(numbers), "a finite number")
    return numbers


def distances(query_positions: object, key_positions: object) -> IntArray:
    """Compute (n, m) int64 j − i of every key (m,) from every query (n,), whole numbers within ±2⁶²."""
    queries = whole_positions("query_positions", query_positions, 1, minimum=-_HALF, below=_HALF)
    return whole_positions("key_positions", key_positions, 1, minimum=-_HALF, below=_HALF) - queries[:, None]


def whole_positions(
    name: str, value: object, ndim: int | None = None, *, minimum: int | None = None, below: int | None = None
) -> IntArray:
    """Check integers of any shape, or of ``ndim`` dimensions, minimum <= p < below, and return a new int64 array."""
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
    """Raise for the first position that is wrong, with its index in the name."""
    if not wrong.any():
        return
    at = tuple(int(i) for i in np.unravel_index(int(wrong.argmax()), wrong.shape))
    index = f"[{', '.join(map(str, at))}]" if at else ""
    raise InvalidInputError(f"{name}{index}: got {values[at]}, want {want}")
