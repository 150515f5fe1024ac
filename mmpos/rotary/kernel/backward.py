"""The kernel of gradients through rotation and norm, those of the weights included, and its launch."""

# mypy: ignore-errors
# ruff: noqa: N803  (constants of a kernel are upper case)

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmpos.rotary.kernel import tiling
from mmpos.rotary.kernel.channels import load_pairs, load_rest, store_pairs, store_rest
from mmpos.rotary.kernel.heads import rotate_heads, turned
from mmpos.rotary.kernel.norm import inverse_rms, load_weight, mean_product
from mmpos.rotary.kernel.phases import phases
from mmpos.rotary.norms import Norm


@triton.jit
def _norm_heads(
    grad, x, out, weight, sums, eps, offset, head_first, head_stop, grad_base, x_base, out_base,
    grad_head, grad_dim, x_head, x_dim, out_head, out_dim, cos, sin, valid,
    PAIRS: tl.constexpr, PAIRS_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    ADJACENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bring gradients of heads back through turn and norm; return those of the weight, summed over these heads."""
    weights = load_weight(weight, offset, PAIRS, PAIRS_PADDED, REST, REST_PADDED, ADJACENT)
    by_first = tl.zeros([BLOCK, PAIRS_PADDED], tl.float32)
    by_second = tl.zeros([BLOCK, PAIRS_PADDED], tl.float32)
    by_rest = tl.zeros([BLOCK, REST_PADDED], tl.float32)
    for head in range(head_first, head_stop):
        source = grad + (grad_base[:, None] + head * grad_head)
        first, second = load_pairs(source, grad_dim, valid, PAIRS, PAIRS_PADDED, ADJACENT)
        first, second = turned(first, second, cos, sin)
        rest = load_rest(source, grad_dim, valid, 0.0, PAIRS, REST, REST_PADDED).to(tl.float32)
        source = x + (x_base[:, None] + head * x_head)
        x_first, x_second = load_pairs(source, x_dim, valid, PAIRS, PAIRS_PADDED, ADJACENT)
        x_rest = load_rest(source, x_dim, valid, 0.0, PAIRS, REST, REST_PADDED).to(tl.float32)
        scale = inverse_rms(x_first, x_second, x_rest, eps, 2 * PAIRS + REST, REST)
        x_first, x_second, x_rest = x_first * scale, x_second * scale, x_rest * scale
        if sums is not None:
            by_first += first * x_first
            by_second += second * x_second
            by_rest += rest * x_rest
        if out is not None:
            first, second, rest = first * weights[0], second * weights[1], rest * weights[2]
            mean = mean_product(first, second, rest, x_first, x_second, x_rest, 2 * PAIRS + REST, REST)
            first, second = scale * (first - x_first * mean), scale * (second - x_second * mean)
            target = out + (out_base[:, None] + head * out_head)
            store_pairs(target, out_dim, valid, first, second, PAIRS, PAIRS_PADDED, ADJACENT)
            if REST > 0:
                store_rest(target, out_dim, valid, scale * (rest - x_rest * mean), PAIRS, REST, REST_PADDED)
    return by_first, by_second, by_rest


@triton.jit
def _heads(
    grad, x, out, weight, sums, eps, offset, grad_strides, x_strides, out_strides, heads, batch, place, cos, sin, valid,
    PAIRS: tl.constexpr, PAIRS_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    ADJACENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The share that this program has of the heads of one tensor; without a weight they are turned alone."""
    share, shares = tl.program_id(1), tl.num_programs(1)
    first, stop = share * heads // shares, (share + 1) * heads // shares
    grad_base = batch * grad_strides[0] + place * grad_strides[1]
    x_base = batch * x_strides[0] + place * x_strides[1]
    out_base = batch * out_strides[0] + place * out_strides[1]
    if weight is not None:
        by_first, by_second, by_rest = _norm_heads(
            grad, x, out, weight, sums, eps, offset, first, stop, grad_base, x_base, out_base,
            tl.cast(grad_strides[2], tl.int64), grad_strides[3], tl.cast(x_strides[2], tl.int64), x_strides[3],
            tl.cast(out_strides[2], tl.int64), out_strides[3], cos, sin, valid,
            PAIRS, PAIRS_PADDED, REST, REST_PADDED, ADJACENT, BLOCK,
        )  # fmt: skip
        if sums is not None:
            program = tl.program_id(0).to(tl.int64) * shares + share
            target = sums + program * (2 * PAIRS + REST) + tl.zeros([1, 1], tl.int64)
            there = tl.full([1], 1, tl.int1)
            by_first, by_second = tl.sum(by_first, axis=0)[None, :], tl.sum(by_second, axis=0)[None, :]
            store_pairs(target, 1, there, by_first, by_second, PAIRS, PAIRS_PADDED, ADJACENT)
            if REST > 0:
                store_rest(target, 1, there, tl.sum(by_rest, axis=0)[None, :], PAIRS, REST, REST_PADDED)
    elif out is not None:
        rotate_heads(
            grad, out, None, None, None, first, stop, grad_base, out_base,
            grad_strides[2], grad_strides[3], out_strides[2], out_strides[3], cos, sin, valid,
            PAIRS, PAIRS_PADDED, REST, REST_PADDED, ADJACENT, True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "seq", "segments", "row_stride", "q_heads", "k_heads"])
def backward_kernel(
    q_grad, k_grad, q, k, q_out, k_out, q_weight, k_weight, q_sums, k_sums, positions, frequencies, pair_axis,
    eps, offset, tokens, seq, segments, row_stride, q_heads, k_heads, attention_factor,
    q_grad_strides, k_grad_strides, q_strides, k_strides, q_out_strides, k_out_strides,
    PAIRS: tl.constexpr, PAIRS_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    AXES: tl.constexpr, MODE: tl.constexpr, AS_HF: tl.constexpr, ADJACENT: tl.constexpr,
    CONJUGATE: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program takes a block of tokens, and a share of the heads of q and of k, by the same phases."""
    token, valid, cos, sin = phases(
        positions, segments, row_stride, frequencies, pair_axis, tokens, attention_factor,
        PAIRS, PAIRS_PADDED, AXES, MODE, AS_HF, CONJUGATE, SCALED, BLOCK,
    )  # fmt: skip
    batch = (token // seq).to(tl.int64)
    place = (token % seq).to(tl.int64)
    _heads(
        q_grad, q, q_out, q_weight, q_sums, eps, offset, q_grad_strides, q_strides, q_out_strides, q_heads,
        batch, place, cos, sin, valid, PAIRS, PAIRS_PADDED, REST, REST_PADDED, ADJACENT, BLOCK,
    )  # fmt: skip
    _heads(
        k_grad, k, k_out, k_weight, k_sums, eps, offset, k_grad_strides, k_strides, k_out_strides, k_heads,
        batch, place, cos, sin, valid, PAIRS, PAIRS_PADDED, REST, REST_PADDED, ADJACENT, BLOCK,
    )  # fmt: skip


def launch_backward(
    grads: Sequence[Tensor], inputs: Sequence[Tensor], outs: Sequence[Tensor | None], summed: Sequence[bool],
    positions: Tensor, frequencies: Tensor, pair_axis: Tensor, *,
    mode: int, adjacent: bool, as_hf: bool, attention_factor: float, conjugate: bool, norm: Norm,
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of a norm and rotation, in one launch and a sum for each weight, always in the same order.

    Args:
        grads: of the rotated q and k, (batch, seq, heads, head_dim), at least one token.
        inputs: q and k before the norm, likewise.
        outs: where their gradients go; None where nobody wants them.
        summed: whether somebody wants those of the weights.
        positions: as of the rotation, like all that follows; conjugate turns back.

    Returns:
        (head_dim,) float32 gradients of the weights that are wanted.
    """
    q, k = inputs
    batch, seq, q_heads, head_dim = q.shape
    tokens = batch * seq
    width = tiling.width(head_dim, pair_axis.shape[0], True)
    block, shares, warps = tiling.tiles(tokens, q_heads + k.shape[2], width)
    grid = triton.cdiv(tokens, block), shares
    sums = [q.new_empty((grid[0] * grid[1], head_dim), dtype=torch.float32) if want else None for want in summed]
    strides = [x.stride() for x in (*grads, *inputs, *(grads[i] if x is None else x for i, x in enumerate(outs)))]
    with tiling.on(q.device):
        backward_kernel[grid](
            *grads, *inputs, *outs, norm.q_weight, norm.k_weight, *sums, positions, frequencies, pair_axis,
            norm.eps, norm.offset, tokens, seq, positions.shape[1], positions.stride(0),
            q_heads, k.shape[2], attention_factor, *strides,
            **tiling.constants(q, positions, pair_axis, mode, attention_factor),
            AS_HF=as_hf, ADJACENT=adjacent, CONJUGATE=conjugate, BLOCK=block,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return [None if x is None else x.sum(0) for x in sums]
