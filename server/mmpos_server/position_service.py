"""Implement PositionService: read a query, place its documents and write the positions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.rpc.positions import get_query, put_result
from mmpos.rpc.queries import InputIds, PositionsQuery, PositionsResult, Shard, Spans, Take, Window
from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import naming
from mmpos_server.config import Limits, Profile, Profiles
from mmpos_server.limits import check, check_message, check_segments, check_table, check_view, reply_bytes
from mmpos_server.plain import SMALL_ANSWER, SMALL_BYTES, SMALL_SEGMENTS

if TYPE_CHECKING:
    from mmpos_server.call import Call

__all__ = ["PositionService", "max_segments"]


class PositionService:
    """Implementation of PositionService.

    Args:
        profiles: settings for the models.
        limits: limits for one request.
    """

    def __init__(self, profiles: Profiles, limits: Limits) -> None:
        self._profiles, self._limits = profiles, limits

    async def place(self, message: pb.PositionsQuery, answer: pb.Positions, call: Call) -> None:
        """Answer Place with the positions of a batch of documents; larger work runs in a thread."""
        if call.request_bytes > SMALL_BYTES:
            query, positions = await call.run("work", lambda: self._solve(self._read(message, call), call))
        else:
            query = self._read(message, call)
            large = max_segments(query) > SMALL_SEGMENTS
            query, positions = await call.run("work", self._solve, query, call) if large else self._solve(query, call)
        call.answer_bytes = size = reply_bytes(positions, query.dense)
        check("response_bytes", size, self._limits)
        if size <= SMALL_ANSWER:
            self._write(query, positions, answer, call)
        else:
            await call.reserve(size)
            await call.run("work", self._write, query, positions, answer, call)

    def _read(self, message: pb.PositionsQuery, call: Call) -> PositionsQuery:
        began = perf_counter()
        check_message(message, self._limits)
        profile = self._profiles.get(message.profile if message.HasField("profile") else None)
        query = get_query("query", message, call.beside, self._profiles.schemes, profile.builder.scheme)
        if isinstance(query.source, InputIds) and message.HasField("profile"):
            query = replace(query, source=_complete(query.source, profile))
        call.staged("read", began)
        return query

    def _solve(self, query: PositionsQuery, call: Call) -> tuple[PositionsQuery, PositionTable]:
        """Return a query with its position table; check the limits before each step."""
        began = perf_counter()
        segments = query.source if isinstance(query.source, SegmentTable) else query.segments()
        call.counts = {"images": check_segments(segments, self._limits)}
        call.checkpoint()
        positions = place(segments, query.scheme or "rope-tie", query.start, query.strict)
        check_table(positions, self._limits)
        for i, view in enumerate(query.views):
            check_view(view, positions, self._limits)
            call.checkpoint()
            with naming(f"views[{i}]"):
                positions = view.view(positions)
            check_table(positions, self._limits)
        call.staged("place", began)
        return query, positions

    def _write(self, query: PositionsQuery, positions: PositionTable, answer: pb.Positions, call: Call) -> None:
        call.checkpoint()
        began = perf_counter()
        put_result(answer, PositionsResult.of(positions, query.dense), call.beside)
        call.counts |= {"documents": positions.documents.shape[1], "tokens": positions.num_tokens}
        call.staged("write", began)


def _complete(source: InputIds, profile: Profile) -> InputIds:
    """Fill the unset fields of token ids from the profile that the client named."""
    builder, placeholders, merge = profile.builder, source.placeholders, source.spatial_merge_size
    if placeholders.image is None:
        markers = {name: value for name, value in vars(placeholders).items() if value is not None}
        placeholders = replace(builder.marker_ids.placeholders, **markers)
    if merge is None and builder.images is not None:
        merge = builder.images.spatial_merge_size
    return replace(source, placeholders=placeholders, spatial_merge_size=merge)


def max_segments(query: PositionsQuery) -> float:
    """Return an upper bound on the number of segments in the documents and views of a query.

    Each frame of an image counts as a segment.
    """
    source = query.source
    if isinstance(source, SegmentTable):
        documents, segments = len(source.segment_offsets) - 1, source.extents[0].sum(dtype=np.float64)
    else:
        grids: tuple[npt.ArrayLike | None, ...]
        if isinstance(source, Spans):
            documents, grids = np.size(source.lengths), (source.grid_thw,)
        else:
            ids, packed = np.asarray(source.input_ids), source.cu_seqlens
            documents = len(ids) if ids.ndim == 2 else 1 if packed is None else np.size(packed)
            grids = source.image_grid_thw, source.video_grid_thw
        frames = [np.ravel(grid)[::3].sum(dtype=np.float64) for grid in grids if grid is not None]
        segments = 2 * sum(frames) + documents
    total = segments
    for view in query.views:
        if isinstance(view, Take):
            starts, stops = np.asarray(view.starts), np.asarray(view.stops)
            disjoint = starts.size == stops.size and bool((starts[1:] >= stops[:-1]).all())
            segments = (1 if disjoint else starts.size) * segments + starts.size
        elif isinstance(view, Window):
            document, documents = np.asarray(view.documents), np.size(view.documents)
            repeats = max(Counter(document.tolist()).values(), default=0)
            segments = repeats * segments + 2 * documents
        else:
            segments += (4 if isinstance(view, Shard) else 1) * documents
        total += segments
    return float(total)
