"""rope_index: a replacement for ``get_rope_index`` of the vision-language models in Transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.library import infer_schema

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.integrations.hf.omni_rope_index import OmniRopeIndex
from mmpos.integrations.hf.token_types import (
    IMAGE,
    VIDEO,
    Ids,
    TokenTypes,
    check_tensors,
    ids_and_deltas,
    merge_grids,
    on_host,
    scan_tensors,
    shapes,
)
from mmpos.integrations.models.from_config import audio_chunk, from_hf_config, thinker
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import AXES, DELTA, FIRST_SEGMENT, HEIGHT, NEXT_POSITION, OFFSET, WIDTH
from mmpos.rotary.hf_config import Fields
from mmpos.rotary.hf_models import MODEL_TYPES, TRANSFORMERS, ModelType
from mmpos.rotary.memory import is_plain
from mmpos.rotary.operators import define_operator
from mmpos.schemes import MRopeTransformers, TMRope, TMRopeQwen3, XDRope
from mmpos.schemes.base import Grids, Placement
from mmpos.schemes.mrope import TimedMRope
from mmpos.segments.kinds import GRID
from mmpos.segments.placeholders import Merging, Placeholders
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import INT32_MAX, IntArray, integer
from mmpos.support.ragged import ragged_arange

__all__ = ["OmniRopeIndex", "RopeIndex", "TimedRopeIndex", "XDRopeIndex", "install", "rope_index", "uninstall"]

Model = TypeVar("Model", bound=nn.Module)

_MROPE = MRopeTransformers()
_TYPES = Placeholders(IMAGE, VIDEO).tokens
_METHOD = "get_rope_index"
_NOT_REPLACED = ("glm_image", "minicpmv4_7")


@dataclass(frozen=True)
class RopeIndex:
    """Function with the same arguments and results as ``get_rope_index`` of Qwen2-VL and the models derived from it.

    The function stores only numbers from the config, so it can be copied and pickled. It runs as a single torch
    operator, so torch.compile can capture it in a graph.

    Args:
        spatial_merge_size: side, in patches, of the square merged into one token.
        temporal_merge_size: number of video frames merged into one.
        frames_apart: whether each frame of a video is a separate grid.
        row_separator: whether each row of an image or frame ends with an extra token of the same type (Hy4).
    """

    spatial_merge_size: int
    temporal_merge_size: int = 1
    frames_apart: bool = False
    row_separator: bool = False

    def __call__(
        self,
        input_ids: Tensor,
        mm_token_type_ids: Tensor,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: object,
    ) -> Ids:
        """Compute the position ids and deltas of a batch.

        Args:
            input_ids: (batch, seq); only the shape, dtype and device are used.
            mm_token_type_ids: (batch, seq) 0 for text, 1 for images, 2 for videos.
            image_grid_thw: (images, 3) frames, height, width before merging; trailing grids without tokens are
                ignored.
            video_grid_thw: (videos, 3) the same for videos.
            attention_mask: (batch, seq); tokens whose mask is 0 are not counted and have the id 0.
            kwargs: ignored, as in Transformers.

        Returns:
            (3, batch, seq) position ids with the dtype of input_ids, and (batch, 1) int64 deltas: new tensors on the
            device of input_ids. A delta is the highest id plus one, minus the number of tokens.

        Raises:
            InvalidInputError: the grids do not match the tokens, or an argument has the wrong shape.
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
        tensors = check_tensors(
            input_ids=input_ids,
            mm_token_type_ids=mm_token_type_ids,
            image_grid_thw=image_grid_thw,
            video_grid_thw=video_grid_thw,
            attention_mask=attention_mask,
        )
        compute = _compute if is_plain(*tensors) else _OPERATOR
        ids: Ids = compute(
            input_ids, mm_token_type_ids, image_grid_thw, video_grid_thw, attention_mask, intervals,
            self.spatial_merge_size, self.temporal_merge_size, self.frames_apart, self.row_separator,
        )  # fmt: skip
        return ids


@dataclass(frozen=True)
class TimedRopeIndex(RopeIndex):
    """Function with the same arguments and results as ``get_rope_index`` of Qwen2.5-VL, which places frames by time.

    Args:
        tokens_per_second: ids per second of video.
    """

    tokens_per_second: int = 1

    def __call__(  # type: ignore[override]  # order of arguments as in Qwen2.5-VL
        self,
        input_ids: Tensor,
        mm_token_type_ids: Tensor,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Tensor | Sequence[float | Tensor] | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: object,
    ) -> Ids:
        """Compute the position ids and deltas of a batch.

        Args:
            input_ids: as for RopeIndex.
            mm_token_type_ids: as for RopeIndex.
            image_grid_thw: as for RopeIndex.
            video_grid_thw: as for RopeIndex.
            second_per_grid_ts: seconds between frames, one number per video; None stands for one second. Frame ids are
                rounded down exactly as in Transformers: the seconds are multiplied first by tokens_per_second (a tensor
                in its own dtype, a list as Python floats), and then by the frame index.
            attention_mask: as for RopeIndex.
            kwargs: ignored, as in Transformers.

        Raises:
            InvalidInputError: as for RopeIndex; also if an entry of second_per_grid_ts is not a number, is negative, or
                leads to ids beyond int32.
        """
        intervals = None
        if isinstance(video_grid_thw, Tensor):
            intervals = _intervals(second_per_grid_ts, self.tokens_per_second, len(video_grid_thw))
        return self._ids(input_ids, mm_token_type_ids, image_grid_thw, video_grid_thw, attention_mask, intervals)


def _intervals(seconds: Tensor | Sequence[float | Tensor] | None, rate: int, videos: int) -> Tensor:
    """Return the (videos,) distances in ids between frames, with the dtype in which Transformers computes them."""
    if seconds is None:
        return torch.full((videos,), rate)
    if isinstance(seconds, Tensor):
        if seconds.is_complex():
            raise InvalidInputError(f"second_per_grid_ts: got {seconds.dtype}, want real numbers")
        return rate * seconds
    if not isinstance(seconds, list | tuple | np.ndarray):
        raise InvalidInputError(f"second_per_grid_ts: got {type(seconds).__name__}, want a tensor or a list")
    for video, each in enumerate(seconds):
        _check_seconds(f"second_per_grid_ts[{video}]", each)
    if any(isinstance(each, Tensor) for each in seconds):
        return rate * torch.stack([torch.as_tensor(each) for each in seconds])
    if all(isinstance(each, int) for each in seconds):
        return rate * torch.tensor(seconds)
    return (rate * torch.tensor(seconds, dtype=torch.float64)).to(torch.get_default_dtype())


def _check_seconds(name: str, seconds: object) -> None:
    if isinstance(seconds, Tensor):
        if seconds.dim():
            raise InvalidInputError(f"{name}: got shape {tuple(seconds.shape)}, want a number")
    elif isinstance(seconds, int):
        integer(name, seconds, minimum=0, maximum=INT32_MAX)
    elif not isinstance(seconds, Real):
        raise InvalidInputError(f"{name}: got {type(seconds).__name__}, want a number")


@dataclass(frozen=True)
class XDRopeIndex:
    """Function with the same arguments and results as ``get_rope_index`` of HunYuan-VL.

    Args:
        spatial_merge_size: side, in patches, of the square merged into one token.
        axes: number of axes; the last three are the column, the row and the number of the image in the batch; the axes
            before them are the token index.
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
        """Compute the position ids and deltas of a batch.

        Args:
            input_ids: (batch, seq); only the shape, dtype and device are used.
            mm_token_type_ids: (batch, seq) 1 for image tokens: the patches, the token at the end of each row, and
                either one token before and one after the patches, or neither of these two. All other values mean text.
            image_grid_thw: (images, 3) frames, height, width before merging, one per image; frames are ignored. None
                treats all tokens as text.
            attention_mask: (batch, seq); tokens whose mask is 0 are not counted and have the id 0.
            kwargs: ignored, as in Transformers.

        Returns:
            (axes, batch, seq) position ids and (batch, 1) deltas, both with the dtype of input_ids.

        Raises:
            InvalidInputError: the grids do not match the tokens, or an argument has the wrong shape.
        """
        check_tensors(
            input_ids=input_ids,
            mm_token_type_ids=mm_token_type_ids,
            image_grid_thw=image_grid_thw,
            attention_mask=attention_mask,
        )
        tensors = input_ids, mm_token_type_ids, image_grid_thw, attention_mask
        ids: Ids = _XD_OPERATOR(*tensors, self.spatial_merge_size, self.axes)
        return ids


Function = RopeIndex | XDRopeIndex | OmniRopeIndex


@dataclass(frozen=True, eq=False)
class _FrameTimes(MRopeTransformers):
    """Transformers' M-RoPE with precomputed frame ids, because their rounding depends on the float dtype.

    Args:
        times: (frames of all grids,) id of each frame minus the id of its grid's first frame.
    """

    times: IntArray = field(kw_only=True)

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        return TimedMRope.place(self, grids, cursor)

    def frame_ids(self, grids: Grids, grid: IntArray, frame: IntArray) -> IntArray:
        return self.times

    def last_ids(self, grids: Grids) -> IntArray:
        return np.asarray(np.maximum.reduceat(self.times, grids.frames.cumsum() - grids.frames))


@dataclass(frozen=True)
class _Still(MRopeTransformers):
    """Transformers' M-RoPE, but with all frames of a grid at the time of the grid's first frame."""

    linear_in = ("cursor",)

    def last_ids(self, grids: Grids) -> IntArray:
        return np.zeros_like(grids.frames)


_STILL = _Still()


def rope_index(config: object) -> Function:
    """Return a replacement for ``get_rope_index`` of a Transformers model, based on its config.

    The ids and deltas that the replacement returns equal those of the method bit for bit, in the same dtype and on the
    same device. The replacement also supports valid input for which the method fails: adjacent images or frames without
    text between them. As in Transformers, ``second_per_grid_ts=None`` stands for one second per frame of Qwen2.5-VL;
    ``mmpos.place`` raises an error instead.

    Args:
        config: the complete config object of a model, the contents of its config.json as a mapping, or the path of that
            file or its folder.

    Returns:
        A function with the method's parameters, except self. It holds no reference to the model and no state.

    Raises:
        UnsupportedError: mmpos has no such function for the model type.
        InvalidInputError: a field is missing from the config.
    """
    fields = Fields.of(config)
    known, got = MODEL_TYPES.get(fields.kind.model_type), f"config.model_type: got {fields.kind.model_type!r}"
    if fields.kind.model_type in _NOT_REPLACED:
        raise UnsupportedError(f"{got}, whose method is not replaced: call model.model.get_rope_index of Transformers")
    if known is None or not known.has_rope_index:
        types = {name for name, row in MODEL_TYPES.items() if row.has_rope_index}
        want = f"want one of {', '.join(sorted(types.difference(_NOT_REPLACED)))}, as in Transformers {TRANSFORMERS}"
        raise UnsupportedError(f"{got}, {want}; a scheme of your own in mmpos.place computes any other ids")
    if known.scheme == XDRope.name:
        settings = from_hf_config(config)
        return XDRopeIndex(settings.spatial_merge_size, settings.scheme.axes)
    language = thinker(fields)
    vision = language.part("vision_config")
    if vision is None:
        raise language.missing_part("vision_config", "the encoder")
    if known.scheme in (TMRope.name, TMRopeQwen3.name):
        return _omni(language, vision, known)
    names = {"spatial_merge_size": True, "temporal_merge_size": known.merges_frames, "tokens_per_second": known.timed}
    sizes = {name: vision.integer(name, needed=True, minimum=1) for name, used in names.items() if used}
    return (TimedRopeIndex if known.timed else RopeIndex)(
        **sizes, frames_apart=known.frames_apart, row_separator=known.row_separator
    )


def _omni(language: Fields, vision: Fields, known: ModelType) -> OmniRopeIndex:
    """Read only the thinker's config, without the rotation, because ids do not depend on it."""
    image, video, audio = (
        language.integer(f"{kind}_token_id", f"{kind}_token_index", needed=True) for kind in ("image", "video", "audio")
    )
    vision_start, audio_start = (
        language.integer(f"{kind}_start_token_id", needed=True) for kind in ("vision", "audio")
    )
    merge = vision.integer("spatial_merge_size", needed=True, minimum=1)
    rate = language.integer("position_id_per_seconds", needed=True, minimum=1)
    chunk, frames = None, None
    if known.scheme == TMRopeQwen3.name:
        frames = audio_chunk(language)
    else:
        chunk = rate * language.integer("seconds_per_chunk", needed=True, minimum=1)
    return OmniRopeIndex(Placeholders(image, video, audio), merge, rate, vision_start, audio_start, chunk, frames)


def install(model: Model) -> Model:
    """Replace ``get_rope_index`` on a model, and on every model inside it, with a function from ``rope_index``.

    The function is set on the instances, not on their classes. Copies and pickles of the model keep the function.
    Repeated calls are allowed.

    Args:
        model: a Transformers model with or without a head, or a module that contains such a model; changed in place.

    Returns:
        The model itself.

    Raises:
        UnsupportedError: no model inside has ``get_rope_index``, ``rope_index`` does not support the type of one of the
            models, or another function is already set on an instance. In these cases, nothing is changed.
    """
    modules = [module for module in model.modules() if callable(getattr(type(module), _METHOD, None))]
    if not modules:
        raise UnsupportedError(f"model: got {type(model).__name__}, want a model with {_METHOD}")
    for module in modules:
        if not isinstance(vars(module).get(_METHOD, RopeIndex(1)), Function):
            got = f"{type(module).__name__}.{_METHOD}"
            raise UnsupportedError(f"model: got {got} set on the instance, want the method of the class")
    functions = [rope_index(module.config) for module in modules]
    for module, function in zip(modules, functions, strict=True):
        setattr(module, _METHOD, function)
    return model


def uninstall(model: Model) -> Model:
    """Remove the functions that ``install`` set; a model without such functions is left unchanged.

    Args:
        model: as for install.

    Returns:
        The model itself.
    """
    for module in model.modules():
        if isinstance(vars(module).get(_METHOD), Function):
            delattr(module, _METHOD)
    return model


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
    row_separator: bool,
) -> Ids:
    mask = attention_mask if attention_mask is None or attention_mask.is_cpu else attention_mask.bool()
    types, mask, images, videos, intervals = on_host(mm_token_type_ids, mask, image_grid_thw, video_grid_thw, intervals)
    merging = Merging(temporal_merge_size, spatial_merge_size, frames_apart, lenient=True, types=True)
    assert types is not None, "checked by the caller"
    ends = spatial_merge_size if row_separator else 0
    scanned = scan_tensors(types, _TYPES, merging, _with_row_ends(images, ends), _with_row_ends(videos, ends), mask)
    if scanned is not None:
        segments, video_of_segment = scanned
        positions = place(segments, _MROPE) if intervals is None else _timed(segments, video_of_segment, intervals)
        if positions is not None:
            return ids_and_deltas(positions, input_ids)
    tokens = TokenTypes.of(types, None if mask is None else mask.bool())
    merge = np.array([1, spatial_merge_size, spatial_merge_size])
    segments = tokens.segments(
        tokens.used("image_grid_thw", images, IMAGE, merge, separators=int(row_separator)),
        tokens.used(
            "video_grid_thw", videos, VIDEO, merge * [temporal_merge_size, 1, 1], frames_apart, int(row_separator)
        ),
        frames_apart=frames_apart,
    )
    positions = place(segments, _MROPE if intervals is None else _with_times(segments, tokens, intervals))
    return ids_and_deltas(positions, input_ids, tokens)


def _with_row_ends(grid_thw: Tensor | None, merge: int) -> Tensor | None:
    """Widen grids by a merged column unless ``merge`` is 0; the C pass declines those of another shape or no width."""
    if not merge or grid_thw is None or grid_thw.dtype != torch.int64 or grid_thw.dim() != 2 or grid_thw.shape[1] != 3:
        return grid_thw
    widened, width = grid_thw.clone(), grid_thw[:, 2] // merge
    widened[:, 2] = torch.where(width > 0, (width + 1) * merge, 0)
    return widened


def _compute_xd(
    input_ids: Tensor,
    mm_token_type_ids: Tensor,
    image_grid_thw: Tensor | None,
    attention_mask: Tensor | None,
    spatial_merge_size: int,
    axes: int,
) -> Ids:
    mask = None if attention_mask is None else attention_mask.bool()
    is_image = mm_token_type_ids == IMAGE
    types, mask, images = on_host(is_image if image_grid_thw is not None else is_image & False, mask, image_grid_thw)
    tokens = TokenTypes.of(types, mask)
    grids = merge_grids("image_grid_thw", images, np.array([0, spatial_merge_size, spatial_merge_size]))
    segments = tokens.segments(grids, placeholders=Placeholders(IMAGE, rows=(IMAGE, IMAGE)))
    ids, deltas = ids_and_deltas(place(segments, XDRope(axes, "batch")), input_ids, tokens)
    return ids, deltas.to(input_ids.dtype)


def _with_times(segments: SegmentTable, tokens: TokenTypes, intervals: Tensor) -> MRopeTransformers:
    """Return the scheme with the ids of all frames; the ids of video frames are truncated products of floats."""
    lengths, grid = segments.lengths, segments.kind == GRID
    is_video = tokens.types.ravel()[(lengths.cumsum() - lengths)[grid]] == VIDEO
    owner, times = ragged_arange(segments.extents[0, grid])
    in_video = is_video[owner]
    times[in_video] = _times((is_video.cumsum() - 1)[owner[in_video]], times[in_video], int(is_video.sum()), intervals)
    return _FrameTimes(times=times)


def _times(video: IntArray, frame: IntArray, videos: int, intervals: Tensor) -> IntArray:
    """Compute the (frames,) ids relative to the first frame of each video.

    Args:
        video: (frames,) index of the video that contains each frame.
        frame: (frames,) index of each frame in its video.
        videos: number of videos.
        intervals: (videos,) distance between frames in ids.
    """
    if intervals.dim() != 1 or len(intervals) < videos:
        got = f"shape {tuple(intervals.shape)}"
        raise InvalidInputError(f"second_per_grid_ts: got {got}, want at least {videos} values, one per video")
    ids = torch.from_numpy(frame) * intervals[torch.from_numpy(video)]
    wide = ids.double().numpy()
    valid = (wide >= 0) & (wide <= INT32_MAX)
    if not valid.all():
        v = int(video[valid.argmin()])
        got = f"frames that are {intervals[v].item():g} ids apart"
        raise InvalidInputError(f"second_per_grid_ts[{v}]: got {got}, want a number >= 0 and ids within int32")
    times: IntArray = ids.long().numpy()
    return times


def _timed(segments: SegmentTable, videos: IntArray | None, intervals: Tensor) -> PositionTable | None:
    """Compute positions for segments, with each video frame at its time; return None if ids could exceed int32.

    Args:
        segments: the documents.
        videos: (segments,) index of the video in each segment, -1 if the segment is not a video; None if there are no
            videos.
        intervals: (videos,) distance between frames in ids.
    """
    positions = place(segments, _STILL)
    if videos is None or not (is_video := videos >= 0).any():
        return positions
    frames = np.where(is_video, segments.extents[0], 1)
    first = frames.cumsum() - frames
    owner, frame = ragged_arange(frames)
    in_video = is_video[owner]
    frame *= in_video
    times = np.zeros_like(frame)
    times[in_video] = _times(videos[owner[in_video]], frame[in_video], int(videos.max()) + 1, intervals)
    table, documents = positions.table[:, owner], positions.documents.copy()
    table[OFFSET] += frame * table[HEIGHT] * table[WIDTH]
    table[AXES] += times
    last = np.maximum.reduceat(table[AXES], first)
    if last.max() > INT32_MAX:
        return None
    document = np.arange(positions.num_documents).repeat(np.diff(segments.segment_offsets))
    np.maximum.at(documents[NEXT_POSITION], document[is_video], last[is_video] + 1)
    documents[DELTA] += documents[NEXT_POSITION] - positions.next_positions
    documents[FIRST_SEGMENT] = first[documents[FIRST_SEGMENT]]
    return PositionTable(table, documents, positions.num_tokens, False, positions.scheme)


def _xd_shapes(
    input_ids: Tensor, kinds: Tensor, grids: Tensor | None, mask: Tensor | None, merge: int, axes: int
) -> Ids:
    batch, seq = input_ids.shape
    return input_ids.new_empty((axes, batch, seq)), input_ids.new_empty((batch, 1))


_OPERATOR = define_operator("rope_index" + infer_schema(_compute, mutates_args=()), _compute, shapes)
_XD_OPERATOR = define_operator("xd_rope_index" + infer_schema(_compute_xd, mutates_args=()), _compute_xd, _xd_shapes)
