"""The extension handles messages like Python: it reads lists and inserts tensors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from message_strategies import messages
from mutations import mutate

from mmpos.rpc import beside
from mmpos.rpc.beside import Beside
from mmpos.rpc.tensors import integer_lists, put_tensor
from mmpos.rpc.v1 import positions_pb2, rotary_pb2, sequences_pb2, table_pb2, tensor_pb2
from mmpos.support import native

assert native.core is not None, "the extension was not built"
CORE = native.core

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
