"""Test small requests that claim huge sizes or lack a field: each is refused before any work, and names the field."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from message_strategies import tensor
from victim import STATUSES, Answer, Victim

from mmpos.rpc.v1 import positions_pb2, rotary_pb2, sequences_pb2, table_pb2, tensor_pb2
from mmpos_server.config import Limits, Profiles, load
from mmpos_server.rotary_service import RotaryService

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the test reads the cost from /proc")

SECONDS, MEMORY = 0.2, 64.0
"""Limits on the CPU seconds and MiB of a refusal."""

DECODE_SECONDS, DECODE_MEMORY = 0.1, 48.0
"""The same limits per MiB of the request: a one-byte number takes eight bytes once parsed, and lists grow by
doubling.
"""

INT32, INT64 = 2**31 - 1, 2**63 - 1
BAD, LIMIT = "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"

Claim = tuple[Callable[[], Any], str, str]
"""The request, the status and the first words of the message."""


@pytest.fixture(scope="module")
def server(hardy: Victim) -> Victim:
    hardy.call("PositionService/Place", place(spans={"lengths": [1]}))
    hardy.call("SequenceService/Build", build({"text": "a"}))
    hardy.call("RotaryService/CosSin", cos_sin(head_dim=8))  # imports torch
    return hardy


def place(**query: Any) -> Any:
    return positions_pb2.PlaceRequest(query=positions_pb2.PositionsQuery(**query))


def view(**views: object) -> dict[str, object]:
    """Return a query with 40,000 segments and one view."""
    text = {"kind": [1] * 40_000, "height": [1] * 40_000, "width": [1] * 40_000, "segments_per_document": [40_000]}
    return {"segments": text, "views": [views]}


def grid(*sides: int, **query: object) -> Any:
    frames, height, width = sides
    table = {"kind": [2], "frames": [frames], "height": [height], "width": [width], "segments_per_document": [1]}
    return place(segments=table, **query)


def ids(shape: list[int], data: bytes = b"", **fields: object) -> Any:
    number = tensor_pb2.DATA_TYPE_INT64
    return place(
        input_ids={"input_ids": {"dtype": number, "shape": shape, "data": data}, "placeholders": {"image": 9}, **fields}
    )


def build(*parts: Any, **query: Any) -> Any:
    documents = [{"parts": list(parts)}]
    return sequences_pb2.BuildRequest(query=sequences_pb2.SequencesQuery(**{"documents": documents, **query}))


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """Return a PNG file whose header gives these sides, but which contains hardly any pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    every = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    packed = [struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in every]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


@cache
def bomb() -> bytes:
    """Return the content of a PNG chunk that decompresses to 256 MiB."""
    packer = zlib.compressobj(1)
    return b"x\0\0" + b"".join(packer.compress(bytes(2**20)) for _ in range(256)) + packer.flush()


def cos_sin(positions: Any = None, **rotary: Any) -> Any:
    result = {"ids": tensor([[0], [0]])} if positions is None else positions
    settings = rotary_pb2.RotarySettings(rotary=rotary_pb2.Rotary(**rotary))
    return rotary_pb2.CosSinRequest(positions=rotary_pb2.RotaryPositions(**result), rotary=settings)


def table(num_tokens: int, width: int = INT32) -> dict[str, object]:
    """Return a table with one text segment."""
    columns = [0, 0, 1, width, 1, 0, 0, 0, 1, 0, 0, 0, 1]
    rows, documents = (np.array(numbers, "<i8").tobytes() for numbers in (columns, [0, 0, num_tokens, 0]))
    return {"table": table_pb2.PositionTable(table=rows, documents=documents, num_tokens=num_tokens, axes=2)}


PLACE: dict[str, Claim] = {
    "a grid of 2^31 by 2^31": (lambda: grid(1, INT32, INT32), LIMIT, "segment 0: got 46116860141324206"),
    "a grid beyond 64 bits": (lambda: grid(INT64, INT64, INT64), LIMIT, "segment 0: got "),
    "frames": (lambda: grid(10**7, 1, 1, scheme={"name": "mrope"}), LIMIT, "segments: got 10000000"),
    "a thumbnail over a tile": (
        lambda: place(
            segments={"kind": [6, 7], "height": [600, 1], "width": [600, 1], "segments_per_document": [2]},
            scheme={"name": "mrope-canvas"},
        ),
        LIMIT,
        "segments: got 360008",
    ),
    "a long text": (lambda: place(spans={"lengths": [INT32]}), LIMIT, "tokens: got 2147483647"),
    "lengths beyond 64 bits": (lambda: place(spans={"lengths": [INT64] * 3}), BAD, "lengths[0]: got 922"),
    "a million documents": (lambda: place(spans={"lengths": [1] * 10**6}), LIMIT, "documents: got 1000000"),
    "a million segments": (
        lambda: place(segments={"kind": [1] * 10**6, "height": [1] * 10**6}),
        LIMIT,
        "segments: got 1000000",
    ),
    "a million times": (
        lambda: place(spans={"seconds_per_frame": [{}] * 10**6}),
        LIMIT,
        "seconds_per_frame: got over 262144",
    ),
    "a million times of videos": (
        lambda: ids([1], bytes(8), seconds_per_frame=[{}] * 10**6),
        LIMIT,
        "seconds_per_frame: got over 262144",
    ),
    "more than 4 MiB": (
        lambda: place(segments={"kind": [0] * (2**22 - 5)}),
        LIMIT,
        "message_bytes: got 4194314, want at most 4194304",
    ),
    "4 MiB in tensors and more besides": (
        lambda: ids([2**19], bytes(2**22), image_grid_thw=[1] * 2**22),
        LIMIT,
        "message_bytes: got 41943",
    ),
    "4 MiB of times": (
        lambda: place(segments={"seconds_per_frame": [{}] * (2**21 - 10)}),
        LIMIT,
        "seconds_per_frame: got over 262144",
    ),
    "4 MiB of views": (lambda: place(views=[{"window": {"starts": [1]}}] * 599_000), LIMIT, "views: got over 16"),
    "a million views": (
        lambda: place(views=[{"decode": {}}] * 10**6, spans={"lengths": [1]}),
        LIMIT,
        "views: got over 16",
    ),
    "windows that multiply": (
        lambda: place(**view(window={"documents": [0] * 4096, "starts": [0] * 4096, "lengths": [4_000] * 4096})),
        LIMIT,
        "segments: got 16384000",
    ),
    "a window beyond 64 bits": (
        lambda: place(**view(window={"documents": [0], "starts": [INT64], "lengths": [INT64]})),
        LIMIT,
        "tokens: got 9223372036854775808",
    ),
    "ranges that multiply": (
        lambda: place(**view(take={"starts": [0] * 10**5, "stops": [40_000] * 10**5})),
        LIMIT,
        "segments: got 4000000000",
    ),
    "padding to 2^31 - 1, dense": (
        lambda: place(spans={"lengths": [3]}, views=[{"pad": {"length": INT32, "side": 2}}], dense={}),
        LIMIT,
        "tokens: got 2147483647",
    ),
    "decoding forever": (lambda: place(**view(decode={"steps": INT32})), LIMIT, "documents[0]: got id 2147"),
    "sharding among 2^63 ranks": (
        lambda: place(**view(shard={"rank": 0, "world_size": INT64, "layout": 1})),
        BAD,
        "world_size: got 9223372036854775807, want <= 2147483647",
    ),
    "many rows": (
        lambda: place(spans={"lengths": [1]}, dense={"axes": [0] * 10**6}),
        LIMIT,
        "query.dense.axes: got 1000000 rows, want at most 16",
    ),
    "many bytes of reply": (
        lambda: place(spans={"lengths": [16 * 10**6]}, dense={"axes": [0] * 16}),
        LIMIT,
        "response_bytes: got 1024000000",
    ),
    "the last id": (lambda: place(spans={"lengths": [3]}, start=INT32), LIMIT, "documents[0], tokens 0 to 2: got ids"),
    "an id beyond": (lambda: place(spans={"lengths": [3]}, start=INT64), BAD, "start: got 9223372036854775807"),
    "a shape larger than its data": (
        lambda: ids([2**40], bytes(8)),
        BAD,
        "input_ids.data: got 8 bytes, want 8796093022208",
    ),
    "a shape that overflows 64 bits": (
        lambda: ids([4, 2**62], b""),
        BAD,
        "input_ids.data: got 0 bytes, want 147573952",
    ),
    "2^32 rows": (lambda: ids([2**32, 2**32], b""), LIMIT, "documents: got 4294967296"),
    "an empty array of a huge width": (lambda: ids([0, INT64]), BAD, "input_ids.shape: got (0, 9223372036854775807)"),
    "many images": (lambda: ids([1], bytes(8), image_grid_thw=[1] * 3 * 10**5), LIMIT, "images: got 100000"),
    "a long name": (lambda: grid(1, 1, 1, scheme={"name": "x" * 10**6}), BAD, "scheme: got 'xxx"),
}

BUILD: dict[str, Claim] = {
    "60,000 by 60,000 pixels": (lambda: build({"image": png(60_000, 60_000)}, patches=True), LIMIT, "parts[0]: image"),
    "2^31 by 2^31 pixels": (lambda: build({"image": png(INT32, INT32)}, patches=True), LIMIT, "parts[0]: "),
    "many images of many pixels": (
        lambda: build(*[{"image": png(5000, 5000)}] * 100, patches=True),
        LIMIT,
        "pixels: got 2500000000",
    ),
    "a million documents": (lambda: build(documents=[{}] * 10**6), LIMIT, "documents: got over 4096"),
    "a million parts": (lambda: build(*[{}] * 10**6), LIMIT, "parts: got over 262144"),
    "a grid of 2^31": (lambda: build({"grid": {"height": INT32, "width": INT32}}), LIMIT, "tokens: got 4611686"),
    "an image of 2^31": (lambda: build({"image_size": {"height": INT32, "width": INT32}}), LIMIT, "parts[0]: "),
    "ids larger than their data": (
        lambda: build({"token_ids": {"dtype": 3, "shape": [2**60], "data": bytes(8)}}),
        BAD,
        "parts[0].token_ids.data: got 8 bytes, want 9223372036854775808",
    ),
    "pixels larger than their data": (
        lambda: build({"pixels": {"dtype": 1, "shape": [INT32, INT32, 3]}}, patches=True),
        BAD,
        "parts[0].pixels.data: got 0 bytes",
    ),
    **{
        f"a compressed chunk {kind.decode()}": (
            partial(lambda kind: build({"image": png(10, 10, (kind, bomb()))}, patches=True), kind),
            BAD,
            "parts[0]: image: got a truncated or corrupt file, want a whole one (Decompressed data too large",
        )
        for kind in (b"iCCP", b"zTXt")
    },
    "the last id": (lambda: build({"text": "abc"}, start=INT32), LIMIT, "documents[0], tokens 0 to 2: got ids"),
}

COS_SIN: dict[str, Claim] = {
    "a huge head": (lambda: cos_sin(head_dim=INT64), LIMIT, "rotary.head_dim: got 9223372036854775807"),
    "a huge axis": (lambda: cos_sin(head_dim=8, pair_axis=[0, 0, 0, 2**40]), BAD, "axes: got 1099511627777"),
    "more than 4 MiB": (lambda: cos_sin(head_dim=8, axis_scaling=[{}] * 2**21), LIMIT, "axis_scaling: got over 1024"),
    "a million axes": (
        lambda: cos_sin(head_dim=8, pair_axis=[0] * 10**6),
        BAD,
        "rotary.pair_axis: got 1000000 numbers",
    ),
    "many tokens": (lambda: cos_sin(table(INT32), head_dim=8), LIMIT, "tokens: got 2147483647"),
    "many bytes of reply": (lambda: cos_sin(table(16 * 10**6), head_dim=8), LIMIT, "response_bytes: got 1024000000"),
    "many heads of reply": (
        lambda: cos_sin(table(16 * 10**4), head_dim=8, allocation="heads", head_axes=[1] * 100),
        LIMIT,
        "response_bytes: got 1024000000",
    ),
    "a million heads": (
        lambda: cos_sin(head_dim=8, allocation="heads", head_axes=[1] * 10**6),
        BAD,
        "rotary.head_axes: got 1000000 numbers, want at most 256",
    ),
    "no axes": (lambda: cos_sin({"ids": tensor(np.zeros((0, 4)))}, head_dim=8), BAD, "positions: got shape (0, 4)"),
    "axes of a table": (
        lambda: cos_sin({"table": table_pb2.PositionTable(axes=INT32)}, head_dim=8),
        BAD,
        "positions.table.axes: got 2147483647, want 1 to 16",
    ),
    "no positions": (rotary_pb2.CosSinRequest, BAD, "positions: got none, want a RotaryPositions"),
    "an unknown layout": (
        lambda: rotary_pb2.CosSinRequest(positions={"ids": tensor([[0], [0]])}, layout=99),  # type: ignore[arg-type]
        BAD,
        "layout: got 99, want one of COS_SIN_LAYOUT_UNSPECIFIED, COS_SIN_LAYOUT_PAIRS, COS_SIN_LAYOUT_TRANSFORMERS, "
        "COS_SIN_LAYOUT_TORCHTITAN, COS_SIN_LAYOUT_ANGLES",
    ),
}

ROTATE: dict[str, Claim] = {
    "no q": (
        lambda: rotary_pb2.RotateRequest(positions={"ids": tensor([[0], [0]])}),  # type: ignore[arg-type]
        BAD,
        "q: got none, want a Tensor",
    ),
}


CLAIMS = {
    **{name: ("Position/Place", claim) for name, claim in PLACE.items()},
    **{f"{name} to build": ("Sequence/Build", claim) for name, claim in BUILD.items()},
    **{f"{name} to rotate": ("Rotary/CosSin", claim) for name, claim in COS_SIN.items()},
    **{name: ("Rotary/Rotate", claim) for name, claim in ROTATE.items()},
}


@pytest.mark.parametrize(("method", "claim"), CLAIMS.values(), ids=CLAIMS)
def test_a_huge_claim_is_refused_cheaply(server: Victim, method: str, claim: Claim) -> None:
    make, status, words = claim
    request = make().SerializeToString()
    answer, cost = server.costly(method.replace("/", "Service/"), request)
    if answer.status == "OK" and method == "Sequence/Build":
        [result] = sequences_pb2.BuildResponse.FromString(answer.data).sequences.results
        answer = Answer(STATUSES[result.error.code], result.error.message)
    assert (answer.status, answer.message[: len(words)]) == (status, words)
    size = len(request) / 2**20
    assert cost.seconds <= SECONDS + DECODE_SECONDS * size
    assert cost.memory <= MEMORY + DECODE_MEMORY * size


def test_unknown_fields_in_a_rotation_are_not_cached() -> None:
    rotations = RotaryService(Profiles.from_config(load()), Limits())
    rotary, unknown = rotary_pb2.Rotary(head_dim=16, theta=[10_000.0]), b"\x82\x7d\x04"  # field 2000, four bytes
    results = set()
    for number in range(3):
        message = rotary_pb2.RotarySettings(rotary=rotary)
        message.rotary.MergeFromString(unknown + number.to_bytes(4, "little"))
        results.add(id(rotations._rotary(message)))
    assert len(results) == 1
