"""The channels of a head in a kernel: pairs and the rest, loaded as float32, stored with one rounding."""

# mypy: ignore-errors
# ruff: noqa: N803  (constants of a kernel are upper case)

import triton
import triton.language as tl


# Offsets are 64 bits wide: long batches pass 2³¹ elements.
@triton.jit
def load_pairs(source, step, valid, PAIRS: tl.constexpr, PAIRS_PADDED: tl.constexpr, ADJACENT: tl.constexpr):
    """(rows, PAIRS_PADDED) float32 first and second channels of pairs; zeros where there are none."""
    if ADJACENT:
        both = tl.arange(0, 2 * PAIRS_PADDED).to(tl.int64)
        mask = valid[:, None] & (both < 2 * PAIRS)[None, :]
        values = tl.load(source + both[None, :] * step, mask=mask, other=0.0)
        first, second = tl.split(values.reshape(values.shape[0], PAIRS_PADDED, 2).to(tl.float32))
    else:
        pair = tl.arange(0, PAIRS_PADDED).to(tl.int64)
        mask = valid[:, None] & (pair < PAIRS)[None, :]
        first = tl.load(source + pair[None, :] * step, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + (pair + PAIRS)[None, :] * step, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_pairs(
    target, step, valid, first, second, PAIRS: tl.constexpr, PAIRS_PADDED: tl.constexpr, ADJACENT: tl.constexpr
):
    """Store first and second channels of pairs, where load_pairs finds them."""
    dtype: tl.constexpr = target.dtype.element_ty
    if ADJACENT:
        both = tl.arange(0, 2 * PAIRS_PADDED).to(tl.int64)
        mask = valid[:, None] & (both < 2 * PAIRS)[None, :]
        values = tl.join(first, second).reshape(first.shape[0], 2 * PAIRS_PADDED)
        tl.store(target + both[None, :] * step, values.to(dtype), mask=mask)
    else:
        pair = tl.arange(0, PAIRS_PADDED).to(tl.int64)
        mask = valid[:, None] & (pair < PAIRS)[None, :]
        left, right = first.to(dtype), second.to(dtype)
        tl.store(target + pair[None, :] * step, left, mask=mask)
        tl.store(target + (pair + PAIRS)[None, :] * step, right, mask=mask)


@triton.jit
def load_rest(source, step, valid, other, PAIRS: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr):
    """(rows, REST_PADDED) the channels behind the pairs, as they are; where there are none other, or anything."""
    rest = tl.arange(0, REST_PADDED).to(tl.int64)
    mask = valid[:, None] & (rest < REST)[None, :]
    return tl.load(source + (2 * PAIRS + rest)[None, :] * step, mask=mask, other=other)


@triton.jit
def store_rest(target, step, valid, values, PAIRS: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr):
    """Store the channels behind the pairs."""
    rest = tl.arange(0, REST_PADDED).to(tl.int64)
    mask = valid[:, None] & (rest < REST)[None, :]
    tl.store(target + (2 * PAIRS + rest)[None, :] * step, values.to(target.dtype.element_ty), mask=mask)
