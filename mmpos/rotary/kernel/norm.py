"""The norm of a head in a kernel: the root of the mean square over all its channels, and weights, in float32."""

# mypy: ignore-errors
# ruff: noqa: N803  (constants of a kernel are upper case)

import triton
import triton.language as tl

from mmpos.rotary.kernel.channels import load_pairs, load_rest


@triton.jit
def load_weight(
    weight, offset, PAIRS: tl.constexpr, PAIRS_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    ADJACENT: tl.constexpr,
):  # fmt: skip
    """(1, PAIRS_PADDED) float32 weights of first and of second channels, and (1, REST_PADDED) those of the rest."""
    source = weight + tl.zeros([1, 1], tl.int64)
    there = tl.full([1], 1, tl.int1)
    first, second = load_pairs(source, 1, there, PAIRS, PAIRS_PADDED, ADJACENT)
    rest = load_rest(source, 1, there, 0.0, PAIRS, REST, REST_PADDED).to(tl.float32)
    return first + offset, second + offset, rest + offset


@triton.jit
def mean_product(
    first, second, rest, other_first, other_second, other_rest, CHANNELS: tl.constexpr, REST: tl.constexpr
):
    """(rows, 1) the mean over all channels of the product of two heads."""
    total = tl.sum(first * other_first + second * other_second, axis=1)
    if REST > 0:
        total += tl.sum(rest * other_rest, axis=1)
    return (total * (1.0 / CHANNELS))[:, None]


@triton.jit
def inverse_rms(first, second, rest, eps, CHANNELS: tl.constexpr, REST: tl.constexpr):
    """(rows, 1) what brings heads to a mean square of 1."""
    return tl.rsqrt(mean_product(first, second, rest, first, second, rest, CHANNELS, REST) + eps)
