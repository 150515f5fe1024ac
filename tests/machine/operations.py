"""What instructions compute from their operands: a function of arrays, with one element per thread, for each opcode."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from accesses import Fault

Array = Any
"""A numpy array with one element per thread."""

DTYPES = {
    "pred": np.bool_, "b8": np.uint8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "f16": np.float16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64, "f32x2": np.float32,
}  # fmt: skip
"""How numpy holds a value of each type; "f32x2" has two per thread, and "bf16" is widened to float32."""

WIDER = {"u16": "u32", "u32": "u64", "s32": "s64"}


class Operation(NamedTuple):
    """What an opcode computes.

    Args:
        compute: its function.
        result: the type of the result.
        operands: the types of the operands.
    """

    compute: Callable[..., Array]
    result: str
    operands: tuple[str, ...]


OPERATIONS: dict[str, Operation] = {}


def spelled(pattern: str) -> Iterator[str]:
    """Spell out the alternatives in braces: "shr.{u32,s32}" is "shr.u32" and "shr.s32"."""
    pieces = re.split(r"\{(.*?)\}", pattern)
    yield from map("".join, product(*(piece.split(",") if i % 2 else [piece] for i, piece in enumerate(pieces))))


def define(patterns: str, types: str, compute: Callable[..., Array]) -> None:
    """Define opcodes by a function and its types, such as "T T -> T".

    T is the last suffix of the opcode, S the suffix before it, and W the type twice as wide as T.
    """
    operands, _, result = types.partition(" -> ")
    for opcode in (opcode for pattern in patterns.split() for opcode in spelled(pattern)):
        *_, before, last = opcode.split(".")
        named = {"T": last, "S": before, "W": WIDER.get(last, "")}
        wanted = tuple(named.get(name, name) for name in operands.split())
        OPERATIONS[opcode] = Operation(compute, named.get(result, result), wanted)


# Integers: results wrap around.

define("add.{s16,s32,s64,u32}", "T T -> T", lambda a, b: a + b)
define("sub.{s16,s32,s64}", "T T -> T", lambda a, b: a - b)
define("mul.lo.{s16,s32,s64}", "T T -> T", lambda a, b: a * b)
define("mad.lo.{s32,s64}", "T T T -> T", lambda a, b, c: a * b + c)
define("mul.wide.{u16,u32,s32}", "T T -> W", lambda a, b: _wide(a) * _wide(b))
define("mad.wide.{u32,s32}", "T T W -> W", lambda a, b, c: _wide(a) * _wide(b) + c)
define("mul.hi.{u16,u32,s32}", "T T -> T", lambda a, b: (_wide(a) * _wide(b) >> a.itemsize * 8).astype(a.dtype))
define("neg.s32", "T -> T", np.negative)
define("abs.s32", "T -> T", np.abs)
define("min.{s32,s64}", "T T -> T", np.minimum)
define("max.{s32,s64}", "T T -> T", np.maximum)
define("and.{pred,b16,b32,b64}", "T T -> T", lambda a, b: a & b)
define("or.{pred,b16,b32,b64}", "T T -> T", lambda a, b: a | b)
define("xor.{pred,b32}", "T T -> T", lambda a, b: a ^ b)
define("not.{pred,b32}", "T -> T", lambda a: ~a)


def _wide(a: Array) -> Array:
    return a.astype({np.uint16: np.uint32, np.uint32: np.uint64, np.int32: np.int64}[a.dtype.type])


def _divide(a: Array, b: Array) -> Array:
    """Divide and round towards zero; the result of a division by zero is undefined, as it is on a GPU."""
    quotient = a // np.where(b == 0, 1, b).astype(a.dtype)
    rest = a - quotient * b
    return np.where(b == 0, -1, quotient + ((rest != 0) & ((a < 0) != (b < 0)))).astype(a.dtype)


define("div.{s32,s64,u32}", "T T -> T", _divide)
define("rem.{s32,u32}", "T T -> T", lambda a, b: a - _divide(a, b) * b)


def _shift_left(a: Array, by: Array) -> Array:
    bits = a.itemsize * 8
    return np.where(by >= bits, 0, a << np.minimum(by, bits - 1).astype(a.dtype)).astype(a.dtype)


def _shift_right(a: Array, by: Array) -> Array:
    """Shift in zeros, or copies of the sign of signed numbers."""
    bits = a.itemsize * 8
    shifted = a >> np.minimum(by, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(by >= bits, 0, shifted).astype(a.dtype)


define("shl.{b16,b32,b64}", "T u32 -> T", _shift_left)
define("shr.{u16,u32,u64,s32,s64}", "T u32 -> T", _shift_right)


def _shift_both(low: Array, high: Array, by: Array) -> Array:
    """Shift 64 bits left by a number modulo 32, and return the high half."""
    both = high.astype(np.uint64) << np.uint64(32) | low
    return (both << (by & np.uint32(31)).astype(np.uint64) >> np.uint64(32)).astype(np.uint32)


define("shf.l.wrap.b32", "T T T -> T", _shift_both)


def _extract(a: Array, start: Array, length: Array) -> Array:
    """Return a field of bits; a field of a signed number keeps the sign of its highest bit."""
    if ((start + length > 32) | (length == 0)).any():
        raise Fault("bfe of a field that is empty or passes bit 31")
    left = a << (32 - start - length).astype(a.dtype)
    return left >> (32 - length).astype(a.dtype)


define("bfe.{u32,s32}", "T u32 u32 -> T", _extract)


def _permute(a: Array, b: Array, selector: Array) -> Array:
    """Pick the four bytes of the result among the eight of b·2³² + a by the four lowest hexadecimal digits."""
    both = b.astype(np.uint64) << np.uint64(32) | a
    result = np.zeros_like(a)
    for i in range(4):
        digit = selector >> np.uint32(4 * i) & np.uint32(15)
        if (digit > 7).any():
            raise Fault("prmt that copies a sign")
        result |= ((both >> (digit * 8).astype(np.uint64)) & np.uint64(255)).astype(np.uint32) << np.uint32(8 * i)
    return result


define("prmt.b32", "T T T -> T", _permute)

# Floating point: each operation rounds once, to nearest even, and keeps subnormal numbers unless it says ftz.

define("add{.rn,}.{f32,f64} add.rn.f32x2", "T T -> T", lambda a, b: a + b)
define("sub{.rn,}.{f32,f64} sub.rn.f32x2", "T T -> T", lambda a, b: a - b)
define("mul{.rn,}.{f32,f64} mul.rn.f32x2", "T T -> T", lambda a, b: a * b)
define("add.rn.f32.{f16,bf16}", "T S -> S", lambda a, b: a.astype(np.float32) + b)
define("sub.rn.f32.{f16,bf16}", "T S -> S", lambda a, b: a.astype(np.float32) - b)
define("div.rn.f64", "T T -> T", lambda a, b: a / b)
define("neg.{f32,f64}", "T -> T", np.negative)
define("abs.f32", "T -> T", np.abs)


def _fused(a: Array, b: Array, c: Array) -> Array:
    """Compute a·b + c in float32, rounded once: the sum in float64 is rounded to odd, so that it can be rounded again.

    The product of two float32 is exact in float64.
    """
    product_, addend = a.astype(np.float64) * b, c.astype(np.float64)
    total = product_ + addend
    part = total - product_
    error = (product_ - (total - part)) + (addend - part)
    odd = total.view(np.int64) & 1 == 1
    towards = np.where(error > 0, np.inf, -np.inf)
    return np.where((error == 0) | odd | ~np.isfinite(error), total, np.nextafter(total, towards)).astype(np.float32)


define("fma.rn.f32", "T T T -> T", _fused)


def _flushing(compute: Callable[..., Array]) -> Callable[..., Array]:
    """Make a function of float32 take subnormal numbers for zeros of their sign, and return such zeros."""

    def flush(a: Array) -> Array:
        return np.where(np.abs(a) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), a), a)

    return lambda *operands: flush(compute(*map(flush, operands)))


@_flushing
def _inverse_root(a: Array) -> Array:
    """Compute 1/√a, rounded to nearest; a GPU's result may differ from it by a relative error of 2^-22.9."""
    return (1 / np.sqrt(a.astype(np.float64))).astype(np.float32)


define("rsqrt.approx.ftz.f32", "T -> T", _inverse_root)
define("fma.rn.ftz.f32", "T T T -> T", _flushing(_fused))
define("mul.rn.ftz.f32", "T T -> T", _flushing(lambda a, b: a * b))
define("abs.ftz.f32", "T -> T", _flushing(np.abs))

# Comparison: all but "ne" of integers and the ones that end with "u" are false for NaN.

define("setp.eq.{b16,b32,b64}", "T T -> pred", np.equal)
define("setp.ne.{b16,b32,b64}", "T T -> pred", np.not_equal)
define("setp.lt.{s32,u32,s64,u64,f32}", "T T -> pred", np.less)
define("setp.le.{s32,u32,s64,f32}", "T T -> pred", np.less_equal)
define("setp.gt.{s32,u32,s64,f32}", "T T -> pred", np.greater)
define("setp.ge.{s32,u32,s64,f32}", "T T -> pred", np.greater_equal)
define("setp.{gtu,geu}.f32", "T T -> pred", lambda a, b: ~(a <= b))
define("setp.{ltu}.f32", "T T -> pred", lambda a, b: ~(a >= b))
define("setp.{neu}.f32", "T T -> pred", np.not_equal)
define("selp.{b16,b32,b64,f32}", "T T pred -> T", lambda a, b, chosen: np.where(chosen, a, b))

# Conversion, from the last suffix to the one before it.

INTEGERS = "{s16,s32,s64,u16,u32,u64}"


def round_bfloat16(a: Array) -> Array:
    """Round float32 to nearest even, and return the bits of bfloat16; NaN has one representation."""
    bits = a.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
    return np.where(np.isnan(a), 0x7FFF, rounded).astype(np.uint16)


def _round_float16(a: Array) -> Array:
    return np.where(np.isnan(a), 0x7FFF, a.astype(np.float16).view(np.uint16)).astype(np.uint16)


def _pack(high: Array, low: Array) -> Array:
    return high.astype(np.uint32) << np.uint32(16) | low


def _to_int32(a: Array) -> Array:
    """Round to the nearest even integer and clamp; NaN becomes 0."""
    rounded = np.rint(a.astype(np.float64))
    return np.nan_to_num(np.clip(rounded, -(2.0**31), 2.0**31 - 1)).astype(np.int32)


for _kind, _dtype in DTYPES.items():
    if _kind[0] in "su" and _kind[1:].isdigit():
        define(f"cvt.{_kind}.{INTEGERS}", "T -> S", lambda a, dtype=_dtype: a.astype(dtype))
define("cvt.rn.f32.{s32,u32,s64}", "T -> S", lambda a: a.astype(np.float32))
define("cvt.rn.f64.{s32,s64}", "T -> S", lambda a: a.astype(np.float64))
define("cvt.f32.{f16,bf16}", "T -> S", lambda a: a.astype(np.float32))
define("cvt.rn.bf16.f32", "T -> b16", round_bfloat16)
define("cvt.rn.f16.f32", "T -> b16", _round_float16)
define("cvt.rn.bf16x2.f32", "T T -> b32", lambda a, b: _pack(round_bfloat16(a), round_bfloat16(b)))
define("cvt.rn.f16x2.f32", "T T -> b32", lambda a, b: _pack(_round_float16(a), _round_float16(b)))
define("cvt.rni.ftz.s32.f32", "T -> S", _to_int32)
define("cvt.rn.f32.f64", "T -> S", lambda a: a.astype(np.float32))
