"""Large tensors beside their messages and lists of integers are read and written as by protobuf, also in C."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError, EncodeError, Message
from hypothesis import given
from hypothesis import strategies as st
from message_strategies import messages, tensor
from mutations import mutate

from mmpos.errors import LimitExceededError
from mmpos.rpc import beside
from mmpos.rpc.beside import Beside
from mmpos.rpc.tensors import get_tensor, integer_lists, put_tensor
from mmpos.rpc.v1 import positions_pb2, rotary_pb2, sequences_pb2, table_pb2, tensor_pb2
from mmpos.support import native

assert native.core is not None, "the extension was not built"
CORE = native.core

Kind = type[Message]

TENSORS: dict[Kind, Callable[[Any], list[tensor_pb2.Tensor]]] = {
    rotary_pb2.RotateRequest: lambda message: [message.q, message.k, message.positions.ids],
    rotary_pb2.CosSinResponse: lambda message: [message.cos, message.sin, message.cache],
    positions_pb2.PlaceRequest: lambda message: [
        getattr(message.query.input_ids, name) for name in ("input_ids", "attention_mask")
    ],
    tensor_pb2.Tensor: lambda message: [message],
}
"""The tensors that a message may contain."""


def parsed(kind: Kind, raw: bytes, kept: Beside | None = None) -> Message | None:
    """Parse a message, its large tensors beside it or with protobuf; return None if the message is refused."""
    with suppress(DecodeError):
        if kept is None:
            return kind.FromString(raw)
        message = kept.parse(kind, raw)
        for large in TENSORS[kind](message):
            if large.data:
                large.data = bytes(kept.data(large))
        return message
    return None


def examples() -> list[Message]:
    """Return a message of each kind, some with large and some with small tensors."""
    large, small = tensor(np.arange(40), "int64"), tensor([1, 2], "int64")
    ids = positions_pb2.InputIds(input_ids=large, attention_mask=large, image_grid_thw=[1, 2, 3])
    return [
        rotary_pb2.RotateRequest(q=large, k=large, positions=rotary_pb2.RotaryPositions(ids=large), conjugate=True),
        rotary_pb2.RotateRequest(q=small, k=large, positions=rotary_pb2.RotaryPositions(ids=small)),
        rotary_pb2.CosSinResponse(cos=large, sin=small, cache=large),
        positions_pb2.PlaceRequest(query=positions_pb2.PositionsQuery(input_ids=ids, profile="a")),
        large,
    ]


@pytest.mark.parametrize("message", examples(), ids=lambda message: type(message).__name__)
def test_valid_and_broken_messages_are_parsed_as_by_protobuf(message: Message, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "LEAST_BYTES", 24)
    kind, raw = type(message), message.SerializeToString()
    assert parsed(kind, raw, Beside()) == message
    assert len(Beside().parse(kind, raw).SerializeToString()) < len(raw)
    chance = random.Random(len(raw))
    cases = [raw[:size] for size in range(len(raw))] + [raw + raw, raw + raw[: len(raw) // 2], b"\x0b" + raw]
    cases += [mutate(raw, chance) for _ in range(3000)]
    for case in cases:
        assert parsed(kind, case, Beside()) == parsed(kind, case), case
    assert 100 < sum(parsed(kind, case) is None for case in cases) < len(cases) - 100


MOST = {"fields": 90, "documents": 3, "parts": 5, "views": 2, "seconds_per_frame": 4, "axis_scaling": 1}
BUILD, PLACE, ROTATE = sequences_pb2.BuildRequest, positions_pb2.PlaceRequest, rotary_pb2.RotateRequest


def parts(*numbers: int, **fields: Any) -> Any:
    """Return the fields of a Build request whose documents have these numbers of parts."""
    return {"query": {"documents": [{"parts": [fields] * number} for number in numbers]}}


REPEATED: list[tuple[Kind, Callable[[int], Any], int, str]] = [
    (BUILD, lambda n: {"query": {"documents": [{}] * n}}, 3, "documents: got over 3"),
    (BUILD, lambda n: parts(2, 0, n - 2), 5, "parts: got over 5"),
    (BUILD, lambda n: parts(1, token_ids={"shape": [1] * n}), 80, "shape: got 81 bytes"),
    (PLACE, lambda n: {"query": {"views": [{}] * n}}, 2, "views: got over 2"),
    (PLACE, lambda n: {"query": {"segments": {"seconds_per_frame": [{}] * n}}}, 4, "seconds_per_frame: got over 4"),
    (ROTATE, lambda n: {"rotary": {"rotary": {"axis_scaling": [{}] * n}}}, 1, "axis_scaling: got over 1"),
]


@pytest.mark.parametrize(("kind", "fields", "most", "got"), REPEATED, ids=[row[3] for row in REPEATED])
def test_repeated_messages_are_counted_before_they_are_parsed(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, fields: Callable[[int], Any], most: int, got: str
) -> None:
    monkeypatch.setattr(beside, "LEAST_BYTES", 1)
    fits, over = (kind(**fields(n)).SerializeToString() for n in (most, most + 1))
    assert Beside().marked(kind, fits, MOST) == fits
    for prefix in (b"", b"\x8b\x06\x8c\x06", b"\x98\x06\xff\1", b"\xaa\x06\2\x0a\0"):  # unknown fields, one a group
        with pytest.raises(LimitExceededError, match=f"^{got}, want at most {most}"):
            Beside().marked(kind, prefix + over + b"\xff", MOST)
    assert Beside().marked(kind, over) == over  # an answer


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\x98\x06\1" * 65, "64 in one message, want packed numbers"),
        (b"\x12\0\x1a\0" * 33, "64 in one message, want packed numbers"),
        ((b"\x0a\x5a" + b"\x98\x06\1" * 30) * 4, "90, want at most 90 in one request to this server"),
    ],
    ids=["numbers", "messages by turns", "messages within messages"],
)
def test_other_fields_are_counted(monkeypatch: pytest.MonkeyPatch, raw: bytes, message: str) -> None:
    assert Beside().marked(PLACE, raw, MOST) == raw  # not worth a look
    monkeypatch.setattr(beside, "LEAST_BYTES", 1)
    with pytest.raises(LimitExceededError, match=f"^fields: got over {message}$"):
        Beside().marked(PLACE, raw, MOST)


def test_an_endless_number_is_refused_immediately() -> None:
    with pytest.raises(DecodeError):
        Beside().parse(rotary_pb2.RotateRequest, b"\x08" + b"\xff" * 2**22)


def test_a_mark_from_another_message_is_treated_as_data() -> None:
    q = tensor(np.arange(2**16, dtype=np.int32), "int32")
    mark = Beside().parse(tensor_pb2.Tensor, q.SerializeToString()).data
    assert (len(mark), Beside().data(tensor_pb2.Tensor(data=mark))) == (32, mark)


def test_tensors_are_read_in_place() -> None:
    q = np.arange(2**16, dtype=np.int32)
    raw = rotary_pb2.RotateRequest(q=tensor(q, "int32"), k=tensor([1], "int32")).SerializeToString()
    kept = Beside()
    message = kept.parse(rotary_pb2.RotateRequest, raw)
    array = get_tensor("q", message.q, beside=kept)
    np.testing.assert_array_equal(array, q, strict=True)
    assert np.shares_memory(array, np.frombuffer(raw, np.uint8))
    assert get_tensor("k", message.k, beside=kept).tolist() == [1]


def test_tensors_stay_in_their_messages_if_there_are_many_documents() -> None:
    document: Any = {"parts": [{"token_ids": tensor(np.arange(2**16, dtype=np.int32), "int32")}]}
    raw = sequences_pb2.BuildRequest(query={"documents": [document] * 2}).SerializeToString()  # type: ignore[arg-type]
    assert Beside().marked(sequences_pb2.BuildRequest, raw) == raw


def test_a_message_of_2_gib_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_MOST_BYTES", 2**17)
    for size, refused in ((2**17 - 100, False), (2**17, True)):
        message, kept = rotary_pb2.RotateRequest(), Beside()
        put_tensor(message.q, np.zeros(size, np.uint8), kept)
        assert kept.size == size
        if refused:
            with pytest.raises(EncodeError):
                kept.serialize(message)
        else:
            assert len(kept.serialize(message)) < 2**17


# Lists of integers read from a message's bytes equal the lists read one by one.

LISTS: dict[type[Any], tuple[str, ...]] = {
    table_pb2.SegmentTable: ("kind", "frames", "height", "width", "segments_per_document", "row_separator_segments"),
    positions_pb2.Spans: ("lengths", "offsets", "grid_thw", "documents"),
    positions_pb2.Window: ("documents", "starts", "lengths"),
}


def read(message: Any) -> list[list[int]]:
    lists = integer_lists(message, *LISTS[type(message)])
    assert {array.dtype for array in lists} == {np.dtype(np.int64)}
    return [array.tolist() for array in lists]


@given(st.sampled_from(sorted(LISTS, key=str)).flatmap(messages))
def test_all_lists_in_any_message_are_read(message: Any) -> None:
    assert read(message) == [list(getattr(message, field)) for field in LISTS[type(message)]]


def test_many_numbers_of_every_length_are_read_and_unknown_fields_skipped(way: str) -> None:
    numbers = [sign * 2**bits for bits in range(63) for sign in (1, -1)] * 200
    raw = positions_pb2.Spans(lengths=numbers, documents=[7]).SerializeToString()
    unknown = b"\x98\x06\1" + b"\x9d\x06abcd" + b"\x99\x06abcdefgh" + b"\x9a\x06\2ab"
    for more in (b"", unknown, b"\x0d" + bytes(4), b"\xa3\x06\x08\1\xa4\x06"):  # lengths of another type; a group
        assert read(positions_pb2.Spans.FromString(raw + more)) == [numbers, [], [], [7]]


def test_malformed_bytes_are_read_or_declined() -> None:
    """Sanitizers must find no errors in the reader."""
    assert CORE.integers(b"\x0a\1\7", bytes([1] + [2] * 15)) == (np.int64(7).tobytes(), *[b""] * 15)
    assert CORE.integers(b"\x0a\1\7", bytes([1] + [2] * 16)) is None  # too many fields
    for raw in (
        b"\x80",
        b"\0\0",
        b"\x0b\x0c",
        b"\x08",
        b"\x0d\0\0\0",
        b"\x0a",
        b"\x0a\5a",
        b"\x0a\1\x80",
        b"\x0a\0\x0a\0",
    ):
        assert CORE.integers(raw, b"\1") is None  # no encoder writes these bytes
    valid = positions_pb2.Spans(lengths=[1, 300, -1], offsets=[5], documents=[2**40] * 3).SerializeToString()
    chance = random.Random(3)
    answers = {CORE.integers(mutate(valid, chance, [valid, b"\x0a\0"]), b"\1\2\3\4") is None for _ in range(20_000)}
    assert answers == {True, False}


# Inserting large tensors into an answer's bytes produces the same bytes that protobuf writes.

SIZES = [1, 100, 127, 128, 16_000, 16_383, 16_384, 70_000]
"""Sizes around the limits at which a message, or a message around it, needs one more byte for its length."""


def array(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return (np.arange(size) % 251).astype(np.uint8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("least", [0, 128])
def test_answers_have_the_bytes_of_protobuf(way: str, monkeypatch: pytest.MonkeyPatch, size: int, least: int) -> None:
    monkeypatch.setattr(beside, "LEAST_BYTES", least)

    def answers(kept: Beside | None) -> list[bytes]:
        place = positions_pb2.StreamPlaceResponse(id=3)
        place.positions.cu_seqlens.extend([0, 300])
        put_tensor(place.positions.dense, array(size), kept)
        place.positions.next_positions.extend([7] * 200)
        build = sequences_pb2.BuildResponse()
        for number in range(3):
            sequence = build.sequences.results.add().sequence
            put_tensor(sequence.input_ids, array(size + number), kept)
            put_tensor(sequence.patches, array(size // (1 + number)), kept)
        rotated = rotary_pb2.RotateResponse()
        put_tensor(rotated.q, array(size), kept)
        put_tensor(rotated.k, array(2 * size), kept)
        alone = tensor_pb2.Tensor()
        put_tensor(alone, array(3 * size).reshape(-1, 3)[:, 1], kept)  # one channel of an image
        return [(kept or Beside()).serialize(message) for message in (place, build, rotated, alone)]

    assert answers(Beside()) == answers(None)


def test_a_large_tensor_is_copied_once() -> None:
    data, kept, message = array(beside.LEAST_BYTES), Beside(), tensor_pb2.Tensor()
    put_tensor(message, data, kept)
    assert message.ByteSize() < 100
    (large,) = kept._large
    assert np.shares_memory(large, data)
    assert tensor_pb2.Tensor.FromString(kept.serialize(message)).data == data.tobytes()


def test_buffers_are_joined_in_order_and_other_objects_are_declined() -> None:
    large = array(3 * 2**20)
    parts = (b"", b"ab", memoryview(b"cd"), np.zeros(0, np.uint8), large, np.arange(3, dtype="<i2"))
    assert CORE.joined(parts) == b"abcd" + large.tobytes() + b"\0\0\1\0\2\0"
    assert CORE.joined(()) == b""
    assert CORE.joined([b"a"]) is None  # not a tuple
    assert CORE.joined((b"a", "text")) is None  # not a buffer
    assert CORE.joined((b"a", large[::2])) is None
