"""Expansion of a placed table into one id per token: in C where it was built, and the same in numpy.

In numpy rows of patches become runs, and runs become tokens. The arrays are those of a PositionTable, and trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mmpos.positions.table_rows import AXES, DENOMINATOR, HEIGHT, OFFSET, SKIP, WIDTH
from mmpos.support import native
from mmpos.support.checks import INT32_MAX, Array, IntArray
from mmpos.support.ragged import ragged_arange

BLOCK = 16384
"""Tokens expanded at a time: temporaries stay in the cache and below malloc's threshold for mapping pages."""


def dense_dtype(fractional: bool) -> type[np.int32 | np.float64]:
    """Give the dtype of ids: int32, or float64 where they may be fractions."""
    return np.float64 if fractional else np.int32


def dense(table: IntArray, num_tokens: int, fractional: bool) -> Array:
    """Expand all axes into a new (axes, tokens) array of int32, or of float64 where ids may be fractions."""
    ids: Array = np.empty(((len(table) - AXES) // 4, num_tokens), dense_dtype(fractional))
    expand(table, num_tokens, fractional, ids, range(len(ids)))
    return ids


def expand(table: IntArray, num_tokens: int, fractional: bool, out: Array, axes: Sequence[int]) -> None:
    """Write ids of all tokens; numerators if they are not to be fractional.

    Args:
        table: (5 + 4·axes, segments).
        num_tokens: tokens of the table.
        fractional: whether to divide by denominators.
        out: (rows, tokens) int32, int64 or float64 with any strides.
        axes: the axis of each row of out, repeats allowed.
    """
    # A byte tells C each axis.
    if native.core is None or max(axes, default=0) > 255 or not native.core.expand(
        table, num_tokens, fractional, out, bytes(axes), True
    ):  # fmt: skip
        _expand(table, num_tokens, fractional, out, axes)


def per_token(table: IntArray, num_tokens: int, values: Array) -> IntArray:
    """Repeat the number or flag of every segment for its tokens: (tokens,) int64, new."""
    lengths = np.diff(table[OFFSET], append=num_tokens)
    if native.core is not None:
        constant = np.zeros((AXES + 4, lengths.size), np.int64)
        constant[OFFSET], constant[WIDTH], constant[AXES] = table[OFFSET], lengths, values
        constant[HEIGHT] = constant[DENOMINATOR] = 1
        out = np.empty((1, num_tokens), np.int64)
        if native.core.expand(constant, num_tokens, False, out, None, True):
            return out[0]
    return values.astype(np.int64).repeat(lengths)


class Runs(NamedTuple):
    """Consecutive tokens of one row of one segment, whose numerators are value + step · token.

    Args:
        start: (runs,) first token.
        length: (runs,) tokens.
        value: (axes, runs) numerator that the run would have at token 0 of the table.
        step: (axes, runs) numerator per token.
    """

    start: IntArray
    length: IntArray
    value: IntArray
    step: IntArray


def _expand(table: IntArray, num_tokens: int, fractional: bool, out: Array, axes: Sequence[int]) -> None:
    runs = _runs(table, num_tokens)
    wanted = sorted(set(axes))
    firsts = [axes.index(axis) for axis in wanted]
    if out.dtype.kind == "i":
        _fill(runs, wanted, [out[i] for i in firsts])
    else:
        numerators = np.empty((len(wanted), num_tokens), np.int64)
        _fill(runs, wanted, list(numerators))
        denominator = table[DENOMINATOR].repeat(np.diff(table[OFFSET], append=num_tokens)) if fractional else 1
        for i, numerator in zip(firsts, numerators, strict=True):
            np.divide(numerator, denominator, out=out[i])
    for i, axis in enumerate(axes):
        if axes.index(axis) != i:
            out[i] = out[axes.index(axis)]


def _runs(table: IntArray, num_tokens: int) -> Runs:
    """Cut every segment into the rows of its grid; the first and the last row of a segment may be partial."""
    skip, height, width = table[SKIP], table[HEIGHT], table[WIDTH]
    first_row = skip // width
    stop_row = (skip + np.diff(table[OFFSET], append=num_tokens) + (width - 1)) // width
    segment, row = ragged_arange(stop_row - first_row, first_row)
    per_run = table.take(segment, axis=1)
    begin = row * per_run[WIDTH]
    col = np.maximum(per_run[SKIP] - begin, 0)
    start = begin + col + (per_run[OFFSET] - per_run[SKIP])
    origin, step_frame, step_row, step_col = (per_run[AXES + i :: 4] for i in range(4))
    value = origin + (col - start) * step_col
    if (stop_row > height).any():
        frame, row = np.divmod(row, per_run[HEIGHT])
        value += frame * step_frame
    value += row * step_row
    return Runs(start, np.diff(start, append=num_tokens), value, step_col)


def _fill(runs: Runs, axes: Sequence[int], out: Sequence[Array]) -> None:
    """Write the (tokens,) numerators of these axes, a block of whole runs at a time."""
    if not out or not runs.start.size:
        return
    kind, tokens = out[0].dtype, out[0].size
    # Narrow integers wrap around on the way and come out right, since the ids themselves fit.
    value, step = runs.value.astype(kind, copy=False), runs.step.astype(kind, copy=False)
    edges = [0, runs.start.size]
    if tokens > BLOCK:
        edges[1:1] = sorted({*runs.start.searchsorted(np.arange(BLOCK, tokens, BLOCK)).tolist()} - {*edges})
    for first, stop in pairwise(edges):
        length = runs.length[first:stop]
        begin, end = int(runs.start[first]), tokens if stop == runs.start.size else int(runs.start[stop])
        token = np.arange(begin, end).astype(kind) if end > INT32_MAX else np.arange(begin, end, dtype=kind)
        for axis, target in zip(axes, out, strict=True):
            block = target[begin:end]
            np.multiply(step[axis, first:stop].repeat(length), token, out=block)
            block += value[axis, first:stop].repeat(length)
