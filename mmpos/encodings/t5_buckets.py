"""Weights for distances in buckets that grow: near ones exactly, far ones by their logarithm."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mmpos.encodings.base import NUM_HEADS, LearnedBias, distances, draw, whole_positions
from mmpos.errors import InvalidInputError
from mmpos.rotary.frequencies import Float64Array
from mmpos.support.cached import cached_property
from mmpos.support.checks import INT32_MAX, IntArray, boolean, integer

__all__ = ["T5Buckets"]

NUM_BUCKETS, MAX_DISTANCE = 32, 128


@dataclass(frozen=True, eq=False)
class T5Buckets(LearnedBias):
    """The bias of query i and key j is the row of the bucket of j − i.

    n buckets serve one direction, e = ⌊n/2⌋ of them a distance each. A distance d >= e is in bucket
    e + ⌊(n − e)·log(d/e) / log(M/e)⌋, at most n − 1, where M is max_distance. Causal: later keys are in bucket 0.
    Bidirectional: half of the buckets for keys before the query or at it, the other half for later ones.

    The floor is exact, since d reaches bucket e + b as soon as d^(n−e) >= M^b·e^(n−e−b), in integers; published
    code rounds float32 logarithms.

    Source: "Exploring the limits of transfer learning" (Raffel et al., 2020), and its code in Mesh TensorFlow.

    >>> T5Buckets(bidirectional=False).bucket([-15, -16, -32, -64, -91, -128, 3]).tolist()
    [15, 16, 21, 26, 29, 31, 0]
    >>> T5Buckets().bucket([-8, -12, -16, -64, -128, 8, 128]).tolist()
    [8, 9, 10, 14, 15, 24, 31]

    Args:
        weights: (buckets, num_heads); drawn for 32 buckets by default.
        max_distance: M, from which on all distances are in the last bucket.
        bidirectional: whether keys may be after queries.
    """

    weights: Float64Array = field(default_factory=lambda: draw(NUM_BUCKETS, NUM_HEADS, 0), repr=False)
    max_distance: int = MAX_DISTANCE
    bidirectional: bool = True
    num_heads: int = field(init=False)
    name: ClassVar[str] = "t5-buckets"

    def __post_init__(self) -> None:
        super().__post_init__()
        boolean("bidirectional", self.bidirectional)
        fewest = 4 if self.bidirectional else 2
        if len(self.weights) < fewest or (self.bidirectional and len(self.weights) % 2):
            want = f"{'an even number' if self.bidirectional else 'a number'} >= {fewest}"
            raise InvalidInputError(f"weights: got {len(self.weights)} buckets, want {want}")
        integer("max_distance", self.max_distance, minimum=self._per_direction // 2 + 1, maximum=INT32_MAX)

    @classmethod
    def drawn(
        cls,
        num_buckets: int = NUM_BUCKETS,
        max_distance: int = MAX_DISTANCE,
        bidirectional: bool = True,
        num_heads: int = NUM_HEADS,
        seed: int = 0,
    ) -> T5Buckets:
        """One before training.

        Args:
            num_buckets: of both directions together.
            max_distance: M.
            bidirectional: whether keys may be after queries.
            num_heads: heads.
            seed: of the random numbers.
        """
        rows = integer("num_buckets", num_buckets, minimum=2)
        return cls(draw(rows, integer("num_heads", num_heads, minimum=1), seed), max_distance, bidirectional)

    @property
    def _per_direction(self) -> int:
        return len(self.weights) // 2 if self.bidirectional else len(self.weights)

    @cached_property
    def first_distances(self) -> IntArray:
        """(n,) smallest distance of every bucket of one direction; read-only."""
        exact = self._per_direction // 2
        steps = self._per_direction - exact

        def first(b: int) -> int:
            reached = self.max_distance**b * exact ** (steps - b)
            return bisect_left(range(self.max_distance), reached, key=lambda distance: distance**steps)

        distances = np.array([*range(exact), *(first(b) for b in range(steps))], np.int64)
        distances.setflags(write=False)
        return distances

    def bucket(self, relative: npt.ArrayLike) -> IntArray:
        """(...) bucket of every distance j − i of a key from its query."""
        ahead = whole_positions("relative", relative, minimum=-(2**63) + 1)
        distance = np.abs(ahead) if self.bidirectional else np.maximum(-ahead, 0)
        bucket = np.searchsorted(self.first_distances, distance, side="right") - 1
        return bucket + (ahead > 0) * self._per_direction if self.bidirectional else bucket

    def index(self, query_positions: npt.ArrayLike, key_positions: npt.ArrayLike) -> IntArray:
        return self.bucket(distances(query_positions, key_positions))
