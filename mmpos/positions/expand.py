"""Expand a trusted, placed table to one id per token, in C if the extension is available, else in numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmpos.positions.table_rows import AXES, DENOMINATOR, HEIGHT, OFFSET, SKIP, WIDTH
from mmpos.support import native
from mmpos.support.checks import Array, IntArray

BLOCK = 4096
"""Number of tokens that numpy expands at a time, so that temporaries do not grow with the table."""


def dense_dtype(fractional: bool) -> type[np.int32 | np.float64]:
    """Return the dtype of ids: int32, or float64 if ids may be fractions."""
    return np.float64 if fractional else np.int32


def dense(table: IntArray, num_tokens: int, fractional: bool) -> Array:
    """Expand all axes to a new (axes, tokens) array of int32, or of float64 if ids may be fractions."""
    ids: Array = np.empty(((len(table) - AXES) // 4, num_tokens), dense_dtype(fractional))
    core = native.core
    if core is None or not core.expand(table, num_tokens, fractional, ids, None, True):
        expand(table, num_tokens, fractional, ids, range(len(ids)))
    return ids


def expand(table: IntArray, num_tokens: int, fractional: bool, out: Array, axes: Sequence[int]) -> None:
    """Write the ids of all tokens, or their numerators if ``fractional`` is False.

    Args:
        table: (5 + 4·axes, segments).
        num_tokens: number of tokens in the table.
        fractional: whether to divide by denominators.
        out: (rows, tokens) int32, int64 or float64 with any strides.
        axes: axis of each row of out; repeats are allowed.
    """
    # C reads each axis as a byte.
    if native.core is None or max(axes, default=0) > 255 or not native.core.expand(
        table, num_tokens, fractional, out, bytes(axes), True
    ):  # fmt: skip
        _expand(table, num_tokens, fractional, out, axes)


def _expand(table: IntArray, num_tokens: int, fractional: bool, out: Array, axes: Sequence[int]) -> None:
    for begin in range(0, num_tokens, BLOCK):
        token = np.arange(begin, min(begin + BLOCK, num_tokens))
        segment = table[OFFSET].searchsorted(token, side="right") - 1
        row, col = np.divmod(table[SKIP, segment] + token - table[OFFSET, segment], table[WIDTH, segment])
        frame, row = np.divmod(row, table[HEIGHT, segment])
        for target, axis in zip(out[:, begin : begin + BLOCK], axes, strict=True):
            origin, step_frame, step_row, step_col = table[AXES + 4 * axis : AXES + 4 * axis + 4, segment]
            numerator = origin + frame * step_frame + row * step_row + col * step_col
            target[:] = numerator / table[DENOMINATOR, segment] if fractional else numerator
