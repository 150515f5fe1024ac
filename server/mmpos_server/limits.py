"""Check limits before the work begins: count what a request claims to contain and compare that with the limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mmpos.errors import LimitExceededError
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import AXES, FIRST_TOKEN, OFFSET
from mmpos.rpc.queries import Dense, Take, View, Window
from mmpos.rpc.v1.positions_pb2 import PositionsQuery
from mmpos.segments.kinds import AUDIO, CLIP, PAD, TEXT, THUMBNAIL, TILE
from mmpos.segments.table import SegmentTable
from mmpos_server.config import Limits

if TYPE_CHECKING:
    from mmpos_server.call import Call

__all__ = [
    "MAX_VIEWS",
    "check",
    "check_answer",
    "check_message",
    "check_segments",
    "check_table",
    "check_view",
    "most_fields",
    "reply_bytes",
]

MAX_VIEWS, MAX_SCALINGS = 16, 1024
"""Maximum number of views in a query, and of scalings, one for each axis, in a rotation."""


def most_fields(limits: Limits) -> dict[str, int]:
    """Return how many messages each repeated field of a request may hold, for ``Beside.marked`` to count."""
    return {
        "fields": limits.segments + 2**16,
        "documents": limits.documents,
        "parts": limits.segments,
        "seconds_per_frame": limits.segments,
        "views": MAX_VIEWS,
        "axis_scaling": MAX_SCALINGS,
    }


def check(name: str, got: float, limits: Limits) -> None:
    """Check a number against the limit with this name.

    Raises:
        LimitExceededError: the number is larger; the message names the limit.
    """
    most = getattr(limits, name)
    if got > most:
        _refuse(name, got, most)


def _refuse(name: str, got: float, most: int) -> None:
    raise LimitExceededError(f"{name}: got {got:.0f}, want at most {most} in one request to this server")


def check_message(message: PositionsQuery, limits: Limits) -> None:
    """Check the lists in a query against the limits before they are converted to arrays."""
    source = message.WhichOneof("source")
    if source == "segments":
        check("segments", len(message.segments.kind), limits)
        check("documents", len(message.segments.segments_per_document), limits)
    elif source == "spans":
        check("images", max(len(message.spans.offsets), len(message.spans.seconds_per_frame)), limits)
        check("documents", len(message.spans.lengths), limits)
    elif source == "input_ids":
        ids = message.input_ids
        rows = ids.input_ids.shape[0] if len(ids.input_ids.shape) == 2 else max(len(ids.cu_seqlens) - 1, 1)
        grids = (len(ids.image_grid_thw) + len(ids.video_grid_thw)) // 3
        check("documents", rows, limits)
        check("images", max(grids, len(ids.seconds_per_frame)), limits)
    if len(message.views) > MAX_VIEWS:
        _refuse("views", len(message.views), MAX_VIEWS)


def check_segments(segments: SegmentTable, limits: Limits) -> int:
    """Check documents against all limits except tokens, before they are placed; return the number of images."""
    kind = segments.kind
    counts = np.bincount(kind, minlength=TILE + 1).tolist()
    images = kind.size - counts[TEXT] - counts[PAD] - counts[AUDIO]
    check("documents", segments.segment_offsets.size - 1, limits)
    check("images", images, limits)
    # A scheme may split a grid at every frame, a clip also at every audio token, thumbnails and tiles at their markers
    # and the tokens after them, and a thumbnail with tiles at every patch.
    check("segments", segments.extents[0].sum(), limits)
    detailed = counts[THUMBNAIL] + counts[TILE]
    if detailed:
        stretched = (kind == THUMBNAIL) & (np.append(kind[1:], PAD) == TILE)
        check("segments", 4 * detailed + segments.extents[1:, stretched].prod(axis=0).sum(), limits)
    if segments.extra_tokens is not None:
        check("segments", 2 * segments.extra_tokens[kind == CLIP].sum(), limits)
    return images


def check_table(positions: PositionTable, limits: Limits) -> None:
    """Check a position table against the limits."""
    check("documents", positions.documents.shape[1], limits)
    check("segments", positions.table.shape[1], limits)
    check("tokens", positions.num_tokens, limits)


def check_view(view: View, positions: PositionTable, limits: Limits) -> None:
    """Check the size of a view before it is computed, since overlapping ranges may multiply the size of the table."""
    if not isinstance(view, Take | Window):
        return
    tokens, ranges = positions.num_tokens, np.size(view.starts)
    check("segments", ranges, limits)
    if isinstance(view, Window):
        check("documents", np.size(view.documents), limits)
        check("tokens", np.sum(view.lengths, dtype=np.float64), limits)
    offset, edges = positions.table[OFFSET], np.append(positions.documents[FIRST_TOKEN], tokens)
    ends, owners = (view.stops, view.starts) if isinstance(view, Take) else (view.lengths, view.documents)
    fits = np.size(ends) == np.size(owners) == ranges and edges.size > 1
    if not fits or ranges * offset.size <= limits.segments:  # no range has more segments than the table
        return
    if isinstance(view, Take):
        begin, end = np.clip(view.starts, 0, tokens), np.clip(view.stops, 0, tokens)
    else:
        document = np.clip(view.documents, 0, edges.size - 2)
        first, stop = edges[document], edges[document + 1]
        begin = np.clip(first + np.clip(view.starts, 0, tokens), first, stop)
        end = np.clip(begin + np.clip(view.lengths, 0, tokens), begin, stop)
    pieces = offset.searchsorted(end, side="left") - offset.searchsorted(begin, side="right") + 1
    check("segments", np.maximum(pieces, 0)[end > begin].sum(), limits)


def check_answer(size: float, limits: Limits, call: Call) -> None:
    """Check the size of a reply against the limit before the reply is computed, and record it in the call."""
    check("response_bytes", size, limits)
    call.answer_bytes += size


def reply_bytes(positions: PositionTable, dense: Dense | None) -> int:
    """Return the size in bytes of a query's table or ids."""
    if dense is None:
        return positions.table.nbytes + positions.documents.nbytes
    rows = (positions.table.shape[0] - AXES) // 4 if dense.axes is None else len(dense.axes)
    return rows * positions.num_tokens * (4 if not positions.fractional and dense.dtype in (None, "int32") else 8)
