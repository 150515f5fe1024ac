"""The one Triton kernel: positions from a table, phases, and the rotation of q and k, forward and backward."""

# mypy: ignore-errors
# ruff: noqa: N803  (constants of a kernel are upper case)

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmpos.rotary.phases import COS, SIN

# Modes of positions, as in phases: 0 and 1 are tables of integers and of fractions, 2 and 3 dense ids.
S0, S1, S2, S3 = (tl.constexpr(value) for value in SIN)
C0, C1, C2, C3 = (tl.constexpr(value) for value in COS)
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
def _segments(table, segments, token, first, stop, BLOCK: tl.constexpr):
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
def _cell(column, row_stride, token):
    """Frame, row and column of tokens in the grids of their segments, given pointers to their table columns."""
    offset = tl.load(column).to(tl.int32)
    skip = tl.load(column + row_stride).to(tl.int32)
    height = tl.load(column + 2 * row_stride).to(tl.int32)
    width = tl.load(column + 3 * row_stride).to(tl.int32)
    index = skip + (token - offset)
    rows = index // width
    return rows // height, rows % height, index % width


@triton.jit
def _numerator(column, row_stride, frame, row, col, axis: tl.constexpr, kind: tl.constexpr):
    """origin + frame·step_frame + row·step_row + col·step_col on one axis."""
    part = column + (5 + 4 * axis) * row_stride
    value = tl.load(part).to(kind) + frame.to(kind) * tl.load(part + row_stride).to(kind)
    value += row.to(kind) * tl.load(part + 2 * row_stride).to(kind)
    return value + col.to(kind) * tl.load(part + 3 * row_stride).to(kind)


@triton.jit
def _position(positions, column, row_stride, token, valid, frame, row, col, axis: tl.constexpr, MODE: tl.constexpr):
    """Integer part (int32) and fraction (uint32, units of 2⁻³²) of the ids on one axis."""
    if MODE == 0:
        # 32 bits suffice: products may wrap around, the ids fit.
        whole = _numerator(column, row_stride, frame, row, col, axis, tl.int32)
        fraction = tl.zeros_like(whole).to(tl.uint32)
    elif MODE == 1:
        numerator = _numerator(column, row_stride, frame, row, col, axis, tl.int64)
        denominator = tl.load(column + 4 * row_stride)
        # Division truncates towards zero; ids may be negative, so floor.
        quotient = numerator // denominator
        rest = numerator - quotient * denominator
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


@triton.jit
def _cos_sin(turn):
    """float32 cos and sin of angles in units of 2⁻³² turn; see phases.cos_sin_of_turns."""
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
def _phases(
    positions, segments, row_stride, frequencies, pair_axis, token, valid, first, stop,
    PAIRS: tl.constexpr, PAIRS_PADDED: tl.constexpr, AXES: tl.constexpr, MODE: tl.constexpr,
    AS_HF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(BLOCK, PAIRS_PADDED) float32 cos and sin, for all heads of a block of tokens."""
    pair = tl.arange(0, PAIRS_PADDED)
    real = pair < PAIRS
    axis_of_pair = tl.load(pair_axis + pair, mask=real, other=0)[None, :]
    column = positions + token
    frame = token
    row = token
    col = token
    if MODE <= 1:
        column = positions + _segments(positions, segments, token, first, stop, BLOCK)
        frame, row, col = _cell(column, row_stride, token)
    whole = tl.zeros([BLOCK, PAIRS_PADDED], tl.int32)
    fraction = tl.zeros([BLOCK, PAIRS_PADDED], tl.uint32)
    for axis in tl.static_range(AXES):
        on_axis, rest = _position(positions, column, row_stride, token, valid, frame, row, col, axis, MODE)
        whole = tl.where(axis_of_pair == axis, on_axis[:, None], whole)
        if MODE % 2 == 1:
            fraction = tl.where(axis_of_pair == axis, rest[:, None], fraction)
    if AS_HF:
        inv_freq = tl.load(frequencies + pair, mask=real, other=0.0)[None, :]
        ids = whole.to(tl.float32)
        if MODE % 2 == 1:
            ids = ((whole.to(tl.int64) << 32) + fraction.to(tl.int64)).to(tl.float32) * 2.3283064365386963e-10
        angle = ids * inv_freq
        return tl.cos(angle), tl.sin(angle)
    hi = tl.load(frequencies + pair, mask=real, other=0).to(tl.uint32)[None, :]
    lo = tl.load(frequencies + PAIRS + pair, mask=real, other=0).to(tl.uint32)[None, :]
    unsigned = whole.to(tl.uint32, bitcast=True)
    turn = unsigned * hi + tl.umulhi(unsigned, lo) - tl.where(whole < 0, lo, 0)
    if MODE % 2 == 1:
        rounds = tl.load(frequencies + 2 * PAIRS + pair, mask=real, other=0).to(tl.uint32)[None, :]
        turn += tl.umulhi(fraction, hi) + fraction * rounds
    return _cos_sin(turn)


@triton.jit
def _rotate_heads(
    x, out, head_first, head_stop, x_base, out_base, x_head, x_dim, out_head, out_dim, cos, sin, valid,
    PAIRS: tl.constexpr, PAIRS_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    ADJACENT: tl.constexpr, COPY_REST: tl.constexpr,
):  # fmt: skip
    """Rotate heads of a block of tokens: float32 arithmetic, one rounding at the end."""
    # Offsets are 64 bits wide: long batches pass 2³¹ elements.
    pair = tl.arange(0, PAIRS_PADDED).to(tl.int64)
    mask = valid[:, None] & (pair < PAIRS)[None, :]
    x_head, out_head = tl.cast(x_head, tl.int64), tl.cast(out_head, tl.int64)
    for head in range(head_first, head_stop):
        source = x + (x_base[:, None] + head * x_head)
        target = out + (out_base[:, None] + head * out_head)
        if ADJACENT:
            both = tl.arange(0, 2 * PAIRS_PADDED).to(tl.int64)
            mask_both = valid[:, None] & (both < 2 * PAIRS)[None, :]
            values = tl.load(source + both[None, :] * x_dim, mask=mask_both, other=0.0)
            first, second = tl.split(values.reshape(values.shape[0], PAIRS_PADDED, 2).to(tl.float32))
            rotated = tl.join(first * cos - second * sin, second * cos + first * sin)
            rotated = rotated.reshape(values.shape[0], 2 * PAIRS_PADDED)
            tl.store(target + both[None, :] * out_dim, rotated.to(out.dtype.element_ty), mask=mask_both)
        else:
            first = tl.load(source + pair[None, :] * x_dim, mask=mask, other=0.0).to(tl.float32)
            second = tl.load(source + (pair + PAIRS)[None, :] * x_dim, mask=mask, other=0.0).to(tl.float32)
            left = (first * cos - second * sin).to(out.dtype.element_ty)
            right = (second * cos + first * sin).to(out.dtype.element_ty)
            tl.store(target + pair[None, :] * out_dim, left, mask=mask)
            tl.store(target + (pair + PAIRS)[None, :] * out_dim, right, mask=mask)
        if COPY_REST and REST > 0:
            rest = tl.arange(0, REST_PADDED).to(tl.int64)
            keep = valid[:, None] & (rest < REST)[None, :]
            kept = tl.load(source + (2 * PAIRS + rest)[None, :] * x_dim, mask=keep)
            tl.store(target + (2 * PAIRS + rest)[None, :] * out_dim, kept, mask=keep)


# Strides are specialised, for wide loads; numbers that change with every batch are not, or it might compile anew.
@triton.jit(do_not_specialize=["tokens", "seq", "segments", "row_stride", "q_heads", "k_heads"])
def rotary_kernel(
    q, k, q_out, k_out, positions, frequencies, pair_axis,
    tokens, seq, segments, row_stride, q_heads, k_heads, attention_factor,
    q_batch, q_token, q_head, q_dim, k_batch, k_token, k_head, k_dim,
    q_out_batch, q_out_token, q_out_head, q_out_dim, k_out_batch, k_out_token, k_out_head, k_out_dim,
    PAIRS: tl.constexpr, PAIRS_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    AXES: tl.constexpr, MODE: tl.constexpr, AS_HF: tl.constexpr, ADJACENT: tl.constexpr,
    CONJUGATE: tl.constexpr, SCALED: tl.constexpr, COPY_REST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program rotates a block of tokens, and a share of the heads of q and of k, by the same phases."""
    first = tl.program_id(0) * BLOCK
    stop = tl.minimum(first + BLOCK, tokens)
    token = first + tl.arange(0, BLOCK)
    valid = token < tokens
    cos, sin = _phases(
        positions, segments, row_stride, frequencies, pair_axis, token, valid, first, stop,
        PAIRS, PAIRS_PADDED, AXES, MODE, AS_HF, BLOCK,
    )  # fmt: skip
    if SCALED:
        cos, sin = cos * attention_factor, sin * attention_factor
    if CONJUGATE:
        sin = -sin
    batch = (token // seq).to(tl.int64)
    place = (token % seq).to(tl.int64)
    share, shares = tl.program_id(1), tl.num_programs(1)
    q_base, q_out_base = batch * q_batch + place * q_token, batch * q_out_batch + place * q_out_token
    _rotate_heads(
        q, q_out, share * q_heads // shares, (share + 1) * q_heads // shares, q_base, q_out_base,
        q_head, q_dim, q_out_head, q_out_dim, cos, sin, valid,
        PAIRS, PAIRS_PADDED, REST, REST_PADDED, ADJACENT, COPY_REST,
    )  # fmt: skip
    k_base, k_out_base = batch * k_batch + place * k_token, batch * k_out_batch + place * k_out_token
    _rotate_heads(
        k, k_out, share * k_heads // shares, (share + 1) * k_heads // shares, k_base, k_out_base,
        k_head, k_dim, k_out_head, k_out_dim, cos, sin, valid,
        PAIRS, PAIRS_PADDED, REST, REST_PADDED, ADJACENT, COPY_REST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "segments", "row_stride"])
def dense_kernel(
    table, ids, tokens, segments, row_stride, AXES: tl.constexpr, FRACTIONAL: tl.constexpr, BLOCK: tl.constexpr
):
    """(axes, tokens) ids of a table: int32, or float64 for fractional schemes."""
    first = tl.program_id(0) * BLOCK
    stop = tl.minimum(first + BLOCK, tokens)
    token = first + tl.arange(0, BLOCK)
    column = table + _segments(table, segments, token, first, stop, BLOCK)
    frame, row, col = _cell(column, row_stride, token)
    for axis in tl.static_range(AXES):
        target = ids + axis * tl.cast(tokens, tl.int64) + token
        if FRACTIONAL:
            numerator = _numerator(column, row_stride, frame, row, col, axis, tl.int64)
            value = numerator.to(tl.float64) / tl.load(column + 4 * row_stride).to(tl.float64)
        else:
            value = _numerator(column, row_stride, frame, row, col, axis, tl.int32)
        tl.store(target, value, mask=token < tokens)


def launch(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, positions: Tensor, frequencies: Tensor, pair_axis: Tensor, *,
    mode: int, adjacent: bool, as_hf: bool, attention_factor: float, conjugate: bool,
) -> None:  # fmt: skip
    """Rotate q and k into q_out and k_out in one launch; see operator.rotate. Allocates nothing, waits for nothing."""
    batch, seq, q_heads, head_dim = q.shape
    tokens, pairs = batch * seq, pair_axis.shape[0]
    if tokens == 0:
        return
    block, shares, warps = _tiling(tokens, q_heads + k.shape[2], triton.next_power_of_2(pairs))
    rest = head_dim - 2 * pairs
    axes = (positions.shape[0] - 5) // 4 if mode < 2 else positions.shape[0]
    with _on(q.device):
        rotary_kernel[(triton.cdiv(tokens, block), shares)](
            q, k, q_out, k_out, positions, frequencies, pair_axis,
            tokens, seq, positions.shape[1], positions.stride(0), q_heads, k.shape[2], attention_factor,
            *q.stride(), *k.stride(), *q_out.stride(), *k_out.stride(),
            PAIRS=pairs, PAIRS_PADDED=triton.next_power_of_2(pairs),
            REST=rest, REST_PADDED=triton.next_power_of_2(max(rest, 1)),
            AXES=axes, MODE=mode, AS_HF=as_hf, ADJACENT=adjacent, CONJUGATE=conjugate,
            SCALED=attention_factor != 1.0, COPY_REST=q.data_ptr() != q_out.data_ptr(), BLOCK=block,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip


def launch_dense(table: Tensor, tokens: int, axes: int, fractional: bool) -> Tensor:
    """(axes, tokens) ids of a table on its device, in one launch."""
    ids = torch.empty((axes, tokens), dtype=torch.float64 if fractional else torch.int32, device=table.device)
    if tokens:
        with _on(table.device):
            dense_kernel[(triton.cdiv(tokens, 256),)](
                table, ids, tokens, table.shape[1], table.stride(0), AXES=axes, FRACTIONAL=fractional, BLOCK=256
            )
    return ids


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Launch on the tensors' device, which need not be the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _tiling(tokens: int, heads: int, pairs: int) -> tuple[int, int, int]:
    """Tokens per program, programs that share the heads of these tokens, and warps per program.

    A program makes its phases once and uses them for all its heads, so it should have many; but a device
    is only full with a few thousand programs. A thread holds eight pairs of a head: two loads of 16 bytes.
    """
    warps = 4 if tokens >= 2048 else 1
    block = max(1, 32 * warps * 8 // pairs)
    programs = triton.cdiv(tokens, block)
    return block, max(1, min(triton.cdiv(heads, 2), 2048 // programs)), warps
