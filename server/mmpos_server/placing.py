"""PositionService: a query is read, answered and written."""

from __future__ import annotations

from dataclasses import replace

from mmpos.positions import PositionTable
from mmpos.queries import InputIds, PositionsQuery, PositionsResult
from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos.wire.positions import get_query, put_result
from mmpos_server.call import Call
from mmpos_server.config import Limits
from mmpos_server.profiles import Profile, Profiles
from mmpos_server.refusals import check_message, check_reply, check_segments, check_table, check_view

__all__ = ["INLINE_BYTES", "Placing", "complete"]

INLINE_BYTES = 16_384
"""Queries up to this size, with what they have in shared memory, are answered between two others: a thread would cost
more than they do."""


class Placing:
    """The method of PositionService.

    Args:
        profiles: settings of models.
        limits: most that one request may ask for.
    """

    def __init__(self, profiles: Profiles, limits: Limits) -> None:
        self._profiles, self._limits = profiles, limits

    async def place(self, message: pb.PositionsQuery, answer: pb.Positions, call: Call) -> None:
        """Place a batch."""
        if message.ByteSize() + call.weighed <= INLINE_BYTES and not message.HasField("dense"):
            found = self._answer(message, answer, call)
        else:
            found = await call.run("place", self._answer, message, answer, call)
        call.count(documents=found[0], tokens=found[1], images=found[2])

    def solve(self, query: PositionsQuery, call: Call) -> tuple[PositionTable, int]:
        """The table that a query asks for, and the images in its documents; each step is weighed before it is done."""
        with call.stage("place"):
            segments = query.segments()
            images = check_segments(segments, self._limits)
            call.checkpoint()
            positions = query.place(segments)
            for view in query.views:
                check_table(positions, self._limits)
                check_view(view, positions, self._limits)
                call.checkpoint()
                positions = view.view(positions)
            check_table(positions, self._limits)
        return positions, images

    def _answer(self, message: pb.PositionsQuery, answer: pb.Positions, call: Call) -> tuple[int, int, int]:
        with call.stage("read"):
            check_message(message, self._limits)
            profile = self._profiles.get(message.profile if message.HasField("profile") else None)
            query = complete(get_query("query", message, call.memory), profile, named=message.HasField("profile"))
        positions, images = self.solve(query, call)
        call.checkpoint()
        with call.stage("write"):
            check_reply(positions, query.dense, self._limits, call.memory)
            put_result(answer, PositionsResult.of(positions, query.dense), call.memory)
        return positions.num_documents, positions.num_tokens, images


def complete(query: PositionsQuery, profile: Profile, *, named: bool) -> PositionsQuery:
    """The query with what it leaves to the profile.

    Args:
        query: what the client said.
        profile: the settings to take the rest from.
        named: whether the client named the profile; grids are not merged by one that it did not.
    """
    source = query.source
    if isinstance(source, InputIds):
        builder = profile.builder
        if source.image_token_id is None and named:
            markers = builder.marker_ids
            source = replace(source, image_token_id=markers.patch)
            if source.row_token_id is None and source.last_row_token_id is None:
                source = replace(source, row_token_id=markers.row, last_row_token_id=markers.last_row)
        if source.spatial_merge_size is None and named and builder.images is not None:
            source = replace(source, spatial_merge_size=builder.images.spatial_merge_size)
    scheme = profile.builder.scheme if query.scheme is None else query.scheme
    return replace(query, source=source, scheme=scheme)
