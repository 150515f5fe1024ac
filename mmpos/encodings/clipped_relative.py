"""Weights for distances instead of positions, one for all that are far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mmpos.encodings.base import NUM_HEADS, LearnedBias, distances, draw
from mmpos.errors import InvalidInputError
from mmpos.rotary.frequencies import Float64Array
from mmpos.support.checks import IntArray, integer

__all__ = ["ClippedRelative"]

MAX_DISTANCE = 16


@dataclass(frozen=True, eq=False)
class ClippedRelative(LearnedBias):
    """The bias of query i and key j is row clip(j − i, −K, K) + K of 2K + 1 rows: constant beyond ±K.

    Shaw's rows are vectors a that stand beside keys, q·(k + a). As here, one number for each head and row, it is the
    form of T5 and of Swin.

    Source: "Self-attention with relative position representations" (Shaw et al., 2018).

    >>> encoding = ClippedRelative.drawn(max_distance=2)
    >>> encoding.index([5], range(11)).tolist()
    [[0, 0, 0, 0, 1, 2, 3, 4, 4, 4, 4]]

    Args:
        weights: (2K + 1, num_heads); drawn for K = 16 by default.
    """

    weights: Float64Array = field(default_factory=lambda: draw(2 * MAX_DISTANCE + 1, NUM_HEADS, 0), repr=False)
    num_heads: int = field(init=False)
    name: ClassVar[str] = "clipped-relative"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.weights) % 2 == 0:
            raise InvalidInputError(f"weights: got {len(self.weights)} rows, want 2K + 1")

    @classmethod
    def drawn(cls, max_distance: int = MAX_DISTANCE, num_heads: int = NUM_HEADS, seed: int = 0) -> ClippedRelative:
        """One before training.

        Args:
            max_distance: K.
            num_heads: heads.
            seed: of the random numbers.
        """
        rows = 2 * integer("max_distance", max_distance, minimum=0) + 1
        return cls(draw(rows, integer("num_heads", num_heads, minimum=1), seed))

    @property
    def max_distance(self) -> int:
        """K, beyond which distances are one."""
        return len(self.weights) // 2

    def index(self, query_positions: npt.ArrayLike, key_positions: npt.ArrayLike) -> IntArray:
        ahead = distances(query_positions, key_positions)
        return np.clip(ahead, -self.max_distance, self.max_distance) + self.max_distance
