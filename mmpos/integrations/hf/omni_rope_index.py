"""Replacement for ``get_rope_index`` of Qwen2.5-Omni and Qwen3-Omni."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.library import infer_schema

from mmpos.errors import InvalidInputError
from mmpos.integrations.hf.token_types import (
    IMAGE,
    VIDEO,
    Ids,
    TokenTypes,
    check_tensors,
    ids_and_deltas,
    on_device,
    on_host,
    shapes,
)
from mmpos.integrations.models.settings import audio_tokens
from mmpos.positions.place import place
from mmpos.rotary.operators import define_operator
from mmpos.schemes import TMRope
from mmpos.segments.kinds import AUDIO, CLIP, GRID
from mmpos.segments.placeholders import Placeholders
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import INT32_MAX, IntArray, counted
from mmpos.support.ragged import ragged_arange

__all__ = ["OmniRopeIndex"]

_AUDIO, _VISION_START, _AUDIO_START = 3, 4, 5  # additional token types; segments treat these markers as text


@dataclass(frozen=True)
class OmniRopeIndex:
    """Function with the same arguments and results as ``get_rope_index`` of the Qwen Omni models.

    In Qwen2.5-Omni, ids have the dtype of input_ids, or int64 if there are no grids; padding has the id 1. Frame times
    are rounded down.

    In Qwen3-Omni, ids and deltas are float32. Frames have fractional ids, and the tokens after a video continue from
    them. Each id is the sum of the previous id and an increment, rounded to float32. Deltas are rounded in the same
    way: a decoding step adds the number of tokens to the delta and rounds once more. Padding has the id 0, or 1 if
    there are no grids.

    Args:
        placeholders: token ids of image patches, video patches and audio.
        spatial_merge_size: side, in patches, of the square merged into one token.
        tokens_per_second: ids per second.
        vision_start_token_id: token id of the marker before an image or a video.
        audio_start_token_id: token id of the marker before audio; in a video with audio, it follows the video marker.
        tokens_per_chunk: ids per chunk in Qwen2.5-Omni; the frames of a chunk come before its audio. None for
            Qwen3-Omni.
        audio_chunk: number of audio frames per chunk of the Qwen3-Omni encoder; None for Qwen2.5-Omni.
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
        """Compute the position ids and deltas of a batch.

        Args:
            input_ids: (batch, seq). If it is None or there are no grids, the tokens in the mask are counted instead.
            image_grid_thw: (images, 3) frames, height, width before merging; trailing grids without tokens are
                ignored. If it is None, placeholders without a marker before them are treated as text.
            video_grid_thw: (videos, 3) the same for videos.
            attention_mask: (batch, seq); tokens whose mask is not 1 are not counted and have the padding id.
            use_audio_in_video: whether a video's audio may be interleaved with its frames.
            audio_seqlens: (audios,) number of frames of each audio at the encoder's input, compared with the number of
                audio tokens; None to skip the comparison. ``ModelSettings.audio_tokens`` converts frames to tokens.
            second_per_grids: (videos,) seconds between frames; all times are computed in float32.

        Returns:
            (3, batch, seq) position ids and (batch, 1) deltas. A delta is the highest id plus one, minus the number of
            tokens.

        Raises:
            InvalidInputError: grids or audio do not match the tokens, or an argument has the wrong shape.
        """
        tensors = {"image_grid_thw": image_grid_thw, "video_grid_thw": video_grid_thw, "attention_mask": attention_mask}
        if input_ids is None or (image_grid_thw is None and video_grid_thw is None):
            if attention_mask is None:
                raise InvalidInputError("attention_mask: got None, want a tensor if there are no grids")
            return self._count(attention_mask)
        tensors |= {"audio_seqlens": audio_seqlens, "second_per_grids": second_per_grids}
        check_tensors(input_ids=input_ids, **tensors)
        kinds = torch.zeros_like(input_ids, dtype=torch.uint8)
        markers = self.vision_start_token_id, self.audio_start_token_id
        patches = self.placeholders
        for kind, token in enumerate((patches.image, patches.video, patches.audio, *markers), 1):
            kinds.masked_fill_(torch.eq(input_ids, token), kind)  # type: ignore[arg-type]  # Omni models have all five
        sizes = self.spatial_merge_size, self.tokens_per_second, self.tokens_per_chunk, self.audio_chunk
        ids: Ids = _OPERATOR(input_ids, kinds, *tensors.values(), use_audio_in_video, *sizes)
        return ids

    def _count(self, attention_mask: Tensor) -> Ids:
        """Return the index of each token among the unmasked tokens of its row (1 for masked tokens), and the deltas."""
        mask = attention_mask.long() if self.audio_chunk is None else attention_mask.float()
        ids = (mask.cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        return ids.repeat(3, 1, 1), ids.amax(-1, keepdim=True) + 1 - attention_mask.sum(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class _OmniTimes(TMRope):
    """Transformers' TMRoPE with precomputed frame ids.

    Args:
        times: (frames of all grids,) id of each frame minus the id of its grid's first frame.
        first_frames: (grids,) index of the first frame in each grid.
    """

    times: IntArray = field(kw_only=True)
    first_frames: IntArray = field(kw_only=True)

    def frame_ids(self, grid: IntArray, frame: IntArray, step: IntArray, per: IntArray) -> IntArray:
        return np.asarray(self.times[self.first_frames[grid] + frame])


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
    segments = tokens.segments(
        tokens.used("image_grid_thw", images, IMAGE, merge),
        tokens.used("video_grid_thw", videos, VIDEO, merge),
        Placeholders(IMAGE, VIDEO, _AUDIO),
    )
    if audio is not None:
        _check_audio(segments, audio.numpy(), audio_chunk)
    if not use_audio_in_video and (segments.kind == CLIP).any():
        raise InvalidInputError("use_audio_in_video: got False, want True for a video with audio between its frames")
    times, first_frames = _omni_times(segments, tokens, seconds, tokens_per_second)
    if tokens_per_chunk is None:
        return _float_ids(segments, tokens, times.numpy(), input_ids)
    # Transformers truncates the times and then rounds them to float32 once more.
    rounded = times.long().float().long().numpy()
    seconds_per_chunk = Fraction(tokens_per_chunk, tokens_per_second)
    scheme = _OmniTimes(tokens_per_second, "transformers", seconds_per_chunk, times=rounded, first_frames=first_frames)
    return ids_and_deltas(place(segments, scheme), input_ids, tokens, padding=1)


def _check_audio(segments: SegmentTable, frames: IntArray, audio_chunk: int | None) -> None:
    """Compare the numbers of audio tokens, in clips and alone, with the numbers of frames passed to the encoder."""
    lengths = audio_tokens("audio_seqlens", frames, audio_chunk)
    audios = np.flatnonzero(lengths > 0)
    tokens = np.where(segments.kind == AUDIO, segments.lengths, 0)
    if segments.extra_tokens is not None:
        tokens = tokens + segments.extra_tokens
    tokens = tokens[tokens > 0]
    if audios.size != tokens.size:
        raise InvalidInputError(
            f"audio_seqlens: got {counted(audios.size, 'audio')} of at least one token, "
            f"want {tokens.size}, one per run of audio tokens"
        )
    for i in audios[lengths[audios] != tokens][:1]:
        raise InvalidInputError(
            f"audio_seqlens[{i}]: got {counted(frames[i], 'frame')}, which the encoder turns into "
            f"{counted(lengths[i], 'token')}, want the {tokens[audios == i][0]} in input_ids"
        )


def _text_without_marker(tokens: TokenTypes, kind: int) -> TokenTypes:
    """Treat placeholders of a kind without grids as text, as Transformers does, unless one follows a marker."""
    types = tokens.types.ravel()
    at = np.flatnonzero(types == kind)
    if not at.size or (types[at[at > 0] - 1] >= _VISION_START).any():
        return tokens  # segments() rejects these placeholders
    return replace(tokens, types=np.where(tokens.types == kind, 0, tokens.types))


def _omni_times(
    segments: SegmentTable, tokens: TokenTypes, seconds: Tensor | None, rate: int
) -> tuple[Tensor, IntArray]:
    """Return the float32 id of each frame minus that of its grid's first frame, and the first frame of each grid."""
    grid = (segments.kind == GRID) | (segments.kind == CLIP)
    frames, lengths = segments.extents[0, grid], segments.lengths
    clip = (segments.kind == CLIP)[grid]
    is_video = clip | (tokens.types.ravel()[(lengths.cumsum() - lengths)[grid]] == VIDEO)
    videos = int(is_video.sum())
    if videos and (seconds is None or seconds.dim() != 1 or len(seconds) < videos):
        got = "None" if seconds is None else f"shape {tuple(seconds.shape)}"
        raise InvalidInputError(f"second_per_grids: got {got}, want at least {videos} values, one per video")
    owner, frame = ragged_arange(frames)
    intervals = torch.ones(frames.size)
    if seconds is not None and videos:
        seconds = seconds[:videos].float()
        if not (valid := (seconds >= 0) & seconds.isfinite()).all():
            v = int(valid.logical_not().int().argmax())
            raise InvalidInputError(f"second_per_grids[{v}]: got {seconds[v].item()}, want a number >= 0")
        intervals[torch.from_numpy(is_video)] = seconds
    times = torch.from_numpy(frame) * intervals[torch.from_numpy(owner)] * rate
    if not (valid := times.double() <= INT32_MAX).all():
        g = owner[int(valid.logical_not().int().argmax())]
        v = int(is_video[:g].sum())
        raise InvalidInputError(f"second_per_grids[{v}]: got {intervals[g].item():g}, want frame ids within int32")
    return times, frames.cumsum() - frames


Floats = npt.NDArray[np.float32]

_TEXT, _MARKERS, _CONTENT, _LAST, _AFTER, _LAST_AFTER, _NEXT = range(7)
"""Columns of ``_Contents._sums``: the first id of the text before a content, the first id of its start markers, the
first and the highest id of its tokens, the first and the last id of its end markers, and the first id of the text after
it. Each column is the previous column plus an increment, summed in float32."""


@dataclass(frozen=True, eq=False)
class _Contents:
    """Images, videos, audio and videos with audio in a packed batch, in token order.

    Args:
        document: (contents,) index of the document that contains each content.
        first: (contents,) index in the batch of the first token after the start markers.
        markers: (contents,) number of start markers, which equals the number of end markers.
        frames: (contents,) number of frames, 0 for audio.
        height: (contents,) rows of patches, 0 for audio.
        width: (contents,) columns of patches, 0 for audio.
        audio: (contents,) number of audio tokens.
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
        """(contents,) index of the token after the last one of the content."""
        return self.first + self.frames * self.height * self.width + self.audio

    @property
    def is_first(self) -> npt.NDArray[np.bool_]:
        """(contents,) whether the content is the first in its document."""
        return np.diff(self.document, prepend=-1) > 0

    @property
    def text(self) -> IntArray:
        """(contents,) number of text tokens before the start markers; negative if the markers of contents overlap."""
        before = np.append(0, (self.stop + self.markers)[:-1])[: self.first.size]
        return self.first - self.markers - np.where(self.is_first, self.cu_seqlens[self.document], before)

    def ids(self, times: Floats) -> tuple[Floats, Floats]:
        """Compute the (3, tokens) ids of all tokens and the (documents,) deltas.

        Frames and audio of a video are interleaved by ascending id, and a frame comes before audio with the same id.
        The comparison uses rounded ids, so the order depends on the position of the video.
        Source: get_rope_index of Qwen3-Omni in Transformers.

        Args:
            times: (frames of all contents,) id of each frame minus that of the content's first frame; ascending in each
                content.
        """
        frame_of, _ = ragged_arange(self.frames)
        audio_of, audio_index = ragged_arange(self.audio)
        owner, is_audio = np.append(frame_of, audio_of), np.arange(frame_of.size + audio_of.size) >= frame_of.size
        local = np.append(times, audio_index.astype(np.float32))
        unit_tokens = np.where(is_audio, 1, (self.height * self.width)[owner])  # a unit is a frame or an audio token
        last_frame = np.zeros(self.first.size, np.float32)
        last_frame[frame_of] = times  # times ascend, so the last assignment wins
        last_patch = np.maximum(last_frame, np.maximum(self.height, self.width) - np.float32(1)).astype(np.float32)
        last_audio = (self.audio - 1).astype(np.float32)
        ends_in_audio = (self.frames == 0) | ((self.audio > 0) & (last_audio >= last_frame))
        while True:  # rounding sometimes swaps the last frame and the last audio token, which changes all later ids
            sums = self._sums(np.where(ends_in_audio, last_audio, last_patch))
            value = sums[owner, _CONTENT] + local
            order = np.lexsort((is_audio, value, owner))
            ends = is_audio[order[(self.frames + self.audio).cumsum() - 1]]
            if (ends == ends_in_audio).all():
                break
            ends_in_audio = ends
        ids = self._text_ids(sums)
        unit, index = ragged_arange(unit_tokens[order])
        unit, first = order[unit], self.first[owner[order]] + _since_first(unit_tokens[order], owner[order])
        token = first.repeat(unit_tokens[order]) + index
        ids[0, token] = value[unit]
        for axis, local_id in enumerate(np.divmod(index, np.maximum(self.width, 1)[owner[unit]]), 1):
            patch = sums[owner[unit], _CONTENT] + local_id.astype(np.float32)
            ids[axis, token] = np.where(is_audio[unit], value[unit], patch)
        bounds = self.cu_seqlens
        highest = np.maximum.reduceat(ids.max(axis=0), bounds[:-1]) if bounds.size > 1 else np.zeros(0, np.float32)
        return ids, (highest + np.float32(1)) - np.diff(bounds).astype(np.float32)

    def _sums(self, last: Floats) -> Floats:
        """Sum the increments of ids; the result is (contents, 7) ids with the columns _TEXT to _NEXT.

        Args:
            last: (contents,) highest id of each content minus its first id.
        """
        rank = np.arange(self.first.size)
        rank = rank - np.maximum.accumulate(np.where(self.is_first, rank, 0))
        one = np.ones_like(last)
        added = np.stack([self.text, self.markers, last, one, self.markers - 1, one], axis=1).astype(np.float32)
        steps = np.zeros((self.cu_seqlens.size - 1, rank.max(initial=0) + 1, added.shape[1]), np.float32)
        steps[self.document, rank] = added
        steps = steps.reshape(len(steps), steps.shape[1] * steps.shape[2])
        sums = np.concatenate([np.zeros_like(steps[:, :1]), np.add.accumulate(steps, axis=1)], axis=1)
        return np.asarray(sums[self.document[:, None], rank[:, None] * added.shape[1] + np.arange(_NEXT + 1)])

    def _text_ids(self, sums: Floats) -> Floats:
        """Return (3, tokens) ids in which those of text and markers are set; the ids of contents are uninitialised."""
        bounds = self.cu_seqlens
        begin, end = bounds[:-1], bounds[1:]
        after = np.minimum(self.markers, end[self.document] - self.stop)
        (final,) = np.append(self.is_first, True)[1:].nonzero()  # the last content of each document that has contents
        begin, start = begin.copy(), np.zeros(begin.size, np.float32)
        begin[self.document[final]] = (self.stop + after)[final]
        start[self.document[final]] = sums[final, _NEXT]
        firsts = [self.first - self.markers - self.text, self.first - self.markers, self.stop, begin]
        lengths = np.concatenate([self.text, self.markers, after, end - begin])
        owner, index = ragged_arange(lengths)
        starts = np.concatenate([*sums[:, [_TEXT, _MARKERS, _AFTER]].T, start])
        ids = np.empty((3, int(bounds[-1])), np.float32)
        ids[:, np.concatenate(firsts)[owner] + index] = starts[owner] + index.astype(np.float32)
        return ids


def _since_first(lengths: IntArray, owner: IntArray) -> IntArray:
    """Sum the lengths from an owner's first entry to each of its entries; the owners are in ascending order."""
    before = lengths.cumsum() - lengths
    return np.asarray(before - before[np.searchsorted(owner, owner)])


def _float_ids(segments: SegmentTable, tokens: TokenTypes, times: Floats, input_ids: Tensor) -> Ids:
    """Compute the float32 ids and deltas of Qwen3-Omni."""
    assert tokens.cu_seqlens is not None, "packed"
    contents = _contents(segments, tokens.types, tokens.cu_seqlens)
    size, batch = 3 * input_ids.numel(), len(input_ids)
    numbers = np.zeros(size + batch, np.float32)
    numbers[:size].reshape(3, -1)[:, tokens.packed_index], numbers[size:] = contents.ids(times)
    return on_device(numbers, input_ids, 3)


def _contents(segments: SegmentTable, types: IntArray, cu_seqlens: IntArray) -> _Contents:
    """Collect the contents and check that each follows its start marker, as in Qwen3-Omni."""
    kind, lengths = segments.kind, segments.lengths
    is_content = (kind == GRID) | (kind == CLIP) | (kind == AUDIO)
    document = np.arange(cu_seqlens.size - 1).repeat(np.diff(segments.segment_offsets))[is_content]
    first, kind = (lengths.cumsum() - lengths)[is_content], kind[is_content]
    is_audio, is_clip = kind == AUDIO, kind == CLIP
    frames, height, width = np.where(is_audio, 0, segments.extents[:, is_content])
    audio = np.where(is_audio, lengths[is_content], 0)
    if segments.extra_tokens is not None:
        audio[is_clip] = segments.extra_tokens[is_content][is_clip]
    contents = _Contents(document, first + 2 * is_clip, 1 + is_clip, frames, height, width, audio, cu_seqlens)
    marker = np.where(is_audio | is_clip, _AUDIO_START, _VISION_START)
    # A content at the first token has no marker, so its number of text tokens is negative.
    starts = (contents.text >= 0) & (types[contents.first - 1] == marker)
    starts &= ~is_clip | (types[np.maximum(contents.first - 2, 0)] == _VISION_START)
    if not starts.all():
        c = int(starts.argmin())
        at = f"document {document[c]}, token {contents.first[c] - cu_seqlens[document[c]]}"
        want = "vision_start_token_id" if not is_audio[c] else "audio_start_token_id"
        want = f"{want} and audio_start_token_id" if is_clip[c] else want
        raise InvalidInputError(f"input_ids: got other tokens before the placeholders at {at}, want {want}")
    return contents


def _shapes(input_ids: Tensor, *arguments: object) -> Ids:
    *_, audio_chunk = arguments
    ids, deltas = shapes(input_ids)
    return (ids, deltas) if audio_chunk is None else (ids.float(), deltas.float())


_OPERATOR = define_operator("omni_rope_index" + infer_schema(_compute, mutates_args=()), _compute, _shapes)
