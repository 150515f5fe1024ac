"""Rotations of q and k: rotary position embeddings with one or more axes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmpos.encodings.base import Encoding, real_positions
from mmpos.errors import InvalidInputError
from mmpos.rotary import Rotary
from mmpos.rotary.frequencies import Float64Array
from mmpos.support.checks import IntArray, instance

__all__ = ["Rotation"]


@dataclass(frozen=True)
class Rotation(Encoding):
    """An encoding that rotates channel pairs of q and k by angles proportional to the positions.

    Pair j is multiplied by [[cos, −sin], [sin, cos]] (*corrected*: one source prints the transpose for RoPE).
    R_mᵀR_n = R_{n−m}: scores depend only on distances, norms are preserved, and adding the same c to all positions
    changes nothing.

    *Corrected*: one source rotates the embedding once, before the network, instead of q and k in every layer. But W_q
    R_p x is not R_p W_q x, so its scores depend on absolute positions. Its table has shape (seq, 1, dim/2), which for a
    batch either broadcasts along the batch axis or raises an error; the right shape is (1, seq, dim/2).

    >>> Rotation(Rotary(4, axes=1)).rotate([[1, 1, 0, 0]], [1]).round(6).tolist()
    [[0.540302, 0.99995, 0.841471, 0.01]]

    Args:
        rotary: frequencies, axes and channel pairs, in the form that ``mmpos.rotary.apply_rotary`` takes.
    """

    rotary: Rotary

    def __post_init__(self) -> None:
        instance("rotary", self.rotary, Rotary, "mmpos.rotary.Rotary")

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
        if ids.ndim not in (1, 2) or (ids.ndim == 2 and ids.shape[0] != self.rotary.axes):
            raise InvalidInputError(f"positions: got shape {ids.shape}, want (n,) or ({self.rotary.axes}, n)")
        per_axis = np.broadcast_to(ids, (self.rotary.axes, ids.shape[-1]))
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
