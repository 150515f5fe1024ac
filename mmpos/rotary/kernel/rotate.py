"""Rotate q and k, also into a paged cache, and keys within one; compute gradients: kernels and launches."""

# mypy: ignore-errors
# ruff: noqa: N803  (kernel constants are upper case)

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmpos.rotary.kernel import tiling
from mmpos.rotary.kernel.heads import (
    inverse_rms,
    load_pairs,
    load_rest,
    load_weight,
    mean_product,
    rotate_heads,
    rotate_pairs,
    rows_of,
    share_of,
    store_pairs,
    store_rest,
)
from mmpos.rotary.kernel.phases import angles_of, cos_sin_of, phases
from mmpos.rotary.paged import Stored
from mmpos.rotary.reference import NO_NORM, Norm, RotationArguments


@triton.jit
def slots_of(slots, token, stored, capacity, block_size):
    """Return whether each token has a valid slot, and the slot's 64-bit block and offset."""
    slot = tl.load(slots + token, mask=token < stored, other=-1).to(tl.int64)
    kept = (slot >= 0) & (slot < capacity)
    slot = tl.where(kept, slot, 0).to(tl.int32)  # 32-bit division is faster
    return kept, (slot // block_size).to(tl.int64), (slot % block_size).to(tl.int64)


@triton.jit
def _copy_heads(x, out, x_rows, out_rows, heads, kept, CHANNELS: tl.constexpr):
    """Copy this program's share of unrotated heads."""
    x_head, out_head = tl.cast(x.head, tl.int64), tl.cast(out.head, tl.int64)
    first_head, stop_head = share_of(heads)
    for head in range(first_head, stop_head):
        source = x.data + (x_rows[:, None] + head * x_head)
        target = out.data + (out_rows[:, None] + head * out_head)
        store_rest(target, out.channel, kept, load_rest(source, x.channel, kept, None, CHANNELS), CHANNELS)


# Strides are specialised for wide loads. Numbers that change with every batch are not, to avoid recompilation.
@triton.jit(
    do_not_specialize=[
        "tokens", "seq", "segments", "row_stride", "q_heads", "k_heads", "stored", "capacity", "block_size",
    ]
)  # fmt: skip
def rotary_kernel(
    q, k, v, q_out, k_out, key_cache, value_cache, slots,
    positions, frequencies, pair_axis, q_weight, k_weight, eps, offset,
    tokens, seq, segments, row_stride, q_heads, k_heads, stored, capacity, block_size, attention_factor,
    CHANNELS: tl.constexpr, VALUE_CHANNELS: tl.constexpr, ANGLES: tl.constexpr, COPY_Q_REST: tl.constexpr,
    COPY_K_REST: tl.constexpr, BLOCK: tl.constexpr, NORM_AFTER: tl.constexpr,
):  # fmt: skip
    """Rotate a block of tokens and a share of their heads per program, with shared phases.

    With caches, store k and v of tokens with slots; k_out is None if the rotated k is not returned.
    """
    token, valid, cos, sin = phases(
        positions, segments, row_stride, frequencies, pair_axis, tokens, attention_factor, CHANNELS, ANGLES, BLOCK
    )
    batch = (token // seq).to(tl.int64)
    index = (token % seq).to(tl.int64)
    rotate_heads(
        q, q_out, rows_of(q, batch, index), rows_of(q_out, batch, index), q_heads, q_weight, eps, offset,
        cos, sin, valid, CHANNELS, COPY_Q_REST, NORM_AFTER,
    )  # fmt: skip
    k_rows = rows_of(k, batch, index)
    if key_cache is not None:
        kept, page, slot = slots_of(slots, token, stored, capacity, block_size)
        rotate_heads(
            k, key_cache, k_rows, rows_of(key_cache, page, slot), k_heads, k_weight, eps, offset,
            cos, sin, kept, CHANNELS, True, NORM_AFTER,
        )  # fmt: skip
        v_rows, value_rows = rows_of(v, batch, index), rows_of(value_cache, page, slot)
        _copy_heads(v, value_cache, v_rows, value_rows, k_heads, kept, VALUE_CHANNELS)
        if k_out is not None:
            tl.debug_barrier()  # k_out may be k itself
    if k_out is not None:  # tokens without a slot too
        rotate_heads(
            k, k_out, k_rows, rows_of(k_out, batch, index), k_heads, k_weight, eps, offset,
            cos, sin, valid, CHANNELS, COPY_K_REST, NORM_AFTER,
        )  # fmt: skip


def launch_rotate(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, rotation: RotationArguments, norm: Norm = NO_NORM,
    stored: Stored | None = None,
) -> None:  # fmt: skip
    """Do what ``reference.rotate_all`` does, and store k and v, in one launch, without allocating or waiting."""
    batch, seq, q_heads, head_dim = q.shape
    tokens, k_heads = batch * seq, k.shape[2]
    if tokens == 0:
        return
    v, key_cache, value_cache, slots, return_k = (None, None, None, None, True) if stored is None else stored
    width = tiling.width(head_dim, rotation.num_pairs, not norm.is_none)
    block, shares, warps = tiling.tiles(tokens, q_heads + k_heads * (1 if stored is None else 2), width)
    shares = tiling.shares_of(shares, rotation.head_groups)
    of = tiling.pieces_of if norm.is_none and stored is None else tiling.channels_of
    channels = of(head_dim, rotation.num_pairs, rotation.adjacent)
    rows = max(block * width // channels.pairs_padded, tiling.power_of_two(channels.pieces))
    values, sizes = None, (None, None, None)
    if stored is not None:
        values, (blocks, size) = tiling.channels_of(v.shape[3], 0), key_cache.shape[:2]
        sizes = slots.shape[0], blocks * size, size
    with tiling.on(q.device):
        tiling.launch(
            rotary_kernel, (tiling.cdiv(tokens, rows // channels.pieces), shares), warps,
            *map(tiling.heads_of, (q, k, v, q_out, k_out if return_k else None, key_cache, value_cache)), slots,
            rotation.positions, rotation.frequencies, rotation.pair_axis, *tiling.norm_arguments(norm),
            tokens, seq, rotation.positions.shape[1], rotation.positions.stride(0), q_heads, k_heads, *sizes,
            rotation.attention_factor,
            CHANNELS=channels, VALUE_CHANNELS=values,
            ANGLES=tiling.angles_of(rotation), COPY_Q_REST=q.data_ptr() != q_out.data_ptr(),
            COPY_K_REST=k.data_ptr() != k_out.data_ptr(), BLOCK=rows, NORM_AFTER=norm.after,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "tokens", "segments", "row_stride", "from_segments", "from_row_stride", "heads", "capacity", "block_size",
    ]
)  # fmt: skip
def rerotate_kernel(
    pages, slots, from_positions, positions, frequencies, pair_axis,
    tokens, from_segments, from_row_stride, segments, row_stride, heads, capacity, block_size,
    CHANNELS: tl.constexpr, FROM: tl.constexpr, ANGLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate a share of the heads of a block of tokens in place."""
    first_token = tl.program_id(0) * BLOCK
    stop_token = tl.minimum(first_token + BLOCK, tokens)
    token = first_token + tl.arange(0, BLOCK)
    valid = token < tokens
    old = angles_of(
        from_positions, from_segments, from_row_stride, frequencies, pair_axis,
        token, valid, first_token, stop_token, CHANNELS, FROM, BLOCK,
    )  # fmt: skip
    new = angles_of(
        positions, segments, row_stride, frequencies, pair_axis,
        token, valid, first_token, stop_token, CHANNELS, ANGLES, BLOCK,
    )  # fmt: skip
    if ANGLES.as_hf:
        old_cos, old_sin = cos_sin_of(old, True)
        new_cos, new_sin = cos_sin_of(new, True)
        cos = new_cos * old_cos + new_sin * old_sin
        sin = new_sin * old_cos - new_cos * old_sin
    else:
        cos, sin = cos_sin_of(new - old, False)
    kept, page, slot = slots_of(slots, token, tokens, capacity, block_size)
    rows, head_stride = rows_of(pages, page, slot), tl.cast(pages.head, tl.int64)
    first_head, stop_head = share_of(heads)
    for head in range(first_head, stop_head):
        pointer = pages.data + (rows[:, None] + head * head_stride)
        first, second = load_pairs(pointer, pages.channel, kept, CHANNELS)
        first, second = rotate_pairs(first, second, cos, sin)
        store_pairs(pointer, pages.channel, kept, first, second, CHANNELS)


def launch_rerotate(pages: Tensor, slots: Tensor, start: RotationArguments, stop: RotationArguments) -> None:
    """Rotate keys in a cache from old to new positions in one launch, without allocating or waiting.

    Args:
        pages: (blocks, block_size, heads, head_dim).
        slots: (tokens,) slots of the tokens.
        start: the rotation at the old positions; its attention factor and conjugate are ignored.
        stop: the rotation at the new positions, with the same frequencies.
    """
    blocks, block_size, heads, head_dim = pages.shape
    tokens = slots.shape[0]
    if not tokens * blocks * heads:
        return
    block, shares, warps = tiling.tiles(tokens, heads, tiling.width(head_dim, stop.num_pairs, False))
    shares = tiling.shares_of(shares, stop.head_groups)
    with tiling.on(pages.device):
        tiling.launch(
            rerotate_kernel, (tiling.cdiv(tokens, block), shares), warps,
            tiling.heads_of(pages), slots,
            start.positions, stop.positions, stop.frequencies, stop.pair_axis,
            tokens, start.positions.shape[1], start.positions.stride(0),
            stop.positions.shape[1], stop.positions.stride(0), heads, blocks * block_size, block_size,
            CHANNELS=tiling.channels_of(head_dim, stop.num_pairs, stop.adjacent),
            FROM=tiling.angles_of(start), ANGLES=tiling.angles_of(stop), BLOCK=block,
        )  # fmt: skip


@triton.jit
def _norm_heads(
    grad, x, out, heads, weight, sums, eps, offset, batch, index, cos, sin, valid,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, NORM_AFTER: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of heads through rotation and norm; return the weight gradient summed over these heads."""
    weights = load_weight(weight, offset, CHANNELS)
    grad_rows, x_rows = rows_of(grad, batch, index), rows_of(x, batch, index)
    grad_head, x_head = tl.cast(grad.head, tl.int64), tl.cast(x.head, tl.int64)
    if out is not None:
        out_rows, out_head = rows_of(out, batch, index), tl.cast(out.head, tl.int64)
    width: tl.constexpr = CHANNELS.pairs_padded
    rest_width: tl.constexpr = CHANNELS.rest_padded
    by_first = tl.zeros([BLOCK, width], tl.float32)
    by_second = tl.zeros([BLOCK, width], tl.float32)
    by_rest = tl.zeros([BLOCK, rest_width], tl.float32)
    first_head, stop_head = share_of(heads)
    for head in range(first_head, stop_head):
        source = grad.data + (grad_rows[:, None] + head * grad_head)
        first, second = load_pairs(source, grad.channel, valid, CHANNELS)
        if not NORM_AFTER:
            first, second = rotate_pairs(first, second, cos, sin)
        rest = load_rest(source, grad.channel, valid, 0.0, CHANNELS).to(tl.float32)
        source = x.data + (x_rows[:, None] + head * x_head)
        x_first, x_second = load_pairs(source, x.channel, valid, CHANNELS)
        x_rest = load_rest(source, x.channel, valid, 0.0, CHANNELS).to(tl.float32)
        if NORM_AFTER:  # recompute the input of the norm; the angles are those of the backward rotation
            x_first, x_second = rotate_pairs(x_first, x_second, cos, -sin)
        scale = inverse_rms(x_first, x_second, x_rest, eps, CHANNELS)
        x_first, x_second, x_rest = x_first * scale, x_second * scale, x_rest * scale
        if sums is not None:
            by_first += first * x_first
            by_second += second * x_second
            by_rest += rest * x_rest
        if out is not None:
            first, second, rest = first * weights[0], second * weights[1], rest * weights[2]
            mean = mean_product(first, second, rest, x_first, x_second, x_rest, CHANNELS)
            first, second = scale * (first - x_first * mean), scale * (second - x_second * mean)
            if NORM_AFTER:
                first, second = rotate_pairs(first, second, cos, sin)
            target = out.data + (out_rows[:, None] + head * out_head)
            store_pairs(target, out.channel, valid, first, second, CHANNELS)
            if CHANNELS.rest > 0:
                store_rest(target, out.channel, valid, scale * (rest - x_rest * mean), CHANNELS)
    return by_first, by_second, by_rest


@triton.jit
def _heads(
    grad, x, out, heads, weight, sums, eps, offset, batch, index, cos, sin, valid,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, NORM_AFTER: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of this program's share of one tensor's heads; without a weight, only rotate them back."""
    if weight is not None:
        by_first, by_second, by_rest = _norm_heads(
            grad, x, out, heads, weight, sums, eps, offset, batch, index, cos, sin, valid, CHANNELS, BLOCK,
            NORM_AFTER,
        )  # fmt: skip
        if sums is not None:
            program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
            target = sums + program * (2 * CHANNELS.pairs + CHANNELS.rest) + tl.zeros([1, 1], tl.int64)
            mask = tl.full([1], 1, tl.int1)
            by_first, by_second = tl.sum(by_first, axis=0)[None, :], tl.sum(by_second, axis=0)[None, :]
            store_pairs(target, 1, mask, by_first, by_second, CHANNELS)
            if CHANNELS.rest > 0:
                store_rest(target, 1, mask, tl.sum(by_rest, axis=0)[None, :], CHANNELS)
    elif out is not None:
        rotate_heads(
            grad, out, rows_of(grad, batch, index), rows_of(out, batch, index), heads, None, None, None,
            cos, sin, valid, CHANNELS, True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "seq", "segments", "row_stride", "q_heads", "k_heads"])
def backward_kernel(
    q_grad, k_grad, q, k, q_out, k_out, q_weight, k_weight, eps, offset, q_sums, k_sums,
    positions, frequencies, pair_axis, tokens, seq, segments, row_stride, q_heads, k_heads, attention_factor,
    CHANNELS: tl.constexpr, ANGLES: tl.constexpr, BLOCK: tl.constexpr, NORM_AFTER: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of tokens and a share of the q and k heads per program, from shared phases."""
    token, valid, cos, sin = phases(
        positions, segments, row_stride, frequencies, pair_axis, tokens, attention_factor, CHANNELS, ANGLES, BLOCK
    )
    batch = (token // seq).to(tl.int64)
    index = (token % seq).to(tl.int64)
    _heads(
        q_grad, q, q_out, q_heads, q_weight, q_sums, eps, offset, batch, index, cos, sin, valid,
        CHANNELS, BLOCK, NORM_AFTER,
    )  # fmt: skip
    _heads(
        k_grad, k, k_out, k_heads, k_weight, k_sums, eps, offset, batch, index, cos, sin, valid,
        CHANNELS, BLOCK, NORM_AFTER,
    )  # fmt: skip


def launch_backward(
    grads: Sequence[Tensor], inputs: Sequence[Tensor], outs: Sequence[Tensor | None], summed: Sequence[bool],
    rotation: RotationArguments, norm: Norm,
) -> list[Tensor | None]:  # fmt: skip
    """Compute the gradients of a rotation and norm in one launch and one sum per weight, in a deterministic order.

    Args:
        grads: gradients of the rotated q and k, (batch, seq, heads, head_dim) with at least one token.
        inputs: q and k of the forward pass, with the same shapes.
        outs: outputs for the gradients of q and k; None if unwanted.
        summed: whether each weight's gradient is wanted.
        rotation: the backward rotation.
        norm: the norm of the forward pass.

    Returns:
        (head_dim,) float32 gradients of both weights; None if unwanted.
    """
    q, k = inputs
    batch, seq, q_heads, head_dim = q.shape
    tokens = batch * seq
    width = tiling.width(head_dim, rotation.num_pairs, True)
    block, shares, warps = tiling.tiles(tokens, q_heads + k.shape[2], width)
    shares = tiling.shares_of(shares, rotation.head_groups)
    grid = tiling.cdiv(tokens, block), shares
    sums = [q.new_empty((grid[0] * grid[1], head_dim), dtype=torch.float32) if want else None for want in summed]
    with tiling.on(q.device):
        tiling.launch(
            backward_kernel, grid, warps,
            *map(tiling.heads_of, (*grads, *inputs)), *map(tiling.heads_of, outs),
            *tiling.norm_arguments(norm), *sums, rotation.positions, rotation.frequencies, rotation.pair_axis,
            tokens, seq, rotation.positions.shape[1], rotation.positions.stride(0), q_heads, k.shape[2],
            rotation.attention_factor,
            CHANNELS=tiling.channels_of(head_dim, rotation.num_pairs, rotation.adjacent),
            ANGLES=tiling.angles_of(rotation), BLOCK=block, NORM_AFTER=norm.after,
        )  # fmt: skip
    return [None if x is None else x.sum(0) for x in sums]
