"""Implement PositionService: read a query, place its documents and write the positions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mmpos.positions.table import PositionTable
from mmpos.rpc.positions import get_query, put_result
from mmpos.rpc.queries import InputIds, PositionsQuery, PositionsResult, Shard, Spans, Take, Window
from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos.segments.table import SegmentTable
from mmpos_server.config import Limits, Profile, Profiles
from mmpos_server.limits import (
    check_message,
    check_reply,
    check_segments,
    check_table,
    check_view,
    dense_bytes,
)
from mmpos_server.plain import SMALL_ANSWER, SMALL_BYTES, SMALL_SEGMENTS

if TYPE_CHECKING:
    from mmpos_server.call import Call

__all__ = ["PositionService", "is_small", "max_segments"]


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

        def finish(query: PositionsQuery) -> None:
            put(query, *self._solve(query, call))

        def put(query: PositionsQuery, positions: PositionTable, images: int) -> None:
            call.checkpoint()
            with call.stage("write"):
                check_reply(positions, query.dense, self._limits, call)
                put_result(answer, PositionsResult.of(positions, query.dense), call.beside)
            call.count(documents=positions.num_documents, tokens=positions.num_tokens, images=images)

        if not is_small(call):
            return await call.run("work", lambda: finish(self._read(message, call)))
        query = self._read(message, call)
        if max_segments(query) > SMALL_SEGMENTS:
            return await call.run("work", finish, query)
        positions, images = self._solve(query, call)
        if query.dense is None or dense_bytes(positions, query.dense) <= SMALL_ANSWER:
            return put(query, positions, images)
        return await call.run("work", put, query, positions, images)

    def _read(self, message: pb.PositionsQuery, call: Call) -> PositionsQuery:
        with call.stage("read"):
            check_message(message, self._limits)
            profile = self._profiles.get(message.profile if message.HasField("profile") else None)
            query = get_query("query", message, call.beside, self._profiles.schemes)
            return _complete(query, profile, named=message.HasField("profile"))

    def _solve(self, query: PositionsQuery, call: Call) -> tuple[PositionTable, int]:
        """Return the position table of a query and its number of images; check the limits before each step."""
        with call.stage("place"):
            segments = query.segments()
            images = check_segments(segments, self._limits)
            call.checkpoint()
            positions = query.place(segments)
            check_table(positions, self._limits)
            for view in query.views:
                check_view(view, positions, self._limits)
                call.checkpoint()
                positions = view.view(positions)
                check_table(positions, self._limits)
        return positions, images


def is_small(call: Call) -> bool:
    """Return whether a call's request is small enough to be read on the event loop."""
    return call.request_bytes <= SMALL_BYTES


def _complete(query: PositionsQuery, profile: Profile, *, named: bool) -> PositionsQuery:
    """Fill the unset fields of a query from a profile.

    Args:
        query: the client's query.
        profile: settings for the unset fields.
        named: whether the client named the profile; only then are grids merged by the profile's spatial_merge_size.
    """
    source = query.source
    if isinstance(source, InputIds):
        builder = profile.builder
        if source.placeholders.image is None and named:
            markers = {name: value for name, value in vars(source.placeholders).items() if value is not None}
            source = replace(source, placeholders=replace(builder.marker_ids.placeholders, **markers))
        if source.spatial_merge_size is None and named and builder.images is not None:
            source = replace(source, spatial_merge_size=builder.images.spatial_merge_size)
    scheme = profile.builder.scheme if query.scheme is None else query.scheme
    if source is query.source and scheme is query.scheme:
        return query
    return PositionsQuery(source, scheme, query.start, query.strict, query.views, query.dense)


def max_segments(query: PositionsQuery) -> float:
    """Return an upper bound on the number of segments in the documents and views of a query."""
    documents, segments = _source(query.source)
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
    return total


def _source(source: SegmentTable | Spans | InputIds) -> tuple[int, float]:
    """Count the documents and bound the number of segments, counting each frame of an image as a segment."""
    if isinstance(source, SegmentTable):
        return source.num_documents, source.extents[0].sum(dtype=np.float64)
    if isinstance(source, Spans):
        documents, grids = np.size(source.lengths), [source.grid_thw]
    else:
        ids, packed = np.asarray(source.input_ids), source.cu_seqlens
        documents = len(ids) if ids.ndim == 2 else 1 if packed is None else np.size(packed)
        grids = [grid for grid in (source.image_grid_thw, source.video_grid_thw) if grid is not None]
    frames = sum(float(np.ravel(grid)[::3].sum(dtype=np.float64)) for grid in grids)
    return documents, 2 * frames + documents
