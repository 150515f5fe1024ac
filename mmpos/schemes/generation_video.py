"""Schemes of video generation models: frames, rows and columns from 0, stretched, centred or in seconds."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from mmpos.errors import LimitExceededError, UnsupportedError
from mmpos.schemes.base import Grids, Pieces, Placement
from mmpos.schemes.generation import LatentScheme, check_steps, over_one
from mmpos.schemes.mrope import checked_rate, frame_steps
from mmpos.support.checks import INT32_MAX, IntArray, boolean, integer
from mmpos.support.ragged import ragged_arange


@dataclass(frozen=True)
class Wan(LatentScheme):
    """Patch (t, i, j) at (t, i, j); text is used in cross-attention and has no ids.

    Source: WanRotaryPosEmbed of diffusers; also SkyReels V2, Sana-Video, SANA-WM, AnyFlow and VACE.

    Args:
        skip_length: the frames of a grid of two frames are at 0 and ``skip_length − 1``, like ``temporal_skip_len`` of
            ChronoEdit (8); with 0, they are at 0 and 1.
        beside: whether grids after the first, the references, are to the right of the first, at (1 + t, i, w + j), as
            in Wan-Animate 2.
    """

    name: ClassVar[str] = "wan"
    linear_in = ("start",)
    text = False
    frames = True
    keyframes = True
    skip_length: int = 0
    beside: bool = False

    def __post_init__(self) -> None:
        length = integer("Wan.skip_length", self.skip_length, minimum=0, maximum=INT32_MAX)
        object.__setattr__(self, "skip_length", length)
        object.__setattr__(self, "references", boolean("Wan.beside", self.beside))
        if self.beside:  # the first image differs from the others
            object.__setattr__(self, "linear_in", None)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        step = np.where(grids.frames == 2, self.skip_length - 1, 1) if self.skip_length else 1
        beside = grids.number > 0 if self.beside else np.zeros(grids.number.size, np.bool_)
        start = grids.start
        first = start + grids.first_frame + beside
        return Placement([first, start, start + beside * grids.width], [step, 0, 0], [0, 1, 0], [0, 0, 1])


@dataclass(frozen=True)
class AnyFlowFar(LatentScheme):
    """A compressed context at (t, r·i + (r−1)/2, r·j + (r−1)/2), then frames at full size.

    The context is the first grid, with f frames. The other grids are at (f + t, i, j): the generated frames, and in
    training the same frames without noise. Without a compressed context, the ids are those of ``wan``. The mean of r
    neighbouring rotations, scaled to length 1, is exactly the rotation by their mean angle. Source:
    AnyFlowCausalRotaryPosEmbed of diffusers.

    Args:
        ratio: frame patches along each side of a context patch (compressed_patch_size / patch_size).
    """

    name: ClassVar[str] = "anyflow-far"
    references = True
    text = False
    frames = True
    fractional = True
    ratio: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", integer("AnyFlowFar.ratio", self.ratio, minimum=1, maximum=INT32_MAX))

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        context = grids.number == 0
        frames = np.where(context, 0, grids.frames[grids.document.searchsorted(grids.document)])
        step = 2 * np.where(context, self.ratio, 1)
        start = 2 * grids.start
        middle = start + step // 2 - 1
        return Placement([start + 2 * frames, middle, middle], [2, 0, 0], [0, step, 0], [0, 0, step], 2)


@dataclass(frozen=True)
class HunyuanVideo(LatentScheme):
    """All text at 0, where nothing is rotated; patch (t, i, j) at (t, i, j).

    Source: HunyuanVideoRotaryPosEmbed of diffusers; also HunyuanVideo 1.5, Motif-Video and CogVideoX 1.5.
    """

    name: ClassVar[str] = "hunyuan-video"
    linear_in = ("start",)
    frames = True
    keyframes = True

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        start = grids.start
        return Placement([start + grids.first_frame, start, start], [1, 0, 0], [0, 1, 0], [0, 0, 1])


@dataclass(frozen=True)
class CogVideoX(LatentScheme):
    """All text at 0, frame t at t; rows and columns stretched over a region of a base grid of 30 × 45.

    The region is the largest centred one with the grid's aspect ratio. Source: ``get_resize_crop_region_for_grid`` and
    ``get_3d_rotary_pos_embed`` of diffusers; also EasyAnimate and ConsisID. CogVideoX 1.5 uses ``hunyuan-video``.

    Args:
        base_height: rows of the base grid, sample_height / patch_size.
        base_width: columns of the base grid.
        as_released: step of n rows over a region from s to e. True: (e·(n−1)/n − s)/(n−1), as computed by diffusers,
            which is correct only for s = 0. False: (e − s)/n, as intended by the comments in diffusers and by the code
            that trained the checkpoints.
    """

    name: ClassVar[str] = "cogvideox"
    linear_in = ("start",)
    frames = True
    keyframes = True
    fractional = True
    base_height: int = 30
    base_width: int = 45
    as_released: bool = True

    def __post_init__(self) -> None:
        for name in ("base_height", "base_width"):
            side = integer(f"CogVideoX.{name}", getattr(self, name), minimum=1, maximum=INT32_MAX)
            object.__setattr__(self, name, side)
        boolean("CogVideoX.as_released", self.as_released)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        height, width, tall, wide = grids.height, grids.width, self.base_height, self.base_width
        upright = height * wide > tall * width
        # float64 in diffusers' order of operations, whose rounding errors decide how np.rint rounds halves.
        rows = np.where(upright, tall, np.rint(wide / width * height)).astype(np.int64)
        columns = np.where(upright, np.rint(tall / height * width), wide).astype(np.int64)
        top, down, over_rows = self._spread(tall, rows, height)
        left, right, over_columns = self._spread(wide, columns, width)
        over = np.lcm(over_rows, over_columns)
        by_row, by_column = over // over_rows, over // over_columns
        start = grids.start * over
        return Placement(
            [start + grids.first_frame * over, start + top * over, start + left * over],
            [over, 0, 0],
            [0, down * by_row, 0],
            [0, 0, right * by_column],
            over,
        )

    def _spread(self, base: int, part: IntArray, count: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return the first of ``count`` ids over a centred region, and the numerator and denominator of their step."""
        first = np.rint((base - part) / 2).astype(np.int64)
        step, over = part, count
        if self.as_released:
            over = count * np.maximum(count - 1, 1)
            step = (first + part) * (count - 1) - count * first
        step = np.where(count > 1, step, 0)
        common = np.gcd(step, over)
        return first, step // common, over // common


@dataclass(frozen=True)
class _Scaled(LatentScheme):
    """Patch (t, i, j) at (t, i, j) times the steps; text is used in cross-attention and has no ids."""

    text = False
    frames = True
    keyframes = True
    fractional = True
    frame_step: int | Fraction = 1
    row_step: int | Fraction = 1
    col_step: int | Fraction = 1

    def __post_init__(self) -> None:
        check_steps(self, "frame_step", "row_step", "col_step")

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        over, (onward, down, right) = over_one(self.frame_step, self.row_step, self.col_step)
        start = grids.start * over
        if (np.abs(grids.first_frame) * float(onward)).max() > 2.0**62:
            raise LimitExceededError(f"{self.name}: got first frames with ids beyond 2**62, want ids within int32")
        first = start + grids.first_frame * onward
        return Placement([first, start, start], [onward, 0, 0], [0, down, 0], [0, 0, right], over)


@dataclass(frozen=True)
class Allegro(_Scaled):
    """Patch (t, i, j) at (t/2.2, i/2, j/2); text is used in cross-attention and has no ids.

    Source: ``get_3d_rotary_pos_embed_allegro`` of diffusers.

    Args:
        frame_step: ids between two frames, 1 / interpolation_scale_t, an integer or a Fraction.
        row_step: ids between two rows.
        col_step: ids between two columns.
    """

    name: ClassVar[str] = "allegro"
    linear_in = ("start",)
    frame_step: int | Fraction = Fraction(5, 11)
    row_step: int | Fraction = Fraction(1, 2)
    col_step: int | Fraction = Fraction(1, 2)


@dataclass(frozen=True)
class Kandinsky(_Scaled):
    """Patch (t, i, j) at (t, i, j), each divided by the scale factor of its axis; text has a separate rotation.

    Source: Kandinsky5RoPE3D and Kandinsky6RoPE3D of diffusers.

    Args:
        frame_step: ids between two frames, 1 / scale_factor[0], an integer or a Fraction.
        row_step: ids between two rows.
        col_step: ids between two columns.
    """

    name: ClassVar[str] = "kandinsky"
    linear_in = ("start",)


@dataclass(frozen=True)
class _Ltx(LatentScheme):
    """Base class of LTX schemes: ids 2x − 1, where x is the time or place of a latent relative to a base size.

    Every grid consists of two pieces, since its first latent covers fewer frames of the video; ``first_frame`` counts
    frames of the video, and moves the grid by this time. ``seconds_per_frame`` is 1/fps of the video.
    """

    text = False
    frames = True
    keyframes = True
    timed = True
    fractional = True
    row_step: int | Fraction = Fraction(1, 32)
    col_step: int | Fraction = Fraction(1, 32)
    tokens_per_second: int | Fraction = Fraction(1, 10)
    causal_offset: int = 1
    frames_per_latent: int = 8

    def __post_init__(self) -> None:
        check_steps(self, "row_step", "col_step", "tokens_per_second")
        name = type(self).__name__
        frames = integer(f"{name}.frames_per_latent", self.frames_per_latent, minimum=1, maximum=2**15)
        object.__setattr__(self, "frames_per_latent", frames)
        offset = integer(f"{name}.causal_offset", self.causal_offset, minimum=0, maximum=frames)
        object.__setattr__(self, "causal_offset", offset)

    @property
    @abstractmethod
    def firsts(self) -> tuple[int, int, int]:
        """Position of latent 0 and its extrapolation from later latents in half frames; that of row 0 in half rows."""

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        owner, piece = ragged_arange(np.minimum(grids.frames, 2))
        height, width = grids.height[owner], grids.width[owner]
        frame = height * width
        tokens, skip = np.where(piece > 0, (grids.frames[owner] - 1) * frame, frame), piece * frame
        first, extrapolated, half = self.firsts
        numerator, denominator = frame_steps(self, grids, self.tokens_per_second, needed_from=1 if first else 2)
        reach = (np.abs(grids.first_frame) + self.frames_per_latent * grids.frames) * (numerator / denominator)
        space, (down, right) = over_one(Fraction(self.row_step) / 2, Fraction(self.col_step) / 2)
        over: IntArray = np.lcm(2 * np.minimum(denominator, INT32_MAX), space)
        if max(denominator.max(), over.max(), reach.max()) > INT32_MAX:
            raise LimitExceededError(f"{self.name}: got times beyond its limits, want ids and denominators below 2**31")
        numerator, denominator, over = numerator[owner], 2 * denominator[owner], over[owner]
        time, place = numerator * (over // denominator), over // space
        start = (grids.start[owner] - 1) * over
        begin = 2 * np.broadcast_to(grids.first_frame, grids.frames.shape)[owner]
        # If ids are midpoints, only a video that begins at frame 0 has a shorter first latent.
        whole = (begin != 0) & (grids.frames[owner] > 1) & (half > 0)
        begin += np.where(whole, self.frames_per_latent, np.where(piece > 0, extrapolated, first))
        origin = [
            start + begin * time,
            start + half * down * place,
            start + half * right * place,
        ]
        moves: list[list[IntArray | int]] = [
            [2 * self.frames_per_latent * time, 0, 0],
            [0, 2 * down * place, 0],
            [0, 0, 2 * right * place],
        ]
        step_frame, step_row, step_col = (steps[: self.axes] for steps in moves)
        pieces = Pieces(owner, tokens, skip, height, width)
        return Placement(origin[: self.axes], step_frame, step_row, step_col, over, pieces)


@dataclass(frozen=True)
class Ltx(_Ltx):
    """Latent (t, i, j) at 2·max(0, 8t − 7)/fps/20 − 1, i/32 − 1, j/32 − 1; text is used in cross-attention.

    ``seconds_per_frame`` of a grid is 1/fps of the video; grids with several frames need it. Source:
    LTXVideoRotaryPosEmbed and LTXConditionPipeline of diffusers; LTXPipeline uses ``causal_offset=8``.

    Args:
        row_step: ids between two rows, 2·32 / base_height, an integer or a Fraction.
        col_step: ids between two columns.
        tokens_per_second: ids per second, 2 / base_num_frames.
        causal_offset: video frames in the first latent; latent t is at frame max(0, 8t + causal_offset − 8).
        frames_per_latent: video frames between two latents.
    """

    name: ClassVar[str] = "ltx"

    @property
    def firsts(self) -> tuple[int, int, int]:
        return 0, 2 * (self.causal_offset - self.frames_per_latent), 0


@dataclass(frozen=True)
class Ltx2(_Ltx):
    """Latent (t, i, j) at (8t − 3)/fps/10 − 1, (i + ½)/32 − 1, (j + ½)/32 − 1: the middle of its frames and pixels.

    The first latent is at ½/fps/10 − 1, so every grid needs ``seconds_per_frame``, which is 1/fps of the video. In a
    grid of several latents with a ``first_frame`` f other than 0, all cover 8 frames, with the middle at f + 8t + 4.
    Audio is a grid of 1 × 1 with one frame per latent and 1/100 seconds per frame, in the scheme with ``axes=1`` and
    ``frames_per_latent=4``. Source: LTX2AudioVideoRotaryPosEmbed of diffusers.

    Args:
        row_step: ids between two rows, 2·32 / base_height, an integer or a Fraction.
        col_step: ids between two columns.
        tokens_per_second: ids per second, 2 / base_num_frames.
        causal_offset: video frames in the first latent.
        frames_per_latent: video frames between two latents.
        axes: 3, or 1 for audio and for video in its cross-attention with audio.
    """

    name: ClassVar[str] = "ltx2"
    axes: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if integer("Ltx2.axes", self.axes, minimum=1, maximum=3) == 2:
            raise UnsupportedError("Ltx2.axes: got 2, want 1 or 3")
        object.__setattr__(self, "axes", int(self.axes))

    @property
    def firsts(self) -> tuple[int, int, int]:
        return self.causal_offset, 2 * self.causal_offset - self.frames_per_latent, 1


@dataclass(frozen=True)
class Cosmos(LatentScheme):
    """Patch (t, i, j) at (24·t/fps, i, j); text is used in cross-attention and has no ids.

    ``seconds_per_frame`` of a grid is 1/fps for the pipeline's fps; grids with several frames need it. Source:
    CosmosRotaryPosEmbed of diffusers, whose theta differs by axis.

    Args:
        tokens_per_second: ids per second, ``base_fps``, an integer or a Fraction.
    """

    name: ClassVar[str] = "cosmos"
    linear_in = ("cursor", "start")
    text = False
    frames = True
    keyframes = True
    timed = True
    fractional = True
    tokens_per_second: int | Fraction = 24

    def __post_init__(self) -> None:
        rate = checked_rate(f"{type(self).__name__}.tokens_per_second", self.tokens_per_second)
        object.__setattr__(self, "tokens_per_second", rate)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        return self._timed(grids, grids.start)

    def _timed(self, grids: Grids, first: IntArray) -> Placement:
        """Place grids whose first frames have the integer ids ``first``."""
        step, over = frame_steps(self, grids, self.tokens_per_second)
        start = grids.start * over
        first = first * over + grids.first_frame * step
        return Placement([first, start, start], [step, 0, 0], [0, over, 0], [0, 0, over], over)


@dataclass(frozen=True)
class Cosmos3(Cosmos):
    """Text token n at (n, n, n), every grid after n text tokens at (n + 15000 + 24·t/fps, i, j).

    ``seconds_per_frame`` of a grid is 1/fps for the pipeline's fps; grids with several frames need it. Sound is a
    grid of 1 × 1 with one frame per latent; actions are one with ``first_frame=1`` and four frames per latent. Source:
    Cosmos3OmniPipeline of diffusers with ``unified_3d_mrope_reset_spatial_ids``.

    Args:
        tokens_per_second: ids per second, ``base_fps``, an integer or a Fraction.
        margin: ids between text and grids, ``unified_3d_mrope_temporal_modality_margin``.
    """

    name: ClassVar[str] = "cosmos3"
    linear_in = ("cursor", "start")
    references = True
    text = True
    text_axes = (0, 1, 2)
    margin: int = 15000

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "margin", integer("Cosmos3.margin", self.margin, minimum=0, maximum=INT32_MAX))

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        return self._timed(grids, cursor + self.margin)


@dataclass(frozen=True)
class MiniMaxH3(LatentScheme):
    """Text token n at (n, 0, 0); latent t of a video after n text tokens at n + 5/3·(0, 1, 5, 9, 13, 17, 18, …).

    Row i of an h × w grid is at 16·(1 − h/√hw) + 32·i/√hw, and column j at 16·(1 − w/√hw) + 32·j/√hw. These numbers are
    rational only if h·w is a square; other sizes are refused. Audio, which is fixed to the ends of the width, is not
    supported. Source: the modular pipeline of MiniMax-H3 in diffusers.
    """

    name: ClassVar[str] = "minimax-h3"
    frames = True
    fractional = True
    text_axes = (0,)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        area = grids.height * grids.width
        root = np.rint(np.sqrt(area.astype(np.float64))).astype(np.int64)
        if (root * root != area).any():
            i = int((root * root != area).argmax())
            got = f"a grid of {grids.height[i]} × {grids.width[i]}, whose ids are over √{area[i]}"
            raise UnsupportedError(f"minimax-h3: got {got}, want h·w to be a square; pass dense ids to Rotary instead")
        # Latent 0 is a piece, and so is every group of five latents after it. Latents in a group are four frames apart,
        # and each group begins one frame after the last latent before it.
        owner, five = ragged_arange(1 + -(-(grids.frames - 1) // 5))
        height, width, root = grids.height[owner], grids.width[owner], root[owner]
        first = np.maximum(5 * five - 4, 0)
        count = np.where(five > 0, np.minimum(grids.frames[owner] - first, 5), 1)
        over = 3 * root
        # Latent t in the group that begins at 5q + 1 is at 5/3·(4t − 3q − 3).
        back = np.where(five > 0, 3 * five, 0)
        start = grids.start[owner] * over
        return Placement(
            [
                cursor[owner] * over - 5 * root * back,
                start + 48 * (root - height),
                start + 48 * (root - width),
            ],
            [20 * root, 0, 0],
            [0, 96, 0],
            [0, 0, 96],
            over,
            Pieces(owner, count * height * width, first * height * width, height, width),
        )
