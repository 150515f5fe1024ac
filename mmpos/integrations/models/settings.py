"""ModelSettings: the scheme, token ids, merge size and rotations of one deployed model, and their use."""

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
"""Patches merged along each side into one token, by the downsample_mode of MiniCPM-V 4.7."""


@dataclass(frozen=True)
class ModelSettings:
    """Settings of a model's positions; `from_hf_config` reads them from a config.

    Args:
        model_type: of the config.
        scheme: positions of text and grids in the language model.
        rotary: rotation of its q and k; one axis where positions are those of text.
        vision_scheme: positions in the encoder, of grids before merging; None where it has none of ours.
        vision_rotary: rotation of the encoder's q and k; None where there is none, or it is not known.
        placeholders: which tokens stand for patches, for audio where its place depends on that of videos, for ends of
            rows and around crops, as far as the config names them.
        image_markers: ids of the tokens before and after an image; None where the config does not name them.
        row_markers: names of the tokens after the rows of an image, all but the last and the last; None where rows
            follow each other.
        opening_token_id: id of the token after which one placeholder without a patch begins an image (NeoMME); else
            None.
        video_markers: ids around a video whose frames have the placeholders of images; else None.
        spatial_merge_size: patches merged along each side into one token.
        temporal_merge_size: frames of video_grid_thw merged into one.
        patch_size: side of a patch of the encoder in pixels; None where it is not in the config.
        temporal_patch_size: frames in a patch; likewise.
        frames_apart: every frame of a video is a grid of its own, with text between.
        generates: images are generated, with their grids behind those of the prompt: see ``generated``.
        start: id of the first token of a document: 1 of PaliGemma, 0 of all others.
        second_rotary: rotation of the second channel of every pair, where other axes drive it than the first, which
            rotary then describes alone: what turns are the first channels of the one and the second of the other.
        image_file: how images are prepared, from the file beside a config.json; None where no folder was read.
        audio_chunk: frames of audio that the encoder takes at a time; None where it takes all at once.
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
        """Make the table of a tokenised batch from the processor of the model.

        A model with one axis gives placeholders the ids of text; without grids they are counted as text.

        Args:
            input_ids: (tokens,) one document, or packed documents with cu_seqlens; or (batch, seq).
            image_grid_thw: (images, 3) frames, height, width before merging, as in Transformers; of MiniCPM-V 4.7 its
                target_sizes, one for each thumbnail and slice, with a 1 before.
            video_grid_thw: (videos, 3) likewise.
            cu_seqlens: (documents + 1,) first token of each packed document, then the total.
            attention_mask: (batch, seq) of 0 and 1, padded left or right.
            seconds_per_frame: one per video (Transformers' second_per_grid_ts), or None.
            rows: the ids of row_markers, as of ``Placeholders``; None of NeoMME is the token after its first row.
            audio_lengths: (audios,) tokens of each audio after the encoder, to be compared with input_ids; or None.
            images_per_sample: (documents,) how many of image_grid_thw belong to each document, those to generate last,
                which are left out; None where there are none of these.

        Raises:
            InvalidInputError: as by ``SegmentTable.from_input_ids``.
            UnsupportedError: images_per_sample of a model that generates no images.
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
        """Make the table of the images that a model generates after its prompts, the last grid first, and their end.

        Placed at ``start=settings.place(prompt).next_positions``, its ids are laid ahead of the decoding.
        Source: get_rope_index of GLM-Image in Transformers.

        Args:
            prompt: the table of the prompts, of ``segments``.
            image_grid_thw: (images, 3) of each document those of its prompt, then those to generate, in tokens.
            images_per_sample: (documents,) how many belong to each.

        Returns:
            a document for each prompt: a grid for each image to generate, then one token, the marker at the end.

        Raises:
            UnsupportedError: a model that generates no images.
            InvalidInputError: fewer grids for a document than its prompt has.
        """
        if not self.generates:
            raise UnsupportedError(f"generated: got {self.model_type!r}, want a model that generates images")
        return generated(prompt, *per_sample(image_grid_thw, images_per_sample, prompt.num_documents))

    def audio_tokens(self, frames: npt.ArrayLike) -> IntArray:
        """Count the tokens that the encoder makes of audio, as ``segments`` takes them for audio_lengths.

        Source: _get_feat_extract_output_lengths of Qwen2.5-Omni and Qwen3-Omni in Transformers.

        Args:
            frames: (audios,) of the features before the encoder: the sums of the rows of the processor's
                feature_attention_mask, which get_rope_index calls audio_seqlens.

        Raises:
            UnsupportedError: a model that counts audio as text.
            InvalidInputError: no integers >= 0.
        """
        if self.placeholders.audio is None:
            raise UnsupportedError(f"audio_tokens: got {self.model_type!r}, want a model of Qwen Omni")
        return audio_tokens("frames", frames, self.audio_chunk)

    def place(self, segments: SegmentTable, start: npt.ArrayLike | None = None) -> PositionTable:
        """Place segments as the language model does, from self.start on unless start is told; see ``mmpos.place``."""
        return place(segments, self.scheme, self.start if start is None else start)

    @property
    def markers(self) -> Markers:
        """Tokens around and inside an image, for ``SequenceBuilder``: by id, those that end rows by name.

        Raises:
            UnsupportedError: the config does not name them, or images have tokens that Markers cannot describe
                (HunYuan-VL, NeoMME, MiniCPM-V 4.7).
        """
        image = self.placeholders.image
        if self.row_markers is not None and image is not None:
            return Markers(None, None, image, *self.row_markers)
        for there, what in (
            (self.placeholders.framed, "placeholders without a patch before, between and after their rows"),
            (self.opening_token_id is not None, "a placeholder without a patch before their rows"),
            (self.placeholders.crops is not None, "a thumbnail and tiles, each with markers of its own"),
        ):
            if there:
                raise UnsupportedError(
                    f"markers: got {self.model_type!r}, whose images have {what}, which SequenceBuilder does not make, "
                    "want the input_ids of its processor, which segments reads"
                )
        if self.image_markers is None or image is None:
            raise UnsupportedError(
                f"markers: got a config of {self.model_type!r} that does not name the tokens around images, "
                "want Markers of your own"
            )
        return Markers(*self.image_markers, image)

    def image_processor(self, **arguments: Any) -> ImageProcessor:
        """Make an ImageProcessor with the patches, merging and order of the encoder.

        Args:
            arguments: of ImageProcessor, in place of what the image_file says.

        Raises:
            UnsupportedError: the order of the encoder's patches is not known, or the image_file is of an image
                processor that ImageProcessor does not follow.
            InvalidInputError: mean, std, min_pixels and max_pixels are neither told nor in an image_file: a config.json
                does not hold them; or the image_file contradicts the config.
        """
        from mmpos.images import ImageProcessor

        if self.vision_scheme is None or self.patch_size is None:
            raise UnsupportedError(
                f"image_processor: got {self.model_type!r}, want a model whose config says how patches are ordered"
            )
        sizes: dict[str, Any] = {"patch_size": self.patch_size, "spatial_merge_size": self.spatial_merge_size}
        missing = [name for name in ("mean", "std", "min_pixels", "max_pixels") if name not in arguments]
        if missing and self.image_file is None:
            raise InvalidInputError(
                f"image_processor: got no {', '.join(missing)}, which a config.json does not hold, want them told, or "
                "mmpos.from_hf_config(folder) of a folder with its preprocessor_config.json"
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
        """Select the grids of images that are complete in a prompt: those before as many markers of an image's end."""
        if not self.generates:
            raise UnsupportedError(f"images_per_sample: got one of {self.model_type!r}, want None: it generates none")
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
    """Count the tokens of audio, (audios,); see ``ModelSettings.audio_tokens``."""
    lengths = int_array(name, frames, (None,))
    first_bad(name, lengths, minimum=0, maximum=INT32_MAX)
    if chunk is None:
        return ((lengths - 1) // 2 - 1) // 2 + 1
    # Three convolutions halve what is left of whole chunks, of which each gives 13, however many frames it has.
    rest = lengths % chunk
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + lengths // chunk * 13


def per_sample(
    image_grid_thw: npt.ArrayLike | None, images_per_sample: npt.ArrayLike, documents: int
) -> tuple[IntArray, IntArray]:
    """Check grids, (images, 3), and how many belong to each document, (documents,)."""
    grids = int_array("image_grid_thw", () if image_grid_thw is None else image_grid_thw, (None, 3))
    counts = int_array("images_per_sample", images_per_sample, (documents,))
    first_bad("images_per_sample", counts, minimum=0, maximum=INT32_MAX)
    if counts.sum() != len(grids):
        raise InvalidInputError(f"images_per_sample: got a sum of {counts.sum()}, want {len(grids)}, one per grid")
    return grids, counts


def generated(prompt: SegmentTable, grids: IntArray, counts: IntArray) -> SegmentTable:
    """Make the table of images to come, of what ``per_sample`` gives; see ``ModelSettings.generated``."""
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


def _videos_apart(batch: PackedIds, image: int, video: int, markers: tuple[int, int]) -> IntArray:
    """Return new ids, in which placeholders of images between the markers of a video are those of videos.

    Source: create_mm_token_type_ids of GLM-4V in Transformers: a token is in a video where more videos of its document
    have begun than ended.
    """
    ids = batch.ids.astype(np.int64)
    begin, end = (ids == marker for marker in markers)
    open_videos = np.append(0, np.cumsum(begin.astype(np.int64) - end))
    at = np.flatnonzero(ids == image)
    if at.size:  # and so there is a document
        document = np.maximum(np.searchsorted(batch.starts, at, side="right") - 1, 0)
        ids[at[open_videos[at] > open_videos[batch.starts[document]]]] = video
    return ids


def _without_openings(batch: PackedIds, opening: int, image: int) -> tuple[IntArray, int | None]:
    """Return new ids, in which placeholders that begin images, and hold no patch, are the tokens before them.

    Source: get_placeholder_mask of NeoMME in Transformers: a placeholder right after the opening token holds none.

    Returns:
        the ids, and the token after the first row of patches, None where there is none.
    """
    ids = batch.ids.astype(np.int64)
    at = np.setdiff1d(np.flatnonzero(ids == image), batch.starts)
    ids[at[ids[at - 1] == opening]] = opening
    runs = replace(batch, ids=ids).runs(image)
    row_end = None
    if runs.first.size and (stop := runs.first[0] + runs.tokens[0]) < batch.stops[runs.document[0]]:
        row_end = int(ids[stop])
    return ids, row_end
