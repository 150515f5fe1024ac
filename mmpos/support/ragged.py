"""Insertion of padding segments around the documents of any table with one column per segment."""

from __future__ import annotations

import numpy as np

from mmpos.support.checks import IntArray


def insert_padding(
    columns: IntArray,
    offsets: IntArray,
    left: IntArray,
    right: IntArray,
    pad: IntArray,
    *,
    length_rows: tuple[int, ...],
) -> tuple[IntArray, IntArray]:
    """Insert one padding column before and after each document where its length is not 0.

    Args:
        columns: (rows, segments).
        offsets: (documents + 1,) first segment of each document, then the total.
        left: (documents,) padding tokens before each document.
        right: (documents,) padding tokens after each document.
        pad: (rows,) the padding column, whose ``length_rows`` become the number of tokens.
        length_rows: the rows that hold the number of tokens.

    Returns:
        new columns and new offsets.
    """
    # Right padding of one document stands before left padding of the next: interleave in document order.
    lengths = np.column_stack([left, right]).ravel()
    places = np.column_stack([offsets[:-1], offsets[1:]]).ravel()
    used = lengths > 0
    values = np.repeat(pad[:, None], int(used.sum()), axis=1)
    values[list(length_rows)] = lengths[used]
    added = used.reshape(-1, 2).sum(axis=1)
    new_offsets = offsets + np.concatenate([[0], np.cumsum(added)])
    return np.insert(columns, places[used], values, axis=1), new_offsets
