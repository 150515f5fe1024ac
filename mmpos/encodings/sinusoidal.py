"""Sines and cosines of many frequencies: a shift of the position is a rotation of the vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mmpos.encodings.base import DIM, AdditiveTable, real_positions
from mmpos.rotary import Rotary
from mmpos.rotary.allocation import MAX_HEAD_DIM
from mmpos.rotary.frequencies import Float64Array
from mmpos.support.cached import cached_property
from mmpos.support.checks import even, finite

__all__ = ["Sinusoidal"]


@dataclass(frozen=True)
class Sinusoidal(AdditiveTable):
    """Channels 2k and 2k + 1 are sin(pω_k) and cos(pω_k), ω_k = theta^(−2k/d) for pair k = 0 … d/2 − 1.

    PE(p + k) = M_k PE(p) with an orthogonal M_k, see ``shift``; PE(p)·PE(q) = Σ cos ω_k(p − q).

    *Corrected*: the last pair of 512 channels divides p by 9646.616 = 10000^(510/512), one source multiplies. No two
    whole positions share a vector: pair 0 alone would need p − q to be a multiple of 2π. So positions 1 and 513
    differ, and the 63,000 "unique positions" of another are only the period 2π·10⁴ that the slowest pair
    comes close to.

    Source: "Attention is all you need" (Vaswani et al., 2017).

    >>> Sinusoidal(dim=4).table(1).round(6).tolist()
    [0.841471, 0.540302, 0.01, 0.99995]

    Args:
        dim: channels; even.
        theta: base of the frequencies.
    """

    dim: int = DIM
    theta: float = 10000.0
    name: ClassVar[str] = "sinusoidal"

    def __post_init__(self) -> None:
        even("dim", self.dim, maximum=MAX_HEAD_DIM)
        _ = self.frequencies  # refuses a theta that is none

    @cached_property
    def frequencies(self) -> Float64Array:
        """(dim/2,) ω_k in rad per position: those of RoPE; read-only."""
        return Rotary(self.dim, self.theta, axes=1).inv_freq_array

    def table(self, positions: npt.ArrayLike) -> Float64Array:
        angles = real_positions("positions", positions)[..., None] * self.frequencies
        return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(*angles.shape[:-1], self.dim)

    def shift(self, k: float) -> Float64Array:
        """(dim, dim) M_k with M_k PE(p) = PE(p + k): blocks [[cos ωk, sin ωk], [−sin ωk, cos ωk]]."""
        angles = finite("k", k) * self.frequencies
        sine, cosine = 2 * np.arange(self.dim // 2), 2 * np.arange(self.dim // 2) + 1
        matrix = np.zeros((self.dim, self.dim))
        matrix[sine, sine] = matrix[cosine, cosine] = np.cos(angles)
        matrix[sine, cosine], matrix[cosine, sine] = np.sin(angles), -np.sin(angles)
        return matrix
