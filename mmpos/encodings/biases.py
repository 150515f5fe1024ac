"""Attention biases that depend on distance: clipped, in buckets, linear, or none."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mmpos.encodings.base import (
    NUM_HEADS,
    AttentionBias,
    LearnedBias,
    distances,
    draw,
    real_positions,
    whole_positions,
)
from mmpos.errors import InvalidInputError
from mmpos.rotary.allocation import MAX_HEAD_DIM
from mmpos.rotary.frequencies import Float64Array
from mmpos.support.cached import cached_property
from mmpos.support.checks import INT32_MAX, IntArray, boolean, integer

__all__ = ["Alibi", "ClippedRelative", "NoPE", "T5Buckets"]

CLIPPED_AT = 16


@dataclass(frozen=True, eq=False)
class ClippedRelative(LearnedBias):
    """The bias of query i and key j is row clip(j − i, −K, K) + K of 2K + 1 rows: constant beyond ±K.

    Shaw adds a vector a to each key, q·(k + a). This class uses one number per head and row, as T5 and Swin do.

    Source: "Self-attention with relative position representations" (Shaw et al., 2018).

    >>> encoding = ClippedRelative.drawn(max_distance=2)
    >>> encoding.index([5], range(11)).tolist()
    [[0, 0, 0, 0, 1, 2, 3, 4, 4, 4, 4]]

    Args:
        weights: (2K + 1, num_heads); drawn at random for K = 16 by default.
    """

    weights: Float64Array = field(default_factory=lambda: draw(2 * CLIPPED_AT + 1, NUM_HEADS), repr=False)
    num_heads: int = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.weights) % 2 == 0:
            raise InvalidInputError(f"weights: got {len(self.weights)} rows, want 2K + 1")

    @classmethod
    def drawn(cls, max_distance: int = CLIPPED_AT, num_heads: int = NUM_HEADS) -> ClippedRelative:
        """Draw the weights of an untrained model for K = max_distance."""
        rows = 2 * integer("max_distance", max_distance, minimum=0) + 1
        return cls(draw(rows, integer("num_heads", num_heads, minimum=1)))

    @property
    def max_distance(self) -> int:
        """K, the distance beyond which the bias is constant."""
        return len(self.weights) // 2

    def index(self, query_positions: npt.ArrayLike, key_positions: npt.ArrayLike) -> IntArray:
        ahead = distances(query_positions, key_positions)
        return np.clip(ahead, -self.max_distance, self.max_distance) + self.max_distance


@dataclass(frozen=True, eq=False)
class T5Buckets(LearnedBias):
    """The bias of query i and key j is the row of weights for the bucket of j − i.

    Each direction has n buckets, of which the first e = ⌊n/2⌋ hold one distance each. A distance d >= e is in bucket
    e + ⌊(n − e)·log(d/e) / log(M/e)⌋, at most n − 1, where M is max_distance. Causal: all later keys are in bucket 0.
    Bidirectional: half of the buckets are for keys at or before the query, the other half for later keys.

    The floor is computed exactly, in integers: d is in bucket e + b or higher if d^(n−e) >= M^b·e^(n−e−b). Published
    code rounds float32 logarithms.

    Source: "Exploring the limits of transfer learning" (Raffel et al., 2020), and its code in Mesh TensorFlow.

    >>> T5Buckets(bidirectional=False).bucket([-15, -16, -32, -64, -91, -128, 3]).tolist()
    [15, 16, 21, 26, 29, 31, 0]
    >>> T5Buckets().bucket([-8, -12, -16, -64, -128, 8, 128]).tolist()
    [8, 9, 10, 14, 15, 24, 31]

    Args:
        weights: (buckets, num_heads); drawn at random for 32 buckets by default.
        max_distance: M; distances from M on are in the last bucket.
        bidirectional: whether keys after the query have separate buckets.
    """

    weights: Float64Array = field(default_factory=lambda: draw(32, NUM_HEADS), repr=False)
    max_distance: int = 128
    bidirectional: bool = True
    num_heads: int = field(init=False)

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
        cls, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True, num_heads: int = NUM_HEADS
    ) -> T5Buckets:
        """Draw the weights of an untrained model; the buckets of both directions are counted together."""
        rows = integer("num_buckets", num_buckets, minimum=2)
        return cls(draw(rows, integer("num_heads", num_heads, minimum=1)), max_distance, bidirectional)

    @property
    def _per_direction(self) -> int:
        return len(self.weights) // 2 if self.bidirectional else len(self.weights)

    @cached_property
    def first_distances(self) -> IntArray:
        """Smallest distance in each of the n buckets of one direction, (n,); read-only."""
        exact = self._per_direction // 2
        steps = self._per_direction - exact

        def first(b: int) -> int:
            reached = self.max_distance**b * exact ** (steps - b)
            return bisect_left(range(self.max_distance), reached, key=lambda distance: distance**steps)

        distances = np.array([*range(exact), *(first(b) for b in range(steps))], np.int64)
        distances.setflags(write=False)
        return distances

    def bucket(self, relative: npt.ArrayLike) -> IntArray:
        """Return the bucket for each distance j − i of a key j from a query i, with the shape of ``relative``."""
        ahead = whole_positions("relative", relative, minimum=-(2**63) + 1)
        distance = np.abs(ahead) if self.bidirectional else np.maximum(-ahead, 0)
        bucket = np.searchsorted(self.first_distances, distance, side="right") - 1
        return bucket + (ahead > 0) * self._per_direction if self.bidirectional else bucket

    def index(self, query_positions: npt.ArrayLike, key_positions: npt.ArrayLike) -> IntArray:
        return self.bucket(distances(query_positions, key_positions))


@dataclass(frozen=True)
class Alibi(AttentionBias):
    """The bias of query i and key j is −m_h·|i − j|, with slopes m_h = 2^(−8h/H) for heads h = 1 … H.

    If H is not a power of two, the slopes of the largest power P < H come first, followed by every other slope of 2P,
    as in the paper's code. The paper is causal, j <= i; for later keys, this class uses the symmetric form proposed by
    its authors.

    Source: "Train short, test long" (Press et al., 2022).

    >>> Alibi(num_heads=12).slopes[8:].round(6).tolist()
    [0.707107, 0.353553, 0.176777, 0.088388]

    Args:
        num_heads: H.
    """

    num_heads: int = NUM_HEADS

    def __post_init__(self) -> None:
        integer("num_heads", self.num_heads, minimum=1, maximum=MAX_HEAD_DIM)

    @cached_property
    def slopes(self) -> Float64Array:
        """(num_heads,) m_h; read-only."""
        power = 1 << (int(self.num_heads).bit_length() - 1)
        slopes = np.concatenate([_geometric(power), _geometric(2 * power)[::2][: self.num_heads - power]])
        slopes.setflags(write=False)
        return slopes

    def bias(self, query_positions: npt.ArrayLike, key_positions: npt.ArrayLike) -> Float64Array:
        queries = real_positions("query_positions", query_positions, 1)
        distance = np.abs(queries[:, None] - real_positions("key_positions", key_positions, 1))
        return -self.slopes[:, None, None] * distance


def _geometric(num_heads: int) -> Float64Array:
    return np.exp2(-8 * np.arange(1, num_heads + 1) / num_heads)


@dataclass(frozen=True)
class NoPE(AttentionBias):
    """A bias of zero.

    Without a mask, attention is permutation-equivariant and cannot depend on positions. With a causal mask, y_n is a
    mean over n values, so its variance depends on n; a single layer still cannot tell the order of the keys before a
    query.

    Source: kexue.fm 10347; "Transformer language models without positional encodings still learn positional
    information" (Haviv et al., 2022).

    Args:
        num_heads: number of heads.
    """

    num_heads: int = NUM_HEADS

    def __post_init__(self) -> None:
        integer("num_heads", self.num_heads, minimum=1, maximum=MAX_HEAD_DIM)

    def bias(self, query_positions: npt.ArrayLike, key_positions: npt.ArrayLike) -> Float64Array:
        queries = real_positions("query_positions", query_positions, 1)
        return np.zeros((self.num_heads, queries.size, real_positions("key_positions", key_positions, 1).size))
