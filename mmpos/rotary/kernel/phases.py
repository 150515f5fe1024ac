"""Compute the ids, cos and sin of a block of tokens in a kernel, bit-equal to the reference."""

# mypy: ignore-errors
# ruff: noqa: N803  (kernel constants are upper case)

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmpos.positions import table_rows as rows
from mmpos.rotary import reference
from mmpos.rotary.kernel.heads import columns_of
from mmpos.rotary.kernel.tiling import cdiv, launch, on

OFFSET, SKIP, HEIGHT, WIDTH, DENOMINATOR, AXES = (
    tl.constexpr(row) for row in (rows.OFFSET, rows.SKIP, rows.HEIGHT, rows.WIDTH, rows.DENOMINATOR, rows.AXES)
)
ROWS_OF_AXIS = tl.constexpr(4)
LAST_TOKEN = tl.constexpr(2**31 - 1)
S0, S1, S2, S3 = (tl.constexpr(value) for value in reference.SIN)
C0, C1, C2, C3 = (tl.constexpr(value) for value in reference.COS)


@triton.jit
def _first_segment(table, segments, token):
    """Find the last segment that begins at or before a token: each step loads 32 evenly spaced offsets at once."""
    low = 0
    count = segments
    lane = tl.arange(0, 32)
    while count > 1:
        step = (count + 31) // 32
        offset = tl.load(table + low + lane * step, mask=lane * step < count, other=LAST_TOKEN)
        passed = tl.sum((offset <= token).to(tl.int32), axis=0) - 1  # the first offset is always <= token
        low += passed * step
        count = tl.minimum(step, count - passed * step)
    return low


@triton.jit
def _segments_of(table, segments, token, first, stop, BLOCK: tl.constexpr):
    """Find the (BLOCK,) segments of tokens: search for the first token's segment, then step forward."""
    low = _first_segment(table, segments, first)
    segment = tl.zeros([BLOCK], tl.int32) + low
    following = low + 1
    offset = tl.load(table + following, mask=following < segments, other=LAST_TOKEN).to(tl.int32)
    while offset < stop:
        segment += (token >= offset).to(tl.int32)
        following += 1
        offset = tl.load(table + following, mask=following < segments, other=LAST_TOKEN).to(tl.int32)
    return segment


@triton.jit
def _cell(column, row_stride, token):
    """Compute the tokens' frame, row and column within their segments, from pointers to their table columns."""
    offset = tl.load(column + OFFSET * row_stride).to(tl.int32)
    skip = tl.load(column + SKIP * row_stride).to(tl.int32)
    height = tl.load(column + HEIGHT * row_stride).to(tl.int32)
    width = tl.load(column + WIDTH * row_stride).to(tl.int32)
    index = skip + (token - offset)
    rows = index // width
    return rows // height, rows % height, index % width


@triton.jit
def _numerator(column, row_stride, frame, row, col, axis: tl.constexpr, kind: tl.constexpr):
    """Compute origin + frame·step_frame + row·step_row + col·step_col on one axis."""
    origin = column + (AXES + ROWS_OF_AXIS * axis) * row_stride
    value = tl.load(origin).to(kind) + frame.to(kind) * tl.load(origin + row_stride).to(kind)
    value += row.to(kind) * tl.load(origin + 2 * row_stride).to(kind)
    return value + col.to(kind) * tl.load(origin + 3 * row_stride).to(kind)


@triton.jit
def _position(positions, column, row_stride, token, valid, frame, row, col, axis: tl.constexpr, ANGLES: tl.constexpr):
    """Compute the integer part (int32) and fraction (uint32, units of 2⁻³²) of ids on one axis."""
    if ANGLES.from_table and ANGLES.fractional:
        numerator = _numerator(column, row_stride, frame, row, col, axis, tl.int64)
        denominator = tl.load(column + DENOMINATOR * row_stride)
        # Division truncates towards zero; negative ids must be floored.
        quotient = numerator // denominator
        rest = numerator - quotient * denominator
        below = rest < 0
        whole = tl.where(below, quotient - 1, quotient).to(tl.int32)
        rest = tl.where(below, rest + denominator, rest)
        fraction = ((rest << 32) // denominator).to(tl.uint32)
    elif ANGLES.from_table:
        # 32 bits suffice: products may wrap around, but ids fit in int32.
        whole = _numerator(column, row_stride, frame, row, col, axis, tl.int32)
        fraction = tl.zeros_like(whole).to(tl.uint32)
    else:
        ids = tl.load(positions + axis * tl.cast(row_stride, tl.int64) + token, mask=valid, other=0)
        if ANGLES.fractional:
            whole = (ids >> 32).to(tl.int32)
            fraction = ids.to(tl.uint32)
        else:
            if ANGLES.cache_rows > 0:
                ids = tl.minimum(tl.maximum(ids, -1), ANGLES.cache_rows)  # ids beyond 32 bits would wrap to other rows
            whole = ids.to(tl.int32)
            fraction = tl.zeros_like(whole).to(tl.uint32)
    return whole, fraction


@triton.jit
def _cos_sin_of_turns(turn):
    """Compute float32 cos and sin of angles in units of 2⁻³² turn, like ``reference.cos_sin_of_turns``."""
    quadrant = (turn + 0x20000000) >> 30
    rest = (turn - (quadrant << 30)).to(tl.int32, bitcast=True)
    u = rest.to(tl.float32) * 1.862645149230957e-09
    z = u * u
    sin = u * (S0 + z * (S1 + z * (S2 + z * S3)))
    cos = 1.0 + z * (C0 + z * (C1 + z * (C2 + z * C3)))
    odd = (quadrant & 1) != 0
    swapped = tl.where(odd, sin, cos)
    sin = tl.where(odd, cos, sin)
    cos = tl.where(((quadrant + 1) & 2) != 0, -swapped, swapped)
    return cos, tl.where((quadrant & 2) != 0, -sin, sin)


@triton.jit
def _group_of_program(ANGLES: tl.constexpr):
    """Return the group of heads that this program rotates if heads rotate differently."""
    return tl.program_id(1) * ANGLES.head_groups // tl.num_programs(1)


@triton.jit
def _ids_of_pairs(
    positions, segments, row_stride, pair_axis, token, valid, first, stop,
    CHANNELS: tl.constexpr, ANGLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the (BLOCK, pairs_padded) integer parts and fractions of ids, each on the axis of its pair.

    Ids on axis −1 are 0.
    """
    width: tl.constexpr = CHANNELS.pairs_padded
    axes: tl.constexpr = ANGLES.axes
    if ANGLES.head_groups > 0:
        pair_axis += _group_of_program(ANGLES) * CHANNELS.pairs
    pair = columns_of(BLOCK, width, CHANNELS)
    axis_of_pair = tl.load(pair_axis + pair, mask=pair < CHANNELS.pairs, other=0)
    column = positions + token
    frame = token
    row = token
    col = token
    if ANGLES.from_table:
        column = positions + _segments_of(positions, segments, token, first, stop, BLOCK)
        frame, row, col = _cell(column, row_stride, token)
    whole = tl.zeros([BLOCK, width], tl.int32)
    fraction = tl.zeros([BLOCK, width], tl.uint32)
    for axis in tl.static_range(axes):
        on_axis, rest = _position(positions, column, row_stride, token, valid, frame, row, col, axis, ANGLES)
        whole = tl.where(axis_of_pair == axis, on_axis[:, None], whole)
        if ANGLES.fractional:
            fraction = tl.where(axis_of_pair == axis, rest[:, None], fraction)
    return whole, fraction


@triton.jit
def _cos_sin_of_cache(cache, whole, valid, CHANNELS: tl.constexpr, ANGLES: tl.constexpr, BLOCK: tl.constexpr):
    """Load float32 cos and sin from an engine's cache; they are NaN for ids that have no row in the cache."""
    pair = columns_of(BLOCK, CHANNELS.pairs_padded, CHANNELS)
    mask = valid[:, None] & (pair < CHANNELS.pairs)
    known = mask & (whole >= 0) & (whole < ANGLES.cache_rows)
    row = cache + (tl.where(known, whole, 0).to(tl.int64) * (2 * CHANNELS.pairs) + pair)
    cos = tl.load(row, mask=known, other=0.0).to(tl.float32)
    sin = tl.load(row + CHANNELS.pairs, mask=known, other=0.0).to(tl.float32)
    # Masked lanes stay 0, since they take part in sums over tokens and channels.
    missing = mask & (known == 0)
    return tl.where(missing, float("nan"), cos), tl.where(missing, float("nan"), sin)


@triton.jit
def _words(frequencies, CHANNELS: tl.constexpr, ANGLES: tl.constexpr, BLOCK: tl.constexpr):
    """Load the words of the frequencies; call this before the segment search, whose loads depend on each other."""
    pair = columns_of(BLOCK, CHANNELS.pairs_padded, CHANNELS)
    real = pair < CHANNELS.pairs
    if ANGLES.own_frequencies:
        frequencies += _group_of_program(ANGLES) * CHANNELS.pairs * (1 if ANGLES.as_hf else 3)
    if ANGLES.as_hf:
        hi = tl.load(frequencies + pair, mask=real, other=0.0)
        lo, rounds = hi, hi
    else:
        hi = tl.load(frequencies + pair, mask=real, other=0).to(tl.uint32)
        lo = tl.load(frequencies + CHANNELS.pairs + pair, mask=real, other=0).to(tl.uint32)
        rounds = lo
        if ANGLES.fractional:
            rounds = tl.load(frequencies + 2 * CHANNELS.pairs + pair, mask=real, other=0).to(tl.uint32)
    return hi, lo, rounds


@triton.jit
def _angles(words, whole, fraction, ANGLES: tl.constexpr):
    """Compute (BLOCK, pairs_padded) angles: uint32 in units of 2⁻³² turn, or float32 rad as in Transformers."""
    if ANGLES.as_hf:
        ids = whole.to(tl.float32)
        if ANGLES.fractional:
            ids = ((whole.to(tl.int64) << 32) + fraction.to(tl.int64)).to(tl.float32) * 2.3283064365386963e-10
        angles = ids * words[0]
    else:
        hi, lo, rounds = words
        unsigned = whole.to(tl.uint32, bitcast=True)
        angles = unsigned * hi + tl.umulhi(unsigned, lo) - tl.where(whole < 0, lo, 0)
        if ANGLES.fractional:
            angles += tl.umulhi(fraction, hi) + fraction * rounds
    return angles


@triton.jit
def angles_of(
    positions, segments, row_stride, frequencies, pair_axis, token, valid, first, stop,
    CHANNELS: tl.constexpr, ANGLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute (BLOCK, pairs_padded) angles of tokens."""
    words = _words(frequencies, CHANNELS, ANGLES, BLOCK)
    whole, fraction = _ids_of_pairs(
        positions, segments, row_stride, pair_axis, token, valid, first, stop, CHANNELS, ANGLES, BLOCK
    )
    return _angles(words, whole, fraction, ANGLES)


@triton.jit
def cos_sin_of(angles, AS_HF: tl.constexpr):
    """Compute float32 cos and sin of the angles that ``angles_of`` returns."""
    return (tl.cos(angles), tl.sin(angles)) if AS_HF else _cos_sin_of_turns(angles)


@triton.jit
def phases(
    positions, segments, row_stride, frequencies, pair_axis, tokens, attention_factor,
    CHANNELS: tl.constexpr, ANGLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute this program's tokens, their mask, and the cos and sin that all heads of the program share."""
    block: tl.constexpr = BLOCK // CHANNELS.pieces
    first = tl.program_id(0) * block
    stop = tl.minimum(first + block, tokens)
    token = first + tl.arange(0, BLOCK) // CHANNELS.pieces
    valid = token < stop
    if ANGLES.cache_rows > 0:
        whole, _ = _ids_of_pairs(
            positions, segments, row_stride, pair_axis, token, valid, first, stop, CHANNELS, ANGLES, BLOCK
        )
        cos, sin = _cos_sin_of_cache(frequencies, whole, valid, CHANNELS, ANGLES, BLOCK)
    else:
        angles = angles_of(
            positions, segments, row_stride, frequencies, pair_axis,
            token, valid, first, stop, CHANNELS, ANGLES, BLOCK,
        )  # fmt: skip
        cos, sin = cos_sin_of(angles, ANGLES.as_hf)
    if ANGLES.scaled:
        cos, sin = cos * attention_factor, sin * attention_factor
    if ANGLES.conjugate:
        sin = -sin
    return token, valid, cos, sin


@triton.jit(do_not_specialize=["tokens", "segments", "row_stride"])
def dense_kernel(
    table, ids, tokens, segments, row_stride, NUM_AXES: tl.constexpr, FRACTIONAL: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the (axes, tokens) ids of a table: int32, or float64 for fractional schemes."""
    first = tl.program_id(0) * BLOCK
    stop = tl.minimum(first + BLOCK, tokens)
    token = first + tl.arange(0, BLOCK)
    column = table + _segments_of(table, segments, token, first, stop, BLOCK)
    frame, row, col = _cell(column, row_stride, token)
    for axis in tl.static_range(NUM_AXES):
        target = ids + axis * tl.cast(tokens, tl.int64) + token
        if FRACTIONAL:
            numerator = _numerator(column, row_stride, frame, row, col, axis, tl.int64)
            value = numerator.to(tl.float64) / tl.load(column + DENOMINATOR * row_stride).to(tl.float64)
        else:
            value = _numerator(column, row_stride, frame, row, col, axis, tl.int32)
        tl.store(target, value, mask=token < tokens)


def launch_dense(table: Tensor, tokens: int, axes: int, fractional: bool) -> Tensor:
    """Compute the (axes, tokens) ids of a table on its device in one launch."""
    ids = torch.empty((axes, tokens), dtype=torch.float64 if fractional else torch.int32, device=table.device)
    if tokens:
        with on(table.device):
            launch(
                dense_kernel, (cdiv(tokens, 256), 1), 4, table, ids, tokens, table.shape[1], table.stride(0),
                NUM_AXES=axes, FRACTIONAL=fractional, BLOCK=256,
            )  # fmt: skip
    return ids
