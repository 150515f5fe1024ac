"""Test requests that claim huge sizes, and random ones: none costs much, gets INTERNAL or stops the server."""

from __future__ import annotations

import os
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from hostile_images import chunk
from message_strategies import LIKELY, REQUESTS, corpus, for_each, messages, tensor
from mutations import mutate
from refusals import is_sentence
from server_program import PATIENT, Program

from mmpos.rpc.positions import get_result
from mmpos.rpc.sequences import get_sequence
from mmpos.rpc.v1 import error_pb2, positions_pb2, rotary_pb2, sequences_pb2, table_pb2
from mmpos_server.config import Limits, Profiles, load
from mmpos_server.rotary_service import RotaryService

SETTINGS = f"""{PATIENT}
[profiles.default]
images = {{ backend = "pillow" }}
rotary = {{ head_dim = 8 }}
"""
STATUSES = {
    error_pb2.ERROR_CODE_INVALID_INPUT: "INVALID_ARGUMENT",
    error_pb2.ERROR_CODE_UNSUPPORTED: "UNIMPLEMENTED",
    error_pb2.ERROR_CODE_LIMIT_EXCEEDED: "RESOURCE_EXHAUSTED",
    error_pb2.ERROR_CODE_INTERNAL: "INTERNAL",
}
"""Status of a call by the error code of an item."""


class Answer(NamedTuple):
    """The status of a call with its message, and the serialized response, which is empty after an error."""

    status: str
    message: str = ""
    data: bytes = b""


class Victim:
    """A server under test."""

    def __init__(self, program: Program) -> None:
        self.pid = program.process.pid
        unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self.channel = grpc.insecure_channel(program.address, options=unlimited)

    def call(self, method: str, request: Any) -> Answer:
        """Send a message, or arbitrary bytes, and return the answer."""
        raw = request if isinstance(request, bytes) else request.SerializeToString()
        try:
            call: Any = self.channel.unary_unary(f"/mmpos.rpc.v1.{method}")
            return Answer("OK", data=call(raw, timeout=300))
        except grpc.RpcError as error:
            return Answer(error.code().name, error.details() or "")

    def costly(self, method: str, request: Any) -> tuple[Answer, float, float]:
        """Send a message; return the answer, the server's CPU seconds, and the MiB by which its peak memory rose."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")  # resets the peak
        memory, seconds = self.memory("VmRSS"), self.seconds()
        answer = self.call(method, request)
        return answer, self.seconds() - seconds, self.memory("VmHWM") - memory

    def memory(self, which: str = "VmRSS") -> float:
        """Return the memory in MiB that the server uses (VmRSS), or used at its peak (VmHWM)."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{which}:"))

    def seconds(self) -> float:
        """Return the CPU seconds that the server has used so far."""
        values = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


SECONDS, MEMORY = 0.2, 64.0
"""Limits on the CPU seconds and MiB of a refusal."""

DECODE_SECONDS, DECODE_MEMORY = 0.1, 48.0
"""The same limits per MiB of the request: a one-byte number takes eight bytes once parsed, and lists grow by
doubling.
"""

INT32, INT64, MANY = 2**31 - 1, 2**63 - 1, 10**6
BAD, LIMIT = "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "mmpos.toml").write_text(SETTINGS)
    program = Program.launch(folder / "log", "--config", str(folder / "mmpos.toml"), "--rotations")
    server = Victim(program)
    try:
        server.call("PositionService/Place", place(spans={"lengths": [1]}))
        server.call("SequenceService/Build", build({"text": "a"}))
        assert server.call("RotaryService/CosSin", cos_sin(head_dim=8)).status == "OK"  # imports torch
        yield server
        assert program.process.poll() is None, "the server has died"
        assert server.call("InfoService/GetInfo", b"").status == "OK"
    finally:
        server.channel.close()
        program.kill()


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


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the test reads the cost from /proc")
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
    assert results[0] is results[1] is results[2]


# Random messages and bytes

FAULTS = {*STATUSES.values(), "NOT_FOUND"} - {"INTERNAL"}


@pytest.fixture(scope="module")
def fuzzed(server: Victim) -> Iterator[Victim]:
    before = server.memory()
    yield server
    assert server.memory() < before + 300, "the server has grown"


def check(method: str, answer: Answer) -> None:
    """Check that an answer is either a valid response or a sentence about the request."""
    if answer.status != "OK":
        assert answer.status in FAULTS
        assert is_sentence(answer.message), answer.message
        return
    response = REQUESTS[method][1].FromString(answer.data)
    if method == "PositionService/Place":
        result = get_result("positions", response.positions)
        assert (result.table is None) != (result.dense is None)
    if method == "SequenceService/Build":
        for built in response.sequences.results:
            if built.WhichOneof("outcome") == "error":
                assert STATUSES[built.error.code] in FAULTS
            else:
                get_sequence("sequence", built.sequence)


@pytest.mark.parametrize("method", REQUESTS)
def test_random_and_mostly_valid_messages_are_answered_or_refused(fuzzed: Victim, method: str) -> None:
    for strategy in (messages(REQUESTS[method][0]), LIKELY[method]):
        for_each(strategy, 60, lambda request: check(method, fuzzed.call(method, request)))


MUTABLE = [method for method in REQUESTS if method != "InfoService/GetInfo"]


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", MUTABLE)
def test_mutants_are_answered_or_refused(fuzzed: Victim, method: str, many: bool, pytestconfig: pytest.Config) -> None:
    number = int(pytestconfig.getoption("--mutations")) // len(MUTABLE) if many else 300
    chance, raw, statuses = random.Random(method), corpus(method, 100), set()
    for turn in range(number):
        sent = mutate(chance.choice(raw), chance, raw) if turn % 3 else chance.randbytes(chance.randint(0, 64))
        answer = fuzzed.call(method, sent)
        try:
            check(method, answer)
        except Exception as error:
            raise AssertionError(f"{method} of bytes.fromhex({sent.hex()!r}): {answer}") from error
        statuses.add(answer.status)
    assert statuses >= {"OK", "INVALID_ARGUMENT"}
