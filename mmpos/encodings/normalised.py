"""The position as a share of the sequence: bounded, but its step depends on the length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mmpos.encodings.base import DIM, MAX_CHANNELS, AdditiveTable, whole_positions
from mmpos.rotary.frequencies import Float64Array
from mmpos.support.checks import integer

__all__ = ["Normalised"]


@dataclass(frozen=True)
class Normalised(AdditiveTable):
    """PE(p) = p / (T − 1) in every channel, in [0, 1]; a sequence of one token has 0.

    The same position has another vector in a longer sequence, and neighbours come ever closer.

    Source: "详解Transformer中的Positional Encoding" (2021), the second of the ideas that it drops.

    >>> Normalised(dim=1).table([0, 1, 2, 3, 4]).ravel().tolist()
    [0.0, 0.25, 0.5, 0.75, 1.0]

    Args:
        dim: channels.
        length: T; None for one more than the largest position on the last axis of those asked for.
    """

    dim: int = DIM
    length: int | None = None
    name: ClassVar[str] = "normalised"

    def __post_init__(self) -> None:
        integer("dim", self.dim, minimum=1, maximum=MAX_CHANNELS)
        if self.length is not None:
            integer("length", self.length, minimum=1)

    def table(self, positions: npt.ArrayLike) -> Float64Array:
        ids = whole_positions("positions", positions, minimum=0, below=self.length)
        last = np.atleast_1d(ids).max(axis=-1, keepdims=True, initial=0) if self.length is None else self.length - 1
        share = (ids / np.maximum(last, 1)).reshape(ids.shape)
        return np.repeat(share[..., None], self.dim, axis=-1)
