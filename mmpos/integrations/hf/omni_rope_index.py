"""Function in the place of ``get_rope_index`` of Qwen2.5-Omni and of Qwen3-Omni."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.library import infer_schema

from mmpos.errors import InvalidInputError
from mmpos.integrations.hf.token_types import IMAGE, VIDEO, Ids, TokenTypes, check_tensors, moved, on_host, shapes
from mmpos.integrations.models.settings import audio_tokens
from mmpos.positions.place import place
from mmpos.rotary.operators import define_operator
from mmpos.schemes import TMRope
from mmpos.segments.kinds import AUDIO, CLIP, GRID
from mmpos.segments.placeholders import Placeholders
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import INT32_MAX, IntArray
from mmpos.support.ragged import ragged_arange

__all__ = ["OmniRopeIndex"]

_AUDIO, _VISION_START, _AUDIO_START = 3, 4, 5  # types beside IMAGE and VIDEO; segments count the markers as text


@dataclass(frozen=True)
class OmniRopeIndex:
    """Function with the arguments and the results of ``get_rope_index`` of the Qwen Omni models.

    Of Qwen2.5-Omni, ids have the dtype of input_ids, and are int64 where there are no grids; padding has the id 1.
    Times of frames are rounded down.

    Of Qwen3-Omni, ids and deltas are float32: frames have fractions of ids, and everything after a video goes on from
    these. Each id is the sum of the one before and a number, rounded to float32, and so are the deltas: a step of
    decoding adds the number of tokens to them, and rounds once more. Padding has the id 0; where there are no grids, 1.

    Args:
        placeholders: tokens of image patches, of video patches and of audio.
        spatial_merge_size: patches merged along each side into one token.
        tokens_per_second: ids that a second takes.
        vision_start_token_id: the marker before an image or a video.
        audio_start_token_id: the marker before audio, inside that of a video where both take turns.
        tokens_per_chunk: ids of a chunk of Qwen2.5-Omni, of which a clip has first the frames and then the audio.
        audio_chunk: frames of audio that the encoder of Qwen3-Omni takes at a time; None of Qwen2.5-Omni.
    """

    placeholders: Placeholders
    spatial_merge_size: int
    tokens_per_second: int
    vision_start_token_id: int
    audio_start_token_id: int
    tokens_per_chunk: int | None = None
    audio_chunk: int | None = None

    def __call__(
        self,
        input_ids: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        attention_mask: Tensor | None = None,
        use_audio_in_video: bool = False,
        audio_seqlens: Tensor | None = None,
        second_per_grids: Tensor | None = None,
    ) -> Ids:
        """Compute the position ids of a batch, and by how much they run ahead of its tokens.

        Args:
            input_ids: (batch, seq); None, as no grids at all, counts the tokens of the mask.
            image_grid_thw: (images, 3) frames, height, width before merging; those that no token is left for are
                passed over. With None, placeholders without a marker before them are text.
            video_grid_thw: (videos, 3) likewise.
            attention_mask: (batch, seq); tokens under another value than 1 are left out, and have the id of padding.
            use_audio_in_video: whether videos may have their audio between their frames.
            audio_seqlens: (audios,) frames of each audio before the encoder, to be compared with the tokens; or None.
                ``ModelSettings.audio_tokens`` says how many tokens they become.
            second_per_grids: (videos,) seconds between frames; multiplied as float32.

        Returns:
            (3, batch, seq) position ids, and (batch, 1) deltas: the highest id plus one less the number of tokens.

        Raises:
            InvalidInputError: grids or audio that do not fit the tokens, or arguments of other shapes.
        """
        named = {"image_grid_thw": image_grid_thw, "video_grid_thw": video_grid_thw, "attention_mask": attention_mask}
        if input_ids is None or (image_grid_thw is None and video_grid_thw is None):
            if attention_mask is None:
                raise InvalidInputError("attention_mask: got None, want a tensor, where there are no grids")
            return self._count(attention_mask)
        named |= {"audio_seqlens": audio_seqlens, "second_per_grids": second_per_grids}
        check_tensors(input_ids=input_ids, **named)
        kinds = torch.zeros_like(input_ids, dtype=torch.uint8)
        markers = self.vision_start_token_id, self.audio_start_token_id
        own = self.placeholders
        for kind, token in enumerate((own.image, own.video, own.audio, *markers), 1):
            kinds.masked_fill_(torch.eq(input_ids, token), kind)  # type: ignore[arg-type]  # a model of Omni has all
        sizes = self.spatial_merge_size, self.tokens_per_second, self.tokens_per_chunk, self.audio_chunk
        ids: Ids = _OPERATOR(input_ids, kinds, *named.values(), use_audio_in_video, *sizes)
        return ids

    def _count(self, attention_mask: Tensor) -> Ids:
        """Count the tokens of each row that a mask leaves; those under a 0 have the id 1."""
        counted = attention_mask.long() if self.audio_chunk is None else attention_mask.float()
        ids = (counted.cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        return ids.repeat(3, 1, 1), ids.amax(-1, keepdim=True) + 1 - attention_mask.sum(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class _OmniTimes(TMRope):
    """TMRoPE of Transformers with the id of every frame given.

    Args:
        times: (frames of all grids,) ids after the first of the grid.
        begins: (grids,) index of the first frame of each grid.
    """

    times: IntArray = field(kw_only=True)
    begins: IntArray = field(kw_only=True)

    def frame_ids(self, grid: IntArray, frame: IntArray, step: IntArray, per: IntArray) -> IntArray:
        return np.asarray(self.times[self.begins[grid] + frame])


def _compute(
    input_ids: Tensor,
    kinds: Tensor,
    image_grid_thw: Tensor | None,
    video_grid_thw: Tensor | None,
    attention_mask: Tensor | None,
    audio_seqlens: Tensor | None,
    second_per_grids: Tensor | None,
    use_audio_in_video: bool,
    spatial_merge_size: int,
    tokens_per_second: int,
    tokens_per_chunk: int | None,
    audio_chunk: int | None,
) -> Ids:
    mask = None if attention_mask is None else attention_mask == 1
    types, mask, images, videos, audio, seconds = on_host(
        kinds, mask, image_grid_thw, video_grid_thw, audio_seqlens, second_per_grids
    )
    tokens = TokenTypes.of(types, mask, most=_AUDIO_START)
    if audio_chunk is not None:
        tokens = tokens.packed()
    for kind, grids in ((IMAGE, images), (VIDEO, videos)):
        if grids is None:
            tokens = _text_without_marker(tokens, kind)
    merge = np.array([1, spatial_merge_size, spatial_merge_size])
    heard = None if audio is None else audio_tokens("audio_seqlens", audio.numpy(), audio_chunk)
    segments = tokens.segments(
        tokens.used("image_grid_thw", images, IMAGE, merge),
        tokens.used("video_grid_thw", videos, VIDEO, merge),
        Placeholders(IMAGE, VIDEO, _AUDIO),
        audio_lengths=None if heard is None else heard[heard > 0],
    )
    if not use_audio_in_video and (segments.kind == CLIP).any():
        raise InvalidInputError("use_audio_in_video: got False, want True for a video with audio between its frames")
    times, begins = _omni_times(segments, tokens, seconds, tokens_per_second)
    if tokens_per_chunk is None:
        return _sums(segments, tokens, times.numpy(), input_ids)
    # They are rounded once more, to float32, on their way to the ids.
    whole = times.long().float().long().numpy()
    seconds_per_chunk = Fraction(tokens_per_chunk, tokens_per_second)
    scheme = _OmniTimes(tokens_per_second, "transformers", seconds_per_chunk, times=whole, begins=begins)
    return tokens.answer(place(segments, scheme), input_ids, padding=1)


def _text_without_marker(tokens: TokenTypes, kind: int) -> TokenTypes:
    """Take placeholders of a kind without grids for text, as the method does, unless one is right after a marker."""
    types = tokens.types.ravel()
    at = np.flatnonzero(types == kind)
    if not at.size or (types[at[at > 0] - 1] >= _VISION_START).any():
        return tokens  # to be refused
    return replace(tokens, types=np.where(tokens.types == kind, 0, tokens.types))


def _omni_times(
    segments: SegmentTable, tokens: TokenTypes, seconds: Tensor | None, rate: int
) -> tuple[Tensor, IntArray]:
    """Give the float32 ids of all frames after the first of their grid, and the first frame of each."""
    grid = (segments.kind == GRID) | (segments.kind == CLIP)
    frames, lengths = segments.extents[0, grid], segments.lengths
    clip = (segments.kind == CLIP)[grid]
    is_video = clip | (tokens.types.ravel()[(lengths.cumsum() - lengths)[grid]] == VIDEO)
    videos = int(is_video.sum())
    if videos and (seconds is None or seconds.dim() != 1 or len(seconds) < videos):
        got = "None" if seconds is None else f"shape {tuple(seconds.shape)}"
        raise InvalidInputError(f"second_per_grids: got {got}, want at least {videos} values, one per video")
    owner, frame = ragged_arange(frames)
    between = torch.ones(frames.size)
    if seconds is not None and videos:
        seconds = seconds[:videos].float()
        if not (good := (seconds >= 0) & seconds.isfinite()).all():
            v = int(good.logical_not().int().argmax())
            raise InvalidInputError(f"second_per_grids[{v}]: got {seconds[v].item()}, want a number >= 0")
        between[torch.from_numpy(is_video)] = seconds
    times = torch.from_numpy(frame) * between[torch.from_numpy(owner)] * rate
    if not (good := times.double() <= INT32_MAX).all():
        g = owner[int(good.logical_not().int().argmax())]
        v = int(is_video[:g].sum())
        raise InvalidInputError(
            f"second_per_grids[{v}]: got {between[g].item():g}, want ids of its frames within int32"
        )
    return times, frames.cumsum() - frames


# Sums in float32.

Floats = npt.NDArray[np.float32]

_TEXT, _MARKERS, _INSIDE, _END, _AFTER, _LAST, _NEXT = range(7)
"""Ids that are counted on: of the text before a content, its markers, its inside, the highest inside, the markers
after it, the last of these, and the text that follows. Each is the one before plus a number."""


@dataclass(frozen=True, eq=False)
class _Contents:
    """Images, videos, audio and videos with audio of a packed batch, in the order of tokens.

    Args:
        document: (contents,) index of the document.
        first: (contents,) token of the batch at which the inside begins, after the markers.
        markers: (contents,) how many stand before it, and as many after it.
        frames: (contents,) frames, 0 of audio alone; height and width likewise.
        height: (contents,) rows of patches.
        width: (contents,) columns of patches.
        audio: (contents,) tokens of audio.
        cu_seqlens: (documents + 1,) first token of each document, then the total.
    """

    document: IntArray
    first: IntArray
    markers: IntArray
    frames: IntArray
    height: IntArray
    width: IntArray
    audio: IntArray
    cu_seqlens: IntArray

    @property
    def stop(self) -> IntArray:
        """(contents,) the token after the inside."""
        return self.first + self.frames * self.height * self.width + self.audio

    @property
    def is_first(self) -> npt.NDArray[np.bool_]:
        """(contents,) whether it is the first of its document."""
        return np.diff(self.document, prepend=-1) > 0

    @property
    def text(self) -> IntArray:
        """(contents,) tokens of text before the markers; below 0 where those of two contents overlap."""
        before = np.append(0, (self.stop + self.markers)[:-1])[: self.first.size]
        return self.first - self.markers - np.where(self.is_first, self.cu_seqlens[self.document], before)

    def ids(self, times: Floats) -> tuple[Floats, Floats]:
        """Compute the ids of all tokens, (3, tokens), and by how much they run ahead of the tokens, (documents,).

        Where frames and audio of a video take turns, the earlier id comes first, and a frame before audio of the same
        id: the ids that decide are the rounded ones, so that they depend on where the video begins.
        Source: get_rope_index of Qwen3-Omni in Transformers.

        Args:
            times: (frames of all contents,) ids after the first frame, ascending in each content.
        """
        frame_of, _ = ragged_arange(self.frames)
        audio_of, tone = ragged_arange(self.audio)
        owner, is_audio = np.append(frame_of, audio_of), np.arange(frame_of.size + audio_of.size) >= frame_of.size
        local = np.append(times, tone.astype(np.float32))
        units = np.where(is_audio, 1, (self.height * self.width)[owner])  # tokens of a frame, or one of audio
        last = np.zeros(self.first.size, np.float32)
        last[frame_of] = times  # ascending: the last one stays
        picture = np.maximum(last, np.maximum(self.height, self.width) - np.float32(1)).astype(np.float32)
        sound = (self.audio - 1).astype(np.float32)
        ends_in_audio = (self.frames == 0) | ((self.audio > 0) & (sound >= last))
        while True:  # rounding seldom turns the end of a video around, and then moves all that follows
            counted = self._counted(np.where(ends_in_audio, sound, picture))
            value = counted[owner, _INSIDE] + local
            order = np.lexsort((is_audio, value, owner))
            ends = is_audio[order[(self.frames + self.audio).cumsum() - 1]]
            if (ends == ends_in_audio).all():
                break
            ends_in_audio = ends
        ids = self._lines(counted)
        unit, index = ragged_arange(units[order])
        unit, first = order[unit], self.first[owner[order]] + _since_first(units[order], owner[order])
        token = first.repeat(units[order]) + index
        ids[0, token] = value[unit]
        for axis, local_id in enumerate(np.divmod(index, np.maximum(self.width, 1)[owner[unit]]), 1):
            patch = counted[owner[unit], _INSIDE] + local_id.astype(np.float32)
            ids[axis, token] = np.where(is_audio[unit], value[unit], patch)
        bounds = self.cu_seqlens
        highest = np.maximum.reduceat(ids.max(axis=0), bounds[:-1]) if bounds.size > 1 else np.zeros(0, np.float32)
        return ids, (highest + np.float32(1)) - np.diff(bounds).astype(np.float32)

    def _counted(self, extent: Floats) -> Floats:
        """Add up what is consumed, token by token of the table above: (contents, 7)."""
        rank = np.arange(self.first.size)
        rank = rank - np.maximum.accumulate(np.where(self.is_first, rank, 0))
        one = np.ones_like(extent)
        added = np.stack([self.text, self.markers, extent, one, self.markers - 1, one], axis=1).astype(np.float32)
        steps = np.zeros((self.cu_seqlens.size - 1, rank.max(initial=0) + 1, added.shape[1]), np.float32)
        steps[self.document, rank] = added
        steps = steps.reshape(len(steps), steps.shape[1] * steps.shape[2])
        sums = np.concatenate([np.zeros_like(steps[:, :1]), np.add.accumulate(steps, axis=1)], axis=1)
        return np.asarray(sums[self.document[:, None], rank[:, None] * added.shape[1] + np.arange(_NEXT + 1)])

    def _lines(self, counted: Floats) -> Floats:
        """Give ids to text and markers; the insides are left as they are in memory."""
        bounds = self.cu_seqlens
        begin, end = bounds[:-1], bounds[1:]
        after = np.minimum(self.markers, end[self.document] - self.stop)
        (final,) = np.append(self.is_first, True)[1:].nonzero()  # the last content of each document that has any
        begin, start = begin.copy(), np.zeros(begin.size, np.float32)
        begin[self.document[final]] = (self.stop + after)[final]
        start[self.document[final]] = counted[final, _NEXT]
        firsts = [self.first - self.markers - self.text, self.first - self.markers, self.stop, begin]
        lengths = np.concatenate([self.text, self.markers, after, end - begin])
        owner, index = ragged_arange(lengths)
        starts = np.concatenate([*counted[:, [_TEXT, _MARKERS, _AFTER]].T, start])
        ids = np.empty((3, int(bounds[-1])), np.float32)
        ids[:, np.concatenate(firsts)[owner] + index] = starts[owner] + index.astype(np.float32)
        return ids


def _since_first(lengths: IntArray, owner: IntArray) -> IntArray:
    """Add up the lengths before each entry since the first of its owner; owners ascend."""
    before = lengths.cumsum() - lengths
    return np.asarray(before - before[np.searchsorted(owner, owner)])


def _sums(segments: SegmentTable, tokens: TokenTypes, times: Floats, input_ids: Tensor) -> Ids:
    """Add up the ids of Qwen3-Omni, and put them where the tokens are."""
    assert tokens.cu_seqlens is not None, "packed"
    contents = _contents(segments, tokens.types, tokens.cu_seqlens)
    size, batch = 3 * input_ids.numel(), len(input_ids)
    numbers = np.zeros(size + batch, np.float32)
    numbers[:size].reshape(3, -1)[:, tokens.own], numbers[size:] = contents.ids(times)
    return moved(numbers, input_ids, 3)


def _contents(segments: SegmentTable, types: IntArray, cu_seqlens: IntArray) -> _Contents:
    """Find what stands between markers, each with its own before it, as the method of Qwen3-Omni reads it."""
    kind, lengths = segments.kind, segments.lengths
    inside = (kind == GRID) | (kind == CLIP) | (kind == AUDIO)
    document = np.arange(cu_seqlens.size - 1).repeat(np.diff(segments.segment_offsets))[inside]
    first, kind = (lengths.cumsum() - lengths)[inside], kind[inside]
    heard, clip = kind == AUDIO, kind == CLIP
    frames, height, width = np.where(heard, 0, segments.extents[:, inside])
    audio = np.where(heard, lengths[inside], 0)
    if segments.extra_tokens is not None:
        audio[clip] = segments.extra_tokens[inside][clip]
    contents = _Contents(document, first + 2 * clip, 1 + clip, frames, height, width, audio, cu_seqlens)
    wanted = np.where(heard | clip, _AUDIO_START, _VISION_START)
    begun = (contents.text >= 0) & (types[contents.first - 1] == wanted)  # none before token 0: a text below 0
    begun &= ~clip | (types[np.maximum(contents.first - 2, 0)] == _VISION_START)
    if not begun.all():
        c = int(begun.argmin())
        at = f"document {document[c]}, token {contents.first[c] - cu_seqlens[document[c]]}"
        want = "vision_start_token_id" if not heard[c] else "audio_start_token_id"
        want = f"{want} and audio_start_token_id" if clip[c] else want
        raise InvalidInputError(f"input_ids: got other tokens before the placeholders from {at} on, want {want}")
    return contents


def _shapes(input_ids: Tensor, *given: object) -> Ids:
    *_, audio_chunk = given
    ids, deltas = shapes(input_ids)
    return (ids, deltas) if audio_chunk is None else (ids.float(), deltas.float())


_OPERATOR = define_operator("omni_rope_index" + infer_schema(_compute, mutates_args=()), _compute, _shapes)
