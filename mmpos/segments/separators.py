"""Row separators: which tokens of grids end their rows, and which are patches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mmpos.segments.table import SegmentTable
from mmpos.support.checks import IntArray

__all__ = ["patch_spans", "separator_tokens", "token_types"]


def separator_tokens(segments: SegmentTable) -> IntArray:
    """(separators,) the tokens that end rows of grids, counted over the table, ascending.

    >>> from mmpos.segments.parts import Grid, Text
    >>> table = SegmentTable.from_documents([[Text(3), Grid(2, 3, row_separator=True)]])
    >>> separator_tokens(table).tolist()
    [6, 10]
    """
    if segments.row_separator is None:
        return np.empty(0, np.int64)
    (grid,) = segments.row_separator.nonzero()
    lengths = segments.lengths
    frames, height, width = segments.extents[:, grid]
    rows = frames * height
    owner, row = _counted(rows)
    first = (lengths.cumsum() - lengths)[grid]
    return (first + width)[owner] + row * (width + 1)[owner]


def token_types(segments: SegmentTable) -> npt.NDArray[np.uint8]:
    """(tokens,) 1 for patches, 0 for text and row separators; of a table without padding."""
    found = np.repeat(segments.kind, segments.lengths)
    found[separator_tokens(segments)] = 0
    return found


def patch_spans(image_spans: IntArray, grid_thw: IntArray) -> IntArray:
    """The patches of images, without row separators: one span per image, or one per row where rows end in them.

    Args:
        image_spans: (images, 2) first token of each image's patches and one past its last token, separators included.
        grid_thw: (images, 3) frames, height, width.

    Returns:
        (spans, 2) first patch and one past the last, in order.
    """
    patches = grid_thw.prod(axis=1)
    separated = image_spans[:, 1] - image_spans[:, 0] > patches
    if not separated.any():
        return image_spans
    lengths = np.where(separated, grid_thw[:, 2], patches)
    owner, row = _counted(np.where(separated, grid_thw[:, 0] * grid_thw[:, 1], 1))
    first = image_spans[owner, 0] + row * (lengths + 1)[owner]
    return np.stack([first, first + lengths[owner]], axis=1)


def _counted(counts: IntArray) -> tuple[IntArray, IntArray]:
    """For each of so many things of each owner: the owner, and its number there."""
    owner = np.arange(counts.size).repeat(counts)
    return owner, np.arange(owner.size) - (counts.cumsum() - counts)[owner]
