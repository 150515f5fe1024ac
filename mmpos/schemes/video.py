"""Schemes for video understanding: VideoRoPE with frames centred on a diagonal, and VRoPE with four symmetric axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mmpos.schemes.base import Grids, Placement, Scheme
from mmpos.support.checks import INT32_MAX, IntArray, integer


@dataclass(frozen=True)
class VideoRope(Scheme):
    """Frames δ ids apart on the diagonal, rows and columns centred on it; next text at the last frame's id + 1.

    An image at the start of a document has negative ids. Source: VideoRoPE (arXiv 2502.05173).

    Args:
        delta: ids between two frames.
    """

    name: ClassVar[str] = "videorope"
    linear_in = ("cursor",)
    axes = 3
    timed = False
    delta: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "delta", integer("VideoRope.delta", self.delta, minimum=1, maximum=INT32_MAX))

    def advance(self, grids: Grids) -> IntArray:
        return self.delta * (grids.frames - 1) + 1

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        return Placement(
            [cursor, cursor - (grids.height - 1) // 2, cursor - (grids.width - 1) // 2],
            [self.delta] * 3,
            [0, 1, 0],
            [0, 0, 1],
        )


@dataclass(frozen=True)
class VRope(Scheme):
    """Four axes i+j, i−j+w−1, j−i+h−1, h+w−2−i−j, frames h+w−1 apart: symmetric for every size.

    Source: VRoPE (arXiv 2502.11664).
    """

    name: ClassVar[str] = "vrope"
    linear_in = ("cursor",)
    axes = 4
    timed = False

    def advance(self, grids: Grids) -> IntArray:
        return grids.frames * self._span(grids)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        bottom, right = grids.height - 1, grids.width - 1
        return Placement(
            [cursor, cursor + right, cursor + bottom, cursor + bottom + right],
            [self._span(grids)] * 4,
            [1, 1, -1, -1],
            [1, -1, 1, -1],
        )

    def _span(self, grids: Grids) -> IntArray:
        return grids.height + grids.width - 1
