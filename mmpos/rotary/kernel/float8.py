"""Round to 8 bits and back in a kernel: by integers, since not every GPU and not the interpreter has these dtypes."""

# mypy: ignore-errors
# ruff: noqa: N803, SIM102  (constants of a kernel are upper case, and conditions on them one by one)

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
    """A dtype of 8 bits, known when a kernel is compiled.

    Args:
        mantissa: bits of the mantissa.
        bias: of the exponent.
        largest_code: bits of the largest number.
        largest: that number.
        dynamic: whether scales are computed and written, not read.
    """

    mantissa: int
    bias: int
    largest_code: int
    largest: float
    dynamic: bool


class Formats(NamedTuple):
    """Of q, k and v as they are stored; None where they are not of 8 bits."""

    q: Format | None
    k: Format | None
    v: Format | None


def formats_of(q: torch.dtype, k: torch.dtype, v: torch.dtype, scales: Scales) -> Formats:
    """Return formats of what is stored in these dtypes."""
    computed = (scales.q_computed, scales.k_computed, scales.v_computed)
    return Formats(
        *(
            format_of(dtype, tensor is not None) if dtype.itemsize == 1 else None
            for dtype, tensor in zip((q, k, v), computed, strict=True)
        )
    )


def as_bits(x: Tensor) -> Tensor:
    """View numbers of 8 bits as uint8, and leave all others."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def heads_of_scales(scale: Tensor | None, computed: Tensor | None) -> Heads | None:
    """Return scales with their strides, of a block, a token and a head: (heads,) ones, or those to be computed."""
    if computed is not None:
        return Heads(computed, *computed.stride(), 0)
    return None if scale is None else Heads(scale, 0, 0, scale.stride(0), 0)


@triton.jit
def scale_rows(scales, batch, token, FORMAT: tl.constexpr):
    """Return (rows,) offsets of the scales of tokens, or 0 where all tokens share them."""
    rows = 0
    if FORMAT is not None:
        if FORMAT.dynamic:
            rows = batch * scales.batch + token * scales.token
    return rows


def format_of(dtype: torch.dtype, dynamic: bool) -> Format:
    """Return how a dtype of 8 bits is laid out."""
    largest = torch.finfo(dtype).max
    return (
        Format(3, 7, 0x7E, largest, dynamic) if dtype == torch.float8_e4m3fn else Format(2, 15, 0x7B, largest, dynamic)
    )


@triton.jit
def codes_of(x, FORMAT: tl.constexpr):
    """Round float32 to the nearest number of 8 bits, ties to even and the largest for all beyond it; its uint8 bits."""
    dropped: tl.constexpr = 23 - FORMAT.mantissa
    least_normal: tl.constexpr = (128 - FORMAT.bias) << 23
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = magnitude + ((1 << (dropped - 1)) - 1) + ((magnitude >> dropped) & 1)
    normal = tl.minimum((rounded >> dropped) - ((127 - FORMAT.bias) << FORMAT.mantissa), FORMAT.largest_code)
    # Beside this power of two the last bit of float32 is worth what the last one is below the least normal number.
    large = tl.full(x.shape, (151 - FORMAT.bias - FORMAT.mantissa) << 23, tl.uint32)
    beside = magnitude.to(tl.float32, bitcast=True) + large.to(tl.float32, bitcast=True)
    codes = tl.where(magnitude < least_normal, beside.to(tl.uint32, bitcast=True) - large, normal)
    codes = tl.where(magnitude > 0x7F800000, 0x7F, codes)  # NaN
    return (codes | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def values_of(codes, FORMAT: tl.constexpr):
    """Convert the bits of 8-bit numbers, of any numeric dtype, to float32."""
    unit: tl.constexpr = 2.0 ** (1 - FORMAT.bias - FORMAT.mantissa)
    codes = codes.to(tl.uint32)
    magnitude = codes & 0x7F
    normal = (magnitude << (23 - FORMAT.mantissa)) + ((127 - FORMAT.bias) << 23)
    x = tl.where(
        magnitude < (1 << FORMAT.mantissa), magnitude.to(tl.float32) * unit, normal.to(tl.float32, bitcast=True)
    )
    # e5m2 has infinity, one beyond its largest number; of e4m3 that is the NaN.
    if FORMAT.mantissa == 2:
        x = tl.where(magnitude == FORMAT.largest_code + 1, float("inf"), x)
        x = tl.where(magnitude > FORMAT.largest_code + 1, float("nan"), x)
    else:
        x = tl.where(magnitude > FORMAT.largest_code, float("nan"), x)
    return tl.where(codes >= 0x80, -x, x)


@triton.jit
def _largest_of(x):
    """Find the (rows,) largest magnitude of each row; NaN plays no part."""
    return tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=1)


@triton.jit
def largest_of(first, second, rest, CHANNELS: tl.constexpr):
    """Find the (rows,) largest magnitude of heads, from the parts of which there are any."""
    if CHANNELS.pairs == 0:
        return _largest_of(rest)
    largest = tl.maximum(_largest_of(first), _largest_of(second))
    return tl.maximum(largest, _largest_of(rest)) if CHANNELS.rest > 0 else largest


@triton.jit
def divisor_of(largest, scale, there, FORMAT: tl.constexpr):
    """Return scales of heads: the one that is read, or (rows, 1) computed of their largest magnitudes and written.

    Args:
        largest: (rows,) magnitudes; of no use where scales are read.
        scale: a pointer to the one scale, or (rows,) pointers to where they are written.
        there: (rows,) which heads there are.
        FORMAT: of what is divided.
    """
    if FORMAT.dynamic:
        divisor = tl.maximum(tl.div_rn(largest, FORMAT.largest), LEAST_SCALE)
        tl.store(scale, divisor, mask=there)
        divisor = divisor[:, None]
    else:
        divisor = tl.load(scale)
    return divisor


@triton.jit
def codes_of_heads(first, second, rest, scale, there, CHANNELS: tl.constexpr, FORMAT: tl.constexpr):
    """Divide heads by their scales and round them to the uint8 bits of numbers of 8 bits."""
    divisor = divisor_of(largest_of(first, second, rest, CHANNELS), scale, there, FORMAT)
    first, second, rest = tl.div_rn(first, divisor), tl.div_rn(second, divisor), tl.div_rn(rest, divisor)
    return codes_of(first, FORMAT), codes_of(second, FORMAT), codes_of(rest, FORMAT)
