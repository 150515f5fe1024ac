"""Replacement for ``get_rope_index`` of Qwen2.5-Omni and Qwen3-Omni."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise

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
from mmpos.schemes import Grids, TMRope
from mmpos.segments.kinds import AUDIO, CLIP, GRID, TEXT
from mmpos.segments.placeholders import Placeholders
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import INT32_MAX, IntArray
from mmpos.support.ragged import ragged_arange

__all__ = ["OmniRopeIndex"]

_AUDIO, _VISION_START, _AUDIO_START = 3, 4, 5  # additional token types; segments treat these markers as text
_MARKER_NAMES = {_VISION_START: "vision_start_token_id", _AUDIO_START: "audio_start_token_id"}
_MARKERS = {GRID: [_VISION_START], AUDIO: [_AUDIO_START], CLIP: [_VISION_START, _AUDIO_START]}


@dataclass(frozen=True)
class OmniRopeIndex:
    """Function with the same arguments and results as ``get_rope_index`` of the Qwen Omni models.

    In Qwen2.5-Omni, ids have the dtype of input_ids, or int64 if there are no grids; padding has the id 1. Frame times
    are rounded down. In Qwen3-Omni, ids and deltas are float32. Frames have fractional ids, and the tokens after a
    video continue from them. Each id is the sum of the previous id and an increment, rounded to float32. Deltas are
    rounded in the same way: a decoding step adds the number of tokens to the delta and rounds once more. Padding has
    the id 0, or 1 if there are no grids.

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

    def _steps(self, grids: Grids) -> tuple[IntArray, IntArray]:
        return np.zeros_like(grids.frames), np.ones_like(grids.frames)


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
    lengths = None if audio is None else audio_tokens("audio_seqlens", audio.numpy(), audio_chunk)
    try:
        segments = tokens.segments(
            tokens.used("image_grid_thw", images, IMAGE, merge),
            tokens.used("video_grid_thw", videos, VIDEO, merge),
            Placeholders(IMAGE, VIDEO, _AUDIO),
            audio_lengths=None if lengths is None else lengths[lengths > 0],
        )
    except InvalidInputError as error:
        raise InvalidInputError(str(error).replace("audio_lengths", "audio_seqlens")) from None
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
    kind, first = segments.kind, segments.lengths.cumsum() - segments.lengths
    grid = (kind == GRID) | (kind == CLIP)
    is_video = ((kind == CLIP) | (tokens.types.ravel()[first] == VIDEO))[grid]
    frames, videos = segments.extents[0, grid], int(is_video.sum())
    if videos and (seconds is None or seconds.dim() != 1 or len(seconds) < videos):
        got = "None" if seconds is None else f"shape {tuple(seconds.shape)}"
        raise InvalidInputError(f"second_per_grids: got {got}, want at least {videos} values, one per video")
    owner, frame = ragged_arange(frames)
    intervals = torch.ones(frames.size)
    if seconds is not None and videos:
        intervals[torch.from_numpy(is_video)] = seconds[:videos].float()
    intervals = intervals[torch.from_numpy(owner)]
    times = torch.from_numpy(frame) * intervals * rate
    if not (valid := (intervals >= 0) & (times.double() <= INT32_MAX)).all():
        f = int(valid.logical_not().int().argmax())
        got = f"second_per_grids[{is_video[: owner[f]].sum()}]: got {intervals[f].item():g}"
        raise InvalidInputError(f"{got}, want a number >= 0 and ids within int32")
    return times, frames.cumsum() - frames


class _Row:
    """Ids of one document of Qwen3-Omni, filled in token order; every sum is rounded to float32.

    Source: get_rope_index of Qwen3-Omni in Transformers.
    """

    def __init__(self, ids: npt.NDArray[np.float32]) -> None:
        self.ids, self.at, self.next_id = ids, 0, np.float32(0)

    def add_text(self, tokens: int) -> None:
        """Fill the ids of text or markers; the last markers of a document may be missing."""
        ids = self.ids[:, self.at : self.at + tokens]
        ids[:] = self.next_id + np.arange(ids.shape[1], dtype=np.float32)
        self.at += tokens
        self.next_id = self.next_id + np.float32(tokens)

    def add_content(
        self, first: int, markers: int, times: npt.NDArray[np.float32], height: int, width: int, audio: int
    ) -> None:
        """Fill the ids of text up to a content, its start markers, the content and its end markers.

        Frames and audio of a video are interleaved by ascending id, and a frame comes before audio with the same id.
        The comparison uses rounded ids, so the order depends on the position of the video. There are as many end
        markers as start markers; ``times`` are the ids of the frames minus that of the first, and ascend.
        """
        self.add_text(first - markers - self.at)
        self.add_text(markers)
        patches = np.indices((times.size, height, width), np.float32).reshape(3, -1)
        patches[0] = times.repeat(height * width)
        ids = np.concatenate([patches, np.tile(np.arange(audio, dtype=np.float32), (3, 1))], axis=1) + self.next_id
        last_is_audio = not times.size
        if audio and times.size:
            order = ids[0].argsort(kind="stable")
            ids, last_is_audio = ids[:, order], order[-1] >= patches.shape[1]
        self.ids[:, first : first + ids.shape[1]] = ids
        self.at = first + ids.shape[1]
        last = audio - 1 if last_is_audio else max(times[-1], height - 1, width - 1)
        self.next_id = self.next_id + np.float32(last) + np.float32(1)
        for _ in range(markers):  # two sums, as in the method
            self.add_text(1)


def _float_ids(segments: SegmentTable, tokens: TokenTypes, times: npt.NDArray[np.float32], input_ids: Tensor) -> Ids:
    """Compute the float32 ids and deltas of Qwen3-Omni from packed tokens and the times of all frames."""
    assert tokens.cu_seqlens is not None, "packed"
    bounds, offsets = tokens.cu_seqlens.tolist(), segments.segment_offsets.tolist()
    kinds, stops, extents = segments.kind.tolist(), segments.lengths.cumsum().tolist(), segments.extents.T.tolist()
    audios = [0] * len(kinds) if segments.extra_tokens is None else segments.extra_tokens.tolist()
    size, frame = 3 * input_ids.numel(), 0
    numbers, ids = np.zeros(size + len(input_ids), np.float32), np.empty((3, bounds[-1]), np.float32)
    for d, (begin, end) in enumerate(pairwise(bounds)):
        row = _Row(ids[:, begin:end])
        for s in (s for s in range(offsets[d], offsets[d + 1]) if kinds[s] != TEXT):
            (frames, height, width), audio, stop = extents[s], audios[s], stops[s] - begin
            if kinds[s] == AUDIO:
                frames, height, width, audio = 0, 0, 0, width
            markers = _MARKERS[kinds[s]]
            first = stop - len(markers) * (kinds[s] == CLIP) - frames * height * width - audio
            before = first - len(markers)
            if row.at > before or tokens.types[begin + before : begin + first].tolist() != markers:
                want = " and ".join(_MARKER_NAMES[marker] for marker in markers)
                at = f"document {d}, token {first}"
                raise InvalidInputError(f"input_ids: got other tokens before the placeholders at {at}, want {want}")
            row.add_content(first, len(markers), times[frame : frame + frames], height, width, audio)
            frame += frames
        row.add_text(end - begin - row.at)
        numbers[size + d] = row.ids.max() + np.float32(1) - np.float32(end - begin)
    numbers[:size].reshape(3, -1)[:, tokens.packed_index] = ids
    return on_device(numbers, input_ids, 3)


def _shapes(input_ids: Tensor, *arguments: object) -> Ids:
    ids, deltas = shapes(input_ids)
    return (ids, deltas) if arguments[-1] is None else (ids.float(), deltas.float())  # the last one is audio_chunk


_OPERATOR = define_operator("omni_rope_index" + infer_schema(_compute, mutates_args=()), _compute, _shapes)
