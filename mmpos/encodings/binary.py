"""The position in binary: bounded and of every length, but it jumps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mmpos.encodings.base import DIM, AdditiveTable, whole_positions
from mmpos.rotary.frequencies import Float64Array
from mmpos.support.checks import integer

__all__ = ["Binary"]

MAX_BITS = 63


@dataclass(frozen=True)
class Binary(AdditiveTable):
    """Channel i is bit i of p, (p >> i) & 1, the least significant first.

    Unique below 2^dim, but neighbours jump: 7 and 8 differ in four bits.

    *Corrected*: bit i toggles every 2^i positions and has the period 2^(i+1), so the most significant of n bits
    toggles, and does not cycle, every 2^(n−1).

    Source: "You could have designed state of the art positional encoding" (Fleetwood, 2024).

    >>> Binary(dim=8).table(252)[::-1].astype(int).tolist()
    [1, 1, 1, 1, 1, 1, 0, 0]

    Args:
        dim: bits, at most 63.
    """

    dim: int = DIM
    name: ClassVar[str] = "binary"

    def __post_init__(self) -> None:
        integer("dim", self.dim, minimum=1, maximum=MAX_BITS)

    def table(self, positions: npt.ArrayLike) -> Float64Array:
        ids = whole_positions("positions", positions, minimum=0, below=2**self.dim)
        return (ids[..., None] >> np.arange(self.dim) & 1).astype(np.float64)
