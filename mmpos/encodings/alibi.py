"""A bias that falls with distance, at a rate of its own in every head, and learns nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mmpos.encodings.base import MAX_CHANNELS, NUM_HEADS, AttentionBias, real_positions
from mmpos.rotary.frequencies import Float64Array
from mmpos.support.cached import cached_property
from mmpos.support.checks import integer

__all__ = ["Alibi"]


@dataclass(frozen=True)
class Alibi(AttentionBias):
    """The bias of query i and key j is −m_h·|i − j|, with slopes m_h = 2^(−8h/H) for heads h = 1 … H.

    Where H is no power of two, the slopes of the greatest one P below it come first, then every other slope of 2P,
    as in the code of the paper. The paper is causal, j <= i; for later keys this is its authors' symmetric form.

    Source: "Train short, test long" (Press et al., 2022).

    >>> Alibi(num_heads=12).slopes[8:].round(6).tolist()
    [0.707107, 0.353553, 0.176777, 0.088388]

    Args:
        num_heads: H.
    """

    num_heads: int = NUM_HEADS
    name: ClassVar[str] = "alibi"

    def __post_init__(self) -> None:
        integer("num_heads", self.num_heads, minimum=1, maximum=MAX_CHANNELS)

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
