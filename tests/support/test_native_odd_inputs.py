"""Inputs in odd forms are understood as numpy and Python understand them, with the extension or without."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from mmpos import Grid, InvalidInputError, Placeholders, PositionTable, SegmentTable, Text
from mmpos.positions.table_rows import AXES, DENOMINATOR, HEIGHT, WIDTH


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint64, np.bool_, ">i4"])
def test_masks_of_any_type_say_where_padding_is(way: str, dtype: Any) -> None:
    for left, ones, right in product(range(3), range(1, 4), range(3)):
        mask = np.array([[0] * left + [1] * ones + [0] * right], dtype)
        segments = SegmentTable.from_input_ids(
            np.zeros_like(mask, np.int64), Placeholders(image=7), attention_mask=mask
        )
        assert segments.extents[2].tolist() == [count for count in (left, ones, right) if count]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_mask_of_floats_is_refused_whatever_its_bits(way: str, dtype: Any) -> None:
    mask = np.ones((1, 2), f"i{np.dtype(dtype).itemsize}").view(dtype)
    with pytest.raises(InvalidInputError, match="attention_mask: got float"):
        SegmentTable.from_input_ids([[5, 5]], Placeholders(image=7), attention_mask=mask)


def test_axes_may_be_more_than_a_byte_tells(way: str) -> None:
    table = np.zeros((AXES + 4 * 300, 1), np.int64)
    table[[HEIGHT, DENOMINATOR]], table[WIDTH], table[AXES::4, 0] = 1, 2, np.arange(1, 301)
    positions = PositionTable(table, np.zeros((4, 1), np.int64), 2, False, "many")
    assert positions.dense().tolist() == [[i, i] for i in range(1, 301)]
    assert positions.dense(axes=(299, 3)).tolist() == [[300, 300], [4, 4]]


def test_a_list_that_iterates_in_its_own_way_is_taken_at_its_word(way: str) -> None:
    class Reversed(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            return reversed(self[:])

    document = Reversed([Text(2), Grid(3, 4)])
    assert SegmentTable.from_documents([document]).extents.T.tolist() == [[1, 3, 4], [1, 1, 2]]
    assert SegmentTable.from_documents(Reversed([[Text(2)], [Text(5)]])).extents[2].tolist() == [5, 2]
