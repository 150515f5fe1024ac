"""No encoding at all: a causal mask alone says something about positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mmpos.encodings.base import MAX_CHANNELS, NUM_HEADS, AttentionBias, real_positions, whole_positions
from mmpos.rotary.frequencies import Float64Array
from mmpos.support.checks import finite, integer

__all__ = ["NoPE", "expected_square"]


@dataclass(frozen=True)
class NoPE(AttentionBias):
    """A bias of zero.

    Without a mask, attention then is permutation-equivariant: positions are unknown. With a causal one y_n is the mean
    over n values, which is not the same for every n; one layer still cannot tell in which order the keys before
    it stand.

    Source: kexue.fm 10347; "Transformer language models without positional encodings still learn positional
    information" (Haviv et al., 2022).

    Args:
        num_heads: heads.
    """

    num_heads: int = NUM_HEADS
    name: ClassVar[str] = "nope"

    def __post_init__(self) -> None:
        integer("num_heads", self.num_heads, minimum=1, maximum=MAX_CHANNELS)

    def bias(self, query_positions: npt.ArrayLike, key_positions: npt.ArrayLike) -> Float64Array:
        queries = real_positions("query_positions", query_positions, 1)
        return np.zeros((self.num_heads, queries.size, real_positions("key_positions", key_positions, 1).size))


def expected_square(n: npt.ArrayLike, sigma2: float) -> Float64Array:
    """E[y_n²] = σ²/n of a component of uniform causal attention over n values: where NoPE keeps the position.

    It holds for values that are independent, of mean 0 and variance σ², under uniform attention: at most a model
    before training. It is one number, and neighbours hardly differ in it when n is large. It proves no more: a reader
    of the source normalised it away and trained as well.

    Source: kexue.fm 10347; "Latent positional information is in the self-attention variance" (Chi et al., 2023).

    >>> expected_square([1, 4, 16, 64], 2.25).tolist()
    [2.25, 0.5625, 0.140625, 0.03515625]

    Args:
        n: (...) tokens that are seen, the query's own included; >= 1.
        sigma2: variance of a component of the values.

    Returns:
        (...) float64, new.
    """
    return finite("sigma2", sigma2, minimum=0) / whole_positions("n", n, minimum=1)
