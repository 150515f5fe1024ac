"""Additive tables: the position itself, its bits, sinusoids, and a learned table."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mmpos.encodings.base import DIM, AdditiveTable, draw, freeze, real_positions, whole_positions
from mmpos.rotary import Rotary
from mmpos.rotary.allocation import MAX_HEAD_DIM
from mmpos.rotary.frequencies import Float64Array
from mmpos.support.cached import cached_property
from mmpos.support.checks import IntArray, even, finite, integer

__all__ = ["Binary", "Integer", "LearnedAbsolute", "Normalised", "SingleSinusoid", "Sinusoidal"]

LENGTH = 512


@dataclass(frozen=True)
class _EqualChannels(AdditiveTable):
    """A table with the same number in every channel.

    Args:
        dim: channels.
    """

    dim: int = DIM

    def __post_init__(self) -> None:
        integer("dim", self.dim, minimum=1, maximum=MAX_HEAD_DIM)

    @abstractmethod
    def number(self, positions: npt.ArrayLike) -> Float64Array:
        """Return the number for each position, (...)."""

    def table(self, positions: npt.ArrayLike) -> Float64Array:
        return np.repeat(self.number(positions)[..., None], self.dim, axis=-1)


class Integer(_EqualChannels):
    """PE(p) = p in every channel, for p = 0 … T−1.

    Values are unique, and p + k is always k away from p, but they are unbounded and soon larger than any embedding.

    *Corrected*: one source counts from 0 to L, one position more than a sequence of L tokens has.

    Source: the first attempt of "You could have designed state of the art positional encoding" (Fleetwood, 2024).

    >>> Integer(dim=2).table([0, 1, 4]).tolist()
    [[0.0, 0.0], [1.0, 1.0], [4.0, 4.0]]
    """

    def number(self, positions: npt.ArrayLike) -> Float64Array:
        return real_positions("positions", positions)


class Normalised(_EqualChannels):
    """PE(p) = p / (T − 1) in every channel, in [0, 1]; the only position of a one-token sequence maps to 0.

    T is 1 + the largest position along the last axis of positions. The vector of a position depends on the sequence
    length; the longer the sequence, the closer the vectors of neighbours.

    Source: "详解Transformer中的Positional Encoding" (2021), the second idea, which the article rejects.

    >>> Normalised(dim=1).table([0, 1, 2, 3, 4]).ravel().tolist()
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """

    def number(self, positions: npt.ArrayLike) -> Float64Array:
        ids = whole_positions("positions", positions, minimum=0)
        last = np.atleast_1d(ids).max(axis=-1, keepdims=True, initial=1)
        return (ids / last).reshape(ids.shape)


@dataclass(frozen=True)
class Binary(AdditiveTable):
    """Channel i is bit i of p, (p >> i) & 1; the least significant bit comes first.

    Values are unique below 2^dim, but neighbours can be far apart: 7 and 8 differ in four bits.

    *Corrected*: bit i toggles every 2^i positions and has period 2^(i+1), so the most significant of n bits
    toggles every 2^(n−1) positions; that is not its period.

    Source: "You could have designed state of the art positional encoding" (Fleetwood, 2024).

    >>> Binary(dim=8).table(252)[::-1].astype(int).tolist()
    [1, 1, 1, 1, 1, 1, 0, 0]

    Args:
        dim: bits, at most 63.
    """

    dim: int = DIM

    def __post_init__(self) -> None:
        integer("dim", self.dim, minimum=1, maximum=63)

    def table(self, positions: npt.ArrayLike) -> Float64Array:
        ids = whole_positions("positions", positions, minimum=0, below=2**self.dim)
        return (ids[..., None] >> np.arange(self.dim) & 1).astype(np.float64)


class SingleSinusoid(_EqualChannels):
    """PE(p) = sin(ωp) in every channel, ω = 0.1 rad per position; positions may be fractions.

    *Corrected*: with a small ω, neighbours are nearly equal, at most ω apart; with a large ω, distant positions
    collide. The source says the opposite.

    Source: "详解Transformer中的Positional Encoding" (2021), the step before it combines several frequencies.

    >>> SingleSinusoid(dim=1).table([0, 10]).round(6).ravel().tolist()
    [0.0, 0.841471]
    """

    def number(self, positions: npt.ArrayLike) -> Float64Array:
        return np.sin(0.1 * real_positions("positions", positions))


@dataclass(frozen=True)
class Sinusoidal(AdditiveTable):
    """Channels 2k and 2k + 1 are sin(pω_k) and cos(pω_k), ω_k = theta^(−2k/d) for pair k = 0 … d/2 − 1.

    PE(p + k) = M_k PE(p) with an orthogonal M_k (see ``shift``); PE(p)·PE(q) = Σ cos ω_k(p − q).

    *Corrected*: the last pair of 512 channels divides p by 9646.616 = 10000^(510/512); one source multiplies. No two
    integer positions share a vector, because pair 0 alone would require p − q to be a multiple of 2π. So positions 1
    and 513 differ, and the 63,000 "unique positions" in another source are just the approximate period 2π·10⁴ of the
    slowest pair.

    Source: "Attention is all you need" (Vaswani et al., 2017).

    >>> Sinusoidal(dim=4).table(1).round(6).tolist()
    [0.841471, 0.540302, 0.01, 0.99995]

    Args:
        dim: channels; even.
        theta: base of the frequencies.
    """

    dim: int = DIM
    theta: float = 10000.0

    def __post_init__(self) -> None:
        even("dim", self.dim, maximum=MAX_HEAD_DIM)
        _ = self.frequencies  # raises an error if theta is wrong

    @cached_property
    def frequencies(self) -> Float64Array:
        """Frequencies ω_k in rad per position, (dim/2,), as in RoPE; read-only."""
        return Rotary(self.dim, self.theta, axes=1).inv_freq_array

    def table(self, positions: npt.ArrayLike) -> Float64Array:
        angles = real_positions("positions", positions)[..., None] * self.frequencies
        return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(*angles.shape[:-1], self.dim)

    def shift(self, k: float) -> Float64Array:
        """Return M_k (dim, dim) with M_k PE(p) = PE(p + k): blocks [[cos ωk, sin ωk], [−sin ωk, cos ωk]]."""
        angles = finite("k", k) * self.frequencies
        sine, cosine = 2 * np.arange(self.dim // 2), 2 * np.arange(self.dim // 2) + 1
        matrix = np.zeros((self.dim, self.dim))
        matrix[sine, sine] = matrix[cosine, cosine] = np.cos(angles)
        matrix[sine, cosine], matrix[cosine, sine] = np.sin(angles), -np.sin(angles)
        return matrix


@dataclass(frozen=True, eq=False)
class LearnedAbsolute(AdditiveTable):
    """PE(p) is row p of a table of L_max rows, as in BERT; a position p >= L_max causes an error.

    Source: "Convolutional sequence to sequence learning" (Gehring et al., 2017); BERT (Devlin et al., 2018).

    >>> LearnedAbsolute([[0.5, 0.0], [1.0, 2.0]]).table([1, 0]).tolist()
    [[1.0, 2.0], [0.5, 0.0]]

    Args:
        weights: the table, (L_max, dim); drawn at random for 512 positions by default. The stored copy is read-only.
    """

    weights: Float64Array = field(default_factory=lambda: draw(LENGTH, DIM), repr=False)
    dim: int = field(init=False)

    def __post_init__(self) -> None:
        freeze(self, self.weights, "dim")

    @classmethod
    def drawn(cls, length: int = LENGTH, dim: int = DIM) -> LearnedAbsolute:
        """Draw the weights of an untrained model for L_max = length positions."""
        return cls(draw(integer("length", length, minimum=1), integer("dim", dim, minimum=1)))

    def index(self, positions: npt.ArrayLike) -> IntArray:
        """Return the row for each position, in an array with the shape of positions."""
        return whole_positions("positions", positions, minimum=0, below=len(self.weights))

    def table(self, positions: npt.ArrayLike) -> Float64Array:
        return self.weights[self.index(positions)]
