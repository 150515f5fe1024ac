"""The extension handles messages like Python: it counts elements before parsing, reads lists and inserts tensors."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st
from message_strategies import REQUESTS, for_each, messages
from mutations import mutate

from mmpos.rpc import beside, elements
from mmpos.rpc.beside import Beside
from mmpos.rpc.elements import count_elements
from mmpos.rpc.tensors import integer_lists, put_tensor
from mmpos.rpc.v1 import positions_pb2, rotary_pb2, sequences_pb2, table_pb2, tensor_pb2
from mmpos.support import native

assert native.core is not None, "the extension was not built"
CORE = native.core

ALL = 2**62
PLACE, BUILD = positions_pb2.PlaceRequest, sequences_pb2.BuildRequest
KINDS: Sequence[type[Message]] = [kind for kind, _ in REQUESTS.values()]


def count_both_ways(kind: type[Message], raw: bytes, most: int) -> int:
    """Return the extension's count, or -1, after comparing it with Python's."""
    schema = elements._schema(kind.DESCRIPTOR)
    count = CORE.elements(raw, schema, most)
    assert count is not None
    assert count == elements._count(raw, schema, most)
    return count


def nested(*fields: int, content: bytes) -> bytes:
    """Nest content in fields with these numbers, outermost first."""
    for field in reversed(fields):
        content = bytes([field << 3 | 2]) + _varint(len(content)) + content
    return content


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


GROUP = b"\xa3\x06", b"\xa4\x06"
"""Bytes that begin and end field 100, which no message defines, as a group."""

COUNTS: dict[str, tuple[type[Message], bytes, int]] = {
    "an empty message": (PLACE, b"", 0),
    "a message": (PLACE, b"\x0a\0", 1),
    "the same message twice": (PLACE, b"\x0a\0\x0a\0", 2),
    "nested messages": (BUILD, nested(1, 1, content=b"\x0a\0" * 5), 7),
    "bytes that look like messages": (BUILD, nested(1, 1, 1, 3, content=b"\x0a\0" * 5), 4),
    "packed numbers": (PLACE, nested(1, 2, 1, content=b"\1\xff\1\0"), 6),
    "numbers one by one": (PLACE, nested(1, 2, content=b"\x08\1\x08\2"), 4),
    "packed doubles": (rotary_pb2.Rotary, nested(2, content=bytes(24)), 4),
    "an empty packed list": (PLACE, nested(1, 2, 1, content=b""), 3),
    "an unknown field": (PLACE, b"\xa0\x06\1", 1),
    "a field of another type": (PLACE, nested(1, content=b"\x25" + bytes(4) + b"\x29" + bytes(8)), 3),
    "a group": (PLACE, GROUP[0] + b"\x08\1" + GROUP[1], 3),
    "a hundred nested groups": (PLACE, GROUP[0] * 100 + GROUP[1] * 100, 200),
    "a tag in five bytes": (PLACE, b"\x8a\x80\x80\x80\0\0", 1),
    "the highest field": (PLACE, b"\xf8\xff\xff\xff\x0f\1", 1),
    "a number in ten bytes": (PLACE, b"\xa0\x06" + b"\xff" * 9 + b"\x7f", 1),
    "a length in six bytes": (PLACE, b"\xa2\x06\x81\x80\x80\x80\x80\0a", 1),
}

BROKEN: dict[str, tuple[type[Message], bytes]] = {
    "a truncated tag": (PLACE, b"\x80"),
    "a tag in six bytes": (PLACE, b"\x8a\x80\x80\x80\x80\0\0"),
    "a tag beyond 32 bits": (PLACE, b"\xf8\xff\xff\xff\x1f\1"),
    "field 0": (PLACE, b"\0\1"),
    "wire type 6": (PLACE, b"\x0e"),
    "wire type 7": (PLACE, b"\x0f"),
    "a truncated number": (PLACE, b"\xa0\x06\xff"),
    "a number in eleven bytes": (PLACE, b"\xa0\x06" + b"\xff" * 10 + b"\1"),
    "three bytes of a fixed32": (PLACE, b"\xa5\x06" + bytes(3)),
    "seven bytes of a fixed64": (PLACE, b"\xa1\x06" + bytes(7)),
    "a missing length": (PLACE, b"\x0a"),
    "a length beyond the end": (PLACE, b"\xa2\x06\5abcd"),
    "a length beyond 64 bits": (PLACE, b"\xa2\x06" + b"\xff" * 9 + b"\1"),
    "a length beyond the message": (BUILD, nested(1, content=b"\x12\5a") + b"abcdefgh"),
    "a tag beyond the message": (BUILD, nested(1, content=b"\x80") + b"\x0a\0"),
    "truncated packed numbers": (PLACE, nested(1, 2, 1, content=b"\1\x80")),
    "a packed number in eleven bytes": (PLACE, nested(1, 2, 1, content=b"\xff" * 10 + b"\1")),
    "half a double": (rotary_pb2.Rotary, nested(2, content=bytes(12))),
    "a group without an end": (PLACE, GROUP[0]),
    "a group that ends outside": (PLACE, nested(1, content=GROUP[0]) + GROUP[1]),
    "the end of another group": (PLACE, GROUP[0] + b"\x0c"),
    "an end without a group": (PLACE, GROUP[1]),
    "a hundred and one nested groups": (PLACE, GROUP[0] * 101 + GROUP[1] * 101),
    "a hundred groups in a message": (PLACE, nested(1, content=GROUP[0] * 100 + GROUP[1] * 100)),
}


@pytest.mark.parametrize(("kind", "raw", "count"), COUNTS.values(), ids=COUNTS)
def test_fields_and_packed_numbers_are_counted(kind: type[Message], raw: bytes, count: int) -> None:
    kind.FromString(raw)
    assert count_both_ways(kind, raw, ALL) == count
    assert [count_both_ways(kind, raw, most) for most in range(count + 2)] == [*range(1, count + 1), count, count]


@pytest.mark.parametrize(("kind", "raw"), BROKEN.values(), ids=BROKEN)
def test_bytes_refused_by_parsers_are_refused(way: str, kind: type[Message], raw: bytes) -> None:
    with pytest.raises(DecodeError):
        kind.FromString(raw)
    assert count_both_ways(kind, raw, ALL) == -1
    with pytest.raises(DecodeError, match="wire format"):
        count_elements(kind, raw, ALL)


def test_counting_stops_at_the_limit(way: str) -> None:
    """Check that bytes after the limit, which are malformed here, are not read."""
    raw = nested(1, content=b"\x0a\0" * 10) + b"\x0e"
    assert count_elements(BUILD, raw, 10) == 11
    with pytest.raises(DecodeError):
        count_elements(BUILD, raw, 12)
    long = nested(1, 2, 1, content=b"\xff" * 1000)  # invalid varints, at least 100 given their total length
    assert count_elements(PLACE, long, 50) == 51


def test_the_elements_of_a_serialized_table_are_counted() -> None:
    table = table_pb2.SegmentTable(kind=[table_pb2.SEGMENT_KIND_TEXT] * 300, height=[1] * 300, width=[2**40] * 300)
    table.seconds_per_frame.add(numerator=1, denominator=2)
    assert count_both_ways(table_pb2.SegmentTable, table.SerializeToString(), ALL) == 3 * 301 + 3


def valid_messages(kind: type[Message]) -> list[bytes]:
    """Return valid messages with all kinds of fields."""
    results: list[bytes] = []
    for_each(messages(kind), 60, lambda message: results.append(message.SerializeToString()))
    return results


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_all_bytes_accepted_by_parsers_are_counted(kind: type[Message]) -> None:
    valid = valid_messages(kind)
    pieces = [*valid, *GROUP, b"\x0b", b"\x0c", b"\xff" * 9 + b"\1", b"\x80" * 5]
    chance, seen = random.Random(kind.__name__), [0, 0]
    for _ in range(2000):
        raw = mutate(chance.choice(valid), chance, pieces)
        count = count_both_ways(kind, raw, chance.choice([0, 1, 3, 10, 50, ALL, ALL]))
        try:
            kind.FromString(raw)
        except DecodeError:
            seen[0] += 1
        else:
            assert count >= 0
            seen[1] += 1
    assert min(seen) > 0


def test_messages_of_numbers_are_refused_exactly_when_parsers_refuse_them() -> None:
    """Test messages of numbers only: counting does not check encodings, so it may accept text that parsers refuse."""
    kind = positions_pb2.Spans
    valid = valid_messages(kind)
    chance = random.Random(7)
    for _ in range(4000):
        raw = mutate(chance.choice(valid), chance, [*valid, *GROUP])
        try:
            kind.FromString(raw)
        except DecodeError:
            assert count_both_ways(kind, raw, ALL) == -1
        else:
            assert count_both_ways(kind, raw, ALL) >= 0


@given(st.binary(max_size=64), st.lists(st.lists(st.integers(-9, 4), min_size=3, max_size=3), max_size=3))
def test_any_schema_is_followed_or_declined(raw: bytes, schema: list[list[int]]) -> None:
    table = np.array(schema, np.int32).reshape(len(schema), 3)
    valid = len(schema) > 0 and all(entry in (-8, -4, -1, *range(len(schema) + 1)) for row in schema for entry in row)
    result = CORE.elements(raw, table, ALL)
    assert result == (elements._count(raw, table, ALL) if valid else None)


def test_invalid_messages_and_schemas_are_declined() -> None:
    schema = elements._schema(PLACE.DESCRIPTOR)
    assert CORE.elements(b"\x0a\0", schema.astype(np.int64), ALL) is None
    assert CORE.elements(b"\x0a\0", schema[:, ::2], ALL) is None
    assert CORE.elements(b"\x0a\0", schema[0], ALL) is None
    assert CORE.elements(b"\x0a\0", schema, -1) is None


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


def one_by_one(message: Any) -> list[list[int]]:
    return [list(getattr(message, field)) for field in LISTS[type(message)]]


@given(st.sampled_from(sorted(LISTS, key=str)).flatmap(messages))
def test_all_lists_in_any_message_are_read(message: Any) -> None:
    assert read(message) == one_by_one(message)


def test_many_numbers_of_every_length_are_read(way: str) -> None:
    numbers = [sign * 2**bits for bits in range(63) for sign in (1, -1)] * 200
    message = positions_pb2.Spans(lengths=numbers, documents=[7])
    assert read(message) == [numbers, [], [], [7]]


def test_unknown_fields_are_skipped(way: str) -> None:
    unknown = b"\x98\x06\1" + b"\x9d\x06abcd" + b"\x99\x06abcdefgh" + b"\x9a\x06\2ab"
    for more in (unknown, b"\x0d" + bytes(4), b"\xa3\x06\x08\1\xa4\x06"):  # the second field has another wire type
        assert read(positions_pb2.Spans.FromString(b"\x0a\2\1\2" + more)) == [[1, 2], [], [], []]


@pytest.mark.parametrize(
    "raw",
    [b"\x80", b"\0\0", b"\x0b\x0c", b"\x08", b"\x0d\0\0\0", b"\x0a", b"\x0a\5a", b"\x0a\1\x80", b"\x0a\0\x0a\0"],
    ids=["tag", "field 0", "group", "number", "four bytes", "length", "cut off", "packed number", "a field twice"],
)
def test_bytes_never_written_by_an_encoder_are_declined(raw: bytes) -> None:
    assert CORE.integers(raw, b"\1") is None


def test_too_many_fields_are_declined() -> None:
    assert CORE.integers(b"\x0a\1\7", bytes([1] + [2] * 15)) == (np.int64(7).tobytes(), *[b""] * 15)
    assert CORE.integers(b"\x0a\1\7", bytes([1] + [2] * 16)) is None


def test_malformed_bytes_are_read_or_declined() -> None:
    """Read malformed bytes; sanitizers must find no errors in the reader."""
    valid = positions_pb2.Spans(lengths=[1, 300, -1], offsets=[5], documents=[2**40] * 3).SerializeToString()
    chance, answers = random.Random(3), set()
    for _ in range(20_000):
        answers.add(CORE.integers(mutate(valid, chance, [valid, b"\x0a\0"]), b"\1\2\3\4") is None)
    assert answers == {True, False}


# Inserting large tensors into an answer's bytes produces the same bytes that protobuf writes.

SIZES = [1, 100, 127, 128, 16_000, 16_383, 16_384, 70_000]
"""Sizes around the limits at which a message, or a message around it, needs one more byte for its length."""


def array(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return (np.arange(size) % 251).astype(np.uint8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("least", [0, 128])
def test_answers_have_the_same_bytes_as_those_written_by_protobuf(
    way: str, monkeypatch: pytest.MonkeyPatch, size: int, least: int
) -> None:
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
        put_tensor(alone, array(size), kept)
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
