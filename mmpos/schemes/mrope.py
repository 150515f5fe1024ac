"""The M-RoPE family of the Qwen vision-language models: (frame, row, column) counted from the cursor."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.schemes.base import Grids, Pieces, Placement, Scheme, check_pieces
from mmpos.support.checks import INT32_MAX, IntArray, integer
from mmpos.support.ragged import ragged_arange


@dataclass(frozen=True)
class MRope(Scheme):
    """Patch (t, i, j), counted from zero, at (c + t, c + i, c + j); next text at c + max(f, h, w).

    Source: Qwen2-VL, as implemented in vLLM and SGLang.
    """

    name: ClassVar[str] = "mrope"
    linear_in = ("cursor",)
    axes = 3
    timed = False

    def advance(self, grids: Grids) -> IntArray:
        return grids.extents.max(axis=0)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        return Placement([cursor] * 3, [1, 0, 0], [0, 1, 0], [0, 0, 1])


@dataclass(frozen=True)
class MRopeQwen3(MRope):
    """M-RoPE in which every frame of a video is a separate grid, with timestamp text between frames.

    Source: Qwen3-VL. Build tables with ``frames_apart=True`` or one Grid per frame.
    """

    name: ClassVar[str] = "mrope-qwen3"
    linear_in = ("cursor",)
    frames = False


@dataclass(frozen=True)
class MRopeInterleaveReset(MRope):
    """M-RoPE whose rows and columns restart at zero in every grid: (c + t, i, j), next text at c + max(f, h, w).

    Only text and the frame axis depend on the cursor. Source: arXiv 2510.23095.
    """

    name: ClassVar[str] = "mrope-interleave-reset"
    linear_in = ("cursor",)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        return Placement([cursor, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1])


@dataclass(frozen=True)
class TimedMRope(MRope):
    """M-RoPE whose frames are at c + ``frame_ids``; every frame is a piece, since floors are not affine."""

    timed = True
    tokens_per_second: int | Fraction | None = None

    def frame_ids(self, grids: Grids, grid: IntArray, frame: IntArray) -> IntArray:
        """Return ⌊frame · seconds · rate⌋, the ids between the first frame and each frame of the indexed grids."""
        if self.tokens_per_second is None:
            return frame
        numerator, denominator = frame_steps(self, grids, self.tokens_per_second)
        return frame * numerator[grid] // denominator[grid]

    def last_ids(self, grids: Grids) -> IntArray:
        """Return the ids from the first to the last frame, (grids,); check them before ``place`` cuts frames apart."""
        last = self.frame_ids(grids, np.arange(grids.frames.size), grids.frames - 1)
        if last.max(initial=0) > 2 * INT32_MAX:
            got = f"a last frame {last.max()} ids after the first"
            raise LimitExceededError(f"{self.name}: got {got}, want ids within int32")
        return last

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        check_pieces(self, int(grids.frames.sum()))
        owner, frame = ragged_arange(grids.frames)
        height, width = grids.height[owner], grids.width[owner]
        pieces = Pieces(owner, height * width, frame * height * width, height, width)
        start = cursor[owner]
        first = start + self.frame_ids(grids, owner, frame)
        return Placement([first, start, start], None, [0, 1, 0], [0, 0, 1], pieces=pieces)


@dataclass(frozen=True)
class MRopeTransformers(TimedMRope):
    """M-RoPE as computed by Transformers 5: text continues at c + max(h, w), independently of the frames.

    For long videos, the next position, the maximum of all ids plus one, exceeds the id of the text after the video.

    Args:
        tokens_per_second: for Qwen2.5-VL, frame t is ⌊t · seconds_per_frame · tokens_per_second⌋ ids after the first,
            so grids with several frames need a time. None, for Qwen2-VL and Qwen3-VL, places frames one id apart.
    """

    name: ClassVar[str] = "mrope-transformers"
    linear_in = ("cursor",)
    tokens_per_second: int | None = None

    def __post_init__(self) -> None:
        if self.tokens_per_second is not None:
            rate = integer("MRopeTransformers.tokens_per_second", self.tokens_per_second, minimum=1, maximum=INT32_MAX)
            object.__setattr__(self, "tokens_per_second", rate)
        object.__setattr__(self, "timed", self.tokens_per_second is not None)

    def advance(self, grids: Grids) -> IntArray:
        return grids.extents[1:].max(axis=0)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        return MRope.place(self, grids, cursor) if self.tokens_per_second is None else super().place(grids, cursor)

    def next_after(self, grids: Grids, cursor: IntArray) -> IntArray:
        return cursor + np.maximum(self.last_ids(grids) + 1, self.advance(grids))


@dataclass(frozen=True)
class MRopeQwen25(TimedMRope):
    """M-RoPE in seconds: frame t at c + ⌊t · seconds_per_frame · tokens_per_second⌋, next text at max + 1.

    The product inside the floor is computed exactly. Grids with several frames need a time.
    Source: Qwen2.5-VL; the ids of vLLM and SGLang, except for their rounding.

    Args:
        tokens_per_second: ids per second, an integer or a Fraction.
    """

    name: ClassVar[str] = "mrope-qwen2.5"
    linear_in = ("cursor",)
    tokens_per_second: int | Fraction = 2

    def __post_init__(self) -> None:
        rate = checked_rate("MRopeQwen25.tokens_per_second", self.tokens_per_second)
        object.__setattr__(self, "tokens_per_second", rate)

    def advance(self, grids: Grids) -> IntArray:
        return np.maximum(grids.extents[1:].max(axis=0), self.last_ids(grids) + 1)


def frame_steps(scheme: Scheme, grids: Grids, rate: int | Fraction, needed_from: int = 2) -> tuple[IntArray, IntArray]:
    """Return the ids between two frames, seconds · rate, as numerators and denominators in lowest terms, (grids,) each.

    Raises:
        InvalidInputError: a grid of at least ``needed_from`` frames has no time.
        LimitExceededError: a frame index times its numerator exceeds 2**62.
    """
    seconds, per = grids.seconds(needed_from)
    numerator, denominator = seconds * rate.numerator, per * rate.denominator
    common = np.gcd(numerator, denominator)
    numerator, denominator = numerator // common, denominator // common
    if ((grids.frames + np.abs(grids.first_frame)).astype(np.float64) * numerator).max(initial=0) > 2.0**62:
        raise LimitExceededError(
            f"{scheme.name}: got frame · seconds · tokens_per_second beyond 2**62, want ids within int32"
        )
    return numerator, denominator


def checked_rate(name: str, rate: Any) -> int | Fraction:
    """Check that a rate is an integer or Fraction above 0 with terms below 2**31, and return it."""
    if isinstance(rate, np.integer):
        rate = int(rate)
    if isinstance(rate, bool) or not isinstance(rate, int | Fraction) or rate <= 0:
        raise InvalidInputError(f"{name}: got {rate!r}, want an integer or Fraction > 0")
    if max(rate.numerator, rate.denominator) > INT32_MAX:
        raise LimitExceededError(f"{name}: got {rate}, want terms below 2**31")
    return rate
