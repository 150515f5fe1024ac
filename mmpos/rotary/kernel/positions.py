"""Positions of tokens in a kernel: the segments of a table, cells of grids, and ids."""

# mypy: ignore-errors
# ruff: noqa: N803  (constants of a kernel are upper case)

import triton
import triton.language as tl

LAST = tl.constexpr(2**31 - 1)


@triton.jit
def _first_segment(table, segments, token):
    """The last segment that begins at or before a token, by bisection."""
    low = 0
    high = segments
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(table + middle) <= token
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def segments_of(table, segments, token, first, stop, BLOCK: tl.constexpr):
    """(BLOCK,) the segment of each token: searched once for the first of the block, then stepped forward."""
    low = _first_segment(table, segments, first)
    segment = tl.zeros([BLOCK], tl.int32) + low
    following = low + 1
    offset = tl.load(table + following, mask=following < segments, other=LAST).to(tl.int32)
    while offset < stop:
        segment += (token >= offset).to(tl.int32)
        following += 1
        offset = tl.load(table + following, mask=following < segments, other=LAST).to(tl.int32)
    return segment


@triton.jit
def cell(column, row_stride, token):
    """Frame, row and column of tokens in the grids of their segments, given pointers to their table columns."""
    offset = tl.load(column).to(tl.int32)
    skip = tl.load(column + row_stride).to(tl.int32)
    height = tl.load(column + 2 * row_stride).to(tl.int32)
    width = tl.load(column + 3 * row_stride).to(tl.int32)
    index = skip + (token - offset)
    rows = index // width
    return rows // height, rows % height, index % width


@triton.jit
def numerator(column, row_stride, frame, row, col, axis: tl.constexpr, kind: tl.constexpr):
    """origin + frame·step_frame + row·step_row + col·step_col on one axis."""
    part = column + (5 + 4 * axis) * row_stride
    value = tl.load(part).to(kind) + frame.to(kind) * tl.load(part + row_stride).to(kind)
    value += row.to(kind) * tl.load(part + 2 * row_stride).to(kind)
    return value + col.to(kind) * tl.load(part + 3 * row_stride).to(kind)


@triton.jit
def position(positions, column, row_stride, token, valid, frame, row, col, axis: tl.constexpr, MODE: tl.constexpr):
    """Integer part (int32) and fraction (uint32, units of 2⁻³²) of the ids on one axis; modes as in phases."""
    if MODE == 0:
        # 32 bits suffice: products may wrap around, the ids fit.
        whole = numerator(column, row_stride, frame, row, col, axis, tl.int32)
        fraction = tl.zeros_like(whole).to(tl.uint32)
    elif MODE == 1:
        over = numerator(column, row_stride, frame, row, col, axis, tl.int64)
        denominator = tl.load(column + 4 * row_stride)
        # Division truncates towards zero; ids may be negative, so floor.
        quotient = over // denominator
        rest = over - quotient * denominator
        below = rest < 0
        whole = tl.where(below, quotient - 1, quotient).to(tl.int32)
        rest = tl.where(below, rest + denominator, rest)
        fraction = ((rest << 32) // denominator).to(tl.uint32)
    elif MODE == 2:
        whole = tl.load(positions + axis * tl.cast(row_stride, tl.int64) + token, mask=valid, other=0).to(tl.int32)
        fraction = tl.zeros_like(whole).to(tl.uint32)
    else:
        fixed = tl.load(positions + axis * tl.cast(row_stride, tl.int64) + token, mask=valid, other=0)
        whole = (fixed >> 32).to(tl.int32)
        fraction = fixed.to(tl.uint32)
    return whole, fraction
