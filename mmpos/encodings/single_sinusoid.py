"""One sine of the position: smooth and bounded, but one frequency is either too slow or too fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mmpos.encodings.base import DIM, MAX_CHANNELS, AdditiveTable, real_positions
from mmpos.rotary.frequencies import Float64Array
from mmpos.support.checks import finite, integer

__all__ = ["SingleSinusoid"]


@dataclass(frozen=True)
class SingleSinusoid(AdditiveTable):
    """PE(p) = sin(ωp) in every channel.

    *Corrected*: with small ω neighbours are nearly equal, at most ω apart, and with large ω far positions collide;
    the original has the two the other way round.

    Source: "详解Transformer中的Positional Encoding" (2021), the step before many frequencies.

    >>> SingleSinusoid(dim=1, omega=1.0).table([0, 1]).round(6).ravel().tolist()
    [0.0, 0.841471]

    Args:
        dim: channels.
        omega: ω > 0 in rad per position.
    """

    dim: int = DIM
    omega: float = 0.1
    name: ClassVar[str] = "single-sinusoid"

    def __post_init__(self) -> None:
        integer("dim", self.dim, minimum=1, maximum=MAX_CHANNELS)
        finite("omega", self.omega, above=0)

    def table(self, positions: npt.ArrayLike) -> Float64Array:
        return np.repeat(np.sin(self.omega * real_positions("positions", positions))[..., None], self.dim, axis=-1)
