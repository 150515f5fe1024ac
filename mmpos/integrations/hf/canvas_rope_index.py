"""Function in the place of ``get_rope_index`` of MiniCPM-V 4.7, whose pictures lie on canvases."""

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
    answer,
    check_tensors,
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
_PLACEHOLDER = INT32_MAX - VIDEO  # an id above all of text, to which types of patches are added


@dataclass(frozen=True)
class CanvasRopeIndex:
    """Function with the arguments and the results of ``get_rope_index`` of MiniCPM-V 4.7.

    Args:
        crop_markers: tokens around thumbnails and slices.
        spatial_merge_size: patches merged along each side into one token, where a call does not say it.
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
        """Compute the position ids of a batch, and by how much they run ahead of its tokens.

        Args:
            input_ids: (batch, seq), of which the markers count.
            mm_token_type_ids: (batch, seq) 0 for text and markers, 1 for images, 2 for videos.
            target_sizes: (crops, 2) height and width before merging of the thumbnails and slices of images, in order;
                those that no token is left for are passed over.
            target_sizes_videos: (crops, 2) likewise of the frames of videos.
            downsample_mode: "16x" merges 4×4 patches and "4x" 2×2; None is the mode of the config.
            attention_mask: (batch, seq); tokens under a 0 are left out, and have the id 0.
            kwargs: ignored, as there.

        Returns:
            (3, batch, seq) position ids and (batch, 1): the highest id plus one less the number of tokens, both int64;
            new tensors on the device of input_ids.

        Raises:
            InvalidInputError: sizes that do not fit the tokens, a thumbnail or a slice that is not between its markers,
                a slice apart from its thumbnail, or arguments of other shapes.
        """
        given = check_tensors(
            input_ids=input_ids,
            mm_token_type_ids=mm_token_type_ids,
            target_sizes=target_sizes,
            target_sizes_videos=target_sizes_videos,
            attention_mask=attention_mask,
        )
        merge = self.spatial_merge_size
        if downsample_mode:
            merge = MERGES[one_of("downsample_mode", downsample_mode, MERGES)]
        own = self.crop_markers
        markers = [own.thumbnail_start, own.thumbnail_end, own.tile_start, own.tile_end, own.newline]
        assert mm_token_type_ids is not None, "checked"
        compute = _compute if is_plain(*given) else _OPERATOR
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
    assert kinds is not None, "the call has looked"
    assert ids is not None, "the call has looked"
    merging = Merging(1, spatial_merge_size, frames_apart=False, lenient=True, types=True)
    crops = CropMarkers(*markers)
    scanned = None
    if min(markers) > 0 and max(markers) < _PLACEHOLDER:
        own = Placeholders(IMAGE, VIDEO).tokens
        scanned = scan_tensors(
            kinds, (*own[:5], *markers, *own[10:]), merging, _of_one_frame(images), _of_one_frame(videos), mask,
            marker_ids=ids,
        )  # fmt: skip
    if scanned is not None:
        return answer(place(scanned[0], _CANVAS), input_ids.long())
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
        words = str(error).replace("image_grid_thw", "target_sizes").replace("video_grid_thw", "target_sizes_videos")
        raise InvalidInputError(words) from None
    return tokens.answer(place(segments, _CANVAS), input_ids.long())


def _of_one_frame(sizes: Tensor | None) -> Tensor | None:
    """Make (crops, 3) grids of sizes, which are (crops, 2) as long as nothing is wrong."""
    return sizes if sizes is None or sizes.dim() != 2 else torch.nn.functional.pad(sizes, (1, 0), value=1)


def _grids(tokens: TokenTypes, name: str, sizes: Tensor | None, kind: int, merge: int) -> IntArray | None:
    """Merge sizes, (crops, 2), to grids of one frame, (crops, 3)."""
    used = tokens.used(name, sizes, kind, np.array([merge, merge]))
    return None if used is None else np.insert(used, 0, 1, axis=1)


def _shapes(input_ids: Tensor, *_: object) -> Ids:
    return shapes(input_ids.long())


_OPERATOR = define_operator("canvas_rope_index" + infer_schema(_compute, mutates_args=()), _compute, _shapes)
