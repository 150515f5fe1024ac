"""Cost of a request, bounded by its bytes and its words; work that is not small is done beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from message_strategies import places

from mmpos import Grid, MmposError, SegmentTable, Text
from mmpos.client import Decode, InputIds, Pad, PositionsQuery, Shard, Spans, Take, View, Window
from mmpos.errors import LimitExceededError
from mmpos.rpc.positions import get_query, put_query
from mmpos.rpc.v1 import positions_pb2, sequences_pb2
from mmpos_server.admission import Admission, Call, Clients
from mmpos_server.config import ClientLimits, Limits, Profiles, load
from mmpos_server.endpoints import decode, encode
from mmpos_server.position_service import INLINE_BYTES, PositionService, segments_at_work

CONFIG = load()
LOOP = "of the loop"


@pytest.fixture
def call() -> Iterator[Call]:
    admission = Admission(CONFIG.concurrency, CONFIG.pools)
    yield Call("a", admission, Clients(ClientLimits()).lease(""))
    admission.close()


class Recorder:
    """A type of messages that remembers by which threads they were parsed."""

    DESCRIPTOR = sequences_pb2.BuildRequest.DESCRIPTOR

    def __init__(self) -> None:
        self.threads: list[str] = []

    def FromString(self, raw: bytes) -> Any:  # noqa: N802
        here = threading.current_thread()
        self.threads.append(LOOP if here is threading.main_thread() else here.name.rpartition("_")[0])
        return sequences_pb2.BuildRequest.FromString(raw)


def parsed(raw: bytes, call: Call, limits: Limits = CONFIG.limits) -> list[str]:
    """Which threads parsed these bytes."""
    kind: Any = Recorder()
    assert asyncio.run(decode(kind, raw, call, limits)) == sequences_pb2.BuildRequest.FromString(raw)
    assert call.request_bytes == len(raw)
    return list(kind.threads)


def build(*parts: dict[str, object], documents: int = 1) -> bytes:
    query = {"documents": [{"parts": list(parts)}] * documents}
    return sequences_pb2.BuildRequest(query=query).SerializeToString()  # type: ignore[arg-type]


def test_a_small_message_is_parsed_on_the_loop(call: Call) -> None:
    assert parsed(build({"text": "a bird"}), call) == [LOOP]


def test_a_photograph_of_many_bytes_and_few_fields_is_parsed_on_the_loop(call: Call) -> None:
    assert parsed(build({"image": bytes(2**19)}), call) == [LOOP]


def test_a_message_of_many_fields_is_parsed_in_a_thread(call: Call) -> None:
    assert parsed(build(*[{}] * 20_000), call) == ["mmpos-place"]


def test_a_message_of_very_many_bytes_is_parsed_in_a_thread(call: Call) -> None:
    assert parsed(build({"image": bytes(2**21)}), call) == ["mmpos-place"]


LITTLE = Limits(documents=5, segments=7)
"""10 times 12 fields and numbers, and 65,536 others."""


def test_a_message_of_too_many_fields_is_not_parsed(way: str, call: Call) -> None:
    kind: Any = Recorder()
    most = 65_656
    words = f"request: got {most + 1} fields and numbers or more, want at most {most} for 5 documents and 7 segments"
    with pytest.raises(LimitExceededError) as caught:
        asyncio.run(decode(kind, build(*[{}] * (most - 1)), call, LITTLE))
    assert (str(caught.value), kind.threads) == (words, [])
    assert len(sequences_pb2.BuildRequest.FromString(build(*[{}] * (most - 2))).query.documents[0].parts) == most - 2
    asyncio.run(decode(kind, build(*[{}] * (most - 2)), call, LITTLE))
    assert kind.threads == ["mmpos-place"]


def test_many_bytes_that_are_no_message_are_not_parsed(way: str, call: Call) -> None:
    kind: Any = Recorder()
    for raw in (build(*[{}] * 20_000)[:-1], b"\x0e" + bytes(2**21)):
        with pytest.raises(DecodeError):
            asyncio.run(decode(kind, raw, call, CONFIG.limits))
    assert kind.threads == []


def test_an_answer_that_was_told_to_be_large_is_written_in_a_thread(call: Call) -> None:
    answer = positions_pb2.PlaceResponse()
    answer.positions.cu_seqlens.extend([0, 1])
    assert asyncio.run(encode(answer, call, CONFIG.limits)) == answer.SerializeToString()
    assert [stage for stage, _ in call.stages] == ["encode"]
    call.answer_bytes = 2**20 + 1
    assert asyncio.run(encode(answer, call, CONFIG.limits)) == answer.SerializeToString()
    assert [stage for stage, _ in call.stages] == ["encode", "queue", "encode"]


# Queries.

IMAGES = Spans([1000], [4 * i + 1 for i in range(250)], [[1, 1, 2]] * 250)
"""501 segments: a text before, between and after each of 250 images."""

EVERYTHING = Take([0] * 500, [1000] * 500)
TEXT = SegmentTable.from_documents([[Text(9)]] * 3)
FRAMES = SegmentTable.from_documents([[Text(1), Grid(2, 2, frames=5), Text(1)]])

ESTIMATES: dict[str, tuple[PositionsQuery, float]] = {
    "texts": (PositionsQuery(TEXT), 3),
    "each frame": (PositionsQuery(FRAMES), 7),
    "images among text": (PositionsQuery(IMAGES), 501),
    "frames of spans": (PositionsQuery(Spans([100], [1], [[9, 1, 2]])), 19),
    "token ids": (
        PositionsQuery(InputIds([[1, 2, 3]] * 4, image_grid_thw=[[1, 1, 1]], video_grid_thw=[[3, 1, 1]])),
        12,
    ),
    "packed token ids": (PositionsQuery(InputIds([1, 2, 3], cu_seqlens=[0, 1, 2, 3])), 4),
    "ranges that lie apart": (PositionsQuery(IMAGES, views=[Take([0, 10], [10, 20])]), 501 + 503),
    "ranges over each other": (PositionsQuery(IMAGES, views=[EVERYTHING]), 501 + 251_000),
    "views one after the other": (PositionsQuery(IMAGES, views=[EVERYTHING, Pad()]), 501 + 251_000 + 251_001),
    "a window of each": (PositionsQuery(TEXT, views=[Window([0, 1, 2], [0, 0, 0], [4, 4, 4])]), 3 + 9),
    "windows of one": (PositionsQuery(TEXT, views=[Window([0] * 4, [0] * 4, [4] * 4)]), 3 + 20),
    "no windows": (PositionsQuery(TEXT, views=[Window([], [], [])]), 3),
    "tokens to come": (PositionsQuery(TEXT, views=[Decode(5)]), 3 + 6),
    "a share": (PositionsQuery(TEXT, views=[Shard(0, 2)]), 3 + 15),
}


@pytest.mark.parametrize(("query", "segments"), ESTIMATES.values(), ids=ESTIMATES)
def test_the_segments_of_a_query_are_told_by_its_words(query: PositionsQuery, segments: float) -> None:
    assert segments_at_work(query) == segments


@given(places())
def test_no_query_makes_more_segments_than_were_told(request: Any) -> None:
    query = get_query("query", request.query)
    try:
        positions = query.place(query.segments())
        made = positions.num_segments
        for view in query.views:
            positions = view.view(positions)
            made += positions.num_segments
    except MmposError:
        return
    assert made <= segments_at_work(query)


def placed(call: Call, query: PositionsQuery) -> positions_pb2.Positions:
    """The answer to a query that came in few bytes."""
    message, answer = positions_pb2.PositionsQuery(), positions_pb2.Positions()
    put_query(message, query)
    call.request_bytes = message.ByteSize()
    assert call.request_bytes <= INLINE_BYTES
    asyncio.run(PositionService(Profiles.from_config(CONFIG), CONFIG.limits).place(message, answer, call))
    return answer


def test_a_query_of_few_segments_is_answered_on_the_loop(call: Call) -> None:
    assert placed(call, PositionsQuery(IMAGES)).cu_seqlens == [0, 1000]
    assert [stage for stage, _ in call.stages] == ["read", "place", "write"]


@pytest.mark.parametrize(
    "views",
    [[EVERYTHING], [Window([0] * 9, [0] * 9, [1000] * 9)], [Pad()] * 8],
    ids=["ranges", "windows", "many views"],
)
def test_a_query_of_many_segments_is_answered_in_a_thread(call: Call, views: list[View]) -> None:
    answer = placed(call, PositionsQuery(IMAGES, views=views))
    assert [stage for stage, _ in call.stages] == ["read", "queue", "place", "write"]
    assert call.answer_bytes == len(answer.table.table) + len(answer.table.documents)
