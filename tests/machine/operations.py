"""What instructions compute from their operands: a function of arrays, with an element per thread, for each opcode."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from accesses import Fault
from numpy import bool_, float16, float32, float64, int16, int32, int64, uint8, uint16, uint32, uint64

Array = Any
"""A numpy array with one element per thread."""

DTYPES = {
    "pred": bool_, "b8": uint8, "b16": uint16, "u16": uint16, "s16": int16, "f16": float16,
    "b32": uint32, "u32": uint32, "s32": int32, "f32": float32,
    "b64": uint64, "u64": uint64, "s64": int64, "f64": float64, "f32x2": float32,
}  # fmt: skip
"""How numpy holds a value of each type; "f32x2" has two per thread, and "bf16" is widened to float32."""

WIDER = {"u16": "u32", "u32": "u64", "s32": "s64"}


class Operation(NamedTuple):
    """A function, the type of its result, and the types of its operands."""

    compute: Callable[..., Array]
    result: str
    operands: tuple[str, ...]


OPERATIONS: dict[str, Operation] = {}


def spelled(patterns: str) -> Iterator[str]:
    """Spell out patterns: "ret shr.{u32,s32}" is "ret", "shr.u32" and "shr.s32"."""
    for pattern in patterns.split():
        pieces = re.split(r"\{(.*?)\}", pattern)
        yield from map("".join, product(*(piece.split(",") if i % 2 else [piece] for i, piece in enumerate(pieces))))


def define(patterns: str, types: str, compute: Callable[..., Array]) -> None:
    """Define opcodes by their types, such as "T T -> T", and a function.

    T is the last suffix of an opcode, S the one before it, and W the type twice as wide as T.
    """
    for opcode in spelled(patterns):
        *_, before, last = opcode.split(".")
        named = {"T": last, "S": before, "W": WIDER.get(last, "")}
        *operands, _, result = (named.get(word, word) for word in types.split())
        OPERATIONS[opcode] = Operation(compute, result, tuple(operands))


# Integers, whose results wrap around.


def wide(a: Array) -> Array:
    """Return integers in the type twice as wide."""
    return a.astype(np.dtype(f"{a.dtype.kind}{2 * a.itemsize}"))


def divided(a: Array, b: Array) -> Array:
    """Divide and round towards zero; a division by zero, whose result is undefined, gives −1."""
    quotient = a // np.where(b == 0, 1, b).astype(a.dtype)
    inexact = (a != quotient * b) & ((a < 0) != (b < 0))
    return np.where(b == 0, np.array(-1).astype(a.dtype), quotient + inexact).astype(a.dtype)


def shifted_left(a: Array, by: Array) -> Array:
    """Shift in zeros, also by more bits than there are."""
    return np.where(by < a.itemsize * 8, a << by.astype(a.dtype), 0).astype(a.dtype)


def shifted_right(a: Array, by: Array) -> Array:
    """Shift in zeros, or copies of the sign of signed numbers, also by more bits than there are."""
    last = a.itemsize * 8 - 1
    shifted = a >> np.minimum(by, last).astype(a.dtype)
    return np.where((by > last) & (a.dtype.kind == "u"), 0, shifted).astype(a.dtype)


def field(a: Array, start: Array, length: Array) -> Array:
    """Return a field of bits; that of a signed number keeps the sign of its highest bit."""
    if ((start + length > 32) | (length == 0)).any():
        raise Fault("unknown field: empty, or beyond bit 31")
    return a << (32 - start - length).astype(a.dtype) >> (32 - length).astype(a.dtype)


def inserted(a: Array, b: Array, start: Array, length: Array) -> Array:
    """Return b with a field of bits that has the low bits of a."""
    mask = ((uint64(1) << length.astype(uint64)) - uint64(1)) << start.astype(uint64)
    return ((a.astype(uint64) << start.astype(uint64) & mask) | (b & ~mask)).astype(uint32)


def permuted(a: Array, b: Array, selector: Array) -> Array:
    """Pick each byte among the four of a and the four of b by a hexadecimal digit."""
    result = np.zeros_like(a)
    for i in range(0, 16, 4):
        digit = (selector >> i & 15).astype(uint64)
        if (digit > 7).any():
            raise Fault("unknown permutation: it copies a sign")
        result |= ((joined(b, a) >> digit * 8 & 255) << 2 * i).astype(uint32)
    return result


def joined(high: Array, low: Array) -> Array:
    """Join two numbers of 32 bits to one of 64."""
    return high.astype(uint64) << 32 | low


define("add.{s16,s32,s64,u32}", "T T -> T", lambda a, b: a + b)
define("sub.{s16,s32,s64}", "T T -> T", lambda a, b: a - b)
define("mul.lo.{s16,s32,s64}", "T T -> T", lambda a, b: a * b)
define("mul.wide.{u16,u32,s32}", "T T -> W", lambda a, b: wide(a) * wide(b))
define("mul.hi.{u16,u32,s32}", "T T -> T", lambda a, b: (wide(a) * wide(b) >> a.itemsize * 8).astype(a.dtype))
define("mad.lo.{s32,s64}", "T T T -> T", lambda a, b, c: a * b + c)
define("mad.wide.{u32,s32}", "T T W -> W", lambda a, b, c: wide(a) * wide(b) + c)
define("div.{s32,s64,u32}", "T T -> T", divided)
define("rem.{s32,u32}", "T T -> T", lambda a, b: a - divided(a, b) * b)
define("neg.s32", "T -> T", np.negative)
define("min.{s32,s64}", "T T -> T", np.minimum)
define("max.{s32,s64}", "T T -> T", np.maximum)
define("and.{pred,b16,b32,b64}", "T T -> T", np.bitwise_and)
define("or.{pred,b16,b32,b64}", "T T -> T", np.bitwise_or)
define("xor.{pred,b32}", "T T -> T", np.bitwise_xor)
define("not.pred", "T -> T", np.invert)
define("shl.{b16,b32,b64}", "T u32 -> T", shifted_left)
define("shr.{u16,u32,u64,s32,s64}", "T u32 -> T", shifted_right)
define("shf.l.wrap.b32", "T T T -> T", lambda low, high, by: (joined(high, low) << (by & 31) >> 32).astype(uint32))
define("bfe.{u32,s32}", "T u32 u32 -> T", field)
define("bfi.b32", "T T u32 u32 -> T", inserted)
define("prmt.b32", "T T T -> T", permuted)
define("selp.{b16,b32,b64,f32}", "T T pred -> T", lambda a, b, first: np.where(first, a, b))

# Floating point: every operation rounds once, to nearest even.


def fused(a: Array, b: Array, c: Array) -> Array:
    """Compute a·b + c in float32: exactly but for one rounding to odd in float64, which a second rounding ignores."""
    exact, addend = a.astype(float64) * b, c.astype(float64)
    total = exact + addend
    part = total - exact
    error = (exact - (total - part)) + (addend - part)
    even = np.isfinite(error) & (error != 0) & (total.view(int64) & 1 == 0)
    return np.where(even, np.nextafter(total, np.copysign(np.inf, error)), total).astype(float32)


def flushing(compute: Callable[..., Array]) -> Callable[..., Array]:
    """Make a function of float32 take subnormal numbers for zeros of their sign, and return such zeros (ftz)."""

    def flush(a: Array) -> Array:
        return np.where(np.abs(a) < np.finfo(float32).tiny, np.copysign(float32(0), a), a)

    return lambda *operands: flush(compute(*map(flush, operands)))


def inverse_root(a: Array) -> Array:
    """Compute 1/√a, rounded to nearest; a GPU's result may be off by a factor of 1 ± 2^-22.9."""
    return (1 / np.sqrt(a.astype(float64))).astype(float32)


def bfloat16(a: Array) -> Array:
    """Round float32 to the bits of bfloat16, in which all NaN are 0x7FFF."""
    bits = a.view(uint32)
    return np.where(np.isnan(a), 0x7FFF, bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(uint16)


def half(a: Array) -> Array:
    """Round float32 to the bits of float16, in which all NaN are 0x7FFF."""
    return np.where(np.isnan(a), 0x7FFF, a.astype(float16).view(uint16)).astype(uint16)


def packed(high: Array, low: Array) -> Array:
    """Pack two numbers of 16 bits into one of 32."""
    return high.astype(uint32) << 16 | low


def nearest_integer(a: Array) -> Array:
    """Round to int32, ties to even; clamp what does not fit, and return 0 for NaN."""
    return np.nan_to_num(np.clip(np.rint(a.astype(float64)), -(2.0**31), 2.0**31 - 1)).astype(int32)


define("add.rn.{f32,f32x2}", "T T -> T", lambda a, b: a + b)
define("sub.rn.{f32,f32x2}", "T T -> T", lambda a, b: a - b)
define("mul.rn.{f32,f64,f32x2}", "T T -> T", lambda a, b: a * b)
define("add.rn.f32.{f16,bf16}", "T S -> S", lambda a, b: a.astype(float32) + b)
define("sub.rn.f32.{f16,bf16}", "T S -> S", lambda a, b: a.astype(float32) - b)
define("div.rn.f64", "T T -> T", lambda a, b: a / b)
define("neg.f32", "T -> T", np.negative)
define("abs.ftz.f32", "T -> T", flushing(np.abs))
define("mul.rn.ftz.f32", "T T -> T", flushing(np.multiply))
define("fma.rn.ftz.f32", "T T T -> T", flushing(fused))
define("rsqrt.approx.ftz.f32", "T -> T", flushing(inverse_root))

# Comparison: for NaN, only the opcodes that end with "u" (unordered) are true.

define("setp.eq.{b16,b32,b64}", "T T -> pred", np.equal)
define("setp.ne.{b16,b32,b64} setp.neu.f32", "T T -> pred", np.not_equal)
define("setp.lt.{s32,u32,s64}", "T T -> pred", np.less)
define("setp.le.{s32,s64}", "T T -> pred", np.less_equal)
define("setp.gt.{s32,u32,s64}", "T T -> pred", np.greater)
define("setp.ge.s32", "T T -> pred", np.greater_equal)
define("setp.ltu.f32", "T T -> pred", lambda a, b: ~(a >= b))

# Conversion from the last suffix to the one before it.

for _to in ("s64", "u16", "u32", "u64"):
    define(f"cvt.{_to}.{{s32,u16,u32,u64}}", "T -> S", lambda a, to=DTYPES[_to]: a.astype(to))
define("cvt.rn.f32.{s32,s64,f64} cvt.f32.{f16,bf16}", "T -> S", lambda a: a.astype(float32))
define("cvt.rn.f64.s64", "T -> S", lambda a: a.astype(float64))
define("cvt.rni.ftz.s32.f32", "T -> S", nearest_integer)
define("cvt.rn.bf16.f32", "T -> b16", bfloat16)
define("cvt.rn.f16.f32", "T -> b16", half)
define("cvt.rn.bf16x2.f32", "T T -> b32", lambda a, b: packed(bfloat16(a), bfloat16(b)))
define("cvt.rn.f16x2.f32", "T T -> b32", lambda a, b: packed(half(a), half(b)))
