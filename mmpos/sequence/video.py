"""Video: frames with times, expanded to the plain parts timestamp, frame, timestamp, frame and so on."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from string import Formatter
from typing import Any, NamedTuple

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.segments.kinds import Audio, Clip, Grid, Thumbnail, Tile, fraction, rational
from mmpos.sequence.video_file import read_frames
from mmpos.support.checks import INT32_MAX, counted, written

__all__ = ["QWEN3_VL", "Plain", "Timestamp", "Video", "plain_parts", "refuse_crop", "timestamps"]


QWEN3_VL = "<{seconds:.1f} seconds>"
"""Timestamp format of Qwen3-VL."""

Timestamp = str | Callable[[Fraction], str]
"""A format with the single field seconds, or a function from seconds to text."""

_SPEC = re.compile(r"0?\d{0,2}\.(\d{1,2})f", re.ASCII)


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class Video:
    """A part for SequenceBuilder: frames with times, each an image preceded by its time as text.

    Under every scheme, the ids before a frame do not depend on later frames. Each frame has its own grid. For models
    that merge frames in pairs (temporal_patch_size=2), merge them first and pass one frame per pair, at the mean of its
    two times.

    >>> Video([Grid(2, 3), Grid(2, 3)], seconds_per_frame=0.5).timestamps
    ('<0.0 seconds>', '<0.5 seconds>')

    Args:
        frames: images of any type that ImageProcessor accepts, or Grids of one frame; or one array (frames, height,
            width, channels) or tensor (frames, channels, height, width).
        times: time of each frame in seconds, at least 0 and never decreasing. A float becomes the nearest fraction with
            a denominator up to 1,000,000.
        seconds_per_frame: interval between frames, instead of times: frame k is at exactly k · seconds_per_frame.
        timestamp: text before a frame: a format with the field seconds, rounded half to even from the exact time, or a
            function from a Fraction to text. The default is the format of Qwen3-VL.

    Raises:
        InvalidInputError: there are no frames, a frame is not an image, or the times do not fit; the message names
            ``Video.frames[k]`` or ``Video.times[k]``.
    """

    frames: tuple[object, ...]
    times: tuple[Fraction, ...]
    timestamps: tuple[str, ...]

    def __init__(
        self,
        frames: Iterable[object],
        *,
        times: Iterable[Fraction | float] | None = None,
        seconds_per_frame: Fraction | float | None = None,
        timestamp: Timestamp = QWEN3_VL,
    ) -> None:
        if (times is None) == (seconds_per_frame is None):
            got = "neither" if times is None else "both"
            raise InvalidInputError(f"Video: want either times or seconds_per_frame, got {got}")
        images = _frames(frames)
        step = rational("Video.seconds_per_frame", seconds_per_frame)
        seconds = tuple(k * step for k in range(len(images))) if step is not None else _times(times, len(images))
        object.__setattr__(self, "frames", images)
        object.__setattr__(self, "times", seconds)
        object.__setattr__(self, "timestamps", timestamps("Video.timestamp", timestamp, seconds))

    @classmethod
    def from_file(
        cls,
        file: str | os.PathLike[str] | bytes,
        *,
        fps: float | None = None,
        num_frames: int | None = None,
        max_frames: int | None = None,
        timestamp: Timestamp = QWEN3_VL,
    ) -> Video:
        """Decode frames of a video file with PyAV, chosen as by Transformers, upright and at their real times.

        Args:
            file: path or bytes of the file.
            fps: frames to choose per second, spread evenly over the frames of the file; needs a frame rate.
            num_frames: frames to choose, spread evenly over the frames of the file. Give either this or fps.
            max_frames: largest number of frames; more are spread out.
            timestamp: as in the class.

        Raises:
            InvalidInputError: the file cannot be read, is damaged or truncated, has no video or fewer frames than are
                to be chosen (none is repeated); or fps and num_frames are both missing or both given.
            ImportError: PyAV is not installed.
        """
        frames, times = read_frames(file, fps, num_frames, max_frames)
        return cls(frames, times=times, timestamp=timestamp)

    @property
    def seconds_per_frame(self) -> Fraction | None:
        """Mean interval between frames, as a Grid of all frames takes it; None for a single frame."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else None

    def __repr__(self) -> str:
        return f"Video({counted(len(self.frames), 'frame')}, {self.timestamps[0]!r} to {self.timestamps[-1]!r})"


class Plain(NamedTuple):
    """A part of a document once its videos have been expanded.

    Args:
        part_index: index of the original part in the argument of build.
        name: name for error messages.
        part: text, token ids, audio, a clip or an image.
    """

    part_index: int
    name: str
    part: object


def plain_parts(parts: Iterable[object]) -> Iterator[Plain]:
    """Yield the parts, with every video expanded to text, image, text, image and so on."""
    for i, part in enumerate(parts):
        if not isinstance(part, Video):
            yield Plain(i, f"parts[{i}]", part)
            continue
        for k, (timestamp, frame) in enumerate(zip(part.timestamps, part.frames, strict=True)):
            yield Plain(i, f"parts[{i}].times[{k}]", timestamp)
            yield Plain(i, f"parts[{i}].frames[{k}]", frame)


def refuse_crop(name: str, part: object) -> None:
    """Raise an error for a thumbnail or a tile: no builder cuts pictures the way models with tiles do."""
    if isinstance(part, Thumbnail | Tile):
        raise UnsupportedError(
            f"{name}: got a {type(part).__name__.lower()}, want input_ids and sizes from its model's processor, "
            "which mmpos.from_hf_config(config).segments reads"
        )


def _frames(frames: object) -> tuple[object, ...]:
    shape = getattr(frames, "shape", None)
    if shape is not None and len(shape) != 4:
        want = "a list of images, or (frames, height, width, channels)"
        raise InvalidInputError(f"Video.frames: got shape {tuple(shape)}, want {want}")
    if isinstance(frames, str | bytes | bytearray) or not isinstance(frames, Iterable):
        raise InvalidInputError(f"Video.frames: got {type(frames).__name__}, want a list of images")
    images = tuple(frames)
    if not images:
        raise InvalidInputError("Video.frames: got no frames, want at least one")
    for k, frame in enumerate(images):
        flat = not isinstance(frame, memoryview) and getattr(frame, "ndim", 2) < 2
        if flat or isinstance(frame, str | list | tuple | Video | Audio | Clip | Thumbnail | Tile):
            raise InvalidInputError(f"Video.frames[{k}]: got {type(frame).__name__}, want an image or a Grid")
        if isinstance(frame, Grid) and frame.frames > 1:
            raise InvalidInputError(f"Video.frames[{k}]: got a grid of {counted(frame.frames, 'frame')}, want 1 frame")
    return images


def _times(times: Any, count: int) -> tuple[Fraction, ...]:
    try:
        listed = list(times)
    except TypeError:
        raise InvalidInputError(f"Video.times: got {times!r}, want a list of seconds") from None
    if len(listed) != count:
        raise InvalidInputError(f"Video.times: got {len(listed)} times, want {count}, one per frame")
    seconds: list[Fraction] = []
    for k, time in enumerate(listed):
        exact = fraction(f"Video.times[{k}]", time)
        if exact < 0:
            raise InvalidInputError(f"Video.times[{k}]: got {written(time)}, want >= 0")
        if exact > INT32_MAX:  # the limit is 68 years, so a larger number must mean something else
            raise LimitExceededError(f"Video.times[{k}]: got {written(time)}, want <= {INT32_MAX} seconds")
        if seconds and exact < seconds[-1]:
            got, before = written(time), written(seconds[-1])
            raise InvalidInputError(f"Video.times[{k}]: got {got}, want >= {before}, the time of the previous frame")
        seconds.append(exact)
    return tuple(seconds)


def timestamps(name: str, timestamp: Timestamp, times: Sequence[Fraction]) -> tuple[str, ...]:
    """Format each time as text.

    >>> timestamps("timestamp", "<{seconds:.1f} seconds>", [Fraction(1, 3), Fraction(5, 4)])
    ('<0.3 seconds>', '<1.2 seconds>')

    Args:
        name: name of the timestamp for error messages.
        timestamp: format such as "<{seconds:.1f} seconds>", "{seconds:05.2f} s" or "", or a function. The digits are
            rounded half to even, directly from the exact rational.
        times: exact seconds.

    Raises:
        InvalidInputError: a format has another field or another format type, or the function does not return text.
    """
    write = _format(name, timestamp) if isinstance(timestamp, str) else timestamp
    if not callable(write):
        raise InvalidInputError(f"{name}: got {timestamp!r}, want a format of seconds or a callable")
    texts = tuple(write(time) for time in times)
    for text in texts:
        if not isinstance(text, str):
            raise InvalidInputError(f"{name}: got a callable that returns {text!r}, want text")
    return texts


def _format(name: str, template: str) -> Callable[[Fraction], str]:
    """Check a format and return the function that applies it."""
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as error:
        raise InvalidInputError(f"{name}: got {template!r}, want a format of seconds ({error})") from None
    for _, field, spec, conversion in pieces:
        if field is not None and (field != "seconds" or conversion or not _SPEC.fullmatch(spec or "")):
            raise InvalidInputError(f"{name}: got {template!r}, want only fields such as {{seconds:.1f}}")

    def write(time: Fraction) -> str:
        return "".join(
            literal if field is None else literal + _digits(time, spec or "") for literal, field, spec, _ in pieces
        )

    return write


def _digits(time: Fraction, spec: str) -> str:
    decimals = int(spec.rpartition(".")[2][:-1])
    return format(Decimal(f"{round(time * 10**decimals)}e-{decimals}"), spec)
