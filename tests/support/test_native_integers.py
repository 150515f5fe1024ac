"""Lists of integers are read off the bytes of their message as they are read one by one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from message_strategies import messages
from mutations import broken

from mmpos.rpc.tensors import integer_lists
from mmpos.rpc.v1 import positions_pb2, table_pb2
from mmpos.support import native

assert native.core is not None, "the extension was not built"
CORE = native.core

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
def test_all_lists_of_any_message_are_read(message: Any) -> None:
    assert read(message) == one_by_one(message)


def test_many_numbers_of_every_length_are_read(way: str) -> None:
    numbers = [sign * 2**bits for bits in range(63) for sign in (1, -1)] * 200
    message = positions_pb2.Spans(lengths=numbers, documents=[7])
    assert read(message) == [numbers, [], [], [7]]


def test_fields_of_tomorrow_do_not_matter(way: str) -> None:
    unknown = b"\x98\x06\1" + b"\x9d\x06abcd" + b"\x99\x06abcdefgh" + b"\x9a\x06\2ab"
    for more in (unknown, b"\x0d" + bytes(4), b"\xa3\x06\x08\1\xa4\x06"):  # the last but one is of another type
        assert read(positions_pb2.Spans.FromString(b"\x0a\2\1\2" + more)) == [[1, 2], [], [], []]


@pytest.mark.parametrize(
    "raw",
    [b"\x80", b"\0\0", b"\x0b\x0c", b"\x08", b"\x0d\0\0\0", b"\x0a", b"\x0a\5a", b"\x0a\1\x80", b"\x0a\0\x0a\0"],
    ids=["tag", "field 0", "group", "number", "four bytes", "length", "cut off", "packed number", "a field twice"],
)
def test_what_no_encoder_writes_is_declined(raw: bytes) -> None:
    assert CORE.integers(raw, b"\1") is None


def test_more_fields_than_there_is_room_for_are_declined() -> None:
    assert CORE.integers(b"\x0a\1\7", bytes([1] + [2] * 15)) == (np.int64(7).tobytes(), *[b""] * 15)
    assert CORE.integers(b"\x0a\1\7", bytes([1] + [2] * 16)) is None


def test_broken_bytes_are_read_or_declined() -> None:
    """No sanitizer has anything to say."""
    whole = positions_pb2.Spans(lengths=[1, 300, -1], offsets=[5], documents=[2**40] * 3).SerializeToString()
    chance, answers = random.Random(3), set()
    for _ in range(20_000):
        answers.add(CORE.integers(broken(whole, chance, [whole, b"\x0a\0"]), b"\1\2\3\4") is None)
    assert answers == {True, False}
