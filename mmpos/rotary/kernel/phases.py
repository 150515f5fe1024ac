"""cos and sin of a block of tokens in a kernel, with the bits of the plain phases."""

# mypy: ignore-errors
# ruff: noqa: N803  (constants of a kernel are upper case)

import triton
import triton.language as tl

from mmpos.rotary.kernel.positions import cell, position, segments_of
from mmpos.rotary.phases import COS, SIN

S0, S1, S2, S3 = (tl.constexpr(value) for value in SIN)
C0, C1, C2, C3 = (tl.constexpr(value) for value in COS)


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
def _angles(
    positions, segments, row_stride, frequencies, pair_axis, token, valid, first, stop,
    PAIRS: tl.constexpr, PAIRS_PADDED: tl.constexpr, AXES: tl.constexpr, MODE: tl.constexpr,
    AS_HF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(BLOCK, PAIRS_PADDED) float32 cos and sin of the angles of tokens."""
    pair = tl.arange(0, PAIRS_PADDED)
    real = pair < PAIRS
    axis_of_pair = tl.load(pair_axis + pair, mask=real, other=0)[None, :]
    column = positions + token
    frame = token
    row = token
    col = token
    if MODE <= 1:
        column = positions + segments_of(positions, segments, token, first, stop, BLOCK)
        frame, row, col = cell(column, row_stride, token)
    whole = tl.zeros([BLOCK, PAIRS_PADDED], tl.int32)
    fraction = tl.zeros([BLOCK, PAIRS_PADDED], tl.uint32)
    for axis in tl.static_range(AXES):
        on_axis, rest = position(positions, column, row_stride, token, valid, frame, row, col, axis, MODE)
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
def phases(
    positions, segments, row_stride, frequencies, pair_axis, tokens, attention_factor,
    PAIRS: tl.constexpr, PAIRS_PADDED: tl.constexpr, AXES: tl.constexpr, MODE: tl.constexpr,
    AS_HF: tl.constexpr, CONJUGATE: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The tokens of this program, which of them there are, and cos and sin as all their heads turn by them."""
    first = tl.program_id(0) * BLOCK
    stop = tl.minimum(first + BLOCK, tokens)
    token = first + tl.arange(0, BLOCK)
    valid = token < tokens
    cos, sin = _angles(
        positions, segments, row_stride, frequencies, pair_axis, token, valid, first, stop,
        PAIRS, PAIRS_PADDED, AXES, MODE, AS_HF, BLOCK,
    )  # fmt: skip
    if SCALED:
        cos, sin = cos * attention_factor, sin * attention_factor
    if CONJUGATE:
        sin = -sin
    return token, valid, cos, sin
