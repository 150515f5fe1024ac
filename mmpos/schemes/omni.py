"""TMRoPE of the Qwen Omni models: video and audio on one time axis, with tokens interleaved by time."""

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
"""Contents of a run: patches, audio tokens, the two markers before a clip, or the two after it."""


class Runs(NamedTuple):
    """Runs of tokens with the same content, in token order.

    Args:
        owner: (runs,) index of the grid, ascending.
        content: (runs,) PATCHES, SOUND, BEFORE or AFTER.
        first: (runs,) index of the first token among the grid's tokens with this content.
        tokens: (runs,) number of tokens, at least 1.
    """

    owner: IntArray
    content: IntArray
    first: IntArray
    tokens: IntArray

    @classmethod
    def sorted(cls, *parts: Runs, keys: tuple[IntArray, ...] = ()) -> Runs:
        """Concatenate runs that are not empty and sort them stably by owner, then by ``keys``, the last key first."""
        together = cls(*map(np.concatenate, zip(*parts, strict=True)))
        order = np.lexsort((*keys, together.owner))
        order = order[together.tokens[order] > 0]
        return cls(*(values[order] for values in together))

    @classmethod
    def of(cls, content: int, owner: IntArray, first: IntArray | int, tokens: IntArray | int) -> Runs:
        """Build runs with one content, broadcasting the other columns."""
        return cls(*np.broadcast_arrays(owner, content, first, tokens))


class Clips(NamedTuple):
    """The clips among the grids of a batch.

    Args:
        grid: (clips,) index among the grids.
        frames: (clips,) number of video frames.
        patches: (clips,) patches per frame.
        audio: (clips,) number of audio tokens.
        step: (clips,) numerator of the ids between two frames.
        per: (clips,) denominator of the id step between consecutive frames.
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

    Subclasses define the order of the patches and audio tokens of a clip.
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
        """Number of ids that each pair of markers around a clip consumes: 1 if the pair shares an id, else 2."""

    @abstractmethod
    def merged(self, clips: Clips) -> Runs:
        """Return the runs of PATCHES and SOUND of clips, in token order; owners are indices of clips."""

    @abstractmethod
    def ends_in_audio(self, clips: Clips) -> npt.NDArray[np.bool_]:
        """Return whether the last run of each clip is audio, (clips,)."""

    def frame_ids(self, grid: IntArray, frame: IntArray, step: IntArray, per: IntArray) -> IntArray:
        """Return the integer ids between the first frame of a grid and each frame: ⌊frame · step / per⌋.

        ``grid`` is the index of the grid of each frame, for subclasses that round differently.
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
        # In Transformers, text continues after the last run of a clip, but decoding after the highest id of all its
        # runs.
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
        # Markers that share an id form a column with steps other than 0, since a run at id 0 without steps is padding.
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

    def runs(self, grids: Grids) -> Runs | None:
        """Return the runs of all grids; None if every grid is one affine run and no grid is a clip."""
        if grids.kind is None and (self.fractional or not (grids.frames > 1).any()):
            return None
        check_pieces(self, int(grids.frames.sum()))
        (plain,) = (~_is_clip(grids)).nonzero()
        frames = np.ones_like(plain) if self.fractional else grids.frames[plain]
        owner, frame = ragged_arange(frames)
        tokens = (grids.tokens[plain] // frames)[owner]
        of_plain = Runs.of(PATCHES, plain[owner], frame * tokens, tokens)
        if grids.kind is None:
            return of_plain
        clips = self._clips(grids)
        interleaved = self.merged(clips)
        return Runs.sorted(
            Runs.of(BEFORE, clips.grid, 0, 2),
            interleaved._replace(owner=clips.grid[interleaved.owner]),
            Runs.of(AFTER, clips.grid, 0, 2),
            of_plain,
        )

    def _over(self, unit: IntArray) -> IntArray | int:
        return unit if self.fractional else 1

    def _clip_offsets(self, grids: Grids, runs: Runs, scale: IntArray, unit: IntArray) -> IntArray:
        """Return the offset of each run from the cursor, (runs,); it is 0 outside clips and at their start."""
        inside = self.num_marker_ids * unit * _is_clip(grids)
        after = inside + self._content(grids)[0] * scale
        return np.where(
            runs.content == BEFORE, 0, np.where(runs.content == AFTER, after[runs.owner], inside[runs.owner])
        )

    def _steps(self, grids: Grids) -> tuple[IntArray, IntArray]:
        """Return numerators and denominators of the ids between two frames, (grids,) each; 0 and 1 for one frame."""
        moving = grids.frames > 1
        if not moving.any():
            return np.zeros_like(grids.frames), np.ones_like(grids.frames)
        numerator, denominator = frame_steps(self, grids, self.tokens_per_second)
        return np.where(moving, numerator, 0), np.where(moving, denominator, 1)

    def _content(self, grids: Grids, highest: bool = False) -> tuple[IntArray, IntArray]:
        """Return the ids that grids consume without markers, as numerators and denominators, (grids,) each.

        Args:
            grids: the grids.
            highest: whether to count up to the highest id of a clip instead of the highest id of its last run.
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
    """TMRoPE in chunks of two seconds: first the frames of a chunk, at ⌊t · seconds · rate⌋, then its audio.

    Source: Qwen2.5-Omni. In Transformers, the two markers before a clip share an id, as do the two after it, and text
    continues after the last chunk. In vLLM, each marker has its own id, and text continues at the highest id plus one.

    Args:
        tokens_per_second: ids per second, an integer or a Fraction; each audio token consumes one id.
        engine: "transformers", or "serving" for vLLM.
        seconds_per_chunk: length of a chunk in seconds, an integer or a Fraction.
    """

    name: ClassVar[str] = "tmrope"
    seconds_per_chunk: int | Fraction = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        seconds = checked_rate("TMRope.seconds_per_chunk", self.seconds_per_chunk)
        object.__setattr__(self, "seconds_per_chunk", seconds)
        if seconds * self.tokens_per_second < 1:
            raise InvalidInputError(f"TMRope.seconds_per_chunk: got {seconds}, want at least one audio token per chunk")

    @property
    def num_marker_ids(self) -> int:
        return 1 if self.engine == "transformers" else 2

    def merged(self, clips: Clips) -> Runs:
        size = self._chunk_ids
        owner, frame, wanted, count = self._chunks(clips)
        before = np.where(frame == 0, 1, np.append(0, count[:-1]))
        patches = clips.patches[owner]
        # Transformers opens at most one chunk per token: a frame that skips chunks leaves a token in each of them.
        single = np.clip(wanted - 1 - before, 0, patches)
        check_pieces(self, int(single.sum() + (clips.audio // size + 1).sum()))
        of_frame, k = ragged_arange(single)
        of_audio, chunk = ragged_arange(-(-clips.audio // size))
        singles = Runs.of(PATCHES, owner[of_frame], (frame * patches)[of_frame] + k, 1)
        rest = Runs.of(PATCHES, owner, frame * patches + single, patches - single)
        sound = Runs.of(SOUND, of_audio, chunk * size, np.minimum(size, clips.audio[of_audio] - chunk * size))
        chunks = np.concatenate([before[of_frame] + 1 + k, wanted, chunk + 1])
        parts = (singles, rest, sound)
        content, first = (
            np.concatenate(columns) for columns in zip(*((p.content, p.first) for p in parts), strict=True)
        )
        return Runs.sorted(*parts, keys=(first, content, chunks))

    def ends_in_audio(self, clips: Clips) -> npt.NDArray[np.bool_]:
        last = self._chunks(clips)[3][clips.frames.cumsum() - 1]
        return np.asarray(-(-clips.audio // self._chunk_ids) >= last)

    @property
    def _chunk_ids(self) -> int:
        return int(self.tokens_per_second * self.seconds_per_chunk)

    def _chunks(self, clips: Clips) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Return each frame's owner, index and chunk by time (counted from 1), and the number of chunks so far."""
        owner, frame = ragged_arange(clips.frames)
        ids = self.frame_ids(clips.grid[owner], frame, clips.step[owner], clips.per[owner])
        wanted = ids // self._chunk_ids + 1
        # Frame f of n patches leaves min(wanted, n + previous count) chunks: n·f + min of wanted − n·g over g ≤ f.
        opened = frame * clips.patches[owner]
        # The offset per owner keeps the running minimum of one owner from reaching the next.
        apart = owner << 34
        count = np.minimum.accumulate(wanted - opened - apart) + apart + opened
        return owner, frame, wanted, count


@dataclass(frozen=True)
class TMRopeQwen3(_Omni):
    """TMRoPE by token: a frame at t · seconds · rate precedes the first audio token that is not earlier.

    Source: Qwen3-Omni. In Transformers, times are fractions, each marker has its own id, and text continues after the
    last run. In vLLM, times are floored, the two markers before a clip share an id, as do the two after it, and text
    continues at the highest id plus one.

    Args:
        tokens_per_second: ids per second, an integer or a Fraction; each audio token consumes one id.
        engine: "transformers", or "serving" for vLLM.
    """

    name: ClassVar[str] = "tmrope-qwen3"
    tokens_per_second: int | Fraction = 13

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "fractional", self.engine == "transformers")

    @property
    def num_marker_ids(self) -> int:
        return 1 if self.engine == "serving" else 2

    def merged(self, clips: Clips) -> Runs:
        owner, frame = ragged_arange(clips.frames)
        before = self._audio_before(clips, owner, frame)
        earlier = np.where(frame == 0, 0, np.append(0, before[:-1]))
        patches = clips.patches[owner]
        sound = Runs.of(SOUND, owner, earlier, before - earlier)
        video = Runs.of(PATCHES, owner, frame * patches, patches)
        pairs = Runs(*(np.stack(columns, axis=1).ravel() for columns in zip(sound, video, strict=True)))
        merged = before[clips.frames.cumsum() - 1]
        return Runs.sorted(pairs, Runs.of(SOUND, np.arange(merged.size), merged, clips.audio - merged))

    def ends_in_audio(self, clips: Clips) -> npt.NDArray[np.bool_]:
        return np.asarray(self._audio_before(clips, np.arange(clips.frames.size), clips.frames - 1) < clips.audio)

    def _audio_before(self, clips: Clips, owner: IntArray, frame: IntArray) -> IntArray:
        """Return the number of audio tokens before each frame: those with ids below the frame's."""
        ids = frame * clips.step[owner]
        time = -(-ids // clips.per[owner]) if self.fractional else ids // clips.per[owner]
        return np.minimum(time, clips.audio[owner])
