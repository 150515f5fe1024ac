"""Load, normalise, rotate and store the heads of a block of tokens in a kernel."""

# mypy: ignore-errors
# ruff: noqa: N803  (kernel constants are upper case)

import triton
import triton.language as tl


@triton.jit
def columns_of(rows: tl.constexpr, width: tl.constexpr, CHANNELS: tl.constexpr):
    """Return (1, width) indices of channels or pairs, or (rows, width) if each row contains one piece of a token."""
    column = tl.arange(0, width)[None, :]
    if CHANNELS.pieces > 1:
        column += (tl.arange(0, rows) % CHANNELS.pieces)[:, None] * width
    return column


# Offsets have 64 bits because long batches exceed 2³¹ elements.
@triton.jit
def load_pairs(source, step, valid, CHANNELS: tl.constexpr):
    """Load the first and second channels of pairs as (rows, pairs_padded) float32; masked lanes are 0."""
    if CHANNELS.adjacent:
        both = columns_of(valid.shape[0], 2 * CHANNELS.pairs_padded, CHANNELS).to(tl.int64)
        mask = valid[:, None] & (both < 2 * CHANNELS.pairs)
        values = tl.load(source + both * step, mask=mask, other=0.0)
        first, second = tl.split(values.reshape(values.shape[0], CHANNELS.pairs_padded, 2).to(tl.float32))
    else:
        pair = columns_of(valid.shape[0], CHANNELS.pairs_padded, CHANNELS).to(tl.int64)
        mask = valid[:, None] & (pair < CHANNELS.pairs)
        first = tl.load(source + pair * step, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + (pair + CHANNELS.pairs) * step, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_pairs(target, step, valid, first, second, CHANNELS: tl.constexpr):
    """Round the first and second channels of pairs once and store them, in the layout of ``load_pairs``."""
    dtype: tl.constexpr = target.dtype.element_ty
    if CHANNELS.adjacent:
        both = columns_of(valid.shape[0], 2 * CHANNELS.pairs_padded, CHANNELS).to(tl.int64)
        mask = valid[:, None] & (both < 2 * CHANNELS.pairs)
        values = tl.join(first, second).reshape(first.shape[0], 2 * CHANNELS.pairs_padded)
        tl.store(target + both * step, values.to(dtype), mask=mask)
    else:
        pair = columns_of(valid.shape[0], CHANNELS.pairs_padded, CHANNELS).to(tl.int64)
        mask = valid[:, None] & (pair < CHANNELS.pairs)
        left, right = first.to(dtype), second.to(dtype)
        tl.store(target + pair * step, left, mask=mask)
        tl.store(target + (pair + CHANNELS.pairs) * step, right, mask=mask)


@triton.jit
def load_rest(source, step, valid, other, CHANNELS: tl.constexpr):
    """Load the (rows, rest_padded) unrotated channels; masked lanes hold ``other``, or are undefined if it is None."""
    rest = tl.arange(0, CHANNELS.rest_padded).to(tl.int64)
    mask = valid[:, None] & (rest < CHANNELS.rest)[None, :]
    return tl.load(source + (2 * CHANNELS.pairs + rest)[None, :] * step, mask=mask, other=other)


@triton.jit
def store_rest(target, step, valid, values, CHANNELS: tl.constexpr):
    """Store the unrotated channels."""
    rest = tl.arange(0, CHANNELS.rest_padded).to(tl.int64)
    mask = valid[:, None] & (rest < CHANNELS.rest)[None, :]
    tl.store(target + (2 * CHANNELS.pairs + rest)[None, :] * step, values.to(target.dtype.element_ty), mask=mask)


@triton.jit
def load_weight(weight, offset, CHANNELS: tl.constexpr):
    """Load float32 weights: (1, pairs_padded) each for first and second channels; (1, rest_padded) for the others."""
    source = weight + tl.zeros([1, 1], tl.int64)
    mask = tl.full([1], 1, tl.int1)
    first, second = load_pairs(source, 1, mask, CHANNELS)
    rest = load_rest(source, 1, mask, 0.0, CHANNELS).to(tl.float32)
    return first + offset, second + offset, rest + offset


@triton.jit
def mean_product(first, second, rest, other_first, other_second, other_rest, CHANNELS: tl.constexpr):
    """Compute the (rows, 1) mean over all channels of the product of two heads."""
    total = tl.sum(first * other_first + second * other_second, axis=1)
    if CHANNELS.rest > 0:
        total += tl.sum(rest * other_rest, axis=1)
    return (total * (1.0 / (2 * CHANNELS.pairs + CHANNELS.rest)))[:, None]


@triton.jit
def inverse_rms(first, second, rest, eps, CHANNELS: tl.constexpr):
    """Compute the (rows, 1) factor that scales heads to a mean square of 1."""
    return tl.rsqrt(mean_product(first, second, rest, first, second, rest, CHANNELS) + eps)


@triton.jit
def rotate_pairs(first, second, cos, sin):
    """Rotate channel pairs by their angles; products and sums are rounded separately."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def share_of(heads):
    """Return the range [start, stop) of heads that this program processes."""
    share, shares = tl.program_id(1), tl.num_programs(1)
    return share * heads // shares, (share + 1) * heads // shares


@triton.jit
def rows_of(x, batch, token):
    """Return (rows,) 64-bit offsets of tokens in a tensor of heads."""
    return batch * x.batch + token * x.token


@triton.jit
def rotate_heads(
    x, out, x_rows, out_rows, heads, weight, eps, offset, cos, sin, valid,
    CHANNELS: tl.constexpr, COPY_REST: tl.constexpr, NORM_AFTER: tl.constexpr = False,
):  # fmt: skip
    """Rotate this program's share of heads, normalise them if there is a weight, and round once at the end."""
    x_head, out_head = tl.cast(x.head, tl.int64), tl.cast(out.head, tl.int64)
    if weight is not None:
        weights = load_weight(weight, offset, CHANNELS)
    first_head, stop_head = share_of(heads)
    for head in range(first_head, stop_head):
        source = x.data + (x_rows[:, None] + head * x_head)
        target = out.data + (out_rows[:, None] + head * out_head)
        first, second = load_pairs(source, x.channel, valid, CHANNELS)
        if weight is not None:
            rest = load_rest(source, x.channel, valid, 0.0, CHANNELS).to(tl.float32)
            if NORM_AFTER:
                first, second = rotate_pairs(first, second, cos, sin)
            scale = inverse_rms(first, second, rest, eps, CHANNELS)
            first, second = first * scale * weights[0], second * scale * weights[1]
            rest = rest * scale * weights[2]
            if CHANNELS.rest > 0:
                store_rest(target, out.channel, valid, rest, CHANNELS)
        if weight is None or not NORM_AFTER:
            first, second = rotate_pairs(first, second, cos, sin)
        store_pairs(target, out.channel, valid, first, second, CHANNELS)
        if weight is None and COPY_REST and CHANNELS.rest > 0:
            rest = load_rest(source, x.channel, valid, None, CHANNELS)
            store_rest(target, out.channel, valid, rest, CHANNELS)
