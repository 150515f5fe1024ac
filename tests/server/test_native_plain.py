"""Compare plain queries, which are answered directly from bytes to bytes, with the same queries parsed as messages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from functions_called import functions_called
from google.protobuf.message import DecodeError
from hypothesis import given
from message_strategies import for_each, messages, places
from mutations import mutate
from serving import KeptLogs

from mmpos import Grid, SegmentTable, Text
from mmpos.client import Decode, Dense, InputIds, PositionsQuery
from mmpos.errors import MmposError
from mmpos.positions.plan import forget_plans
from mmpos.rpc.positions import put_query
from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos.schemes import MRopeQwen25, RopeTie, RopeTieV2
from mmpos.segments.kinds import Audio, Segment
from mmpos.segments.placeholders import Placeholders
from mmpos.sequence.builder import SequenceBuilder
from mmpos.support import native
from mmpos_server.app import Server
from mmpos_server.call import Call
from mmpos_server.config import Limits, Profile, Profiles, ServerConfig
from mmpos_server.endpoints import Endpoint
from mmpos_server.methods import Plain
from mmpos_server.plain import PlainQueries
from mmpos_server.services import methods

CONFIG = ServerConfig.read(
    '[profiles.default]\n[profiles.video]\nscheme = "videorope"\n[profiles.rows]\nscheme = "rows"\n'
)
PROFILES = Profiles.from_config(CONFIG)
BATCH: list[list[Segment]] = [[Text(3), Grid(2, 3), Text(2), Grid(4, 4), Text(1)], [Text(300)], [Text(1), Audio(2)]]


class Place:
    """Place without a transport.

    Args:
        limits: limits of one request.
    """

    def __init__(self, limits: Limits = CONFIG.limits) -> None:
        self.plain, self.loop = PlainQueries(PROFILES, limits), asyncio.new_event_loop()
        method = replace(methods(PROFILES, limits)[0], plain=self.plain.answer)
        self._shared = replace(Server(CONFIG, logs=KeptLogs(0), methods=[])._shared, limits=limits)
        self.endpoint = Endpoint(method, self._shared)

    def call(self) -> Call:
        """Return a call that has not begun."""
        return Call("", self._shared.arrivals, self._shared.threads)

    def parsed(self, raw: bytes) -> Plain:
        """Answer a request through messages.

        Raises:
            MmposError, DecodeError: it is refused.
        """
        call = self.call()
        answer = self.loop.run_until_complete(self.endpoint._parsed(raw, call))
        return answer, call.counts["documents"], call.counts["tokens"], call.counts["images"]

    def answer(self, raw: bytes) -> Plain | None:
        """Return the plain answer if there is one, after a check that the parsed request has the same."""
        try:
            parsed = self.parsed(raw)  # which also registers the shapes
        except (MmposError, DecodeError):
            parsed = None
        plain = self.plain.answer(raw)
        assert plain in (None, parsed)
        return plain

    def stop(self) -> None:
        """End the threads."""
        self._shared.threads.close()
        self.loop.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Place]:
    """Yield Place with the limits from the embedded settings."""
    place = Place()
    yield place
    place.stop()


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
def test_a_plain_query_gets_the_answer_of_a_parsed_one(served: Place, raw: bytes) -> None:
    plain = served.answer(raw)
    assert plain is not None
    request = pb.StreamPlaceRequest(id=2**40, query=pb.PlaceRequest.FromString(raw).query)
    item = served.plain.answer(request.SerializeToString(), item=True)
    answer = pb.StreamPlaceResponse(id=2**40, positions=pb.PlaceResponse.FromString(plain[0]).positions)
    assert item == (answer.SerializeToString(), *plain[1:])
    call = served.call()
    assert (call.plain(served.plain.answer, raw), *call.counts.values()) == plain


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
def test_other_and_invalid_queries_are_not_plain(served: Place, raw: bytes) -> None:
    assert served.answer(raw) is None


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


def test_a_query_beyond_a_limit_is_not_plain_and_its_error_names_the_limit() -> None:
    # The limits are set directly, since a settings file may not contain limits this small.
    limited = Place(Limits(**LIMITS))
    for name, (raw, limit) in OVER.items():
        assert (limited.answer(raw) is None) == (limit is not None), name
        if limit is not None:
            with pytest.raises(MmposError, match=f"^{limit}: got "):
                limited.parsed(raw)
    limited.stop()


@given(places())
def test_any_plain_query_gets_the_answer_of_a_parsed_one(served: Place, request: Any) -> None:
    request.query.ClearField("views")  # with views, no query is plain
    served.answer(request.SerializeToString())


def test_mutated_bytes_get_the_answer_of_a_parsed_query(served: Place) -> None:
    pieces = [*PLAIN.values(), *NOT_PLAIN.values()]
    for_each(messages(pb.PlaceRequest), 60, lambda message: pieces.append(message.SerializeToString()))
    small = [raw for raw in pieces if len(raw) < 500]
    plain = [raw for raw in PLAIN.values() if len(raw) < 500]
    chance, declined = random.Random(31), 0
    for turn in range(4000):
        raw = mutate(chance.choice(small), chance, small)
        if turn % 2:  # a plain query with one changed byte often stays plain
            changed = bytearray(chance.choice(plain))
            changed[chance.randrange(len(changed))] = chance.choice([0, 1, 2, 3, 5, 9, 100, 255])
            raw = bytes(changed)
        declined += served.answer(raw) is None
    assert 50 < declined < 3950


def test_shapes_and_settings_are_cached_and_evicted() -> None:
    forget_plans()
    plain = PlainQueries(PROFILES, CONFIG.limits)
    new = query([[Text(1), Grid(3, 7), Text(1)]])
    assert plain.answer(new) is None  # not before the scheme has planned this shape for a message
    PositionsQuery(SegmentTable.from_documents([[Text(1), Grid(3, 7), Text(1)]])).run()
    assert plain.answer(new) is not None
    for stride in range(1, 200):
        assert plain.answer(query([[Text(1)]], scheme=MRopeQwen25(tokens_per_second=stride))) is not None
        assert len(plain._known) <= 64
    assert plain.answer(new) is None  # its plan was evicted


@pytest.mark.parametrize("lacks", ["audio", "resumable"])
def test_queries_are_plain_only_with_a_scheme_that_places_audio_and_continues(lacks: str) -> None:
    for changes in ({}, {lacks: False}):  # a subclass declares again that its ids are linear
        scheme = type("Own", (RopeTie,), {"linear_in": RopeTie.linear_in, **changes})()
        PositionsQuery(SegmentTable.from_documents(BATCH[1:2]), scheme).run()  # registers the shape
        plain = PlainQueries(Profiles([Profile("a", SequenceBuilder(scheme=scheme))]), CONFIG.limits)
        assert (plain.answer(query(BATCH[1:2])) is None) == bool(changes)


def test_without_the_extension_no_query_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "core", None)
    assert PlainQueries(PROFILES, CONFIG.limits).answer(PLAIN["ids"]) is None


IMAGE = InputIds([1, 5, 9, 9, 9, 9, 2, 3], Placeholders(image=9), [[1, 2, 2]])
FEW: dict[str, tuple[PositionsQuery, int]] = {
    "a plain query": (PositionsQuery(SegmentTable.from_documents(BATCH), "mrope-qwen3"), 25),
    "a view": (PositionsQuery(SegmentTable.from_documents(BATCH), views=[Decode()]), 50),
    "input_ids": (PositionsQuery(IMAGE), 60),
}


@pytest.mark.parametrize(("asked", "most"), FEW.values(), ids=FEW)
def test_a_call_runs_few_python_functions(served: Place, asked: PositionsQuery, most: int) -> None:
    request = pb.PlaceRequest()
    put_query(request.query, asked)
    raw = request.SerializeToString()

    async def read() -> bytes:
        return raw

    context = SimpleNamespace(read=read, invocation_metadata=tuple, peer=lambda: "unix:", auth_context=dict)
    asked_again = partial(served.endpoint.answer, None, context)
    assert most / 3 < functions_called(lambda: served.loop.run_until_complete(asked_again())) <= most
