"""The kernel that rotates q and k by positions from a table, forward and backward, and its launch."""

# mypy: ignore-errors
# ruff: noqa: N803  (constants of a kernel are upper case)

import triton
import triton.language as tl
from torch import Tensor

from mmpos.rotary.kernel import tiling
from mmpos.rotary.kernel.heads import rotate_heads
from mmpos.rotary.kernel.phases import phases
from mmpos.rotary.norms import NONE, Norm


# Strides are specialised, for wide loads; numbers that change with every batch are not, or it might compile anew.
@triton.jit(do_not_specialize=["tokens", "seq", "segments", "row_stride", "q_heads", "k_heads"])
def rotary_kernel(
    q, k, q_out, k_out, positions, frequencies, pair_axis, q_weight, k_weight, eps, offset,
    tokens, seq, segments, row_stride, q_heads, k_heads, attention_factor,
    q_batch, q_token, q_head, q_dim, k_batch, k_token, k_head, k_dim,
    q_out_batch, q_out_token, q_out_head, q_out_dim, k_out_batch, k_out_token, k_out_head, k_out_dim,
    PAIRS: tl.constexpr, PAIRS_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    AXES: tl.constexpr, MODE: tl.constexpr, AS_HF: tl.constexpr, ADJACENT: tl.constexpr,
    CONJUGATE: tl.constexpr, SCALED: tl.constexpr, COPY_REST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program rotates a block of tokens, and a share of the heads of q and of k, by the same phases."""
    token, valid, cos, sin = phases(
        positions, segments, row_stride, frequencies, pair_axis, tokens, attention_factor,
        PAIRS, PAIRS_PADDED, AXES, MODE, AS_HF, CONJUGATE, SCALED, BLOCK,
    )  # fmt: skip
    batch = (token // seq).to(tl.int64)
    place = (token % seq).to(tl.int64)
    share, shares = tl.program_id(1), tl.num_programs(1)
    q_base, q_out_base = batch * q_batch + place * q_token, batch * q_out_batch + place * q_out_token
    rotate_heads(
        q, q_out, q_weight, eps, offset, share * q_heads // shares, (share + 1) * q_heads // shares,
        q_base, q_out_base, q_head, q_dim, q_out_head, q_out_dim, cos, sin, valid,
        PAIRS, PAIRS_PADDED, REST, REST_PADDED, ADJACENT, COPY_REST,
    )  # fmt: skip
    k_base, k_out_base = batch * k_batch + place * k_token, batch * k_out_batch + place * k_out_token
    rotate_heads(
        k, k_out, k_weight, eps, offset, share * k_heads // shares, (share + 1) * k_heads // shares,
        k_base, k_out_base, k_head, k_dim, k_out_head, k_out_dim, cos, sin, valid,
        PAIRS, PAIRS_PADDED, REST, REST_PADDED, ADJACENT, COPY_REST,
    )  # fmt: skip


def launch(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, positions: Tensor, frequencies: Tensor, pair_axis: Tensor, *,
    mode: int, adjacent: bool, as_hf: bool, attention_factor: float, conjugate: bool, norm: Norm = NONE,
) -> None:  # fmt: skip
    """Rotate q and k into q_out and k_out in one launch; see operator.rotate. Allocates nothing, waits for nothing."""
    batch, seq, q_heads, _ = q.shape
    tokens = batch * seq
    if tokens == 0:
        return
    width = tiling.width(q.shape[3], pair_axis.shape[0], norm is not NONE)
    block, shares, warps = tiling.tiles(tokens, q_heads + k.shape[2], width)
    # Of both: what has no heads has no address either.
    apart = q.data_ptr() != q_out.data_ptr() or k.data_ptr() != k_out.data_ptr()
    with tiling.on(q.device):
        rotary_kernel[(triton.cdiv(tokens, block), shares)](
            q, k, q_out, k_out, positions, frequencies, pair_axis, *norm,
            tokens, seq, positions.shape[1], positions.stride(0), q_heads, k.shape[2], attention_factor,
            *q.stride(), *k.stride(), *q_out.stride(), *k_out.stride(),
            **tiling.constants(q, positions, pair_axis, mode, attention_factor),
            AS_HF=as_hf, ADJACENT=adjacent, CONJUGATE=conjugate, COPY_REST=apart,
            BLOCK=block, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
