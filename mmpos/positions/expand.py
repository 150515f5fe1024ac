"""Expansion of a placed table into one id per token: in C where it was built, and the same in numpy.

In numpy rows of patches become runs, and runs become tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.positions.columns import AXES, DENOMINATOR, HEIGHT, OFFSET, SKIP, WIDTH, Columns
from mmpos.support import native
from mmpos.support.checks import INT32_MAX, IntArray

Array = npt.NDArray[Any]

BLOCK = 16384
"""Tokens expanded at a time: temporaries stay in the cache and below malloc's threshold for mapping pages."""


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


def dense(table: Columns, out: Array | None, dtype: npt.DTypeLike | None, axes: tuple[int, ...] | None) -> Array:
    """Ids of all tokens; see PositionTable.dense."""
    core = native.core
    # What fits as it is needs no word of ours: checking it costs more than writing thousands of ids.
    plain = axes is None and dtype is None and isinstance(out, np.ndarray)
    if plain and core is not None and core.expand(table.table, table.num_tokens, table.fractional, out, None, True):
        return cast(Array, out)
    rows = _axes(table, axes)
    ids = _target(table, out, dtype, len(rows))
    if max(rows, default=0) > 255:  # a byte tells C each axis
        core = None
    if core is None or not core.expand(table.table, table.num_tokens, table.fractional, ids, bytes(rows), True):
        _dense(table, rows, ids)
    return ids


def rationals(table: Columns) -> tuple[IntArray, IntArray]:
    """Numerators and denominators of all tokens; see PositionTable.rationals."""
    numerators = np.empty((table.axes, table.num_tokens), np.int64)
    if native.core is None or not native.core.expand(table.table, table.num_tokens, False, numerators, None, True):
        _fill(runs(table), range(table.axes), list(numerators))
    return numerators, _denominators(table)


def per_token(table: Columns, values: npt.NDArray[Any]) -> IntArray:
    """(tokens,) int64, new: the number or flag of every token's segment."""
    if native.core is not None:
        constant = np.zeros((AXES + 4, table.num_segments), np.int64)
        constant[OFFSET], constant[WIDTH], constant[AXES] = table.offset, table.segment_lengths, values
        constant[HEIGHT] = constant[DENOMINATOR] = 1
        out = np.empty((1, table.num_tokens), np.int64)
        if native.core.expand(constant, table.num_tokens, False, out, None, True):
            return out[0]
    return values.astype(np.int64).repeat(table.segment_lengths)


def _dense(table: Columns, rows: tuple[int, ...], ids: Array) -> None:
    """Write the ids of these axes into the rows of an array with any strides."""
    cut = runs(table)
    wanted = sorted(set(rows))
    firsts = [rows.index(axis) for axis in wanted]
    if ids.dtype.kind == "i":
        _fill(cut, wanted, [ids[i] for i in firsts])
    else:
        numerators = np.empty((len(wanted), table.num_tokens), np.int64)
        _fill(cut, wanted, list(numerators))
        divisor = _denominators(table) if table.fractional else 1
        for i, numerator in zip(firsts, numerators, strict=True):
            np.divide(numerator, divisor, out=ids[i])
    for i, axis in enumerate(rows):
        if rows.index(axis) != i:
            ids[i] = ids[rows.index(axis)]


def runs(table: Columns) -> Runs:
    """Cut every segment into the rows of its grid; the first and the last row of a segment may be partial."""
    skip, height, width = table.skip, table.height, table.width
    first_row = skip // width
    stop_row = (skip + table.segment_lengths + (width - 1)) // width
    count = stop_row - first_row
    per_run = table.table.repeat(count, axis=1)
    row = np.arange(per_run.shape[1]) - (count.cumsum() - count - first_row).repeat(count)
    begin = row * per_run[WIDTH]
    col = np.maximum(per_run[SKIP] - begin, 0)
    start = begin + col + (per_run[OFFSET] - per_run[SKIP])
    origin, step_frame, step_row, step_col = (per_run[AXES + i :: 4] for i in range(4))
    value = origin + (col - start) * step_col
    if (stop_row > height).any():
        frame, row = np.divmod(row, per_run[HEIGHT])
        value += frame * step_frame
    value += row * step_row
    length = np.empty_like(start)
    length[:-1] = start[1:] - start[:-1]
    length[-1:] = table.num_tokens - start[-1:]
    return Runs(start, length, value, step_col)


def _fill(cut: Runs, axes: Sequence[int], out: Sequence[Array]) -> None:
    """Write the (tokens,) numerators of these axes, a block of whole runs at a time."""
    if not out or not cut.start.size:
        return
    kind, tokens = out[0].dtype, out[0].size
    # Narrow integers wrap around on the way and come out right, since the ids themselves fit.
    value, step = cut.value.astype(kind, copy=False), cut.step.astype(kind, copy=False)
    edges = [0, cut.start.size]
    if tokens > BLOCK:
        edges[1:1] = sorted({*cut.start.searchsorted(np.arange(BLOCK, tokens, BLOCK)).tolist()} - {*edges})
    for first, stop in pairwise(edges):
        length = cut.length[first:stop]
        begin, end = int(cut.start[first]), tokens if stop == cut.start.size else int(cut.start[stop])
        token = np.arange(begin, end).astype(kind) if end > INT32_MAX else np.arange(begin, end, dtype=kind)
        for axis, target in zip(axes, out, strict=True):
            block = target[begin:end]
            np.multiply(step[axis, first:stop].repeat(length), token, out=block)
            block += value[axis, first:stop].repeat(length)


def _denominators(table: Columns) -> IntArray:
    return table.denominator.repeat(table.segment_lengths)


def _axes(table: Columns, axes: tuple[int, ...] | None) -> tuple[int, ...]:
    if axes is None:
        return tuple(range(table.axes))
    rows: list[Any] = list(axes) if isinstance(axes, Sequence | np.ndarray) and np.ndim(axes) == 1 else [None]
    if not all(isinstance(a, int | np.integer) and not isinstance(a, bool) and 0 <= a < table.axes for a in rows):
        raise InvalidInputError(f"axes: got {axes}, want integers from 0 to {table.axes - 1}")
    return tuple(map(int, rows))


def _target(table: Columns, out: Array | None, dtype: npt.DTypeLike | None, rows: int) -> Array:
    shape = (rows, table.num_tokens)
    if out is None:
        return np.empty(
            shape, _checked(table, "dtype", (np.int32, np.float64)[table.fractional] if dtype is None else dtype)
        )
    if not isinstance(out, np.ndarray) or out.shape != shape:
        raise InvalidInputError(f"out: got {_described(out)}, want an array of shape {shape}")
    if not out.flags.writeable:
        raise InvalidInputError("out: got a read-only array, want a writeable one")
    kind = _checked(table, "out", out.dtype)
    if dtype is not None and _checked(table, "dtype", dtype) != kind:
        raise InvalidInputError(f"dtype: got {np.dtype(dtype)} with out of {kind}, want the same or none")
    return out


def _checked(table: Columns, name: str, dtype: npt.DTypeLike) -> np.dtype[Any]:
    wanted = (np.float64,) if table.fractional else (np.int32, np.int64, np.float64)
    try:
        kind = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):
        kind = None
    if kind is None or kind not in wanted:
        got = repr(dtype) if kind is None else f"dtype {kind}"
        names = ", ".join(t.__name__ for t in wanted)
        raise InvalidInputError(f"{name}: got {got}, want {names} for ids of scheme {table.scheme!r}")
    return kind


def _described(out: object) -> str:
    return f"shape {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
