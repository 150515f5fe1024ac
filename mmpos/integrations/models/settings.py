"""ModelSettings: the scheme, token ids, merge size and rotations of a deployed model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.integrations.models.image_file import ImageFile
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.rotary.config import Rotary
from mmpos.schemes import Grid2D, Scheme
from mmpos.segments.placeholders import PackedIds, Placeholders
from mmpos.segments.table import GRID, TEXT, SegmentTable
from mmpos.sequence.builder import Markers
from mmpos.support.checks import INT32_MAX, IntArray, counted, first_bad, int_array
from mmpos.support.ragged import ragged_arange

if TYPE_CHECKING:
    from mmpos.images import ImageProcessor

__all__ = ["ModelSettings"]

MERGES = {"4x": 2, "16x": 4}
"""Side, in patches, of the square merged into one token, for each downsample_mode of MiniCPM-V 4.7."""


@dataclass(frozen=True)
class ModelSettings:
    """Position settings of a model, read from a config by `from_hf_config`.

    Args:
        model_type: model_type in the config.
        scheme: scheme of the language model.
        rotary: rotation of the language model's q and k; one axis if images are placed as text.
        vision_scheme: scheme of the encoder, for grids before merging; None if no scheme computes its positions.
        vision_rotary: rotation of the encoder's q and k; None if there is no rotation or it is unknown.
        placeholders: token ids of patches, of audio whose ids depend on videos, of row ends, and around crops, as far
            as the config defines them.
        image_markers: token ids before and after an image; None if the config does not define them.
        row_markers: names of the token after each row except the last and of the token after the last row; None if
            there are no tokens between rows.
        opening_token_id: id of the token that, at the start of an image, is followed by one placeholder without a patch
            (NeoMME), or None.
        video_markers: token ids around a video whose frames use the same placeholders as images, or None.
        spatial_merge_size: side, in patches, of the square merged into one token.
        temporal_merge_size: number of frames of video_grid_thw merged into one.
        patch_size: side of an encoder patch in pixels; None if it is not in the config.
        temporal_patch_size: frames per patch; None if it is not in the config.
        frames_apart: whether every frame of a video is a separate grid, with text between frames.
        generates: whether the model generates images; the grids of generated images follow the grids in the prompt (see
            ``generated``).
        start: id of the first token in a document: 1 for PaliGemma, 0 for all others.
        second_rotary: rotation of the second channel of every pair if its axis differs from that of the first channel,
            else None. If it is set, rotate the first channels with rotary and the second channels with second_rotary.
        image_file: image processor settings from the model's folder; None unless a folder was read.
        audio_chunk: audio frames per chunk of the encoder; None if the encoder processes all frames together.
    """

    model_type: str
    scheme: Scheme
    rotary: Rotary
    vision_scheme: Grid2D | None = None
    vision_rotary: Rotary | None = None
    placeholders: Placeholders = field(default_factory=Placeholders)
    image_markers: tuple[int, int] | None = None
    row_markers: tuple[str, str] | None = None
    opening_token_id: int | None = None
    video_markers: tuple[int, int] | None = None
    spatial_merge_size: int = 1
    temporal_merge_size: int = 1
    patch_size: int | None = None
    temporal_patch_size: int | None = None
    frames_apart: bool = False
    generates: bool = False
    start: int = 0
    second_rotary: Rotary | None = None
    image_file: ImageFile | None = None
    audio_chunk: int | None = None

    def __post_init__(self) -> None:
        if self.rotary.axes != self.scheme.axes:
            got, want = self.rotary.axes, self.scheme.axes
            raise InvalidInputError(f"rotary: got {counted(got, 'axis')}, want {want} for scheme {self.scheme.name!r}")

    def segments(
        self,
        input_ids: npt.ArrayLike,
        image_grid_thw: npt.ArrayLike | None = None,
        video_grid_thw: npt.ArrayLike | None = None,
        *,
        cu_seqlens: npt.ArrayLike | None = None,
        attention_mask: npt.ArrayLike | None = None,
        seconds_per_frame: Sequence[Fraction | float | None] | None = None,
        rows: tuple[int, int] | None = None,
        audio_lengths: npt.ArrayLike | None = None,
        images_per_sample: npt.ArrayLike | None = None,
    ) -> SegmentTable:
        """Build the segment table of a batch that was tokenised by the model's processor.

        In models with one axis, placeholders are numbered like text; without grids, placeholders become text segments.

        Args:
            input_ids: (tokens,) one document, or packed documents with cu_seqlens; or (batch, seq).
            image_grid_thw: (images, 3) frames, height, width before merging, as in Transformers; for MiniCPM-V 4.7, one
                row of target_sizes per thumbnail and slice, preceded by 1.
            video_grid_thw: (videos, 3) frames, height, width before merging.
            cu_seqlens: (documents + 1,) first token of each packed document, then the total.
            attention_mask: (batch, seq) of 0 and 1, padded left or right.
            seconds_per_frame: one number per video (Transformers' second_per_grid_ts), or None.
            rows: ids of row_markers, as in ``Placeholders``; for NeoMME, None selects the token after the first row.
            audio_lengths: (audios,) tokens of each audio after the encoder, to be checked against input_ids; or None.
            images_per_sample: (documents,) number of rows of image_grid_thw per document, including images to generate,
                which come last and are ignored; None if there are no images to generate.

        Raises:
            InvalidInputError: see ``SegmentTable.from_input_ids``.
            UnsupportedError: images_per_sample is passed for a model that generates no images.
        """
        as_text, image, video = self.scheme.axes == 1, self.placeholders.image, self.placeholders.video
        as_text = as_text and image_grid_thw is None and video_grid_thw is None
        special = self.video_markers or self.opening_token_id is not None or images_per_sample is not None
        if special and image is not None:
            batch = PackedIds.of(input_ids, cu_seqlens, attention_mask)
            if self.video_markers is not None and video is not None:
                input_ids = _videos_apart(batch, image, video, self.video_markers).reshape(np.shape(input_ids))
            if self.opening_token_id is not None:
                ids, row_end = _without_openings(batch, self.opening_token_id, image)
                input_ids = ids.reshape(np.shape(input_ids))
                rows = (row_end, row_end) if rows is None and row_end is not None else rows
            if images_per_sample is not None:
                image_grid_thw = self._sources(batch, image_grid_thw, images_per_sample)
        placeholders = self.placeholders if rows is None else replace(self.placeholders, rows=rows)
        return SegmentTable.from_input_ids(
            input_ids,
            Placeholders() if as_text else placeholders,
            image_grid_thw,
            self._merged_frames(video_grid_thw),
            spatial_merge_size=self.spatial_merge_size,
            cu_seqlens=cu_seqlens,
            attention_mask=attention_mask,
            seconds_per_frame=seconds_per_frame,
            frames_apart=self.frames_apart,
            audio_lengths=audio_lengths,
        )

    def generated(
        self, prompt: SegmentTable, image_grid_thw: npt.ArrayLike, images_per_sample: npt.ArrayLike
    ) -> SegmentTable:
        """Build the segment table of the images to generate after each prompt, last grid first, and the end marker.

        To compute the ids for decoding in advance, place the table with
        ``start=settings.place(prompt).next_positions``.
        Source: get_rope_index of GLM-Image in Transformers.

        Args:
            prompt: segment table of the prompts, from ``segments``.
            image_grid_thw: (images, 3) frames, height, width in tokens; for each document, the images of its prompt,
                then the images to generate.
            images_per_sample: (documents,) number of rows of image_grid_thw per document.

        Returns:
            One document per prompt, with one grid per image to generate, then one text token for the end marker.

        Raises:
            UnsupportedError: the model generates no images.
            InvalidInputError: a document has fewer grids than its prompt.
        """
        if not self.generates:
            raise UnsupportedError(f"generated: got {self.model_type!r}, want a model that generates images")
        grids, counts = per_sample(image_grid_thw, images_per_sample, prompt.num_documents)
        sources = np.zeros(prompt.num_documents, np.int64)
        np.add.at(sources, np.arange(sources.size).repeat(np.diff(prompt.segment_offsets)), prompt.kind == GRID)
        if (sources > counts).any():
            d = int((sources > counts).argmax())
            raise InvalidInputError(
                f"images_per_sample[{d}]: got {counts[d]}, want at least {sources[d]}, the images of the prompt"
            )
        owner, index = ragged_arange(counts - sources + 1)
        is_grid = index < (counts - sources)[owner]
        extents = np.ones((3, owner.size), np.int64)
        extents[1:, is_grid] = grids[(counts.cumsum()[owner] - 1 - index)[is_grid], 1:].T
        return SegmentTable(
            np.where(is_grid, GRID, TEXT).astype(np.uint8), extents, np.append(0, (counts - sources + 1).cumsum())
        )

    def audio_tokens(self, frames: npt.ArrayLike) -> IntArray:
        """Return the number of tokens that the encoder outputs for each audio: the audio_lengths of ``segments``.

        Source: _get_feat_extract_output_lengths of Qwen2.5-Omni and Qwen3-Omni in Transformers.

        Args:
            frames: (audios,) number of feature frames before the encoder: the row sums of the processor's
                feature_attention_mask, called audio_seqlens in get_rope_index.

        Raises:
            UnsupportedError: the model places audio as text.
            InvalidInputError: frames are not integers >= 0.
        """
        if self.placeholders.audio is None:
            raise UnsupportedError(f"audio_tokens: got {self.model_type!r}, want a Qwen Omni model")
        return audio_tokens("frames", frames, self.audio_chunk)

    def place(self, segments: SegmentTable, start: npt.ArrayLike | None = None) -> PositionTable:
        """Place segments with the scheme of the language model, from self.start by default; see ``mmpos.place``."""
        return place(segments, self.scheme, self.start if start is None else start)

    @property
    def markers(self) -> Markers:
        """Markers for ``SequenceBuilder``; tokens around an image are given by id, and tokens after rows by name.

        Raises:
            UnsupportedError: the config does not define the markers, or Markers cannot describe the image tokens
                (HunYuan-VL, NeoMME, MiniCPM-V 4.7).
        """
        image = self.placeholders.image
        if self.row_markers is not None and image is not None:
            return Markers(None, None, image, *self.row_markers)
        for applies, tokens in (
            (self.placeholders.framed, "rows that end in a placeholder without a patch"),
            (self.opening_token_id is not None, "a placeholder without a patch before their rows"),
            (self.placeholders.crops is not None, "a thumbnail and tiles, each with separate markers"),
        ):
            if applies:
                raise UnsupportedError(
                    f"markers: got {self.model_type!r}, whose images have {tokens}, which SequenceBuilder cannot "
                    "build; pass the input_ids of the model's processor to segments"
                )
        if self.image_markers is None or image is None:
            raise UnsupportedError(
                f"markers: the config of {self.model_type!r} does not define the tokens around images; "
                "pass Markers to SequenceBuilder"
            )
        video = None if self.video_markers is not None else self.placeholders.video
        return Markers(*self.image_markers, image, video=video)

    def image_processor(self, **arguments: Any) -> ImageProcessor:
        """Build an ImageProcessor with the encoder's patch size, merge size and patch order.

        Args:
            arguments: arguments of ImageProcessor, which override the image_file.

        Raises:
            UnsupportedError: the patch order of the encoder is unknown, or ImageProcessor does not support the
                image processor of the image_file.
            InvalidInputError: mean, std, min_pixels or max_pixels is neither passed nor contained in an image_file
                (config.json does not contain them), or the image_file contradicts the config.
        """
        from mmpos.images import ImageProcessor

        if self.vision_scheme is None or self.patch_size is None:
            raise UnsupportedError(
                f"image_processor: got {self.model_type!r}, want a model whose config defines the patch order"
            )
        sizes: dict[str, Any] = {"patch_size": self.patch_size, "spatial_merge_size": self.spatial_merge_size}
        missing = [name for name in ("mean", "std", "min_pixels", "max_pixels") if name not in arguments]
        if missing and self.image_file is None:
            raise InvalidInputError(
                f"image_processor: got no {', '.join(missing)}, which config.json does not contain, want a folder with "
                "preprocessor_config.json as the config, or these arguments"
            )
        if missing and self.image_file is not None:
            sizes |= self.image_file.arguments(
                patch_size=self.patch_size,
                merge_size=self.spatial_merge_size,
                temporal_patch_size=self.temporal_patch_size,
            )
        return ImageProcessor(**{**sizes, "order": self.vision_scheme.order, **arguments})

    def _sources(
        self, batch: PackedIds, image_grid_thw: npt.ArrayLike | None, images_per_sample: npt.ArrayLike
    ) -> IntArray:
        """Return the grids of each prompt's complete images, which are counted by their end markers."""
        if not self.generates:
            raise UnsupportedError(
                f"images_per_sample must be None for {self.model_type!r}, a model that generates no images"
            )
        grids, counts = per_sample(image_grid_thw, images_per_sample, batch.starts.size)
        at = np.flatnonzero(batch.ids == (self.image_markers or (-1, -1))[1])
        document = np.searchsorted(batch.starts, at, side="right") - 1
        inside = (document >= 0) & (at < batch.stops[document]) if batch.starts.size else np.zeros(0, np.bool_)
        complete = np.bincount(document[inside], minlength=counts.size)
        owner, index = ragged_arange(counts)
        return grids[index < complete[owner]]

    def _merged_frames(self, video_grid_thw: npt.ArrayLike | None) -> npt.ArrayLike | None:
        if video_grid_thw is None or self.temporal_merge_size == 1:
            return video_grid_thw
        grids = int_array("video_grid_thw", video_grid_thw, (None, 3)).copy()
        odd = grids[:, 0] % self.temporal_merge_size > 0
        if odd.any():
            g = int(odd.argmax())
            raise InvalidInputError(
                f"video_grid_thw[{g}, 0]: got {grids[g, 0]} frames, want a multiple of "
                f"temporal_merge_size={self.temporal_merge_size}"
            )
        grids[:, 0] //= self.temporal_merge_size
        return grids


def audio_tokens(name: str, frames: npt.ArrayLike, chunk: int | None) -> IntArray:
    """Return the number of tokens in each audio, (audios,); see ``ModelSettings.audio_tokens``."""
    lengths = int_array(name, frames, (None,))
    first_bad(name, lengths, minimum=0, maximum=INT32_MAX)
    if chunk is None:
        return ((lengths - 1) // 2 - 1) // 2 + 1
    # Every whole chunk becomes 13 tokens, whatever its length; for the remaining frames, three convolutions each halve
    # the length.
    rest = lengths % chunk
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + lengths // chunk * 13


def per_sample(
    image_grid_thw: npt.ArrayLike | None, images_per_sample: npt.ArrayLike, documents: int
) -> tuple[IntArray, IntArray]:
    """Check and return the grids, (images, 3), and the number of grids per document, (documents,)."""
    grids = int_array("image_grid_thw", () if image_grid_thw is None else image_grid_thw, (None, 3))
    counts = int_array("images_per_sample", images_per_sample, (documents,))
    first_bad("images_per_sample", counts, minimum=0, maximum=INT32_MAX)
    if counts.sum() != len(grids):
        raise InvalidInputError(f"images_per_sample: got a sum of {counts.sum()}, want {len(grids)}, one per grid")
    return grids, counts


def _videos_apart(batch: PackedIds, image: int, video: int, markers: tuple[int, int]) -> IntArray:
    """Return ids with the image placeholders between video markers replaced by video placeholders.

    Source: create_mm_token_type_ids of GLM-4V in Transformers: a token belongs to a video if, within its document, more
        videos have begun than ended before it.
    """
    ids = batch.ids.astype(np.int64)
    begin, end = (ids == marker for marker in markers)
    open_videos = np.append(0, np.cumsum(begin.astype(np.int64) - end))
    at = np.flatnonzero(ids == image)
    if at.size:  # true only if there is at least one document
        document = np.maximum(np.searchsorted(batch.starts, at, side="right") - 1, 0)
        ids[at[open_videos[at] > open_videos[batch.starts[document]]]] = video
    return ids


def _without_openings(batch: PackedIds, opening: int, image: int) -> tuple[IntArray, int | None]:
    """Return ids in which placeholders without a patch, at the start of images, are replaced by the opening token.

    Source: get_placeholder_mask of NeoMME in Transformers: a placeholder directly after the opening token has no patch.

    Returns:
        The ids, and the id of the token after the first row of patches, or None if there is no such row.
    """
    ids = batch.ids.astype(np.int64)
    at = np.setdiff1d(np.flatnonzero(ids == image), batch.starts)
    ids[at[ids[at - 1] == opening]] = opening
    runs = replace(batch, ids=ids).runs(image)
    row_end = None
    if runs.first.size and (stop := runs.first[0] + runs.tokens[0]) < batch.stops[runs.document[0]]:
        row_end = int(ids[stop])
    return ids, row_end
