"""rope_index: a function in the place of ``get_rope_index`` of vision-language models of Transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.integrations.models.from_config import MODEL_TYPES, from_hf_config
from mmpos.integrations.models.settings import ModelSettings
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.rotary.hf_config import Fields
from mmpos.rotary.operators import outside_of_graphs
from mmpos.schemes import MRopeTransformers, TMRope, XDRope
from mmpos.schemes.base import Grids, Pieces, Placement, check_pieces
from mmpos.segments.kinds import CLIP, GRID
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import Array, IntArray, int_array
from mmpos.support.ragged import ragged_arange

__all__ = ["OmniRopeIndex", "RopeIndex", "TimedRopeIndex", "XDRopeIndex", "install", "rope_index", "uninstall"]

Ids = tuple[Tensor, Tensor]
"""(axes, batch, seq) position ids and (batch, 1) deltas."""

Model = TypeVar("Model", bound=nn.Module)

_MODEL_TYPES = (
    *("cohere_compass", "cosmos3_edge", "cosmos3_omni"),
    *("ernie4_5_vl_moe", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl"),
    *("hunyuan_vl", "qwen2_5_omni", "qwen2_5_omni_thinker"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp"),
)
"""Model types with a function here: by MODEL_TYPES OmniRopeIndex, TimedRopeIndex, XDRopeIndex or RopeIndex."""

_MROPE = MRopeTransformers()

_METHOD = "get_rope_index"
_IMAGE, _VIDEO, _AUDIO = 1, 2, 3  # of mm_token_type_ids; text is 0


@dataclass(frozen=True)
class RopeIndex:
    """Function with the arguments and the results of ``get_rope_index`` of Qwen2-VL and those that follow it.

    It keeps numbers of the config alone, so that it can be copied and pickled, and what it does is one operator of
    torch, so that graphs of torch.compile hold it.

    Args:
        spatial_merge_size: patches merged along each side into one token.
        temporal_merge_size: frames of a video merged into one.
        frames_apart: every frame of a video is a grid of its own.
    """

    spatial_merge_size: int
    temporal_merge_size: int = 1
    frames_apart: bool = False

    def __call__(
        self,
        input_ids: Tensor,
        mm_token_type_ids: Tensor,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: object,
    ) -> Ids:
        """Compute the position ids of a batch, and by how much they run ahead of its tokens.

        Args:
            input_ids: (batch, seq); only shape, dtype and device count.
            mm_token_type_ids: (batch, seq) 0 for text, 1 for images, 2 for videos.
            image_grid_thw: (images, 3) frames, height, width before merging; those that no token is left for are
                passed over.
            video_grid_thw: (videos, 3) likewise.
            attention_mask: (batch, seq); tokens under a 0 are left out, and have the id 0.
            kwargs: ignored, as there.

        Returns:
            (3, batch, seq) position ids of the dtype of input_ids, and (batch, 1) int64: the highest id plus one less
            the number of tokens; new tensors on the device of input_ids.

        Raises:
            InvalidInputError: grids that do not fit the tokens, or arguments of other shapes.
        """
        return self._ids(input_ids, mm_token_type_ids, image_grid_thw, video_grid_thw, attention_mask, None)

    def _ids(
        self,
        input_ids: Tensor,
        mm_token_type_ids: Tensor,
        image_grid_thw: Tensor | None,
        video_grid_thw: Tensor | None,
        attention_mask: Tensor | None,
        intervals: Tensor | None,
    ) -> Ids:
        named = {
            "input_ids": input_ids,
            "mm_token_type_ids": mm_token_type_ids,
            "image_grid_thw": image_grid_thw,
            "video_grid_thw": video_grid_thw,
            "attention_mask": attention_mask,
        }
        _check_tensors(**named)
        merges = self.spatial_merge_size, self.temporal_merge_size, self.frames_apart
        ids: Ids = _OPERATOR(*named.values(), intervals, *merges)
        return ids


@dataclass(frozen=True)
class TimedRopeIndex(RopeIndex):
    """Function with the arguments and the results of ``get_rope_index`` of Qwen2.5-VL, whose videos are timed.

    Args:
        tokens_per_second: ids that a second of a video takes.
    """

    tokens_per_second: int = 1

    def __call__(  # type: ignore[override]  # their order is that of Qwen2.5-VL
        self,
        input_ids: Tensor,
        mm_token_type_ids: Tensor,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Tensor | Sequence[float | Tensor] | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: object,
    ) -> Ids:
        """Compute the position ids of a batch, and by how much they run ahead of its tokens.

        Args:
            input_ids: as for RopeIndex, and the others likewise.
            mm_token_type_ids: likewise.
            image_grid_thw: likewise.
            video_grid_thw: likewise.
            second_per_grid_ts: seconds between frames, one per video; None is a second. Ids of frames are rounded down
                as Transformers rounds them: seconds of a tensor are multiplied in its dtype, and those of a list as
                Python's floats, before both meet the frames.
            attention_mask: likewise.
            kwargs: ignored, as there.
        """
        intervals = None
        if isinstance(video_grid_thw, Tensor):
            intervals = _intervals(second_per_grid_ts, self.tokens_per_second, len(video_grid_thw))
        return self._ids(input_ids, mm_token_type_ids, image_grid_thw, video_grid_thw, attention_mask, intervals)


def _intervals(seconds: Tensor | Sequence[float | Tensor] | None, rate: int, videos: int) -> Tensor:
    """Multiply seconds by the ids of a second, in the dtypes of Transformers: (videos,), of any dtype."""
    if seconds is None:
        return torch.full((videos,), rate)
    if isinstance(seconds, Tensor):
        return rate * seconds
    if any(isinstance(each, Tensor) for each in seconds):
        return rate * torch.stack([torch.as_tensor(each) for each in seconds])
    if all(isinstance(each, int) for each in seconds):
        return rate * torch.tensor(seconds)
    return (rate * torch.tensor(seconds, dtype=torch.float64)).to(torch.get_default_dtype())


@dataclass(frozen=True)
class XDRopeIndex:
    """Function with the arguments and the results of ``get_rope_index`` of HunYuan-VL.

    Args:
        spatial_merge_size: patches merged along each side into one token.
        axes: axes of ids: those of places, then column, row and number of the image in the batch.
    """

    spatial_merge_size: int
    axes: int

    def __call__(
        self,
        input_ids: Tensor,
        mm_token_type_ids: Tensor,
        image_grid_thw: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: object,
    ) -> Ids:
        """Compute the position ids of a batch, and by how much they run ahead of its tokens.

        Args:
            input_ids: (batch, seq); only shape, dtype and device count.
            mm_token_type_ids: (batch, seq) 1 for images, with the token at the end of every row, and one before and one
                after the patches or neither; all else is text.
            image_grid_thw: (images, 3) frames, height, width before merging, one for each image; frames do not count.
                None counts all tokens as text.
            attention_mask: (batch, seq); tokens under a 0 are left out, and have the id 0.
            kwargs: ignored, as there.

        Returns:
            (axes, batch, seq) position ids and (batch, 1) deltas, both of the dtype of input_ids.

        Raises:
            InvalidInputError: grids that do not fit the tokens, or arguments of other shapes.
        """
        named = {
            "input_ids": input_ids,
            "mm_token_type_ids": mm_token_type_ids,
            "image_grid_thw": image_grid_thw,
            "attention_mask": attention_mask,
        }
        _check_tensors(**named)
        ids: Ids = _XD_OPERATOR(*named.values(), self.spatial_merge_size, self.axes)
        return ids


@dataclass(frozen=True)
class OmniRopeIndex:
    """Function with the arguments and the results of ``get_rope_index`` of Qwen2.5-Omni.

    Args:
        image_token_id: the placeholder of image patches.
        video_token_id: that of video patches.
        audio_token_id: that of audio.
        spatial_merge_size: patches merged along each side into one token.
        tokens_per_second: ids that a second takes.
        tokens_per_chunk: ids of a chunk, of which a clip has first the frames and then the audio.
    """

    image_token_id: int
    video_token_id: int
    audio_token_id: int
    spatial_merge_size: int
    tokens_per_second: int
    tokens_per_chunk: int

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
                passed over.
            video_grid_thw: (videos, 3) likewise.
            attention_mask: (batch, seq); tokens under another value than 1 are left out, and have the id 1.
            use_audio_in_video: whether videos may have their audio between their frames.
            audio_seqlens: (audios,) frames of each audio before the encoder, to be compared with the tokens; or None.
            second_per_grids: (videos,) seconds between frames; multiplied as float32, then rounded down.

        Returns:
            (3, batch, seq) position ids of the dtype of input_ids, int64 where there are no grids, and (batch, 1)
            deltas: the highest id plus one less the number of tokens.

        Raises:
            InvalidInputError: grids or audio that do not fit the tokens, or arguments of other shapes.
        """
        named = {"image_grid_thw": image_grid_thw, "video_grid_thw": video_grid_thw, "attention_mask": attention_mask}
        if input_ids is None or (image_grid_thw is None and video_grid_thw is None):
            if attention_mask is None:
                raise InvalidInputError("attention_mask: got None, want a tensor, where there are no grids")
            return _count(attention_mask)
        more = {"audio_seqlens": audio_seqlens, "second_per_grids": second_per_grids}
        _check_tensors(input_ids=input_ids, **named, **more)
        kinds = torch.zeros_like(input_ids, dtype=torch.uint8)
        for kind, token in enumerate((self.image_token_id, self.video_token_id, self.audio_token_id), 1):
            kinds += kind * (input_ids == token)
        sizes = self.spatial_merge_size, self.tokens_per_second, self.tokens_per_chunk
        given = (*named.values(), *more.values(), use_audio_in_video)
        ids: Ids = _OMNI_OPERATOR(input_ids, kinds, *given, *sizes)
        return ids


Function = RopeIndex | XDRopeIndex | OmniRopeIndex


def _count(attention_mask: Tensor) -> Ids:
    """Count the tokens of each row that a mask leaves; those under a 0 have the id 1."""
    ids = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
    deltas = ids.amax(-1, keepdim=True) + 1 - attention_mask.sum(-1, keepdim=True)
    return ids.repeat(3, 1, 1), deltas


def _check_tensors(**named: object) -> None:
    """Refuse arguments that are no tensors, and those with a value per token in other shapes than input_ids."""
    tensors = {}
    for name, value in named.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif value is not None or name in ("input_ids", "mm_token_type_ids"):
            raise InvalidInputError(f"{name}: got {type(value).__name__}, want a tensor")
    shape = tuple(tensors["input_ids"].shape)
    if len(shape) != 2:
        raise InvalidInputError(f"input_ids: got shape {shape}, want (batch, seq)")
    for name in ("mm_token_type_ids", "attention_mask"):
        if name in tensors and tensors[name].shape != shape:
            raise InvalidInputError(f"{name}: got shape {tuple(tensors[name].shape)}, want {shape} as input_ids")


@dataclass(frozen=True, eq=False)
class _FrameTimes(MRopeTransformers):
    """M-RoPE of Transformers with the id of every frame given, since floats round these in their own way.

    Args:
        times: (frames of all grids,) ids after the first of the grid.
    """

    times: IntArray = field(kw_only=True)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        owner, frame = ragged_arange(grids.frames)
        check_pieces(self, owner.size)
        height, width = grids.height[owner], grids.width[owner]
        pieces = Pieces(owner, height * width, frame * height * width, height, width)
        start = cursor[owner]
        return Placement([start + self.times, start, start], None, [0, 1, 0], [0, 0, 1], pieces=pieces)

    def next_after(self, grids: Grids, cursor: IntArray) -> IntArray:
        last = np.maximum.reduceat(self.times, grids.frames.cumsum() - grids.frames)
        return cursor + np.maximum(last + 1, self.advance(grids))


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


def rope_index(config: object) -> Function:
    """Make a function in the place of ``get_rope_index`` of a model of Transformers, from its config.

    Its ids and deltas are those of the method, bit for bit, in the same dtype and on the same device. It also answers
    where the method fails though the input is right: images, or frames, that touch without text between them.

    Args:
        config: the whole config object of a model, the mapping of its config.json, or the folder with that.

    Returns:
        a function with the parameters of the method, without self; it has no reference to the model, and no state.

    Raises:
        UnsupportedError: a model type without such a function here.
        InvalidInputError: the config lacks a field.
    """
    fields = Fields.of(config)
    known = MODEL_TYPES.get(fields.model_type)
    if known is None or fields.model_type not in _MODEL_TYPES:
        got, want = fields.model_type, ", ".join(sorted(_MODEL_TYPES))
        raise UnsupportedError(f"config.model_type: got {got!r}, want one of {want}")
    if known.row_separator:
        settings = from_hf_config(config)
        return XDRopeIndex(settings.spatial_merge_size, settings.scheme.axes)
    if known.scheme == TMRope.name:
        return _omni(from_hf_config(config))
    vision = fields.part("vision_config")
    if vision is None:
        raise fields.missing("vision_config", "the config of the encoder")
    named = {"spatial_merge_size": True, "temporal_merge_size": known.merges_frames, "tokens_per_second": known.timed}
    sizes = {name: vision.integer(name, needed=True, minimum=1) or 1 for name, read in named.items() if read}
    return (TimedRopeIndex if known.timed else RopeIndex)(**sizes, frames_apart=known.frames_apart)


def _omni(settings: ModelSettings) -> OmniRopeIndex:
    scheme = settings.scheme
    assert isinstance(scheme, TMRope)
    tokens = {f"{name}_token_id": getattr(settings, f"{name}_token_id") for name in ("image", "video", "audio")}
    for name, token in tokens.items():
        if token is None:
            raise InvalidInputError(f"config.{name}: got none, want an integer")
    rate = scheme.tokens_per_second
    if not isinstance(rate, int):
        raise UnsupportedError(f"config.position_id_per_seconds: got {rate}, want an integer")
    chunk = int(rate * scheme.seconds_per_chunk)
    return OmniRopeIndex(
        **tokens, spatial_merge_size=settings.spatial_merge_size, tokens_per_second=rate, tokens_per_chunk=chunk
    )


def install(model: Model) -> Model:
    """Put ``rope_index`` in the place of ``get_rope_index`` of a model, and of every model inside it.

    The method is covered on the instance alone; copies and pickles of the model keep the function. A model in which it
    is installed may be given again.

    Args:
        model: a model of Transformers, with a head or without, or a module around one; changed in place.

    Returns:
        the model itself.

    Raises:
        UnsupportedError: no model inside has the method, or one is of a type that rope_index does not know, or has
            another function in its place; nothing is changed then.
    """
    modules = [module for module in model.modules() if callable(getattr(type(module), _METHOD, None))]
    if not modules:
        raise UnsupportedError(f"model: got {type(model).__name__}, want a model with {_METHOD}")
    for module in modules:
        if not isinstance(vars(module).get(_METHOD, RopeIndex(1)), Function):
            got = f"{type(module).__name__}.{_METHOD}"
            raise UnsupportedError(f"model: got {got} set on the instance, want that of the class")
    functions = [rope_index(module.config) for module in modules]
    for module, function in zip(modules, functions, strict=True):
        setattr(module, _METHOD, function)
    return model


def uninstall(model: Model) -> Model:
    """Remove the functions that ``install`` put in; a model without them is left as it is.

    Args:
        model: as for install.

    Returns:
        the model itself.
    """
    for module in model.modules():
        if isinstance(vars(module).get(_METHOD), Function):
            delattr(module, _METHOD)
    return model


# The operator. The host reads everything in one copy, and gives the result back in one.


def _compute(
    input_ids: Tensor,
    mm_token_type_ids: Tensor,
    image_grid_thw: Tensor | None,
    video_grid_thw: Tensor | None,
    attention_mask: Tensor | None,
    intervals: Tensor | None,
    spatial_merge_size: int,
    temporal_merge_size: int,
    frames_apart: bool,
) -> Ids:
    mask = None if attention_mask is None else attention_mask.bool()
    types, mask, images, videos, intervals = _on_host(
        mm_token_type_ids, mask, image_grid_thw, video_grid_thw, intervals
    )
    tokens = _Tokens.of(types, mask)
    merge = np.array([1, spatial_merge_size, spatial_merge_size])
    segments = SegmentTable.from_input_ids(
        tokens.types,
        tokens.used("image_grid_thw", images, _IMAGE, merge),
        tokens.used("video_grid_thw", videos, _VIDEO, merge * [temporal_merge_size, 1, 1], frames_apart),
        image_token_id=_IMAGE,
        video_token_id=_VIDEO if tokens.videos or videos is not None else None,
        cu_seqlens=tokens.cu_seqlens,
        attention_mask=tokens.real if tokens.cu_seqlens is None else None,
        frames_apart=frames_apart,
    )
    positions = place(segments, _MROPE if intervals is None else _timed(segments, tokens, intervals))
    return tokens.answer(positions, input_ids)


def _compute_xd(
    input_ids: Tensor,
    mm_token_type_ids: Tensor,
    image_grid_thw: Tensor | None,
    attention_mask: Tensor | None,
    spatial_merge_size: int,
    axes: int,
) -> Ids:
    mask = None if attention_mask is None else attention_mask.bool()
    is_image = mm_token_type_ids == _IMAGE
    types, mask, images = _on_host(is_image if image_grid_thw is not None else is_image & False, mask, image_grid_thw)
    tokens = _Tokens.of(types, mask)
    grids = _merged("image_grid_thw", images, np.array([0, spatial_merge_size, spatial_merge_size]))
    segments = SegmentTable.from_input_ids(
        tokens.types,
        grids,
        image_token_id=_IMAGE,
        cu_seqlens=tokens.cu_seqlens,
        attention_mask=tokens.real if tokens.cu_seqlens is None else None,
        row_separator=True,
    )
    ids, deltas = tokens.answer(place(segments, XDRope(axes, "batch")), input_ids)
    return ids, deltas.to(input_ids.dtype)


def _compute_omni(
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
    tokens_per_chunk: int,
) -> Ids:
    mask = None if attention_mask is None else attention_mask == 1
    types, mask, images, videos, audio, seconds = _on_host(
        kinds, mask, image_grid_thw, video_grid_thw, audio_seqlens, second_per_grids
    )
    tokens = _Tokens.of(types, mask, most=_AUDIO)
    merge = np.array([1, spatial_merge_size, spatial_merge_size])
    segments = SegmentTable.from_input_ids(
        tokens.types,
        tokens.used("image_grid_thw", images, _IMAGE, merge),
        tokens.used("video_grid_thw", videos, _VIDEO, merge),
        image_token_id=_IMAGE,
        video_token_id=_VIDEO,
        audio_token_id=_AUDIO,
        audio_lengths=None if audio is None else _heard(audio),
        cu_seqlens=tokens.cu_seqlens,
        attention_mask=tokens.real if tokens.cu_seqlens is None else None,
    )
    if not use_audio_in_video and (segments.kind == CLIP).any():
        raise InvalidInputError("use_audio_in_video: got False, want True for a video with audio between its frames")
    seconds_per_chunk = Fraction(tokens_per_chunk, tokens_per_second)
    times, begins = _omni_times(segments, tokens, seconds, tokens_per_second)
    scheme = _OmniTimes(tokens_per_second, "transformers", seconds_per_chunk, times=times, begins=begins)
    return tokens.answer(place(segments, scheme), input_ids, padding=1)


def _heard(frames: Tensor) -> IntArray:
    """Count the tokens that the encoder makes of frames of audio, (audios,), without those that give none."""
    tokens = ((int_array("audio_seqlens", frames.numpy(), (None,)) - 1) // 2 - 1) // 2 + 1
    return tokens[tokens > 0]


def _omni_times(
    segments: SegmentTable, tokens: _Tokens, seconds: Tensor | None, rate: int
) -> tuple[IntArray, IntArray]:
    """Give the ids of all frames after the first of their grid, as float32 has them, and the first frame of each."""
    grid = (segments.kind == GRID) | (segments.kind == CLIP)
    frames, lengths = segments.extents[0, grid], segments.lengths
    clip = (segments.kind == CLIP)[grid]
    is_video = clip | (tokens.types.ravel()[(lengths.cumsum() - lengths)[grid]] == _VIDEO)
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
    # They are rounded once more, to float32, on their way to the ids.
    times = (torch.from_numpy(frame) * between[torch.from_numpy(owner)] * rate).long().float().long()
    return times.numpy(), frames.cumsum() - frames


def _shapes(input_ids: Tensor, *_: object) -> Ids:
    """Give results without values, for graphs that are traced."""
    batch, seq = input_ids.shape
    return input_ids.new_empty((3, batch, seq)), input_ids.new_empty((batch, 1), dtype=torch.int64)


def _xd_shapes(
    input_ids: Tensor, kinds: Tensor, grids: Tensor | None, mask: Tensor | None, merge: int, axes: int
) -> Ids:
    batch, seq = input_ids.shape
    return input_ids.new_empty((axes, batch, seq)), input_ids.new_empty((batch, 1))


def _on_host(*tensors: Tensor | None) -> list[Tensor | None]:
    """Copy tensors to the host, those of one device in one copy."""
    away = [tensor for tensor in tensors if tensor is not None and tensor.device.type != "cpu"]
    if len({tensor.device for tensor in away}) != 1:
        return [tensor if tensor is None else tensor.cpu() for tensor in tensors]
    away.sort(key=lambda tensor: -tensor.element_size())  # the widest first, so that all stand at multiples of theirs
    joined = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in away]).cpu()
    parts = joined.split([tensor.numel() * tensor.element_size() for tensor in away])
    copies = {id(one): part.view(one.dtype).view(one.shape) for one, part in zip(away, parts, strict=True)}
    return [copies.get(id(tensor), tensor) for tensor in tensors]


@dataclass(frozen=True, eq=False)
class _Tokens:
    """Token types of a batch.

    Args:
        types: (batch, seq), 0 under padding; or (tokens,) those alone that a mask with holes leaves.
        videos: whether tokens of videos are among them.
        real: (batch, seq) the mask, (batch · seq,) where it has holes; None where it leaves everything.
        cu_seqlens: (batch + 1,) first token of each row, then the total, if the mask has holes; else None.
    """

    types: IntArray
    videos: bool
    real: npt.NDArray[np.bool_] | None = None
    cu_seqlens: IntArray | None = None

    @classmethod
    def of(cls, mm_token_type_ids: Tensor | None, mask: Tensor | None, most: int = _VIDEO) -> _Tokens:
        """Read token types, at most ``most``, and a mask of the same shape, both on the host."""
        assert mm_token_type_ids is not None, "the call has looked"
        types = mm_token_type_ids.numpy()
        if types.dtype.kind not in "biu":
            raise InvalidInputError(f"mm_token_type_ids: got {mm_token_type_ids.dtype}, want integers")
        if types.dtype not in (np.int32, np.int64):
            types = types.astype(np.int64)
        if mask is None or (real := mask.numpy()).all():
            return cls(types, _has_videos(types, most))
        lengths = real.sum(axis=1)
        if not lengths.all():
            row = int((lengths == 0).argmax())
            raise InvalidInputError(f"attention_mask[{row}]: got no tokens, want at least one")
        runs = (real[:, 1:] & ~real[:, :-1]).sum(axis=1) + real[:, 0]
        if (runs == 1).all():
            types = np.where(real, types, np.zeros((), types.dtype))
            return cls(types, _has_videos(types, most), real)
        types = types[real]
        return cls(types, _has_videos(types, most), real.ravel(), np.append(0, lengths.cumsum()))

    def used(
        self, name: str, grid_thw: Tensor | None, kind: int, merge: IntArray, frames_apart: bool = False
    ) -> IntArray | None:
        """Merge the grids of a kind, and leave those at the end away that no token is left for."""
        grids = _merged(name, grid_thw, merge)
        if grids is None:
            return None
        room = int(np.count_nonzero(self.types == kind))
        stops = grids.prod(axis=1, dtype=np.float64).cumsum()
        if not stops.size or stops[-1] <= room:
            return grids
        grids = grids[: np.searchsorted(stops, room) + (room > 0)]
        if frames_apart and room:
            grids = grids.repeat(np.minimum(grids[:, 0], room), axis=0)
            grids[:, 0] = 1
            stops = grids.prod(axis=1, dtype=np.float64).cumsum()
            grids = grids[: np.searchsorted(stops, room) + 1]
        return grids

    def answer(self, positions: PositionTable, input_ids: Tensor, padding: int = 0) -> Ids:
        """Copy ids, with this one under the mask, and int64 deltas to the device of input_ids, at once."""
        (batch, seq), axes = input_ids.shape, positions.axes
        size = axes * batch * seq
        numbers = np.empty(size + batch, np.int64)
        dense, deltas = numbers[:size].reshape(axes, -1), numbers[size:]
        if self.cu_seqlens is None:
            positions.dense(out=dense)
        else:
            dense[:] = 0
            dense[:, self.real] = positions.dense()
        if padding and self.real is not None:
            dense[:, ~self.real.ravel()] = padding
        deltas[:] = positions.deltas
        moved = torch.from_numpy(numbers).to(input_ids.device, non_blocking=input_ids.device.type == "cuda")
        ids, after = moved.split([size, batch])
        # A model keeps the deltas, which are not to hold the memory of the ids.
        return ids.view(axes, batch, seq).to(input_ids.dtype), after.view(batch, 1).clone()


def _merged(name: str, grid_thw: Tensor | None, merge: IntArray) -> IntArray | None:
    """Merge patches; a 0 in ``merge`` makes that size 1."""
    if grid_thw is None:
        return None
    grids = int_array(name, grid_thw.numpy(), (None, 3))
    small = (grids < merge).any(axis=1)
    if small.any():
        g, least = int(small.argmax()), tuple(merge.tolist())
        raise InvalidInputError(f"{name}[{g}]: got {tuple(grids[g].tolist())}, want at least {least}, one token")
    return np.where(merge > 0, grids // np.maximum(merge, 1), 1)


def _has_videos(types: Array, most: int) -> bool:
    """Check that types are 0 to ``most``; returns whether there are others than text and images."""
    least, highest = (int(types.min()), int(types.max())) if types.size else (0, 0)
    if least < 0 or highest > most:
        got = least if least < 0 else highest
        raise InvalidInputError(f"mm_token_type_ids: got {got}, want 0, {_IMAGE} or {_VIDEO}")
    return highest >= _VIDEO


def _timed(segments: SegmentTable, tokens: _Tokens, intervals: Tensor) -> MRopeTransformers:
    """Give frames of videos the ids that products of floats have when they are cut off."""
    lengths, grid = segments.lengths, segments.kind == GRID
    is_video = tokens.types.ravel()[(lengths.cumsum() - lengths)[grid]] == _VIDEO
    videos = int(is_video.sum())
    if intervals.dim() != 1 or len(intervals) < videos:
        got = f"shape {tuple(intervals.shape)}"
        raise InvalidInputError(f"second_per_grid_ts: got {got}, want at least {videos} values, one per video")
    owner, times = ragged_arange(segments.extents[0, grid])
    moving = is_video[owner]
    video = torch.from_numpy((is_video.cumsum() - 1)[owner[moving]])
    times[moving] = (torch.from_numpy(times[moving]) * intervals[video]).long().numpy()
    return _FrameTimes(times=times)


# Not by ``custom_op``, whose first call takes seconds: it imports what compiles graphs.
_LIBRARY = torch.library.Library("mmpos", "FRAGMENT")
_LIBRARY.define(
    "rope_index(Tensor input_ids, Tensor mm_token_type_ids, Tensor? image_grid_thw, Tensor? video_grid_thw, "
    "Tensor? attention_mask, Tensor? intervals, int spatial_merge_size, int temporal_merge_size, bool frames_apart)"
    " -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl("rope_index", outside_of_graphs(_compute), "CompositeExplicitAutograd")
torch.library.register_fake("mmpos::rope_index", _shapes, lib=_LIBRARY)
_LIBRARY.define(
    "xd_rope_index(Tensor input_ids, Tensor mm_token_type_ids, Tensor? image_grid_thw, Tensor? attention_mask, "
    "int spatial_merge_size, int axes) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl("xd_rope_index", outside_of_graphs(_compute_xd), "CompositeExplicitAutograd")
torch.library.register_fake("mmpos::xd_rope_index", _xd_shapes, lib=_LIBRARY)
_OPERATOR = torch.ops.mmpos.rope_index.default
_LIBRARY.define(
    "omni_rope_index(Tensor input_ids, Tensor kinds, Tensor? image_grid_thw, Tensor? video_grid_thw, "
    "Tensor? attention_mask, Tensor? audio_seqlens, Tensor? second_per_grids, bool use_audio_in_video, "
    "int spatial_merge_size, int tokens_per_second, int tokens_per_chunk) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl("omni_rope_index", outside_of_graphs(_compute_omni), "CompositeExplicitAutograd")
torch.library.register_fake("mmpos::omni_rope_index", _shapes, lib=_LIBRARY)
_OMNI_OPERATOR = torch.ops.mmpos.omni_rope_index.default
_XD_OPERATOR = torch.ops.mmpos.xd_rope_index.default
