"""The kernel that rotates q and k and writes k and v into the slots of a paged cache, and its launch."""

# mypy: ignore-errors
# ruff: noqa: N803  (constants of a kernel are upper case)

import triton
import triton.language as tl
from torch import Tensor

from mmpos.rotary.kernel import tiling
from mmpos.rotary.kernel.channels import load_rest, store_rest
from mmpos.rotary.kernel.heads import rotate_heads
from mmpos.rotary.kernel.phases import phases
from mmpos.rotary.norms import NONE, Norm


@triton.jit
def _places(slots, token, stored, capacity, block_size):
    """Which tokens have a slot in the cache, and its block and offset there, 64 bits wide."""
    slot = tl.load(slots + token, mask=token < stored, other=-1).to(tl.int64)
    kept = (slot >= 0) & (slot < capacity)
    slot = tl.where(kept, slot, 0).to(tl.int32)  # so that no 64 bits are divided
    return kept, (slot // block_size).to(tl.int64), (slot % block_size).to(tl.int64)


@triton.jit
def _copy_heads(
    x, out, head_first, head_stop, x_base, out_base, x_head, x_dim, out_head, out_dim, kept,
    CHANNELS: tl.constexpr, CHANNELS_PADDED: tl.constexpr,
):  # fmt: skip
    """Copy heads of a block of tokens: none of their channels turns."""
    x_head, out_head = tl.cast(x_head, tl.int64), tl.cast(out_head, tl.int64)
    for head in range(head_first, head_stop):
        source = x + (x_base[:, None] + head * x_head)
        target = out + (out_base[:, None] + head * out_head)
        values = load_rest(source, x_dim, kept, None, 0, CHANNELS, CHANNELS_PADDED)
        store_rest(target, out_dim, kept, values, 0, CHANNELS, CHANNELS_PADDED)


# Strides are specialised, for wide loads; numbers that change with every batch are not, or it might compile anew.
@triton.jit(
    do_not_specialize=[
        "tokens", "seq", "segments", "row_stride", "q_heads", "k_heads", "stored", "capacity", "block_size",
    ]
)  # fmt: skip
def store_kernel(
    q, k, v, q_out, k_out, key_cache, value_cache, slots, positions, frequencies, pair_axis,
    q_weight, k_weight, eps, offset,
    tokens, seq, segments, row_stride, q_heads, k_heads, stored, capacity, block_size, attention_factor,
    q_batch, q_token, q_head, q_dim, k_batch, k_token, k_head, k_dim, v_batch, v_token, v_head, v_dim,
    q_out_batch, q_out_token, q_out_head, q_out_dim, k_out_batch, k_out_token, k_out_head, k_out_dim,
    key_block, key_place, key_head, key_dim, value_block, value_place, value_head, value_dim,
    PAIRS: tl.constexpr, PAIRS_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    VALUES: tl.constexpr, VALUES_PADDED: tl.constexpr,
    AXES: tl.constexpr, MODE: tl.constexpr, AS_HF: tl.constexpr, ADJACENT: tl.constexpr,
    SCALED: tl.constexpr, COPY_Q_REST: tl.constexpr, COPY_K_REST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program rotates a block of tokens, and a share of their heads, and stores those that have slots."""
    token, valid, cos, sin = phases(
        positions, segments, row_stride, frequencies, pair_axis, tokens, attention_factor,
        PAIRS, PAIRS_PADDED, AXES, MODE, AS_HF, False, SCALED, BLOCK,
    )  # fmt: skip
    batch = (token // seq).to(tl.int64)
    place = (token % seq).to(tl.int64)
    share, shares = tl.program_id(1), tl.num_programs(1)
    q_base, q_out_base = batch * q_batch + place * q_token, batch * q_out_batch + place * q_out_token
    rotate_heads(
        q, q_out, q_weight, eps, offset, share * q_heads // shares, (share + 1) * q_heads // shares,
        q_base, q_out_base, q_head, q_dim, q_out_head, q_out_dim, cos, sin, valid,
        PAIRS, PAIRS_PADDED, REST, REST_PADDED, ADJACENT, COPY_Q_REST,
    )  # fmt: skip
    kept, page, slot = _places(slots, token, stored, capacity, block_size)
    first, stop = share * k_heads // shares, (share + 1) * k_heads // shares
    k_base = batch * k_batch + place * k_token
    rotate_heads(
        k, key_cache, k_weight, eps, offset, first, stop,
        k_base, page * key_block + slot * key_place, k_head, k_dim, key_head, key_dim, cos, sin, kept,
        PAIRS, PAIRS_PADDED, REST, REST_PADDED, ADJACENT, True,
    )  # fmt: skip
    _copy_heads(
        v, value_cache, first, stop, batch * v_batch + place * v_token, page * value_block + slot * value_place,
        v_head, v_dim, value_head, value_dim, kept, VALUES, VALUES_PADDED,
    )  # fmt: skip
    if k_out is not None:
        # Read and turned once more, since tokens without a slot have their k here only; it may be k itself.
        tl.debug_barrier()
        rotate_heads(
            k, k_out, k_weight, eps, offset, first, stop,
            k_base, batch * k_out_batch + place * k_out_token, k_head, k_dim, k_out_head, k_out_dim, cos, sin, valid,
            PAIRS, PAIRS_PADDED, REST, REST_PADDED, ADJACENT, COPY_K_REST,
        )  # fmt: skip


def launch(
    q: Tensor, k: Tensor, v: Tensor, q_out: Tensor, k_out: Tensor, key_cache: Tensor, value_cache: Tensor,
    slots: Tensor, positions: Tensor, frequencies: Tensor, pair_axis: Tensor, *,
    mode: int, adjacent: bool, as_hf: bool, attention_factor: float, norm: Norm = NONE,
) -> None:  # fmt: skip
    """Rotate q and k, and store k and v, in one launch; see store_operator. Allocates nothing, waits for nothing."""
    batch, seq, q_heads, _ = q.shape
    k_heads, values = v.shape[2:]
    tokens = batch * seq
    if tokens == 0:
        return
    width = tiling.width(q.shape[3], pair_axis.shape[0], norm is not NONE)
    block, shares, warps = tiling.tiles(tokens, q_heads + 2 * k_heads, width)
    with tiling.on(q.device):
        store_kernel[(triton.cdiv(tokens, block), shares)](
            q, k, v, q_out, k_out if k_out.shape[2] else None, key_cache, value_cache, slots,
            positions, frequencies, pair_axis, *norm,
            tokens, seq, positions.shape[1], positions.stride(0), q_heads, k_heads,
            slots.shape[0], key_cache.shape[0] * key_cache.shape[1], key_cache.shape[1], attention_factor,
            *q.stride(), *k.stride(), *v.stride(), *q_out.stride(), *k_out.stride(),
            *key_cache.stride(), *value_cache.stride(),
            **tiling.constants(q, positions, pair_axis, mode, attention_factor),
            VALUES=values, VALUES_PADDED=triton.next_power_of_2(values), AS_HF=as_hf, ADJACENT=adjacent,
            COPY_Q_REST=q.data_ptr() != q_out.data_ptr(), COPY_K_REST=k.data_ptr() != k_out.data_ptr(), BLOCK=block,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
