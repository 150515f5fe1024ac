"""Compute the gradients of a rotation and norm, including those of the weights: kernel and launch."""

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
from mmpos.rotary.kernel.phases import phases
from mmpos.rotary.reference import Norm, RotationArguments


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
