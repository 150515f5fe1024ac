"""A video as frames with times, and the plain parts that it is: timestamp, frame, timestamp, frame …"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.segments.parts import Grid, fraction, rational
from mmpos.sequence.timestamps import QWEN3_VL, Timestamp, timestamps
from mmpos.support.checks import INT32_MAX, IntArray, counted, written

__all__ = ["Plain", "Video", "given_offsets", "plain_parts"]


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class Video:
    """Frames and when they are seen: each is an image of its own, with its time as text before it.

    A part for SequenceBuilder. What comes after a frame changes no id before it, under every scheme. There is one
    grid per frame given: models that merge frames in pairs (temporal_patch_size=2) get one frame per pair, at the mean
    of its two times, from a caller who merges them.

    >>> Video([Grid(2, 3), Grid(2, 3)], seconds_per_frame=0.5).timestamps
    ('<0.0 seconds>', '<0.5 seconds>')

    Args:
        frames: images of any sort that the ImageProcessor takes, or Grids of one frame; or one array of (frames,
            height, width, channels), or tensor of (frames, channels, height, width).
        times: seconds of each frame from the beginning, at least 0 and never decreasing: Fractions, integers, or
            floats, which are taken as the nearest fraction with a denominator up to 1,000,000.
        seconds_per_frame: instead of times: frame k is at k · seconds_per_frame, exactly.
        timestamp: the text before a frame: a format with the field seconds, rounded from the exact time with halves to
            even, or a callable from a Fraction to text. The default is that of Qwen3-VL.

    Raises:
        InvalidInputError: no frames, one that is no image, or times that do not fit them; the message names
            ``Video.frames[k]`` or ``Video.times[k]``.
    """

    frames: tuple[Any, ...]
    times: tuple[Fraction, ...]
    timestamps: tuple[str, ...]

    def __init__(
        self,
        frames: Iterable[Any],
        *,
        times: Iterable[Fraction | float] | None = None,
        seconds_per_frame: Fraction | float | None = None,
        timestamp: Timestamp = QWEN3_VL,
    ) -> None:
        if (times is None) == (seconds_per_frame is None):
            got = "neither" if times is None else "both"
            raise InvalidInputError(f"Video: got {got} of times and seconds_per_frame, want one of them")
        images = _frames(frames)
        step = rational("Video.seconds_per_frame", seconds_per_frame)
        seconds = tuple(k * step for k in range(len(images))) if step is not None else _times(times, len(images))
        object.__setattr__(self, "frames", images)
        object.__setattr__(self, "times", seconds)
        object.__setattr__(self, "timestamps", timestamps("Video.timestamp", timestamp, seconds))

    def __repr__(self) -> str:
        return f"Video({counted(len(self.frames), 'frame')}, {self.timestamps[0]!r} to {self.timestamps[-1]!r})"


class Plain(NamedTuple):
    """A part that is no video.

    Args:
        given: index of the part given that it is, or is of.
        name: what errors call it.
        part: itself.
    """

    given: int
    name: str
    part: Any


def plain_parts(parts: Iterable[Any]) -> Iterator[Plain]:
    """The parts with every video in its place as text, image, text, image …; read one by one."""
    for i, part in enumerate(parts):
        if not isinstance(part, Video):
            yield Plain(i, f"parts[{i}]", part)
            continue
        for k, (timestamp, frame) in enumerate(zip(part.timestamps, part.frames, strict=True)):
            yield Plain(i, f"parts[{i}].times[{k}]", timestamp)
            yield Plain(i, f"parts[{i}].frames[{k}]", frame)


def given_offsets(offsets: npt.ArrayLike, given: Sequence[int]) -> IntArray:
    """(parts given + 1,) first token of each part given, and the total, from (plain parts + 1,) those of plain ones."""
    edges = np.diff(np.asarray(given, np.int64), prepend=-1, append=-1).nonzero()
    found: IntArray = np.asarray(offsets, np.int64)[edges]
    return found


def _frames(frames: Any) -> tuple[Any, ...]:
    shape = getattr(frames, "shape", None)
    if shape is not None and len(shape) != 4:
        want = "a list of images, or (frames, height, width, channels)"
        raise InvalidInputError(f"Video.frames: got shape {tuple(shape)}, want {want}")
    if isinstance(frames, str | bytes | bytearray) or not isinstance(frames, Iterable):
        raise InvalidInputError(f"Video.frames: got {type(frames).__name__}, want a list of images")
    found = tuple(frames)
    if not found:
        raise InvalidInputError("Video.frames: got none, want at least one")
    for k, frame in enumerate(found):
        flat = not isinstance(frame, memoryview) and getattr(frame, "ndim", 2) < 2
        if flat or isinstance(frame, str | list | tuple | Video):
            raise InvalidInputError(f"Video.frames[{k}]: got {type(frame).__name__}, want an image or a Grid")
        if isinstance(frame, Grid) and frame.frames > 1:
            raise InvalidInputError(f"Video.frames[{k}]: got a grid of {counted(frame.frames, 'frame')}, want one of 1")
    return found


def _times(times: Any, count: int) -> tuple[Fraction, ...]:
    try:
        given = list(times)
    except TypeError:
        raise InvalidInputError(f"Video.times: got {times!r}, want a list of seconds") from None
    if len(given) != count:
        raise InvalidInputError(f"Video.times: got {len(given)} times, want {count}, one per frame")
    found: list[Fraction] = []
    for k, time in enumerate(given):
        exact = fraction(f"Video.times[{k}]", time)
        if exact < 0:
            raise InvalidInputError(f"Video.times[{k}]: got {written(time)}, want >= 0")
        if exact > INT32_MAX:  # 68 years: a number of something else
            raise LimitExceededError(f"Video.times[{k}]: got {written(time)}, want <= {INT32_MAX} seconds")
        if found and exact < found[-1]:
            got, before = written(time), written(found[-1])
            raise InvalidInputError(f"Video.times[{k}]: got {got}, want >= {before}, that of the frame before")
        found.append(exact)
    return tuple(found)
