"""Parts of documents (Text, Audio, Grid, Clip, Thumbnail and Tile) and the kinds of their segments."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, TypeAlias

import numpy as np

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.support.checks import INT32_MAX, INT32_MIN, boolean, integer, written

__all__ = [
    "AUDIO",
    "AUDIO_TOKEN",
    "CLIP",
    "CLIP_MARKERS",
    "CROP_MARKERS",
    "GRID",
    "NOUNS",
    "NO_FRAME",
    "PAD",
    "PATCH",
    "TEXT",
    "THUMBNAIL",
    "TILE",
    "Audio",
    "Clip",
    "Grid",
    "Segment",
    "Text",
    "Thumbnail",
    "Tile",
    "fraction",
    "rational",
    "rationals",
]

TEXT = 0
"""The kind of a run of text."""
GRID = 1
"""The kind of an image or a video."""
PAD = 2
"""The kind of padding."""
AUDIO = 3
"""The kind of a run of audio."""
CLIP = 4
"""The kind of a video with its sound."""
THUMBNAIL = 5
"""The kind of a downscaled picture that is followed by tiles."""
TILE = 6
"""The kind of a part of the picture of the preceding thumbnail."""

PATCH, AUDIO_TOKEN = 1, 3
"""Token types of patches and audio tokens, numbered like Transformers' mm_token_type_ids, where 2 means video; text,
markers and row separators have type 0."""

NOUNS = {GRID: "grid", AUDIO: "audio run", CLIP: "clip", THUMBNAIL: "thumbnail", TILE: "tile"}
"""Words for segments whose token ids do not determine their content."""

NO_FRAME = INT32_MIN
"""The first frame of segments that do not name one."""

CLIP_MARKERS = 2
"""Number of markers on each side of the merged tokens of a clip: the video's outside, the audio's inside."""

CROP_MARKERS = 2
"""Number of markers around a thumbnail or a tile: one before and one after its patches."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Run of consecutive tokens."""

    length: int

    extra_tokens: ClassVar[int] = 0

    def __post_init__(self) -> None:
        name = f"{type(self).__name__}.length"
        object.__setattr__(self, "length", integer(name, self.length, minimum=1, maximum=INT32_MAX))

    @property
    def extents(self) -> tuple[int, int, int]:
        """Frames, height, width: a run is one row."""
        return (1, 1, self.length)


@dataclass(frozen=True, slots=True)
class Text(_Run):
    """A run of text tokens; markers such as [IMG] are ordinary text.

    Args:
        length: number of tokens, at least 1.
    """

    kind: ClassVar[int] = TEXT


@dataclass(frozen=True, slots=True)
class Audio(_Run):
    """A run of audio tokens, one for each output of the model's audio encoder; they get the same positions as text.

    Args:
        length: number of tokens, at least 1.
    """

    kind: ClassVar[int] = AUDIO


@dataclass(frozen=True, slots=True, init=False)
class Grid:
    """The patches of one image, or of all frames of one video, in raster order (column fastest).

    Args:
        height: rows of patches after spatial merging, as the language model sees them.
        width: columns of patches after spatial merging.
        frames: frames of a video; 1 for a still image.
        row_separator: whether every row ends in one more token, for models that generate patch by patch.
        seconds_per_frame: time between two frames in seconds, for schemes that place frames by time;
            a float is rounded to the nearest fraction with a denominator up to 1,000,000.
        first_frame: frame at which the grid begins, for keyframes and parts of a video in schemes of generation models;
            counted as in the scheme: frames of the video for ``ltx`` and ``ltx2``, else frames of latents.
    """

    height: int
    width: int
    frames: int
    row_separator: bool
    seconds_per_frame: Fraction | None
    first_frame: int | None

    kind: ClassVar[int] = GRID
    extra_tokens: ClassVar[int] = 0

    def __init__(
        self,
        height: int,
        width: int,
        *surplus: int,
        frames: int = 1,
        row_separator: bool = False,
        seconds_per_frame: Fraction | float | None = None,
        first_frame: int | None = None,
    ) -> None:
        if surplus:
            got = (height, width, *surplus)
            raise InvalidInputError(
                f"Grid: got {len(got)} positional values {got}, want (height, width); "
                "for (frames, height, width) use Grid.from_thw"
            )
        set_field = object.__setattr__
        set_field(self, "height", integer("Grid.height", height, minimum=1, maximum=INT32_MAX))
        set_field(self, "width", integer("Grid.width", width, minimum=1, maximum=INT32_MAX))
        set_field(self, "frames", integer("Grid.frames", frames, minimum=1, maximum=INT32_MAX))
        set_field(self, "row_separator", boolean("Grid.row_separator", row_separator))
        set_field(self, "seconds_per_frame", rational("Grid.seconds_per_frame", seconds_per_frame))
        if first_frame is not None:
            first_frame = integer("Grid.first_frame", first_frame, minimum=NO_FRAME + 1, maximum=INT32_MAX)
        set_field(self, "first_frame", first_frame)

    @classmethod
    def from_thw(cls, thw: Iterable[int], **options: Any) -> Grid:
        """Create a grid from (frames, height, width), the order of Transformers' image_grid_thw."""
        values = tuple(thw) if isinstance(thw, Iterable) else ()
        if len(values) != 3:
            raise InvalidInputError(f"thw: got {thw!r}, want (frames, height, width)")
        return cls(values[1], values[2], frames=values[0], **options)

    @property
    def extents(self) -> tuple[int, int, int]:
        """Frames, height, width."""
        return (self.frames, self.height, self.width)


@dataclass(frozen=True, slots=True, init=False)
class Clip:
    """A video with its sound: patches and audio tokens that a scheme merges by time.

    The segment includes two markers before the merged tokens and two after them; the video's markers enclose the
    audio's. The scheme, not the segment, decides how video and audio tokens alternate.

    Args:
        height: rows of patches after spatial merging.
        width: columns of patches after spatial merging.
        frames: frames of the video, after temporal merging.
        audio: number of audio tokens, at least 1.
        seconds_per_frame: time between two frames in seconds; see Grid.
    """

    height: int
    width: int
    frames: int
    audio: int
    seconds_per_frame: Fraction | None

    kind: ClassVar[int] = CLIP

    def __init__(
        self, height: int, width: int, *, frames: int, audio: int, seconds_per_frame: Fraction | float | None = None
    ) -> None:
        sizes = {"height": height, "width": width, "frames": frames, "audio": audio}
        for name, value in sizes.items():
            object.__setattr__(self, name, integer(f"Clip.{name}", value, minimum=1, maximum=INT32_MAX))
        object.__setattr__(self, "seconds_per_frame", rational("Clip.seconds_per_frame", seconds_per_frame))

    @property
    def extents(self) -> tuple[int, int, int]:
        """Frames, height, width of the video."""
        return (self.frames, self.height, self.width)

    @property
    def extra_tokens(self) -> int:
        """Number of tokens other than patches and markers."""
        return self.audio


@dataclass(frozen=True, slots=True)
class _Crop:
    """The patches of one crop of a picture, with its two markers."""

    height: int
    width: int
    tokens_after: int = 0

    def __post_init__(self) -> None:
        for name, minimum in (("height", 1), ("width", 1), ("tokens_after", 0)):
            value = integer(f"{type(self).__name__}.{name}", getattr(self, name), minimum=minimum, maximum=INT32_MAX)
            object.__setattr__(self, name, value)

    @property
    def extents(self) -> tuple[int, int, int]:
        """Frames, height, width."""
        return (1, self.height, self.width)

    @property
    def extra_tokens(self) -> int:
        """Number of tokens other than patches and markers."""
        return self.tokens_after


@dataclass(frozen=True, slots=True)
class Thumbnail(_Crop):
    """A downscaled picture between two markers; the tiles after it show the same picture at a higher resolution.

    Args:
        height: rows of patches after spatial merging.
        width: columns of patches after spatial merging.
        tokens_after: number of markers and newlines after its end marker, up to its first tile or the next content.
    """

    kind: ClassVar[int] = THUMBNAIL


@dataclass(frozen=True, slots=True)
class Tile(_Crop):
    """A part of the preceding thumbnail's picture, between two markers (a slice of MiniCPM-V).

    Args:
        height: rows of patches after spatial merging.
        width: columns of patches after spatial merging.
        tokens_after: see Thumbnail; between two tiles, these tokens end a row of tiles.
    """

    kind: ClassVar[int] = TILE


Segment: TypeAlias = Text | Audio | Grid | Clip | Thumbnail | Tile
"""Part of a document."""


def rational(name: str, value: Fraction | float | None) -> Fraction | None:
    """Convert a positive time to an exact fraction that fits a table; None stays None."""
    if value is None:
        return None
    exact = fraction(name, value)
    if exact <= 0:
        raise InvalidInputError(f"{name}: got {written(value)}, want > 0 (a float: >= 1e-06)")
    if max(exact.numerator, exact.denominator) > INT32_MAX:
        raise LimitExceededError(f"{name}: got {written(value)}, want a numerator and a denominator below 2**31")
    return exact


def rationals(name: str, values: Iterable[Fraction | float | None] | None) -> list[Fraction | None]:
    """Convert a list, an array or a tensor of times to fractions; None becomes an empty list."""
    if values is None:
        return []
    try:
        return [rational(f"{name}[{i}]", value) for i, value in enumerate(values)]
    except TypeError:
        raise InvalidInputError(f"{name}: got {values!r}, want a list of seconds") from None


def fraction(name: str, value: Fraction | float) -> Fraction:
    """Convert seconds to an exact fraction; a float becomes the nearest fraction with a denominator up to 1,000,000."""
    if isinstance(value, Fraction):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return Fraction(value)
    try:
        if isinstance(value, bool | np.bool_) or not math.isfinite(value):
            raise TypeError
        return Fraction(float(value)).limit_denominator(10**6)
    except (TypeError, ValueError, OverflowError):
        raise InvalidInputError(f"{name}: got {value!r}, want a number of seconds") from None
