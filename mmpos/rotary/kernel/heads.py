"""The heads of a block of tokens in a kernel: loaded once, normalised if there are weights, turned, and stored."""

# mypy: ignore-errors
# ruff: noqa: N803  (constants of a kernel are upper case)

import triton
import triton.language as tl

from mmpos.rotary.kernel.channels import load_pairs, load_rest, store_pairs, store_rest
from mmpos.rotary.kernel.norm import inverse_rms, load_weight


@triton.jit
def turned(first, second, cos, sin):
    """Pairs of channels turned by angles: products and sums rounded one by one."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def rotate_heads(
    x, out, weight, eps, offset, head_first, head_stop, x_base, out_base, x_head, x_dim, out_head, out_dim,
    cos, sin, valid,
    PAIRS: tl.constexpr, PAIRS_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    ADJACENT: tl.constexpr, COPY_REST: tl.constexpr,
):  # fmt: skip
    """Rotate heads of a block of tokens, normalised by a weight unless that is None, with one rounding at the end."""
    x_head, out_head = tl.cast(x_head, tl.int64), tl.cast(out_head, tl.int64)
    if weight is not None:
        weights = load_weight(weight, offset, PAIRS, PAIRS_PADDED, REST, REST_PADDED, ADJACENT)
    for head in range(head_first, head_stop):
        source = x + (x_base[:, None] + head * x_head)
        target = out + (out_base[:, None] + head * out_head)
        first, second = load_pairs(source, x_dim, valid, PAIRS, PAIRS_PADDED, ADJACENT)
        if weight is not None:
            rest = load_rest(source, x_dim, valid, 0.0, PAIRS, REST, REST_PADDED).to(tl.float32)
            scale = inverse_rms(first, second, rest, eps, 2 * PAIRS + REST, REST)
            first, second = first * scale * weights[0], second * scale * weights[1]
            if REST > 0:
                store_rest(target, out_dim, valid, rest * scale * weights[2], PAIRS, REST, REST_PADDED)
        first, second = turned(first, second, cos, sin)
        store_pairs(target, out_dim, valid, first, second, PAIRS, PAIRS_PADDED, ADJACENT)
        if weight is None and COPY_REST and REST > 0:
            rest = load_rest(source, x_dim, valid, None, PAIRS, REST, REST_PADDED)
            store_rest(target, out_dim, valid, rest, PAIRS, REST, REST_PADDED)
