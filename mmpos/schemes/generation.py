"""Schemes of image generation models: text is fixed or on separate axes, and each image is on a separate plane."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from mmpos.errors import LimitExceededError, UnsupportedError
from mmpos.schemes.base import Grids, Placement, Scheme, TextRuns
from mmpos.schemes.mrope import MRopeInterleaveReset, checked_rate
from mmpos.segments.kinds import THUMBNAIL
from mmpos.support.checks import INT32_MAX, INT32_MIN, IntArray, boolean, integer

NOT_AFFINE: Mapping[str, str] = MappingProxyType(
    {
        "cogview4": "its ids ⌊i·base/side⌋ are rounded down, so a row has no constant step; pass dense ids to Rotary",
        "z-image-omni": (
            "its SigLIP ids are scaled to the image and truncated, so a row has no constant step; pass dense ids to "
            "Rotary, or use lumina2(first=1) for Z-Image without SigLIP"
        ),
        "minimax-h3": (
            "its ids are over √(h·w); use mmpos.schemes.MiniMaxH3() if h·w is a square, or pass dense ids to Rotary"
        ),
        "mochi": "its frequencies are learned per head and axis, so an id has no fixed angle",
        "framepack": "it averages the cosines and sines of its history, and the averages are not rotations",
        "helios": "it averages the cosines and sines of its history, and the averages are not rotations",
    }
)
"""Layouts that no scheme can represent for all sizes, with the reason."""


class LatentScheme(Scheme):
    """Base class of schemes whose text advances on some axes only and whose grids consume no ids.

    Ids count from the start of the document. Grids are measured in the transformer's latent patches. Their order
    defines their roles: the first is generated and the others are references, unless a scheme says otherwise.
    """

    axes = 3
    frames = False
    audio = False
    timed = False
    references = False
    resumable = False
    text_axes: ClassVar[tuple[int, ...]] = ()
    """Axes on which text advances; on the other axes its id is the start of the document."""

    def advance(self, grids: Grids) -> IntArray:
        return np.zeros_like(grids.height)

    def place_text(self, runs: TextRuns, cursor: IntArray) -> Placement:
        advances = [axis in self.text_axes for axis in range(self.axes)]
        return Placement([cursor if on else runs.start for on in advances], step_col=[int(on) for on in advances])


@dataclass(frozen=True)
class Flux(LatentScheme):
    """Text at (0, 0, 0), image k of a document at (k, i, j): the generated image is 0, references are 1, 2, ….

    Source: FluxPosEmbed and FluxPipeline, and for references FluxKontextPipeline and BriaFiboEditPipeline of diffusers;
    also Chroma, Bria, Krea 2 and HiDream-I1. VisualCloze starts counting its images at 1.

    Args:
        first: number of the first image, 0 or 1.
    """

    name: ClassVar[str] = "flux"
    references = True
    linear_in = ("start", "number")
    first: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", integer("Flux.first", self.first, minimum=0, maximum=1))

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        start = grids.start
        return Placement([start + self.first + grids.number, start, start], None, [0, 1, 0], [0, 0, 1])


@dataclass(frozen=True)
class Flux2(LatentScheme):
    """Text token n at (0, 0, 0, n), image k at (10·k, i, j, 0): the generated image is 0.

    Source: Flux2PosEmbed and Flux2Pipeline of diffusers.

    Args:
        reference_step: ids between one image and the next.
    """

    name: ClassVar[str] = "flux2"
    references = True
    linear_in = ("start", "number")
    axes = 4
    text_axes = (3,)
    reference_step: int = 10

    def __post_init__(self) -> None:
        step = integer("Flux2.reference_step", self.reference_step, minimum=1, maximum=INT32_MAX)
        object.__setattr__(self, "reference_step", step)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        start = grids.start
        return Placement(
            [start + self.reference_step * grids.number, start, start, start], None, [0, 1, 0, 0], [0, 0, 1, 0]
        )


@dataclass(frozen=True)
class Flux3(LatentScheme):
    """Text token n at (0, 0, 0, n), image k at (0, i/2, j/2, −k): the generated image is 0.

    Source: Flux3PosEmbed and the modular pipeline of FLUX.3 in diffusers (``image_rope_scale``).

    Args:
        row_step: ids between two rows, an integer or a Fraction.
        col_step: ids between two columns.
    """

    name: ClassVar[str] = "flux3"
    references = True
    linear_in = ("start", "number")
    axes = 4
    fractional = True
    text_axes = (3,)
    row_step: int | Fraction = Fraction(1, 2)
    col_step: int | Fraction = Fraction(1, 2)

    def __post_init__(self) -> None:
        check_steps(self, "row_step", "col_step")

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        over, (down, right) = over_one(self.row_step, self.col_step)
        start = grids.start * over
        return Placement(
            [start, start, start, start - grids.number * over], None, [0, down, 0, 0], [0, 0, right, 0], over
        )


@dataclass(frozen=True)
class QwenImage(LatentScheme):
    """Image k at (k, i − ⌈h/2⌉, j − ⌈w/2⌉), text token n at M + n on every axis.

    M = max(⌊h/2⌋, ⌊w/2⌋) over all images. The generated image is 0, references are 1, 2, …. Source: QwenEmbedRope of
    diffusers with ``scale_rope``, which all its models set; also NucleusMoE-Image. The model's tables have 4,096 rows
    for each sign.

    Args:
        layered: whether the last image is the condition, at −1, and M is at least the number of the other images
            (QwenEmbedLayer3DRope).
    """

    name: ClassVar[str] = "qwen-image"
    references = True
    linear_in = ("start", "number")
    frames = True
    text_axes = (0, 1, 2)
    layered: bool = False

    def __post_init__(self) -> None:
        if boolean("QwenImage.layered", self.layered):  # ids depend on the number of all images
            object.__setattr__(self, "linear_in", None)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        start, number = grids.start, grids.number
        if self.layered:
            last = np.diff(grids.document, append=-1) != 0
            number = np.where(last, -1, number)
        origin = [start + number, start - (grids.height + 1) // 2, start - (grids.width + 1) // 2]
        return Placement(origin, [1, 0, 0], [0, 1, 0], [0, 0, 1])

    def cleared(self, grids: Grids) -> IntArray:
        most = grids.extents[1:].max(axis=0) // 2
        return np.maximum(most, grids.number) if self.layered else most


@dataclass(frozen=True)
class QwenImage21(Scheme):
    """Image at (c, i − ⌈h/2⌉, j − ⌈w/2⌉), next text at c + max(h, w): rows and columns ignore earlier tokens.

    Source: QwenImage21Rope of diffusers, whose tables cover −1,024 to 8,191.
    """

    name: ClassVar[str] = "qwen-image-2.1"
    linear_in = ("cursor",)
    axes = 3
    frames = False

    def advance(self, grids: Grids) -> IntArray:
        return np.maximum(grids.height, grids.width)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        return Placement([cursor, -((grids.height + 1) // 2), -((grids.width + 1) // 2)], None, [0, 1, 0], [0, 0, 1])


@dataclass(frozen=True)
class Lumina2(LatentScheme):
    """Text token n at (n, 0, 0), an image after n text tokens at (n + t, i, j).

    Source: Lumina2RotaryPosEmbed of diffusers. Z-Image uses ``first=1``, with text padded to a multiple of 32 tokens
    and the padding counted; ERNIE-Image uses ``image_first=True``; BriaFibo 2 counts its gist from 1 and uses
    ``image_at=max_num_gist_tokens + 1``.

    Args:
        first: id of the first text token, 0 or 1.
        image_first: whether image tokens precede the text tokens, with ids after those of all the text.
        image_at: plane of the first image, independently of the text, with each reference on the next plane; 0 puts
            images after the text.
    """

    name: ClassVar[str] = "lumina2"
    linear_in = ("cursor", "start", "number", "text_tokens")
    frames = True
    text_axes = (0,)
    first: int = 0
    image_first: bool = False
    image_at: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", integer("Lumina2.first", self.first, minimum=0, maximum=1))
        boolean("Lumina2.image_first", self.image_first)
        _check_image_at(self, minimum=0)
        object.__setattr__(self, "references", self.image_at > 0)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        start, plane = grids.start, cursor + self.first
        if self.image_at:
            plane = start + self.image_at + grids.number
        elif self.image_first and grids.text_tokens is not None:
            plane = start + self.first + grids.text_tokens
        return Placement([plane, start, start], [1, 0, 0], [0, 1, 0], [0, 0, 1])

    def place_text(self, runs: TextRuns, cursor: IntArray) -> Placement:
        return super().place_text(runs, cursor + self.first)


@dataclass(frozen=True)
class LongCatImage(LatentScheme):
    """Text token n at (0, n, n), image k after L text tokens at (1 + k, L + i, L + j): the generated image is 0.

    Source: LongCatImagePipeline and LongCatImageEditPipeline of diffusers, in which text is padded to
    ``tokenizer_max_length`` tokens.

    Args:
        image_at: L; 0 means the number of text tokens before the image.
    """

    name: ClassVar[str] = "longcat-image"
    references = True
    linear_in = ("cursor", "start", "number")
    text_axes = (1, 2)
    image_at: int = 0

    def __post_init__(self) -> None:
        _check_image_at(self, minimum=0)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        first = grids.start + self.image_at if self.image_at else cursor
        return Placement([grids.start + 1 + grids.number, first, first], None, [0, 1, 0], [0, 0, 1])


@dataclass(frozen=True)
class OvisImage(LatentScheme):
    """Text token n at (0, n, n), patch (i, j) of an image at (0, i, j).

    Source: OvisImagePosEmbed and OvisImagePipeline of diffusers.
    """

    name: ClassVar[str] = "ovis-image"
    linear_in = ("start",)
    text_axes = (1, 2)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        return Placement([grids.start] * 3, None, [0, 1, 0], [0, 0, 1])


@dataclass(frozen=True)
class Ideogram4(LatentScheme):
    """Text token n at (n, n, n), patch (i, j) of an image at (65536, 65536 + i, 65536 + j).

    Source: Ideogram4MRoPE and Ideogram4Pipeline of diffusers.

    Args:
        image_at: id of the first patch.
    """

    name: ClassVar[str] = "ideogram4"
    linear_in = ("start",)
    text_axes = (0, 1, 2)
    image_at: int = 65536

    def __post_init__(self) -> None:
        _check_image_at(self, minimum=INT32_MIN)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        return Placement([grids.start + self.image_at] * 3, None, [0, 1, 0], [0, 0, 1])


@dataclass(frozen=True)
class HunyuanImage(LatentScheme):
    """All text at 0, where nothing is rotated; patch (i, j) of an image at (i, j).

    Source: HunyuanImageRotaryPosEmbed of diffusers; also GLM-Image's transformer and PRX.

    Args:
        axes: 2, or 3 with a frame axis.
    """

    name: ClassVar[str] = "hunyuan-image"
    linear_in = ("start",)
    axes: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", integer("HunyuanImage.axes", self.axes, minimum=2, maximum=3))
        object.__setattr__(self, "frames", self.axes == 3)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        n = self.axes
        return Placement([grids.start] * n, [1, 0, 0][-n:], [0, 1, 0][-n:], [0, 0, 1][-n:])


@dataclass(frozen=True)
class JoyImage(LatentScheme):
    """Grids in sequence on the frame axis, at (t + frames before, i, j); all text at 0.

    Source: JoyImageTransformer3DModel and JoyImageEditPlusTransformer3DModel of diffusers.

    Args:
        text_runs: whether text instead advances on every axis, from the highest grid id + 1 (``rope_type="mrope"``).
    """

    name: ClassVar[str] = "joyimage"
    references = True
    frames = True
    text_runs: bool = False

    def __post_init__(self) -> None:
        boolean("JoyImage.text_runs", self.text_runs)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        start = grids.start
        return Placement([start + self._before(grids), start, start], [1, 0, 0], [0, 1, 0], [0, 0, 1])

    def cleared(self, grids: Grids) -> IntArray | None:
        if not self.text_runs:
            return None
        return np.maximum(grids.extents[1:].max(axis=0), self._before(grids) + grids.frames)

    def place_text(self, runs: TextRuns, cursor: IntArray) -> Placement:
        return Scheme.place_text(self, runs, cursor) if self.text_runs else super().place_text(runs, cursor)

    def _before(self, grids: Grids) -> IntArray:
        """Return the number of frames before each grid in its document, (grids,)."""
        before = grids.frames.cumsum() - grids.frames
        return before - before[grids.document.searchsorted(grids.document)]


@dataclass(frozen=True)
class Bagel(Scheme):
    """All tokens of an image and its two markers at one id; next text at the next id.

    A ``Thumbnail`` is an image with its two markers, and a ``Grid`` is an image without markers. Source: BAGEL, and its
    pipeline in vLLM-Omni.
    """

    name: ClassVar[str] = "bagel"
    linear_in = ("cursor",)
    axes = 1
    frames = False
    kinds = frozenset({THUMBNAIL})

    def advance(self, grids: Grids) -> IntArray:
        if grids.kind is not None and ((grids.kind > THUMBNAIL).any() or np.any(grids.extra_tokens)):
            raise UnsupportedError("bagel: got tiles or tokens after a thumbnail, want each image with its two markers")
        return np.ones_like(grids.height)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        return Placement([cursor])


@dataclass(frozen=True)
class OmniGen2(MRopeInterleaveReset):
    """Patch (i, j) of an image at (c, i, j), next text at c + max(h, w): the same as mrope-interleave-reset.

    Source: OmniGen2 in vLLM-Omni; also Boogu and MammothModa 2.
    """

    name: ClassVar[str] = "omnigen2"
    linear_in = ("cursor",)


def check_steps(scheme: Scheme, *names: str) -> None:
    """Check that the named steps are integers or Fractions above 0 with a common denominator below 2**31."""
    kind = type(scheme).__name__
    over, _ = over_one(*(checked_rate(f"{kind}.{name}", getattr(scheme, name)) for name in names))
    if over > INT32_MAX:
        raise LimitExceededError(f"{kind}: got steps with the denominator {over}, want one below 2**31")


def over_one(*steps: int | Fraction) -> tuple[int, list[int]]:
    """Return the common denominator of steps and the numerators over this denominator.

    >>> over_one(Fraction(1, 2), 3, Fraction(2, 3))
    (6, [3, 18, 4])
    """
    over = lcm(*(step.denominator for step in steps))
    return over, [int(step * over) for step in steps]


def _check_image_at(scheme: LongCatImage | Ideogram4 | Lumina2, minimum: int) -> None:
    name = f"{type(scheme).__name__}.image_at"
    object.__setattr__(scheme, "image_at", integer(name, scheme.image_at, minimum=minimum, maximum=INT32_MAX))
