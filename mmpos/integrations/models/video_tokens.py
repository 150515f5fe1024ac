"""Videos whose frames have the placeholders of images are told from images by the markers around them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mmpos.segments.placeholders import read_batch
from mmpos.support.checks import IntArray

__all__ = ["tell_videos_apart"]


def tell_videos_apart(
    input_ids: npt.ArrayLike,
    cu_seqlens: npt.ArrayLike | None,
    attention_mask: npt.ArrayLike | None,
    tokens: tuple[int, int],
    markers: tuple[int, int],
) -> IntArray:
    """The ids, where a placeholder of an image between the markers of a video is one of a video.

    Source: create_mm_token_type_ids of GLM-4V in Transformers: a token is in a video where more videos of its document
    have begun than ended.

    Args:
        input_ids: as SegmentTable.from_input_ids takes them.
        cu_seqlens: likewise.
        attention_mask: likewise.
        tokens: placeholder ids of images and of videos.
        markers: ids before and after a video.

    Returns:
        a new array of the shape of input_ids.
    """
    batch = read_batch(input_ids, cu_seqlens, attention_mask)
    ids = batch.ids.astype(np.int64)
    begin, end = (ids == marker for marker in markers)
    open_videos = np.append(0, np.cumsum(begin.astype(np.int64) - end))
    at = np.flatnonzero(ids == tokens[0])
    if at.size:  # and so there is a document
        document = np.maximum(np.searchsorted(batch.starts, at, side="right") - 1, 0)
        ids[at[open_videos[at] > open_videos[batch.starts[document]]]] = tokens[1]
    return ids.reshape(np.shape(input_ids))
