"""Base classes of encodings: an additive table, an attention bias, or a rotation of q and k; learned or not."""

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
"""Default sizes of all encodings. The channels of a head can be divided into pairs for one, two or three axes."""

MAX_CHANNELS = MAX_HEAD_DIM
"""Maximum number of channels or heads of an encoding without weights."""


_HALF = 2**62  # the difference of two positions within ±2⁶² fits in int64
_INT64_MAX = 2**63 - 1

STANDARD_DEVIATION = 0.02
"""Standard deviation of randomly drawn weights, as in BERT."""


class Encoding(ABC):
    """Base class of all position encodings; there is one subclass for each of the three kinds."""

    name: ClassVar[str]


class AdditiveTable(Encoding):
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


class AttentionBias(Encoding):
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


class Rotation(Encoding):
    """An encoding that rotates channel pairs of q and k by angles proportional to the positions.

    Pair j is multiplied by [[cos, −sin], [sin, cos]] (*corrected*: one source prints the transpose for RoPE).
    ``rotary`` defines the frequencies, axes and channel pairs.
    """

    def __post_init__(self) -> None:
        _ = self.rotary  # raises an error if a parameter is wrong

    @property
    @abstractmethod
    def rotary(self) -> Rotary:
        """The rotation in the form that ``mmpos.rotary.apply_rotary`` takes."""

    @property
    def axes(self) -> int:
        """Number of position axes."""
        return self.rotary.axes

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a query or a key: (head_dim,), or (heads, head_dim) if axes differ between heads."""
        heads = self.rotary.own_heads
        return (heads, self.rotary.head_dim) if heads else (self.rotary.head_dim,)

    @property
    def pair_channels(self) -> tuple[IntArray, IntArray]:
        """First and second channel of each pair, each as an array (pairs,)."""
        pair = np.arange(self.rotary.num_pairs)
        if self.rotary.pairing == "adjacent":
            return 2 * pair, 2 * pair + 1
        return pair, pair + pair.size

    def angles(self, positions: npt.ArrayLike) -> Float64Array:
        """Compute the rotation angles of the pairs.

        Args:
            positions: (axes, n), or (n,) to use the same positions on all axes.

        Returns:
            (n, pairs) float64 rad, or (n, heads, pairs) if axes differ between heads; new.
        """
        ids = real_positions("positions", positions)
        if ids.ndim not in (1, 2) or (ids.ndim == 2 and ids.shape[0] != self.axes):
            raise InvalidInputError(f"positions: got shape {ids.shape}, want (n,) or ({self.axes}, n)")
        per_axis = np.broadcast_to(ids, (self.axes, ids.shape[-1]))
        return np.moveaxis(self.rotary.pair_ids(per_axis), -1, 0) * self.rotary.inv_freq_array

    def rotate(self, x: npt.ArrayLike, positions: npt.ArrayLike) -> Float64Array:
        """Rotate queries or keys.

        Args:
            x: (n, head_dim), or (n, heads, head_dim) if axes differ between heads; channels from index rotary_dim on
                are not rotated.
            positions: (axes, n), or (n,) to use the same positions on all axes.

        Returns:
            float64 with the shape of x, new.
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
    """An additive table with learned rows."""

    weights: Float64Array
    """(rows, dim), read-only."""

    def __post_init__(self) -> None:
        _freeze(self, self.weights, "dim")

    @abstractmethod
    def index(self, positions: npt.ArrayLike) -> IntArray:
        """Return the row for each position, in an array with the shape of positions."""

    def table(self, positions: npt.ArrayLike) -> Float64Array:
        return self.weights[self.index(positions)]


class LearnedBias(AttentionBias):
    """A bias with learned rows and one column per head."""

    weights: Float64Array
    """(rows, num_heads), read-only."""

    def __post_init__(self) -> None:
        _freeze(self, self.weights, "num_heads")

    @abstractmethod
    def index(self, query_positions: npt.ArrayLike, key_positions: npt.ArrayLike) -> IntArray:
        """Return the row for each query and key, (n, m)."""

    def bias(self, query_positions: npt.ArrayLike, key_positions: npt.ArrayLike) -> Float64Array:
        return np.ascontiguousarray(np.moveaxis(self.weights[self.index(query_positions, key_positions)], -1, 0))


def draw(rows: int, columns: int, seed: int) -> Float64Array:
    """Draw normally distributed weights of shape (rows, columns), as in an untrained model."""
    return np.random.default_rng(integer("seed", seed, minimum=0)).normal(0, STANDARD_DEVIATION, (rows, columns))


def _freeze(encoding: Encoding, weights: object, columns: str) -> None:
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
