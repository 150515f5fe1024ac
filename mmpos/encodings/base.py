"""What an encoding of positions is: a table beside the embeddings, a bias of the scores, or a rotation of q and k."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mmpos.encodings.inputs import Float64Array, IntArray, real_positions
from mmpos.errors import InvalidInputError
from mmpos.rotary import Rotary
from mmpos.rotary.allocation import MAX_HEAD_DIM

__all__ = ["AdditiveTable", "AttentionBias", "Encoding", "Rotation"]

DIM, NUM_HEADS, HEAD_DIM = 48, 4, 12
"""A block of attention that every encoding fits by default: a head's channels are pairs for one, two or three axes."""

MAX_CHANNELS = MAX_HEAD_DIM
"""Most channels, or heads, of an encoding that has no weights."""


class Encoding(ABC):
    """A way for attention to know positions; one of the three kinds below."""

    name: ClassVar[str]


class AdditiveTable(Encoding):
    """An encoding by vectors that are added to the embeddings, or stand beside them."""

    dim: int
    """Channels of a vector."""

    @abstractmethod
    def table(self, positions: npt.ArrayLike) -> Float64Array:
        """The vectors of positions.

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
        """What is added to the scores of every query with every key.

        Args:
            query_positions: (n,).
            key_positions: (m,).

        Returns:
            (num_heads, n, m) float64, new.

        Raises:
            InvalidInputError: what came is not positions.
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
    def pair_channels(self) -> tuple[IntArray, IntArray]:
        """(pairs,) first and (pairs,) second channel of every pair."""
        pair = np.arange(self.rotary.num_pairs)
        if self.rotary.pairing == "adjacent":
            return 2 * pair, 2 * pair + 1
        return pair, pair + pair.size

    def angles(self, positions: npt.ArrayLike) -> Float64Array:
        """(n, pairs) float64 rad by which pairs turn.

        Args:
            positions: (axes, n), or (n,) where all axes have the same.
        """
        ids = real_positions("positions", positions)
        if ids.ndim not in (1, 2) or (ids.ndim == 2 and ids.shape[0] != self.axes):
            raise InvalidInputError(f"positions: got shape {ids.shape}, want (n,) or ({self.axes}, n)")
        per_axis = np.broadcast_to(ids, (self.axes, ids.shape[-1]))
        return per_axis[self.rotary.pair_axis].T * self.rotary.inv_freq_array

    def rotate(self, x: npt.ArrayLike, positions: npt.ArrayLike) -> Float64Array:
        """Queries or keys, turned.

        Args:
            x: (n, head_dim); channels past rotary_dim stay.
            positions: (axes, n), or (n,) where all axes have the same.

        Returns:
            (n, head_dim) float64, new.
        """
        angles = self.angles(positions)
        turned = real_positions("x", x, 2)
        if turned.shape != (len(angles), self.rotary.head_dim):
            raise InvalidInputError(f"x: got shape {turned.shape}, want ({len(angles)}, {self.rotary.head_dim})")
        cos, sin = self.rotary.attention_factor * np.cos(angles), self.rotary.attention_factor * np.sin(angles)
        first, second = self.pair_channels
        a, b = turned[:, first], turned[:, second]
        turned[:, first], turned[:, second] = a * cos - b * sin, a * sin + b * cos
        return turned
