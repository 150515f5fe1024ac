"""Convert 8-bit floats in kernels with integer arithmetic, since some GPUs and Triton's interpreter lack the dtypes."""

# mypy: ignore-errors
# ruff: noqa: N803, SIM102  (kernel constants are upper case and tested in separate conditions)

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmpos.rotary import paged
from mmpos.rotary.kernel.tiling import Heads
from mmpos.rotary.paged import Scales

LEAST_SCALE = tl.constexpr(paged.LEAST_SCALE)


class Format(NamedTuple):
    """Compile-time description of an 8-bit dtype.

    Args:
        mantissa: number of mantissa bits.
        bias: exponent bias.
        largest_code: bits of the largest number.
        largest: the largest number.
        dynamic: whether scales are computed and written instead of read.
    """

    mantissa: int
    bias: int
    largest_code: int
    largest: float
    dynamic: bool


class Formats(NamedTuple):
    """8-bit formats in which q, k and v are stored; None for other dtypes."""

    q: Format | None
    k: Format | None
    v: Format | None


def formats_of(q: torch.dtype, k: torch.dtype, v: torch.dtype, scales: Scales) -> Formats:
    """Return the formats of q, k and v stored in these dtypes."""
    computed = (scales.q_computed, scales.k_computed, scales.v_computed)
    return Formats(
        *(
            format_of(dtype, tensor is not None) if dtype.itemsize == 1 else None
            for dtype, tensor in zip((q, k, v), computed, strict=True)
        )
    )


def heads_of_scales(scale: Tensor | None, computed: Tensor | None) -> Heads | None:
    """Return (heads,) input scales or computed scales as ``Heads`` with their block, token and head strides."""
    if computed is not None:
        return Heads(computed, *computed.stride(), 0)
    return None if scale is None else Heads(scale, 0, 0, scale.stride(0), 0)


@triton.jit
def scale_rows(scales, batch, token, FORMAT: tl.constexpr):
    """Return the (rows,) offsets of the tokens' scales, or 0 if all tokens share their scales."""
    rows = 0
    if FORMAT is not None:
        if FORMAT.dynamic:
            rows = batch * scales.batch + token * scales.token
    return rows


def format_of(dtype: torch.dtype, dynamic: bool) -> Format:
    """Return the format of an 8-bit dtype."""
    largest = torch.finfo(dtype).max
    return (
        Format(3, 7, 0x7E, largest, dynamic) if dtype == torch.float8_e4m3fn else Format(2, 15, 0x7B, largest, dynamic)
    )


@triton.jit
def codes_of(x, FORMAT: tl.constexpr):
    """Round float32 to the nearest 8-bit number, ties to even, with saturation; return the bits as uint8."""
    dropped: tl.constexpr = 23 - FORMAT.mantissa
    least_normal: tl.constexpr = (128 - FORMAT.bias) << 23
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = magnitude + ((1 << (dropped - 1)) - 1) + ((magnitude >> dropped) & 1)
    normal = tl.minimum((rounded >> dropped) - ((127 - FORMAT.bias) << FORMAT.mantissa), FORMAT.largest_code)
    # Just above this power of two, one float32 ulp equals the spacing of 8-bit subnormal numbers.
    large = tl.full(x.shape, (151 - FORMAT.bias - FORMAT.mantissa) << 23, tl.uint32)
    shifted = magnitude.to(tl.float32, bitcast=True) + large.to(tl.float32, bitcast=True)
    codes = tl.where(magnitude < least_normal, shifted.to(tl.uint32, bitcast=True) - large, normal)
    codes = tl.where(magnitude > 0x7F800000, 0x7F, codes)  # NaN
    return (codes | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def values_of(codes, FORMAT: tl.constexpr):
    """Convert the bits of 8-bit numbers, in any numeric dtype, to float32."""
    unit: tl.constexpr = 2.0 ** (1 - FORMAT.bias - FORMAT.mantissa)
    codes = codes.to(tl.uint32)
    magnitude = codes & 0x7F
    normal = (magnitude << (23 - FORMAT.mantissa)) + ((127 - FORMAT.bias) << 23)
    x = tl.where(
        magnitude < (1 << FORMAT.mantissa), magnitude.to(tl.float32) * unit, normal.to(tl.float32, bitcast=True)
    )
    # The code after the largest number is infinity in e5m2 and NaN in e4m3.
    if FORMAT.mantissa == 2:
        x = tl.where(magnitude == FORMAT.largest_code + 1, float("inf"), x)
        x = tl.where(magnitude > FORMAT.largest_code + 1, float("nan"), x)
    else:
        x = tl.where(magnitude > FORMAT.largest_code, float("nan"), x)
    return tl.where(codes >= 0x80, -x, x)


@triton.jit
def _largest_of(x):
    """Return the (rows,) largest magnitudes, ignoring NaN."""
    return tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=1)


@triton.jit
def largest_of(first, second, rest, CHANNELS: tl.constexpr):
    """Return the (rows,) largest magnitudes of heads over their nonempty parts."""
    if CHANNELS.pairs == 0:
        return _largest_of(rest)
    largest = tl.maximum(_largest_of(first), _largest_of(second))
    return tl.maximum(largest, _largest_of(rest)) if CHANNELS.rest > 0 else largest


@triton.jit
def divisor_of(largest, scale, mask, FORMAT: tl.constexpr):
    """Return the scales of heads: one scale that is read, or (rows, 1) scales computed from magnitudes and written.

    Args:
        largest: (rows,) largest magnitudes; unused if the scale is read.
        scale: pointer to the scale that is read, or (rows,) pointers to the scales that are written.
        mask: (rows,) whether each head exists.
        FORMAT: 8-bit format of the heads.
    """
    if FORMAT.dynamic:
        divisor = tl.maximum(tl.div_rn(largest, FORMAT.largest), LEAST_SCALE)
        tl.store(scale, divisor, mask=mask)
        divisor = divisor[:, None]
    else:
        divisor = tl.load(scale)
    return divisor


@triton.jit
def codes_of_heads(first, second, rest, scale, mask, CHANNELS: tl.constexpr, FORMAT: tl.constexpr):
    """Divide heads by their scales and round them to 8-bit numbers; return their bits as uint8."""
    divisor = divisor_of(largest_of(first, second, rest, CHANNELS), scale, mask, FORMAT)
    first, second, rest = tl.div_rn(first, divisor), tl.div_rn(second, divisor), tl.div_rn(rest, divisor)
    return codes_of(first, FORMAT), codes_of(second, FORMAT), codes_of(rest, FORMAT)
