"""Replacement for ``get_rope_index`` of MiniCPM-V 4.7, which places the crops of an image on a canvas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
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
    on_host,
    scan_tensors,
    shapes,
)
from mmpos.integrations.models.settings import MERGES
from mmpos.positions.place import place
from mmpos.rotary.memory import is_plain
from mmpos.rotary.operators import define_operator
from mmpos.schemes import MRopeCanvas
from mmpos.segments.placeholders import CropMarkers, Merging, Placeholders
from mmpos.support.checks import INT32_MAX, IntArray, one_of

__all__ = ["CanvasRopeIndex"]

_CANVAS = MRopeCanvas()
_PLACEHOLDER = INT32_MAX - VIDEO  # above every text id; patches receive this id plus their type


@dataclass(frozen=True)
class CanvasRopeIndex:
    """Function with the same arguments and results as ``get_rope_index`` of MiniCPM-V 4.7.

    Args:
        crop_markers: token ids of the markers around thumbnails and slices.
        spatial_merge_size: side, in patches, of the square merged into one token, unless a call passes downsample_mode.
    """

    crop_markers: CropMarkers
    spatial_merge_size: int

    def __call__(
        self,
        input_ids: Tensor,
        mm_token_type_ids: Tensor | None = None,
        target_sizes: Tensor | None = None,
        target_sizes_videos: Tensor | None = None,
        downsample_mode: str | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: object,
    ) -> Ids:
        """Compute the position ids and deltas of a batch.

        Args:
            input_ids: (batch, seq); only the marker tokens are used.
            mm_token_type_ids: (batch, seq) 0 for text and markers, 1 for images, 2 for videos.
            target_sizes: (crops, 2) height and width, before merging, of the thumbnails and slices of images, in order;
                trailing sizes without tokens are ignored.
            target_sizes_videos: (crops, 2) the same for video frames.
            downsample_mode: "16x" merges 4×4 patches and "4x" merges 2×2; None uses the mode in the config.
            attention_mask: (batch, seq); tokens whose mask is 0 are not counted and have the id 0.
            kwargs: ignored, as in Transformers.

        Returns:
            (3, batch, seq) position ids and (batch, 1) deltas, both int64: new tensors on the device of input_ids. A
            delta is the highest id plus one, minus the number of tokens.

        Raises:
            InvalidInputError: sizes do not match the tokens, a thumbnail or slice is not between its markers, a slice
                is separated from its thumbnail, or an argument has the wrong shape.
        """
        tensors = check_tensors(
            input_ids=input_ids,
            mm_token_type_ids=mm_token_type_ids,
            target_sizes=target_sizes,
            target_sizes_videos=target_sizes_videos,
            attention_mask=attention_mask,
        )
        merge = self.spatial_merge_size
        if downsample_mode:
            merge = MERGES[one_of("downsample_mode", downsample_mode, MERGES)]
        crops = self.crop_markers
        markers = [crops.thumbnail_start, crops.thumbnail_end, crops.tile_start, crops.tile_end, crops.newline]
        assert mm_token_type_ids is not None, "checked above"
        compute = _compute if is_plain(*tensors) else _OPERATOR
        ids: Ids = compute(
            input_ids, mm_token_type_ids, target_sizes, target_sizes_videos, attention_mask, markers, merge
        )
        return ids


def _compute(
    input_ids: Tensor,
    mm_token_type_ids: Tensor,
    target_sizes: Tensor | None,
    target_sizes_videos: Tensor | None,
    attention_mask: Tensor | None,
    markers: Sequence[int],
    spatial_merge_size: int,
) -> Ids:
    mask = attention_mask if attention_mask is None or attention_mask.is_cpu else attention_mask.bool()
    kinds, mask, images, videos, ids = on_host(mm_token_type_ids, mask, target_sizes, target_sizes_videos, input_ids)
    assert kinds is not None, "checked by the caller"
    assert ids is not None, "checked by the caller"
    merging = Merging(1, spatial_merge_size, frames_apart=False, lenient=True, types=True)
    crops = CropMarkers(*markers)
    scanned = None
    if min(markers) > 0 and max(markers) < _PLACEHOLDER:
        type_tokens = Placeholders(IMAGE, VIDEO).tokens
        scanned = scan_tensors(
            kinds, (*type_tokens[:5], *markers, *type_tokens[10:]), merging,
            _one_frame(images), _one_frame(videos), mask,
            marker_ids=ids,
        )  # fmt: skip
    if scanned is not None:
        return ids_and_deltas(place(scanned[0], _CANVAS), input_ids.long())
    mask = None if mask is None else mask.bool()
    tokens = TokenTypes.of(kinds, mask)
    text = ids.numpy() if tokens.cu_seqlens is None else ids.numpy().ravel()[tokens.real]
    types = np.where(tokens.types > 0, tokens.types + _PLACEHOLDER, text.clip(0, _PLACEHOLDER))
    try:
        segments = replace(tokens, types=types).segments(
            _grids(tokens, "target_sizes", images, IMAGE, spatial_merge_size),
            _grids(tokens, "target_sizes_videos", videos, VIDEO, spatial_merge_size),
            Placeholders(_PLACEHOLDER + IMAGE, _PLACEHOLDER + VIDEO, crops=crops),
        )
    except InvalidInputError as error:
        message = str(error).replace("image_grid_thw", "target_sizes").replace("video_grid_thw", "target_sizes_videos")
        raise InvalidInputError(message) from None
    return ids_and_deltas(place(segments, _CANVAS), input_ids.long(), tokens)


def _one_frame(sizes: Tensor | None) -> Tensor | None:
    """Add a frame count of 1 to (crops, 2) sizes; leave sizes of another rank unchanged for a later check to refuse."""
    return sizes if sizes is None or sizes.dim() != 2 else torch.nn.functional.pad(sizes, (1, 0), value=1)


def _grids(tokens: TokenTypes, name: str, sizes: Tensor | None, kind: int, merge: int) -> IntArray | None:
    """Convert (crops, 2) sizes to (crops, 3) merged grids of one frame."""
    used = tokens.used(name, sizes, kind, np.array([merge, merge]))
    return None if used is None else np.insert(used, 0, 1, axis=1)


def _shapes(input_ids: Tensor, *_: object) -> Ids:
    return shapes(input_ids.long())


_OPERATOR = define_operator("canvas_rope_index" + infer_schema(_compute, mutates_args=()), _compute, _shapes)
