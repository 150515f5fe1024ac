"""Test small requests that claim huge sizes: each is refused before any work, and the error names the limit."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_images import chunk
from message_strategies import tensor
from victim import STATUSES, Answer, Victim

from mmpos.rpc.v1 import positions_pb2, rotary_pb2, sequences_pb2, table_pb2
from mmpos_server.config import Limits, Profiles, load
from mmpos_server.rotary_service import RotaryService

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the test reads the cost from /proc")

SECONDS, MEMORY = 0.2, 64.0
"""Limits on the CPU seconds and MiB of a refusal."""

DECODE_SECONDS, DECODE_MEMORY = 0.1, 48.0
"""The same limits per MiB of the request: a one-byte number takes eight bytes once parsed, and lists grow by
doubling.
"""

INT32, INT64, MANY = 2**31 - 1, 2**63 - 1, 10**6
BAD, LIMIT = "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"


@pytest.fixture(scope="module")
def server(hardy: Victim) -> Victim:
    hardy.call("PositionService/Place", place(spans={"lengths": [1]}))
    hardy.call("SequenceService/Build", build({"text": "a"}))
    hardy.call("RotaryService/CosSin", cos_sin(head_dim=8))  # imports torch
    return hardy


def place(**query: Any) -> Any:
    return positions_pb2.PlaceRequest(query=positions_pb2.PositionsQuery(**query))


def table(kind: int, *extents: int, **query: object) -> Any:
    """Ask for the positions of one segment of this kind."""
    frames, height, width = ([extent] for extent in extents)
    sizes = {"frames": frames, "height": height, "width": width, "segments_per_document": [1]}
    return place(segments={"kind": [kind], **sizes}, **query)


def view(**views: object) -> Any:
    """Ask for a view of 40,000 segments."""
    text = {"kind": [1] * 40_000, "height": [1] * 40_000, "width": [1] * 40_000, "segments_per_document": [40_000]}
    return place(segments=text, views=[views])


def ids(*shape: int, data: bytes = b"", **fields: object) -> Any:
    tokens = {"dtype": 3, "shape": shape, "data": data}
    return place(input_ids={"input_ids": tokens, "placeholders": {"image": 9}, **fields})


def build(*parts: Any, **query: Any) -> Any:
    documents = [{"parts": list(parts)}]
    return sequences_pb2.BuildRequest(query=sequences_pb2.SequencesQuery(**{"documents": documents, **query}))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    """Return a PNG file whose header gives these sides, but which contains hardly any pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + pixels + chunk(b"IEND", b"")


@cache
def bomb(kind: bytes) -> bytes:
    """Return a PNG chunk that decompresses to 256 MiB."""
    packer = zlib.compressobj(1)
    return chunk(kind, b"x\0\0" + b"".join(packer.compress(bytes(2**20)) for _ in range(256)) + packer.flush())


def cos_sin(tokens: int = 0, **rotary: Any) -> Any:
    """Ask for the tables of two tokens, or of a text of this many."""
    columns, ends = ([0, 0, 1, INT32, 1, 0, 0, 0, 1, 0, 0, 0, 1], [0, 0, tokens, 0])
    rows, documents = (np.array(numbers, "<i8").tobytes() for numbers in (columns, ends))
    text: Any = {"table": table_pb2.PositionTable(table=rows, documents=documents, num_tokens=tokens, axes=2)}
    settings = rotary_pb2.RotarySettings(rotary=rotary_pb2.Rotary(**rotary))
    positions: Any = rotary_pb2.RotaryPositions(**text) if tokens else {"ids": tensor([[0], [0]])}
    return rotary_pb2.CosSinRequest(positions=positions, rotary=settings)


CLAIMS: list[tuple[str, Callable[[], Any], str, str]] = [
    ("a grid", lambda: table(2, 1, INT32, INT32), LIMIT, "segment 0: got 46116860141324206"),
    ("a grid beyond 64 bits", lambda: table(2, INT64, INT64, INT64), LIMIT, "segment 0: got "),
    ("frames", lambda: table(2, 10**7, 1, 1, scheme={"name": "mrope"}), LIMIT, "segments: got 10000000"),
    ("tiles", lambda: place(
        segments={"kind": [6, 7], "height": [600, 1], "width": [600, 1], "segments_per_document": [2]},
        scheme={"name": "mrope-canvas"},
    ), LIMIT, "segments: got 360008"),
    ("a text", lambda: place(spans={"lengths": [INT32]}), LIMIT, "tokens: got 2147483647"),
    ("texts beyond 64 bits", lambda: place(spans={"lengths": [INT64] * 3}), BAD, "lengths[0]: got 922"),
    ("documents", lambda: place(spans={"lengths": [1] * MANY}), LIMIT, "documents: got 1000000"),
    ("segments", lambda: place(segments={"kind": [1] * MANY, "height": [1] * MANY}), LIMIT, "segments: got 1000000"),
    ("times", lambda: place(spans={"seconds_per_frame": [{}] * MANY}), LIMIT, "seconds_per_frame: got over 262144"),
    ("4 MiB", lambda: place(segments={"kind": [0] * (2**22 - 5)}), LIMIT, "message_bytes: got 4194314, want at most"),
    ("4 MiB beside tensors", lambda: ids(2**19, data=bytes(2**22), image_grid_thw=[1] * 2**22),
     LIMIT, "message_bytes: got 41943"),
    ("views", lambda: place(views=[{"window": {"starts": [1]}}] * 599_000), LIMIT, "views: got over 16"),
    ("windows", lambda: view(window={"documents": [0] * 4096, "starts": [0] * 4096, "lengths": [4_000] * 4096}),
     LIMIT, "segments: got 16384000"),
    ("a window beyond 64 bits", lambda: view(window={"documents": [0], "starts": [INT64], "lengths": [INT64]}),
     LIMIT, "tokens: got 9223372036854775808"),
    ("ranges", lambda: view(take={"starts": [0] * 10**5, "stops": [40_000] * 10**5}),
     LIMIT, "segments: got 4000000000"),
    ("padding", lambda: place(spans={"lengths": [3]}, views=[{"pad": {"length": INT32, "side": 2}}], dense={}),
     LIMIT, "tokens: got 2147483647"),
    ("decoded tokens", lambda: view(decode={"steps": INT32}), LIMIT, "views[0]: documents[0]: got id 2147"),
    ("ranks", lambda: view(shard={"rank": 0, "world_size": INT64, "layout": 1}), BAD, "views[0]: world_size: got 92"),
    ("axes", lambda: place(spans={"lengths": [1]}, dense={"axes": [0] * MANY}),
     LIMIT, "query.dense.axes: got 1000000 rows, want at most 16"),
    ("an answer", lambda: place(spans={"lengths": [16 * MANY]}, dense={"axes": [0] * 16}),
     LIMIT, "response_bytes: got 1024000000"),
    ("the last id", lambda: place(spans={"lengths": [3]}, start=INT32), LIMIT, "documents[0], tokens 0 to 2: got ids"),
    ("a shape", lambda: ids(2**40, data=bytes(8)), BAD, "input_ids.data: got 8 bytes, want 8796093022208"),
    ("2^32 rows", lambda: ids(2**32, 2**32), LIMIT, "documents: got 4294967296"),
    ("an empty array", lambda: ids(0, INT64), BAD, "input_ids.shape: got (0, 9223372036854775807)"),
    ("images", lambda: ids(1, data=bytes(8), image_grid_thw=[1] * 3 * 10**5), LIMIT, "images: got 100000"),
    ("a name", lambda: table(2, 1, 1, 1, scheme={"name": "x" * MANY}), BAD, "scheme: got 'xxx"),
    ("pixels", lambda: build({"image": png(60_000, 60_000)}, patches=True), LIMIT, "parts[0]: image"),
    ("pixels of images", lambda: build(*[{"image": png(3900, 3900)}] * 100, patches=True),
     LIMIT, "pixels: got 1521000000"),
    ("built documents", lambda: build(documents=[{}] * MANY), LIMIT, "documents: got over 4096"),
    ("parts", lambda: build(*[{}] * MANY), LIMIT, "parts: got over 262144"),
    ("a built grid", lambda: build({"grid": {"height": INT32, "width": INT32}}), LIMIT, "tokens: got 4611686"),
    ("an image size", lambda: build({"image_size": {"height": INT32, "width": INT32}}), LIMIT, "parts[0]: "),
    ("a shape of pixels", lambda: build({"pixels": {"dtype": 1, "shape": [INT32, INT32, 3]}}, patches=True),
     BAD, "parts[0].pixels.data: got 0 bytes"),
    ("a color profile", lambda: build({"image": png(10, 10, bomb(b"iCCP"))}, patches=True),
     BAD, "parts[0]: image: got a truncated or corrupt file, want a whole one (Decompressed data too large"),
    ("a comment", lambda: build({"image": png(10, 10, bomb(b"zTXt"))}, patches=True),
     BAD, "parts[0]: image: got a truncated or corrupt file, want a whole one (Decompressed data too large"),
    ("a head", lambda: cos_sin(head_dim=INT64), LIMIT, "rotary.head_dim: got 9223372036854775807"),
    ("an axis", lambda: cos_sin(head_dim=8, pair_axis=[0, 0, 0, 2**40]), BAD, "axes: got 1099511627777"),
    ("scalings", lambda: cos_sin(head_dim=8, axis_scaling=[{}] * 2**21), LIMIT, "axis_scaling: got over 1024"),
    ("axes of pairs", lambda: cos_sin(head_dim=8, pair_axis=[0] * MANY), BAD, "rotary.pair_axis: got 1000000 numbers"),
    ("axes of heads", lambda: cos_sin(head_dim=8, allocation="heads", head_axes=[1] * MANY),
     BAD, "rotary.head_axes: got 1000000 numbers, want at most 256"),
    ("rotated tokens", lambda: cos_sin(INT32, head_dim=8), LIMIT, "tokens: got 2147483647"),
    ("a table", lambda: cos_sin(16 * MANY, head_dim=8), LIMIT, "response_bytes: got 1024000000"),
    ("tables of heads", lambda: cos_sin(16 * 10**4, head_dim=8, allocation="heads", head_axes=[1] * 100),
     LIMIT, "response_bytes: got 1024000000"),
]  # fmt: skip
METHODS = {"Place": "PositionService/Place", "Build": "SequenceService/Build", "CosSin": "RotaryService/CosSin"}


@pytest.mark.parametrize(
    ("make", "status", "words"), [claim[1:] for claim in CLAIMS], ids=[name for name, *_ in CLAIMS]
)
def test_a_huge_claim_is_refused_cheaply(server: Victim, make: Callable[[], Any], status: str, words: str) -> None:
    request = make()
    method, raw = METHODS[type(request).__name__.removesuffix("Request")], request.SerializeToString()
    answer, seconds, memory = server.costly(method, raw)
    if answer.status == "OK" and method == METHODS["Build"]:
        [result] = sequences_pb2.BuildResponse.FromString(answer.data).sequences.results
        answer = Answer(STATUSES[result.error.code], result.error.message)
    assert (answer.status, answer.message[: len(words)]) == (status, words)
    size = len(raw) / 2**20
    assert seconds <= SECONDS + DECODE_SECONDS * size
    assert memory <= MEMORY + DECODE_MEMORY * size


def test_unknown_fields_in_a_rotation_are_not_cached() -> None:
    rotations = RotaryService(Profiles.from_config(load()), Limits())
    rotary, unknown = rotary_pb2.Rotary(head_dim=16, theta=[10_000.0]), b"\x82\x7d\x04"  # field 2000, four bytes
    results = []
    for number in range(3):
        message = rotary_pb2.RotarySettings(rotary=rotary)
        message.rotary.MergeFromString(unknown + number.to_bytes(4, "little"))
        results.append(rotations._rotary(message))
    assert all(result is results[0] for result in results)
