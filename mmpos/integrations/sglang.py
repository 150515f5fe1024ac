"""Positions for SGLang: the ids that its multimodal processors return for a prompt, and segments from its items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.integrations.request_ids import request_ids
from mmpos.positions.table import PositionTable
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import IntArray, host_array, int_array, integer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["item_segments", "mrope_positions"]

GRIDS, SECONDS = ("image_grid_thw", "video_grid_thw"), "second_per_grid_ts"


def mrope_positions(positions: PositionTable) -> tuple[Tensor, Tensor]:
    """Return ``mrope_positions`` and ``mrope_position_delta`` for a request, like SGLang's ``compute_mrope_positions``.

    SGLang slices the ids for chunked prefill and cached prefixes, and uses the delta to place generated and draft
    tokens. However, it resumes a retracted request from the last id of the prompt, so prompts must end with text.

    Args:
        positions: positions of the whole prompt, as one document.

    Returns:
        New int64 tensors of shape (3, tokens) and (1, 1).

    Raises:
        InvalidInputError: positions do not contain exactly one document, or contain padding or a negative id.
        UnsupportedError: there are more than three axes, ids may be fractions, the scheme has no next position, or the
            prompt ends with patches.
    """
    ids, delta = request_ids(positions)
    if not ids.shape[1] or (ids[:, -1] != delta + ids.shape[1] - 1).any():
        got = f"last ids {ids[:, -1].tolist()}" if ids.shape[1] else "no tokens"
        raise UnsupportedError(
            f"positions: got {got}, want a prompt that ends with text, with last id {delta + ids.shape[1] - 1}: SGLang "
            "resumes a retracted request from this id"
        )
    return ids, ids.new_tensor([[delta]])


def item_segments(num_tokens: int, mm_items: Sequence[object], spatial_merge_size: int = 1) -> SegmentTable:
    """Build the segment table of a prompt from SGLang's ``mm_items`` without reading the tokens.

    Args:
        num_tokens: number of tokens in the prompt with expanded placeholders.
        mm_items: items with ``offsets`` (pairs of the first and the last placeholder) and with image_grid_thw or
            video_grid_thw, (n, 3) before merging, and optionally second_per_grid_ts, (n,); a video with one pair per
            frame has text between frames.
        spatial_merge_size: side, in patches, of the square merged into one token.

    Raises:
        InvalidInputError: offsets match neither the grids nor their frames, or spans extend beyond the prompt.
        UnsupportedError: an item has no grid, for example audio.
    """
    merge = integer("spatial_merge_size", spatial_merge_size, minimum=1)
    items = [_item_spans(i, item, merge) for i, item in enumerate(mm_items)]
    rows = np.concatenate([np.zeros((0, 5), np.int64), *(spans for spans, _ in items)])
    times = [time for _, seconds in items for time in seconds]
    order = np.argsort(rows[:, 0], kind="stable")
    rows = rows[order]
    grids = rows[:, 2:]
    short = grids.prod(axis=1) != rows[:, 1] - rows[:, 0] + 1
    if short.any():
        i = int(short.argmax())
        first, last = rows[i, :2].tolist()
        want = "x".join(map(str, grids[i].tolist()))
        raise InvalidInputError(
            f"offsets: got {last - first + 1} placeholders from {first} to {last}, want {grids[i].prod()} for {want} "
            "after merging"
        )
    return SegmentTable.from_spans([num_tokens], rows[:, 0], grids, seconds_per_frame=[times[i] for i in order])


def _item_spans(index: int, item: object, merge: int) -> tuple[IntArray, list[float | None]]:
    """Return first and last placeholder and merged frames, height and width of each span, (spans, 5), and its time."""
    name = f"mm_items[{index}]"
    grid = next((value for field in GRIDS if (value := getattr(item, field, None)) is not None), None)
    if grid is None:
        raise UnsupportedError(f"{name}: got neither image_grid_thw nor video_grid_thw, want one")
    grids = int_array(f"{name}.grid_thw", np.atleast_2d(host_array(f"{name}.grid_thw", grid)), (None, 3))
    values = getattr(item, "offsets", None)
    offsets = int_array(f"{name}.offsets", () if values is None else values, (None, 2))
    seconds = getattr(item, SECONDS, None)
    times = [None] * len(grids) if seconds is None else host_array(f"{name}.{SECONDS}", seconds).ravel().tolist()
    if len(times) != len(grids):
        raise InvalidInputError(f"{name}.{SECONDS}: got {len(times)} values, want {len(grids)}, one per grid")
    if len(grids) == 1 and len(offsets) == grids[0, 0] > 1:  # one span per frame
        grids, times = np.repeat([[1, *grids[0, 1:]]], len(offsets), axis=0), times * len(offsets)
    if len(offsets) != len(grids):
        raise InvalidInputError(f"{name}.offsets: got {len(offsets)} pairs, want {len(grids)}, one per grid")
    odd = (grids[:, 1:] % merge != 0).any(axis=1)
    if odd.any():
        got = grids[int(odd.argmax())].tolist()
        raise InvalidInputError(f"{name}: got grid {got}, want sides that are multiples of {merge}")
    return np.concatenate([offsets, grids // [1, merge, merge]], axis=1), times
