"""A vector of its own for every position, which training finds, and none beyond the last."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy.typing as npt

from mmpos.encodings.base import DIM, LearnedTable, draw, whole_positions
from mmpos.rotary.frequencies import Float64Array
from mmpos.support.checks import IntArray, integer

__all__ = ["LearnedAbsolute"]

LENGTH = 512


@dataclass(frozen=True, eq=False)
class LearnedAbsolute(LearnedTable):
    """PE(p) is row p of a table of L_max rows, as in BERT; p >= L_max is an error, since there is no row to guess.

    Source: "Convolutional sequence to sequence learning" (Gehring et al., 2017); BERT (Devlin et al., 2018).

    >>> LearnedAbsolute([[0.5, 0.0], [1.0, 2.0]]).table([1, 0]).tolist()
    [[1.0, 2.0], [0.5, 0.0]]

    Args:
        weights: (L_max, dim) the table; drawn for 512 positions by default.
    """

    weights: Float64Array = field(default_factory=lambda: draw(LENGTH, DIM, 0), repr=False)
    dim: int = field(init=False)
    name: ClassVar[str] = "learned-absolute"

    @classmethod
    def drawn(cls, length: int = LENGTH, dim: int = DIM, seed: int = 0) -> LearnedAbsolute:
        """One before training.

        Args:
            length: L_max.
            dim: channels.
            seed: of the random numbers.
        """
        return cls(draw(integer("length", length, minimum=1), integer("dim", dim, minimum=1), seed))

    @property
    def length(self) -> int:
        """L_max, the number of positions that there are."""
        return len(self.weights)

    def index(self, positions: npt.ArrayLike) -> IntArray:
        return whole_positions("positions", positions, minimum=0, below=self.length)
