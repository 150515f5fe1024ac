"""Convert batches to the arguments of unpatched Transformers models, and processor outputs to examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmpos.data.batch import Batch, ModelArguments
from mmpos.data.collate import Examples, PackedCollator, PaddedCollator
from mmpos.data.examples import IGNORE_INDEX, Example, Location, Record, RecordError
from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.images import ImageProcessor
from mmpos.positions.table import PositionTable
from mmpos.rotary.hf_models import MODELS, UNLISTED
from mmpos.schemes import Grid2D, Scheme
from mmpos.segments.placeholders import Placeholders
from mmpos.segments.table import GRID, SegmentTable, token_types
from mmpos.sequence.builder import InterleavedSequence
from mmpos.support.checks import IntArray, counted, host_array, int_array
from mmpos.support.ragged import ragged_arange

__all__ = ["MODEL_INPUTS", "Model", "ModelCollator", "ModelInputs", "ProcessedInputs"]


@dataclass(frozen=True)
class ModelInputs:
    """Arguments that models of one type expect for a pack, besides input_ids, labels and the document bounds.

    Args:
        text_row: whether position_ids are [4, batch, seq] with the text row, which gives the document starts, first;
            else they are [batch, seq].
        images: whether the model takes mm_token_type_ids and pixel_values with image_grid_thw, or those of videos.
        planes: whether pixel_values are (patches, 3, patch_size, patch_size) instead of (patches, values).
        seq_idx: whether layers without attention take the document index of each token.
        expert_types: whether moe_mm_token_type_ids select experts, with image markers counted as images.
    """

    text_row: bool = False
    images: bool = False
    planes: bool = False
    seq_idx: bool = False
    expert_types: bool = False


MODEL_INPUTS: Mapping[str, ModelInputs] = MappingProxyType(
    {
        name: ModelInputs(**dict.fromkeys(row.inputs, True))
        for name, row in MODELS.items()
        if isinstance(row.inputs, tuple)
    }
)
"""Model types of Transformers 5.24 that separate the documents of a pack, with their arguments."""


class Model(Protocol):
    """Protocol of the model settings that `mmpos.from_hf_config` returns."""

    @property
    def model_type(self) -> str:
        """Name of the model type."""

    @property
    def scheme(self) -> Scheme:
        """Positions in the language model."""

    @property
    def vision_scheme(self) -> Grid2D | None:
        """Positions in the vision encoder, which determine the order of patches."""

    @property
    def placeholders(self) -> Placeholders:
        """Tokens that stand for patches."""

    @property
    def image_markers(self) -> tuple[int, int] | None:
        """Tokens before and after an image."""

    @property
    def video_markers(self) -> tuple[int, int] | None:
        """Tokens before and after a video whose frames use the image placeholder."""

    @property
    def spatial_merge_size(self) -> int:
        """Patches merged along each side into one token."""

    @property
    def temporal_merge_size(self) -> int:
        """Frames of a video merged into one."""

    @property
    def temporal_patch_size(self) -> int | None:
        """Frames in a patch."""

    def segments(
        self,
        input_ids: npt.ArrayLike,
        image_grid_thw: npt.ArrayLike | None = None,
        video_grid_thw: npt.ArrayLike | None = None,
        *,
        seconds_per_frame: Sequence[Fraction | float | None] | None = None,
    ) -> SegmentTable:
        """Build the segment table of tokens from the model's processor."""

    def place(self, segments: SegmentTable) -> PositionTable:
        """Place segments with the scheme of the language model."""

    def image_processor(self) -> ImageProcessor:
        """Create the ImageProcessor of the vision encoder."""


def _check_kernels(kind: str) -> None:
    """Raise UnsupportedError if the installed Transformers mixes documents where later versions raise an error."""
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        return  # the model runs elsewhere
    missing = [name for name in ("causal_conv1d", "fla") if find_spec(name) is None]
    if missing and [int(part) for part in installed.split(".")[:2]] < [5, 20]:
        got = f"{kind!r}, whose documents Transformers {installed} mixes in a pack without {' and '.join(missing)}"
        raise UnsupportedError(f"settings.model_type: got {got}; install Transformers >= 5.20, or these packages")


@dataclass(frozen=True)
class ModelCollator:
    """Picklable collator that returns the arguments of an unpatched Transformers model; works with Trainer as well.

    Documents of a pack are separate. FlashAttention reads their bounds from cu_seq_lens_q and
    cu_seq_lens_k, other attention from position_ids. The arguments include use_cache=False: with a cache, which the
    nested config of a language model requests even under Trainer, all tokens of the row would attend to each other.

    Args:
        settings: settings of the model, from `mmpos.from_hf_config`; batches must be placed with the model's scheme.
        images: ImageProcessor that made the patches; None creates one from the settings when needed.
        collate: collator that makes the batch, packed or padded.

    Raises:
        UnsupportedError: models of this type do not separate the documents of a pack, or only with missing kernels.
        InvalidInputError: an argument has the wrong type, or images and settings differ in their patches.
    """

    settings: Model
    images: ImageProcessor | None = None
    collate: PackedCollator | PaddedCollator = field(default_factory=PackedCollator)

    def __post_init__(self) -> None:
        _check_settings(self.settings)
        images: object = self.images
        if images is not None and not isinstance(images, ImageProcessor):
            raise InvalidInputError(f"images: got {type(images).__name__}, want an ImageProcessor")
        collate: object = self.collate
        if not isinstance(collate, PackedCollator | PaddedCollator):
            got = type(collate).__name__
            raise InvalidInputError(f"collate: got {got}, want a PackedCollator or a PaddedCollator")
        kind = self.settings.model_type
        if kind not in MODEL_INPUTS:
            reason = MODELS.get(kind, UNLISTED).inputs or "it is not known to separate the documents of a pack"
            want = ", ".join(sorted(MODEL_INPUTS))
            raise UnsupportedError(f"settings.model_type: got {kind!r} ({reason}), want one of {want}")
        if self.inputs.seq_idx and isinstance(collate, PackedCollator):
            _check_kernels(kind)
        vision = self.settings.vision_scheme
        if self.images is not None and vision is None and self.inputs.images:
            raise UnsupportedError(f"images: got an ImageProcessor, want None: {_OWN_PIXELS} of {kind!r}")
        if self.images is not None and vision is not None:
            sizes: dict[str, object] = {"order": vision.order, "spatial_merge_size": self.settings.spatial_merge_size}
            for name, size in sizes.items():
                if (got := getattr(self.images, name)) != size:
                    raise InvalidInputError(f"images.{name}: got {got!r}, want {size!r} of {kind!r}")

    @property
    def inputs(self) -> ModelInputs:
        """Arguments that the model expects."""
        return MODEL_INPUTS[self.settings.model_type]

    def __call__(self, examples: Examples | Batch) -> dict[str, Any]:
        """Collate examples, or the examples of one or more Packs, into the arguments of the model.

        Args:
            examples: examples, one or more Packs, or a collated Batch on any device.

        Returns:
            use_cache, input_ids, labels and position_ids; for a pack, cu_seq_lens_q, cu_seq_lens_k, max_length_q,
            max_length_k, and seq_idx if the model takes it; for a padded batch, attention_mask; for images,
            mm_token_type_ids, moe_mm_token_type_ids if the model takes it, pixel_values and image_grid_thw before
            merging, or their counterparts for videos. Shifted labels are also returned as shift_labels.

        Raises:
            InvalidInputError: the batch has positions of another scheme or placeholders of another model.
            UnsupportedError: images for a text-only model, images without pixels, or a context-parallel shard.
        """
        batch = examples if isinstance(examples, Batch) else self.collate(examples)
        types = self._token_types(batch)
        self._check(batch, types)
        text = batch.text_positions.long()
        ids = batch.position_ids(torch.int64, text_row=batch.packed) if self.inputs.text_row else text
        rows = {"input_ids": batch.input_ids, "labels": batch.labels, "position_ids": ids}
        if batch.shifted:
            rows["shift_labels"] = batch.labels
        if self.inputs.images:
            rows["mm_token_type_ids"] = types
        if self.inputs.expert_types:
            markers = [batch.input_ids.eq(marker).long() for marker in self.settings.image_markers or ()]
            rows["moe_mm_token_type_ids"] = sum(markers, types)
        bounds: dict[str, Any] = {"attention_mask": batch.attention_mask}
        if batch.packed:
            if self.inputs.seq_idx:
                document = torch.arange(len(batch.cu_seqlens) - 1, dtype=torch.int32, device=batch.device)
                rows["seq_idx"] = document.repeat_interleave(batch.cu_seqlens.diff())
            rows = {name: tensor.unsqueeze(-2) for name, tensor in rows.items()}
            bounds = dict.fromkeys(("max_length_q", "max_length_k"), batch.max_seqlen)
            bounds |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), batch.cu_seqlens)
        # No tensor comes first: see Batch.as_dict.
        return ModelArguments({"use_cache": False, **rows, **bounds, **self._pixels(batch, types)})

    def _check(self, batch: Batch, types: Tensor) -> None:
        kind = self.settings.model_type
        if batch.world_size > 1:
            raise UnsupportedError("batch: got a context-parallel shard, want the whole batch")
        if not self.inputs.images:
            if len(batch.grid_thw):
                raise _text_alone("batch", counted(len(batch.grid_thw), "image"), kind)
            if types.any():
                raise _text_alone("batch", "image placeholders", kind)
        if batch.audio_spans is not None:
            got = f"{counted(len(batch.audio_spans), 'run')} of audio for {kind!r}"
            raise UnsupportedError(f"batch: got {got}, want none; audio features are not passed on")
        got = batch.positions.scheme
        if self.inputs.text_row and got != self.settings.scheme.label:
            want = f"{self.settings.scheme.label} of {kind!r}: SequenceBuilder(scheme=settings.scheme)"
            raise InvalidInputError(f"batch.positions: got scheme {got}, want {want}")
        wrong = types.view(-1)[batch.image_spans[:, 0]].eq(0)
        if wrong.any():
            i = int(wrong.int().argmax())
            placeholder = int(batch.input_ids.view(-1)[batch.image_spans[i, 0]])
            want = f"{self.settings.placeholders.image} of {kind!r}: SequenceBuilder(markers=settings.markers)"
            raise InvalidInputError(f"image_spans[{i}]: got the placeholder {placeholder}, want {want}")

    def _token_types(self, batch: Batch) -> Tensor:
        """Return the type of each token: 0 for text, 1 for image patches, 2 for video patches."""
        tokens = batch.input_ids
        types = torch.zeros_like(tokens)
        for kind, placeholder in enumerate((self.settings.placeholders.image, self.settings.placeholders.video), 1):
            if placeholder is not None:
                types += kind * tokens.eq(placeholder)
        if self.settings.video_markers is not None:
            begin, end = (tokens.eq(marker).long() for marker in self.settings.video_markers)
            inside = (begin - end).cumsum(-1)
            if batch.packed:  # restart the count in each document
                before = (inside - begin + end)[batch.cu_seqlens[:-1].long()]
                inside -= before.repeat_interleave(batch.cu_seqlens.diff(), output_size=tokens.numel())
            types += types.eq(1) & (inside > 0)
        return types

    def _pixels(self, batch: Batch, types: Tensor) -> dict[str, Tensor]:
        if not len(batch.grid_thw):
            return {}
        side = self.settings.spatial_merge_size
        grid_thw = batch.grid_thw * batch.grid_thw.new_tensor([1, side, side])
        pixels = self._pixel_values(batch.patches)
        counts = grid_thw.prod(dim=1)
        if len(pixels) != int(counts.sum()):
            raise InvalidInputError(f"patches: got {len(pixels)}, want {int(counts.sum())} as in grid_thw")
        video = types.view(-1)[batch.image_spans[:, 0]].eq(2)
        # GLM fills all placeholders with images or all with videos, so if a batch has both, frames are passed as
        # images.
        if not video.any() or (self.settings.video_markers is not None and not video.all()):
            return {"pixel_values": pixels, "image_grid_thw": grid_thw}
        in_video = video.repeat_interleave(counts)
        videos = {"pixel_values_videos": pixels[in_video], "video_grid_thw": grid_thw[video]}
        if video.all():
            return videos
        return {"pixel_values": pixels[~in_video], "image_grid_thw": grid_thw[~video], **videos}

    def _pixel_values(self, patches: Tensor | None) -> Tensor:
        """Convert patches to the processor's pixel_values; return float patches from the processor unchanged."""
        if patches is None:
            raise UnsupportedError("batch: got images without pixels, want pixels from an ImageProcessor")
        if patches.is_floating_point() and patches.shape[-1] != 3:  # an ImageProcessor's end with colours
            return patches
        if self.settings.vision_scheme is None:
            raise UnsupportedError(f"patches: got uint8, want {_OWN_PIXELS} of {self.settings.model_type!r}")
        images = self.settings.image_processor() if self.images is None else self.images
        frames = 1 if self.inputs.planes else self.settings.temporal_patch_size or 1
        pixels = images.pixel_values(patches, temporal_patch_size=frames)
        return pixels.view(-1, 3, images.patch_size, images.patch_size) if self.inputs.planes else pixels


def _check_settings(settings: object) -> None:
    if not all(hasattr(settings, name) for name in ("model_type", "scheme", "segments", "image_processor")):
        got = type(settings).__name__
        raise InvalidInputError(f"settings: got {got}, want the result of mmpos.from_hf_config(config)")


_PIXELS = ("pixel_values", "pixel_values_videos")
_OWN_PIXELS = "ProcessedInputs with the output of the processor"  # for orders that no ImageProcessor supports


def _text_alone(name: str, got: str, kind: str) -> UnsupportedError:
    """Return the error for images in packs of a text-only model."""
    known = ", ".join(sorted(name for name, inputs in MODEL_INPUTS.items() if inputs.images))
    want = f"text only, or padded rows from its own processor, or one of {known}"
    return UnsupportedError(f"{name}: got {got} for {kind!r}, want {want}")


@dataclass(frozen=True)
class ProcessedInputs:
    """Picklable callable that converts the output of a model's processor for one document to an Example.

    A record has input_ids, (tokens,) or (1, tokens), and optionally image_grid_thw and pixel_values, video_grid_thw,
    pixel_values_videos and second_per_grid_ts, all as returned by the processor. Optional labels, with the shape of
    input_ids, select the trained tokens; the default trains on everything but patches. The field id or key becomes the
    key of the example.

    Args:
        settings: settings of the model, from `mmpos.from_hf_config`.

    Raises:
        InvalidInputError: settings has the wrong type.
    """

    settings: Model

    def __post_init__(self) -> None:
        _check_settings(self.settings)

    def __call__(self, record: Record, location: Location) -> Example:
        """Convert a record to an example.

        Raises:
            RecordError: the record has no tokens, has padding, or has grids or pixels that do not match its tokens.
        """
        try:
            return self._example(key := str(record.get("id", record.get("key", location))), record)
        except (InvalidInputError, UnsupportedError, LimitExceededError) as error:
            # the name in records
            raise RecordError(f"{key}: {error}".replace("seconds_per_frame", "second_per_grid_ts")) from error

    def _example(self, key: str, record: Record) -> Example:
        input_ids = _tokens("input_ids", record.get("input_ids"))
        mask = record.get("attention_mask")
        if mask is not None and not np.asarray(mask).all():
            raise InvalidInputError("attention_mask: got padding, want one document without padding")
        grids = {name: _array(record.get(name)) for name in ("image_grid_thw", "video_grid_thw")}
        seconds = record.get("second_per_grid_ts")
        seconds = None if seconds is None else np.asarray(seconds).tolist()
        kind = self.settings.model_type
        for name in _PIXELS:
            if record.get(name) is not None and not MODEL_INPUTS.get(kind, ModelInputs()).images:
                raise _text_alone(name, "pixels", kind)
        if grids["video_grid_thw"] is not None and self.settings.temporal_merge_size > 1:
            raise UnsupportedError(f"video_grid_thw: got a video for {kind!r}, which merges frames, want only images")
        segments = self.settings.segments(input_ids, **grids, seconds_per_frame=seconds)
        grid = segments.kind == GRID
        stops = segments.lengths.cumsum()
        spans = np.stack([stops - segments.lengths, stops], axis=1)[grid]
        grid_thw = segments.extents[:, grid].T.copy()
        types = token_types(segments)
        video = input_ids == self.settings.placeholders.video
        if self.settings.video_markers is not None:
            starts, ends = ((input_ids == marker).cumsum() for marker in self.settings.video_markers)
            video = starts > ends
        labels = record.get("labels")
        labels = np.where(types, IGNORE_INDEX, input_ids) if labels is None else _tokens("labels", labels)
        sequence = InterleavedSequence(
            input_ids=input_ids,
            token_type_ids=types,
            segments=segments,
            positions=self.settings.place(segments),
            patches=self._patches(record, grid_thw, video[spans[:, 0]]),
            grid_thw=grid_thw,
            image_spans=spans,
            image_hashes=(None,) * len(grid_thw),
            part_offsets=np.array([0, input_ids.size]),
            image_margins=_margins(input_ids, spans, self.settings.image_markers),
        )
        return Example(key, sequence, labels)

    def _patches(self, record: Record, grid_thw: IntArray, video: npt.NDArray[np.bool_]) -> Any:
        """Return the (patches, values) of images and videos, in token order."""
        sources = [_array(record.get(name), np.float32) for name in _PIXELS]
        counts = grid_thw.prod(axis=1) * self.settings.spatial_merge_size**2
        for name, pixels, where in zip(_PIXELS, sources, (~video, video), strict=True):
            got, want = (0 if pixels is None else len(pixels)), int(counts[where].sum())
            if got != want:
                raise InvalidInputError(f"{name}: got {got} patches, want {want} as in the grids")
        arrays = [pixels for pixels in sources if pixels is not None and len(pixels)]
        if len(arrays) < 2:
            return arrays[0] if arrays else None
        starts = np.where(video, len(arrays[0]), 0)
        for where in (video, ~video):
            starts[where] += counts[where].cumsum() - counts[where]
        return np.concatenate(arrays)[ragged_arange(counts, starts)[1]]


def _tokens(name: str, values: object) -> IntArray:
    """Return (tokens,) integers, dropping a batch dimension of 1."""
    array = host_array(name, values)
    return int_array(name, array[0] if array.ndim == 2 and len(array) == 1 else array, (None,))


def _array(values: object, dtype: type = np.int64) -> Any:
    return None if values is None else np.asarray(values, dtype)


def _margins(input_ids: IntArray, spans: IntArray, markers: tuple[int, int] | None) -> tuple[int, int]:
    """Return (1, 1) if every image has a marker token before and after it, else (0, 0)."""
    if markers is None or not len(spans) or spans[0, 0] == 0 or spans[-1, 1] == input_ids.size:
        return 0, 0
    before, after = (
        input_ids[at] == marker for at, marker in zip((spans[:, 0] - 1, spans[:, 1]), markers, strict=True)
    )
    return (1, 1) if before.all() and after.all() else (0, 0)
