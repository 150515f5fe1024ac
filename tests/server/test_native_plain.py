"""Compare plain queries, which are answered directly from bytes to bytes, with the same queries parsed as messages."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from functions_called import functions_called
from grpc import aio
from hypothesis import given
from message_strategies import for_each, messages, places
from mutations import mutate

from mmpos import Grid, SegmentTable, Text
from mmpos.client import Decode, Dense, InputIds, PositionsQuery
from mmpos.positions.plan import forget_plans
from mmpos.rpc.positions import put_query
from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos.schemes import MRopeQwen25, RopeTieV2
from mmpos.segments.kinds import Audio, Segment
from mmpos.segments.placeholders import Placeholders
from mmpos.support import native
from mmpos_server.arrivals import Arrivals
from mmpos_server.call import Threads
from mmpos_server.config import Limits, Profiles, ServerConfig
from mmpos_server.endpoints import Endpoint, Shared
from mmpos_server.logs import Logs
from mmpos_server.metrics import Metrics
from mmpos_server.plain import PlainQueries
from mmpos_server.services import methods
from mmpos_server.streams import StreamEndpoint

PROFILES = '[profiles.default]\n[profiles.video]\nscheme = "videorope"\n[profiles.rows]\nscheme = "rows"\n'
CONFIG = ServerConfig.read(PROFILES)
BATCH: list[list[Segment]] = [[Text(3), Grid(2, 3), Text(2), Grid(4, 4), Text(1)], [Text(300)], [Text(1), Audio(2)]]


@dataclass(frozen=True)
class FailedError(Exception):
    """The status of a call that failed."""

    code: object
    message: str
    metadata: object


class Context:
    """Context of a call or stream with these messages."""

    def __init__(self, *messages: bytes) -> None:
        self._messages = [*messages, aio.EOF]

    async def read(self) -> Any:
        return self._messages.pop(0)

    async def abort(self, *status: Any) -> None:
        raise FailedError(*status)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("x-request-id", "1"),)

    def peer(self) -> str:
        return "unix:"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}


class Way:
    """Place and its stream without a transport, with or without the path for plain queries."""

    def __init__(self, config: ServerConfig, limits: Limits, *, plain: bool) -> None:
        method = methods(Profiles.from_config(config), limits)[0]
        if not plain:
            method = replace(method, plain=None)
        self.metrics, self._threads, self._loop = Metrics(), Threads(), asyncio.new_event_loop()
        shared = Shared(
            limits, Arrivals(1.0), self._threads, self.metrics, Logs(io.TextIOWrapper(io.BytesIO()), sample=0)
        )
        self.place, self.stream = Endpoint(method, shared), StreamEndpoint(method, shared)

    def answer(self, raw: bytes) -> bytes | FailedError:
        try:
            return self._loop.run_until_complete(self.place.answer(None, Context(raw)))
        except FailedError as failed:
            return failed

    def answers(self, *items: bytes) -> list[bytes]:
        async def collected() -> list[bytes]:
            return [answer async for answer in self.stream.answers(None, Context(*items))]

        return self._loop.run_until_complete(collected())

    def stop(self) -> None:
        self._threads.close()
        self._loop.close()


class Both:
    """Both ways, the second without the path for plain queries."""

    def __init__(self, config: ServerConfig, limits: Limits | None = None) -> None:
        limits = limits or config.limits
        self.ways = Way(config, limits, plain=True), Way(config, limits, plain=False)
        self.plain = PlainQueries(Profiles.from_config(config), limits)

    def answers(self, raw: bytes) -> bytes | FailedError:
        """Answer a request in both ways, and check that the answers are equal."""
        result, wanted = (way.answer(raw) for way in self.ways)
        assert result == wanted
        return result

    def counts(self) -> list[dict[str, float]]:
        """Return the metrics of both ways, without timings and those of the process."""
        return [
            {
                f"{sample.name}{sample.labels}": sample.value
                for metric in way.metrics.registry.collect()
                for sample in metric.samples
                if sample.name.startswith("mmpos_")
                and not ("_seconds" in sample.name or sample.name.endswith("_created"))
            }
            for way in self.ways
        ]

    def stop(self) -> None:
        for way in self.ways:
            way.stop()


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    """Yield two servers with the limits from the embedded settings."""
    servers = Both(CONFIG)
    yield servers
    servers.stop()


def query(documents: list[list[Segment]] = BATCH, profile: str | None = None, **arguments: Any) -> bytes:
    """Return the bytes of a Place request."""
    request = pb.PlaceRequest()
    put_query(request.query, PositionsQuery(SegmentTable.from_documents(documents), **arguments), profile)
    return request.SerializeToString()


FRAMES: list[Segment] = [Grid(2, 2, frames=3)]
TOUCHING: list[Segment] = [Grid(2, 2), Grid(2, 2)]
UNEVEN: list[list[Segment]] = [[Text(1), Grid(3, 5), Text(1)]]
FRACTIONAL = "rope-tie-fractional"
PLAIN: dict[str, bytes] = {
    "the default scheme": query(),
    "a scheme with parameters": query(scheme=RopeTieV2(axes=3, rounding="floor")),
    "a profile": query(profile="video"),
    "a profile and a scheme": query(profile="rows", scheme="flatten"),
    "a start": query(start=-7),
    "a start for each document": query(start=[5, -9, 2**31 - 400]),
    "frames": query([[Text(1), *FRAMES, Text(1)]], scheme="mrope"),
    "grids that touch": query([[Text(1), *TOUCHING]], strict=False),
    "grids that may touch": query([[Text(1), *TOUCHING]], scheme="mrope"),
    "ids": query(dense=Dense()),
    "ids as int64": query(dense=Dense("int64")),
    "ids as float64": query(dense=Dense("float64")),
    "fractions": query(UNEVEN, scheme=FRACTIONAL),
    "fractional ids": query(UNEVEN, scheme=FRACTIONAL, dense=Dense()),
    "axes": query(dense=Dense(axes=(1, 0, 0, 1))),
    "many ids": query([[Text(100), Grid(64, 64), Text(5)]] * 9, dense=Dense()),
    "many documents": query(BATCH * 300),
}


@pytest.mark.parametrize("raw", PLAIN.values(), ids=PLAIN)
def test_a_plain_query_gets_the_same_answer_on_both_paths(both: Both, raw: bytes) -> None:
    both.answers(raw)  # the first call registers the shapes
    answer = both.answers(raw)
    assert isinstance(answer, bytes)
    result = both.plain.answer(raw)
    assert result is not None
    positions = pb.PlaceResponse.FromString(answer).positions
    assert (result[0], *result[1:3]) == (answer, len(positions.cu_seqlens) - 1, positions.cu_seqlens[-1])
    item = pb.StreamPlaceRequest(id=2**40, query=pb.PlaceRequest.FromString(raw).query).SerializeToString()
    served = both.plain.answer(item, item=True)
    assert served is not None
    assert served[0] == pb.StreamPlaceResponse(id=2**40, positions=positions).SerializeToString()


def field(number: int, content: bytes, kind: int = 2) -> bytes:
    """Return a field of these bytes: with their length, which must be below 128, or with another wire type."""
    return bytes([number << 3 | kind]) + (bytes([len(content)]) + content if kind == 2 else content)


SEGMENTS = field(1, b"\1") + field(3, b"\1") + field(4, b"\7") + field(5, b"\1")
"""A document of seven tokens of text."""


def changed(old: bytes, new: bytes, more: bytes = b"") -> bytes:
    """Return a query whose document is changed, with these further fields of the query."""
    return field(1, field(1, SEGMENTS.replace(old, new, 1) if old else SEGMENTS) + more)


KIND, ROWS, COUNT = (field(number, bytes([value])) for number, value in ((1, 1), (3, 1), (5, 1)))
NOT_PLAIN: dict[str, bytes] = {
    "no query": b"",
    "spans": pb.PlaceRequest(query={"spans": {"lengths": [9]}}).SerializeToString(),  # type: ignore[arg-type]
    "a view": query(views=[Decode()]),
    "an unknown field": changed(b"", b"") + field(15, b"\1", 0),
    "the query twice": field(1, field(1, SEGMENTS)) * 2,
    "unpacked numbers": changed(KIND, field(1, b"\1", 0)),
    "times": query([[Text(1), Grid(1, 2, frames=2, seconds_per_frame=1)]], scheme="mrope-qwen2.5"),
    "separators": query([[Text(1), Grid(2, 2, row_separator=True), Text(1)]]),
    "a scheme without a plan": query(scheme="tmrope"),
    "a profile that is not UTF-8": changed(b"", b"", field(4, b"\xff")),
    "an unknown profile": query(profile="audio"),
    "grids that must not touch": query([[Text(1), *TOUCHING]]),
    "a document without segments": changed(COUNT, field(5, b"\1\0")),
    "a list that is too short": changed(KIND, field(1, b"\1\1")),
    "an unknown kind": changed(KIND, field(1, b"\x09")),
    "text with rows": changed(ROWS, field(3, b"\2")),
    "a start and starts": changed(b"", b"", field(6, b"\1", 0) + field(7, b"\1")),
    "a start outside int32": changed(b"", b"", field(6, b"\x80\x80\x80\x80\x08", 0)),
    "an axis that does not exist": query(dense=Dense(axes=(2,))),
    "another type of ids": changed(b"", b"", field(10, field(1, b"\6", 0))),
    "fractions as integers": query(UNEVEN, scheme=FRACTIONAL, dense=Dense("int32")),
    "more ids than a small call may have": query([[Text(2**18 + 1)]], dense=Dense()),
}


@pytest.mark.parametrize("raw", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_other_and_invalid_queries_are_parsed_as_messages(both: Both, raw: bytes) -> None:
    both.answers(raw)
    assert both.plain.answer(raw) is None


LIMITS = {"documents": 2, "segments": 4, "tokens": 20, "images": 1, "message_bytes": 1024, "response_bytes": 1024}
OVER: dict[str, tuple[bytes, str | None]] = {
    "at all limits": (query([[Text(3), Grid(2, 3), Text(2)], [Text(9)]]), None),
    "documents": (query([[Text(1)]] * 3), "documents"),
    "segments": (query([[Text(1), Grid(2, 3), Text(1)], [Text(1), Text(1)]]), "segments"),
    "frames as segments": (query([[Text(1), Grid(1, 1, frames=4)]], scheme="mrope"), "segments"),
    "tokens": (query([[Text(20)]]), None),
    "one token more": (query([[Text(21)]]), "tokens"),
    "images": (query([[Grid(2, 3), Text(1), Grid(2, 3)]]), "images"),
    "bytes of the answer": (query([[Text(20)]], dense=Dense("float64", (0,) * 7)), "response_bytes"),
    "bytes of the answer besides its ids": (query([[Text(16)]], dense=Dense("float64", (0,) * 8)), "response_bytes"),
    "bytes of the request": (query([[Text(1)]]) + field(15, bytes(127)) * 9, "message_bytes"),
}


def test_errors_name_the_limit_that_a_value_exceeds() -> None:
    # The limits are set directly, since a settings file may not contain limits this small.
    limited = Both(CONFIG, Limits(**LIMITS))
    for name, (raw, limit) in OVER.items():
        limited.answers(raw)  # the first call registers the shapes
        answer = limited.answers(raw)
        assert (answer.message.partition(":")[0] if isinstance(answer, FailedError) else None) == limit, name
        assert (limited.plain.answer(raw) is None) == (limit is not None), name
    result, wanted = limited.counts()
    assert len(result) > 10
    assert result == wanted
    limited.stop()


@given(places())
def test_any_query_gets_the_same_answer_on_both_paths(both: Both, request: Any) -> None:
    both.answers(request.SerializeToString())


def test_mutated_bytes_get_the_same_answer_on_both_paths(both: Both) -> None:
    pieces = [*PLAIN.values(), *NOT_PLAIN.values()]
    for_each(messages(pb.PlaceRequest), 60, lambda message: pieces.append(message.SerializeToString()))
    small = [raw for raw in pieces if len(raw) < 500]
    chance, seen = random.Random(31), {True: 0, False: 0}
    for turn in range(4000):
        raw = mutate(chance.choice(small), chance, small)
        if turn % 2:  # a plain query with one changed byte often stays plain
            changed = bytearray(chance.choice([sent for sent in PLAIN.values() if len(sent) < 500]))
            changed[chance.randrange(len(changed))] = chance.choice([0, 1, 2, 3, 5, 9, 100, 255])
            raw = bytes(changed)
        both.answers(raw)
        seen[both.plain.answer(raw) is None] += 1
    assert min(seen.values()) > 50
    assert both.counts()[0] == both.counts()[1]


def test_stream_items_get_the_same_answers_on_both_paths(both: Both) -> None:
    requests = [pb.PlaceRequest.FromString(raw) for raw in (*PLAIN.values(), query([[Text(2)]], start=2**31 - 1))]
    items = [pb.StreamPlaceRequest(id=i, query=sent.query).SerializeToString() for i, sent in enumerate(requests)]
    results, wanted = (way.answers(*items) for way in both.ways)
    assert results == wanted
    assert len(results) == len(items)
    assert both.counts()[0] == both.counts()[1]


def test_shapes_and_settings_are_cached_and_evicted() -> None:
    forget_plans()
    plain = PlainQueries(Profiles.from_config(CONFIG), CONFIG.limits)
    new = query([[Text(1), Grid(3, 7), Text(1)]])
    assert plain.answer(new) is None  # not before the scheme has planned this shape for a message
    PositionsQuery(SegmentTable.from_documents([[Text(1), Grid(3, 7), Text(1)]])).run()
    assert plain.answer(new) is not None
    for stride in range(1, 200):
        assert plain.answer(query([[Text(1)]], scheme=MRopeQwen25(tokens_per_second=stride))) is not None
        assert len(plain._known) <= 64
    assert plain.answer(new) is None  # its plan was evicted


def test_without_the_extension_no_query_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "core", None)
    assert PlainQueries(Profiles.from_config(CONFIG), CONFIG.limits).answer(PLAIN["ids"]) is None


IMAGE = InputIds([1, 5, 9, 9, 9, 9, 2, 3], Placeholders(image=9), [[1, 2, 2]])
FEW: dict[str, tuple[PositionsQuery, int]] = {
    "a plain query": (PositionsQuery(SegmentTable.from_documents(BATCH), "mrope-qwen3"), 25),
    "a view": (PositionsQuery(SegmentTable.from_documents(BATCH), views=[Decode()]), 50),
    "input_ids": (PositionsQuery(IMAGE), 60),
}


@pytest.mark.parametrize(("asked", "most"), FEW.values(), ids=FEW)
def test_a_call_runs_few_python_functions(both: Both, asked: PositionsQuery, most: int) -> None:
    request = pb.PlaceRequest()
    put_query(request.query, asked)
    raw, seen = request.SerializeToString(), both.ways[0]
    assert isinstance(seen.answer(raw), bytes)
    assert most / 3 < functions_called(lambda: seen.answer(raw)) <= most
