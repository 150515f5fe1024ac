"""TMRoPE of the Qwen Omni models: video and audio on one clock, whose tokens take turns by time."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.schemes.base import Grids, Pieces, Placement, Scheme, check_pieces
from mmpos.schemes.mrope import checked_rate, frame_steps
from mmpos.segments.kinds import CLIP
from mmpos.support.checks import IntArray, one_of
from mmpos.support.ragged import ragged_arange

PATCHES, SOUND, BEFORE, AFTER = range(4)
"""Contents of runs: patches, audio, the two markers before a clip and the two after it."""


class Turns(NamedTuple):
    """Turns of tokens of one content, in the order of tokens.

    Args:
        owner: (runs,) index of the grid, ascending.
        content: (runs,) PATCHES, SOUND, BEFORE or AFTER.
        first: (runs,) index of the first token among those of this content in its grid.
        tokens: (runs,) how many there are, at least 1.
    """

    owner: IntArray
    content: IntArray
    first: IntArray
    tokens: IntArray

    @classmethod
    def joined(cls, *parts: Turns, keys: tuple[IntArray, ...] = ()) -> Turns:
        """Join runs, sorted by owner and then by these keys, the last of them first; equal ones stay in order."""
        together = cls(*map(np.concatenate, zip(*parts, strict=True)))
        order = np.lexsort((*keys, together.owner))
        order = order[together.tokens[order] > 0]
        return cls(*(values[order] for values in together))

    @classmethod
    def alike(cls, content: int, owner: IntArray, first: IntArray | int, tokens: IntArray | int) -> Turns:
        """Make runs of one content."""
        owner, whole, first, tokens = np.broadcast_arrays(owner, content, first, tokens)
        return cls(owner, whole, first, tokens)


class Clips(NamedTuple):
    """The clips among the grids of a batch.

    Args:
        grid: (clips,) index among the grids.
        frames: (clips,) frames of the video.
        patches: (clips,) patches of a frame.
        audio: (clips,) tokens of the audio.
        step: (clips,) ids between two frames, over ``per``.
        per: (clips,) denominator of step.
    """

    grid: IntArray
    frames: IntArray
    patches: IntArray
    audio: IntArray
    step: IntArray
    per: IntArray


@dataclass(frozen=True)
class _Omni(Scheme):
    """Patch (t, i, j) at (c + t·seconds·rate, c + i, c + j); audio token k of the same clip at c + k on every axis.

    In which order patches and audio of a clip follow each other a member of the family says.
    """

    axes = 3
    kinds = frozenset({CLIP})
    tokens_per_second: int | Fraction = 25
    engine: Literal["transformers", "serving"] = "transformers"

    def __post_init__(self) -> None:
        name = type(self).__name__
        rate = checked_rate(f"{name}.tokens_per_second", self.tokens_per_second)
        object.__setattr__(self, "tokens_per_second", rate)
        one_of(f"{name}.engine", self.engine, ("transformers", "serving"))

    @property
    @abstractmethod
    def num_marker_ids(self) -> int:
        """Number of ids that the two markers before a clip take, and the two after it: 1 if they share one, else 2."""

    @abstractmethod
    def merged(self, clips: Clips) -> Turns:
        """List the runs of PATCHES and SOUND of clips, in order; owners are indices of clips."""

    @abstractmethod
    def ends_in_audio(self, clips: Clips) -> npt.NDArray[np.bool_]:
        """(clips,) whether the last run is one of audio."""

    def frame_ids(self, grid: IntArray, frame: IntArray, step: IntArray, per: IntArray) -> IntArray:
        """Count the whole ids from the first frame to these, given what lies between two of their grid: step over per.

        Args:
            grid: index of the grid of each frame.
            frame: index of each in its grid.
            step: numerators, of the same shape.
            per: denominators, likewise.
        """
        return frame * step // per

    def unit(self, grids: Grids) -> IntArray | None:
        return self._steps(grids)[1] if self.fractional and (grids.frames > 1).any() else None

    def advance(self, grids: Grids) -> IntArray:
        content, unit = self._content(grids)
        return content + 2 * self.num_marker_ids * unit * _is_clip(grids)

    def next_after(self, grids: Grids, cursor: IntArray) -> IntArray | None:
        if self.engine == "serving" or grids.kind is None:
            return None
        # Transformers goes on after the last run of a clip, and decodes after the highest id, which may lie before it.
        highest, unit = self._content(grids, highest=True)
        scale = 1 if grids.unit is None else grids.unit // unit
        return cursor + (highest + self.num_marker_ids * unit) * _is_clip(grids) * scale

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        steps, own = self._steps(grids)
        unit = np.ones_like(own) if grids.unit is None else grids.unit
        scale = unit // own if self.fractional else unit
        runs = self.runs(grids)
        if runs is None:
            return Placement([cursor] * 3, [steps * scale, 0, 0], [0, unit, 0], [0, 0, unit], self._over(unit))
        owner, content, first, tokens = runs
        height, width = grids.height[owner], grids.width[owner]
        patches = content == PATCHES
        start = cursor[owner] + self._clip_offsets(grids, runs, scale, unit)
        time, frame = np.zeros_like(start), steps * scale
        if not self.fractional:
            frames = np.where(patches, first // (height * width), 0)
            time, frame = self.frame_ids(owner, frames, steps[owner], own[owner]), 0 * frame
        # Markers of one id stand in a column, whose steps are not 0: a run at id 0 without steps is padding.
        column = (content >= BEFORE) & (self.num_marker_ids == 1)
        pieces = Pieces(
            owner,
            tokens,
            first,
            np.where(patches, height, np.where(column, tokens, 1)),
            np.where(patches, width, np.where(column, 1, first + tokens)),
        )
        one = unit[owner]
        down, along = np.where(patches, one, 0), np.where(patches, 0, one)
        moves: list[IntArray | int] = [np.where(patches, frame[owner], 0), 0, 0]
        return Placement(
            [start + time, start, start], moves, [0, down, 0], [along, along, one], self._over(one), pieces
        )

    def runs(self, grids: Grids) -> Turns | None:
        """List the runs of all grids; None where each grid is one affine run and none is a clip."""
        if grids.kind is None and (self.fractional or not (grids.frames > 1).any()):
            return None
        check_pieces(self, int(grids.frames.sum()))
        (plain,) = (~_is_clip(grids)).nonzero()
        frames = np.ones_like(plain) if self.fractional else grids.frames[plain]
        owner, frame = ragged_arange(frames)
        tokens = (grids.tokens[plain] // frames)[owner]
        still = Turns.alike(PATCHES, plain[owner], frame * tokens, tokens)
        if grids.kind is None:
            return still
        clips = self._clips(grids)
        merged = self.merged(clips)
        return Turns.joined(
            Turns.alike(BEFORE, clips.grid, 0, 2),
            merged._replace(owner=clips.grid[merged.owner]),
            Turns.alike(AFTER, clips.grid, 0, 2),
            still,
        )

    def _over(self, unit: IntArray) -> IntArray | int:
        return unit if self.fractional else 1

    def _clip_offsets(self, grids: Grids, runs: Turns, scale: IntArray, unit: IntArray) -> IntArray:
        """(runs,) ids from the cursor before a clip to its audio and video, or to the markers after them; else 0."""
        inside = self.num_marker_ids * unit * _is_clip(grids)
        after = inside + self._content(grids)[0] * scale
        return np.where(
            runs.content == BEFORE, 0, np.where(runs.content == AFTER, after[runs.owner], inside[runs.owner])
        )

    def _steps(self, grids: Grids) -> tuple[IntArray, IntArray]:
        """(grids,) ids between two frames as numerators and denominators; 0 and 1 where there is one frame."""
        moving = grids.frames > 1
        if not moving.any():
            return np.zeros_like(grids.frames), np.ones_like(grids.frames)
        numerator, denominator = frame_steps(self, grids, self.tokens_per_second)
        return np.where(moving, numerator, 0), np.where(moving, denominator, 1)

    def _content(self, grids: Grids, highest: bool = False) -> tuple[IntArray, IntArray]:
        """(grids,) ids that grids consume, markers not counted, over (grids,) units of their own.

        Args:
            grids: the grids.
            highest: whether to count to the highest id of a clip, whatever its last run is.
        """
        step, per = self._steps(grids)
        unit = per if self.fractional else np.ones_like(per)
        final = grids.frames - 1
        last = final * step if self.fractional else self.frame_ids(np.arange(final.size), final, step, per)
        content = np.maximum(last, (grids.extents[1:].max(axis=0) - 1) * unit) + unit
        if grids.kind is not None:
            clips = self._clips(grids)
            audio, video = clips.audio * unit[clips.grid], content[clips.grid]
            ends = np.where(self.ends_in_audio(clips), audio, video)
            content[clips.grid] = np.maximum(audio, video) if highest or self.engine == "serving" else ends
        return content, unit

    def _clips(self, grids: Grids) -> Clips:
        (index,) = _is_clip(grids).nonzero()
        step, per = self._steps(grids)
        frames, patches = grids.frames[index], (grids.height * grids.width)[index]
        audio = index if grids.extra_tokens is None else grids.extra_tokens[index]
        return Clips(index, frames, patches, audio, step[index], per[index])


def _is_clip(grids: Grids) -> npt.NDArray[np.bool_]:
    return np.zeros(grids.frames.size, np.bool_) if grids.kind is None else grids.kind == CLIP


@dataclass(frozen=True)
class TMRope(_Omni):
    """TMRoPE in chunks: of every two seconds first the frames, at ⌊t · seconds · rate⌋, then the audio.

    Source: Qwen2.5-Omni. In Transformers the two markers before a clip share an id, as those after it do, and text goes
    on after the last chunk; in vLLM each marker has its own, and text goes on at the highest id plus one.

    Args:
        tokens_per_second: ids per second, an integer or a Fraction; an audio token is one id.
        engine: "transformers" or "serving".
        seconds_per_chunk: seconds of a chunk, an integer or a Fraction.
    """

    name: ClassVar[str] = "tmrope"
    seconds_per_chunk: int | Fraction = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        seconds = checked_rate("TMRope.seconds_per_chunk", self.seconds_per_chunk)
        object.__setattr__(self, "seconds_per_chunk", seconds)
        if seconds * self.tokens_per_second < 1:
            raise InvalidInputError(f"TMRope.seconds_per_chunk: got {seconds}, want one id of audio or more in a chunk")

    @property
    def num_marker_ids(self) -> int:
        return 1 if self.engine == "transformers" else 2

    def merged(self, clips: Clips) -> Turns:
        size = self._chunk_ids
        owner, frame, wanted, count = self._chunks(clips)
        before = np.where(frame == 0, 1, np.append(0, count[:-1]))
        patches = clips.patches[owner]
        # Transformers opens one chunk a token: a frame that skips chunks leaves a token in each of them.
        single = np.clip(wanted - 1 - before, 0, patches)
        check_pieces(self, int(single.sum() + (clips.audio // size + 1).sum()))
        of_frame, k = ragged_arange(single)
        sounding, chunk = ragged_arange(-(-clips.audio // size))
        singles = Turns.alike(PATCHES, owner[of_frame], (frame * patches)[of_frame] + k, 1)
        rest = Turns.alike(PATCHES, owner, frame * patches + single, patches - single)
        sound = Turns.alike(SOUND, sounding, chunk * size, np.minimum(size, clips.audio[sounding] - chunk * size))
        chunks = np.concatenate([before[of_frame] + 1 + k, wanted, chunk + 1])
        parts = (singles, rest, sound)
        content, first = (
            np.concatenate(columns) for columns in zip(*((p.content, p.first) for p in parts), strict=True)
        )
        return Turns.joined(*parts, keys=(first, content, chunks))

    def ends_in_audio(self, clips: Clips) -> npt.NDArray[np.bool_]:
        last = self._chunks(clips)[3][clips.frames.cumsum() - 1]
        return np.asarray(-(-clips.audio // self._chunk_ids) >= last)

    @property
    def _chunk_ids(self) -> int:
        return int(self.tokens_per_second * self.seconds_per_chunk)

    def _chunks(self, clips: Clips) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Number the chunks of frames from 1: owner, frame, chunk by time, and how many there are after the frame."""
        owner, frame = ragged_arange(clips.frames)
        ids = self.frame_ids(clips.grid[owner], frame, clips.step[owner], clips.per[owner])
        wanted = ids // self._chunk_ids + 1
        # Chunks after frame f of n patches are min(wanted, n + chunks before): n·f + the least of wanted − n·g, g ≤ f.
        opened = frame * clips.patches[owner]
        # Owners are so far apart that the least of one is above all of the next.
        apart = owner << 34
        count = np.minimum.accumulate(wanted - opened - apart) + apart + opened
        return owner, frame, wanted, count


@dataclass(frozen=True)
class TMRopeQwen3(_Omni):
    """TMRoPE token by token: a frame at t · seconds · rate stands before the first audio token that is not earlier.

    Source: Qwen3-Omni. In Transformers times are fractions, each marker has an id, and text goes on after the last run;
    in vLLM times are floored, the two markers before a clip share an id, as those after it do, and text goes on at the
    highest id plus one.

    Args:
        tokens_per_second: ids per second, an integer or a Fraction; an audio token is one id.
        engine: "transformers" or "serving".
    """

    name: ClassVar[str] = "tmrope-qwen3"
    tokens_per_second: int | Fraction = 13

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "fractional", self.engine == "transformers")

    @property
    def num_marker_ids(self) -> int:
        return 1 if self.engine == "serving" else 2

    def merged(self, clips: Clips) -> Turns:
        owner, frame = ragged_arange(clips.frames)
        before = self._audio_before(clips, owner, frame)
        earlier = np.where(frame == 0, 0, np.append(0, before[:-1]))
        patches = clips.patches[owner]
        sound = Turns.alike(SOUND, owner, earlier, before - earlier)
        video = Turns.alike(PATCHES, owner, frame * patches, patches)
        turns = Turns(*(np.stack(columns, axis=1).ravel() for columns in zip(sound, video, strict=True)))
        heard = before[clips.frames.cumsum() - 1]
        return Turns.joined(turns, Turns.alike(SOUND, np.arange(heard.size), heard, clips.audio - heard))

    def ends_in_audio(self, clips: Clips) -> npt.NDArray[np.bool_]:
        return np.asarray(self._audio_before(clips, np.arange(clips.frames.size), clips.frames - 1) < clips.audio)

    def _audio_before(self, clips: Clips, owner: IntArray, frame: IntArray) -> IntArray:
        """Count the audio tokens before these frames: those whose id is below the frame's."""
        ids = frame * clips.step[owner]
        time = -(-ids // clips.per[owner]) if self.fractional else ids // clips.per[owner]
        return np.minimum(time, clips.audio[owner])
