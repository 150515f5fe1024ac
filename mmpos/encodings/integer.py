"""The first thing that comes to mind: the position itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mmpos.encodings.base import DIM, MAX_CHANNELS, AdditiveTable, real_positions
from mmpos.rotary.frequencies import Float64Array
from mmpos.support.checks import integer

__all__ = ["Integer"]


@dataclass(frozen=True)
class Integer(AdditiveTable):
    """PE(p) = p in every channel, for p = 0 … T−1.

    Unique, and p + k is one step of k away, but unbounded: soon larger than any embedding.

    *Corrected*: one source counts 0 … L, which is one position more than a sequence of L tokens has.

    Source: the first attempt of "You could have designed state of the art positional encoding" (Fleetwood, 2024).

    >>> Integer(dim=2).table([0, 1, 4]).tolist()
    [[0.0, 0.0], [1.0, 1.0], [4.0, 4.0]]

    Args:
        dim: channels.
    """

    dim: int = DIM
    name: ClassVar[str] = "integer"

    def __post_init__(self) -> None:
        integer("dim", self.dim, minimum=1, maximum=MAX_CHANNELS)

    def table(self, positions: npt.ArrayLike) -> Float64Array:
        return np.repeat(real_positions("positions", positions)[..., None], self.dim, axis=-1)
