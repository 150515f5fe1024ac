"""Rotate q and k and optionally store k and v in a paged cache: kernels and launches."""

# mypy: ignore-errors
# ruff: noqa: N803  (kernel constants are upper case)

import triton
import triton.language as tl
from torch import Tensor

from mmpos.rotary.kernel import tiling
from mmpos.rotary.kernel.heads import load_rest, rotate_heads, rows_of, share_of, store_rest
from mmpos.rotary.kernel.phases import phases
from mmpos.rotary.paged import Stored
from mmpos.rotary.reference import NO_NORM, Norm, RotationArguments


# Strides are specialised for wide loads. Numbers that change with every batch are not, to avoid recompilation.
@triton.jit(do_not_specialize=["tokens", "seq", "segments", "row_stride", "q_heads", "k_heads"])
def rotary_kernel(
    q, k, q_out, k_out, positions, frequencies, pair_axis, q_weight, k_weight, eps, offset,
    tokens, seq, segments, row_stride, q_heads, k_heads, attention_factor,
    CHANNELS: tl.constexpr, ANGLES: tl.constexpr, COPY_REST: tl.constexpr, BLOCK: tl.constexpr,
    NORM_AFTER: tl.constexpr,
):  # fmt: skip
    """Rotate a block of tokens and a share of the q and k heads per program, with shared phases."""
    token, valid, cos, sin = phases(
        positions, segments, row_stride, frequencies, pair_axis, tokens, attention_factor, CHANNELS, ANGLES, BLOCK
    )
    batch = (token // seq).to(tl.int64)
    index = (token % seq).to(tl.int64)
    rotate_heads(
        q, q_out, rows_of(q, batch, index), rows_of(q_out, batch, index), q_heads, q_weight, eps, offset,
        cos, sin, valid, CHANNELS, COPY_REST, NORM_AFTER,
    )  # fmt: skip
    rotate_heads(
        k, k_out, rows_of(k, batch, index), rows_of(k_out, batch, index), k_heads, k_weight, eps, offset,
        cos, sin, valid, CHANNELS, COPY_REST, NORM_AFTER,
    )  # fmt: skip


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


@triton.jit(
    do_not_specialize=[
        "tokens", "seq", "segments", "row_stride", "q_heads", "k_heads", "stored", "capacity", "block_size",
    ]
)  # fmt: skip
def store_kernel(
    q, k, v, q_out, k_out, key_cache, value_cache, slots,
    positions, frequencies, pair_axis, q_weight, k_weight, eps, offset,
    tokens, seq, segments, row_stride, q_heads, k_heads, stored, capacity, block_size, attention_factor,
    CHANNELS: tl.constexpr, VALUE_CHANNELS: tl.constexpr, ANGLES: tl.constexpr, COPY_Q_REST: tl.constexpr,
    COPY_K_REST: tl.constexpr, BLOCK: tl.constexpr, NORM_AFTER: tl.constexpr,
):  # fmt: skip
    """Rotate a block of tokens and a share of their heads per program, and store k and v of tokens with slots."""
    token, valid, cos, sin = phases(
        positions, segments, row_stride, frequencies, pair_axis, tokens, attention_factor, CHANNELS, ANGLES, BLOCK
    )
    batch = (token // seq).to(tl.int64)
    index = (token % seq).to(tl.int64)
    rotate_heads(
        q, q_out, rows_of(q, batch, index), rows_of(q_out, batch, index), q_heads, q_weight, eps, offset,
        cos, sin, valid, CHANNELS, COPY_Q_REST, NORM_AFTER,
    )  # fmt: skip
    kept, page, slot = slots_of(slots, token, stored, capacity, block_size)
    k_rows = rows_of(k, batch, index)
    rotate_heads(
        k, key_cache, k_rows, rows_of(key_cache, page, slot), k_heads, k_weight, eps, offset,
        cos, sin, kept, CHANNELS, True, NORM_AFTER,
    )  # fmt: skip
    v_rows, value_rows = rows_of(v, batch, index), rows_of(value_cache, page, slot)
    _copy_heads(v, value_cache, v_rows, value_rows, k_heads, kept, VALUE_CHANNELS)
    if k_out is not None:
        # Rotate k again because tokens without a slot must also be written; k_out may be k itself.
        tl.debug_barrier()
        rotate_heads(
            k, k_out, k_rows, rows_of(k_out, batch, index), k_heads, k_weight, eps, offset,
            cos, sin, valid, CHANNELS, COPY_K_REST, NORM_AFTER,
        )  # fmt: skip


def launch_rotate(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, rotation: RotationArguments, norm: Norm = NO_NORM
) -> None:  # fmt: skip
    """Rotate q and k into q_out and k_out in one launch, without allocating or waiting.

    Args:
        q: (batch, seq, heads, head_dim).
        k: the same shape with its own number of heads; 0 heads if there is no k.
        q_out: output with the shape of q; it may be q.
        k_out: output with the shape of k; it may be k.
        rotation: the rotation.
        norm: normalisation of each head before or after the rotation.
    """
    batch, seq, q_heads, head_dim = q.shape
    tokens = batch * seq
    if tokens == 0:
        return
    width = tiling.width(head_dim, rotation.num_pairs, not norm.is_none)
    block, shares, warps = tiling.tiles(tokens, q_heads + k.shape[2], width)
    shares = tiling.shares_of(shares, rotation.head_groups)
    of = tiling.pieces_of if norm.is_none else tiling.channels_of
    channels = of(head_dim, rotation.num_pairs, rotation.adjacent)
    rows = max(block * width // channels.pairs_padded, tiling.power_of_two(channels.pieces))
    # Compare both tensors: a tensor without heads has no address.
    separate = q.data_ptr() != q_out.data_ptr() or k.data_ptr() != k_out.data_ptr()
    with tiling.on(q.device):
        tiling.launch(
            rotary_kernel, (tiling.cdiv(tokens, rows // channels.pieces), shares), warps,
            *map(tiling.heads_of, (q, k, q_out, k_out)),
            rotation.positions, rotation.frequencies, rotation.pair_axis, *tiling.norm_arguments(norm),
            tokens, seq, rotation.positions.shape[1], rotation.positions.stride(0), q_heads, k.shape[2],
            rotation.attention_factor,
            CHANNELS=channels, ANGLES=tiling.angles_of(rotation), COPY_REST=separate, BLOCK=rows, NORM_AFTER=norm.after,
        )  # fmt: skip


def launch_store(
    q: Tensor,
    k: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    stored: Stored,
    rotation: RotationArguments,
    norm: Norm = NO_NORM,
) -> None:
    """Rotate q and k and store k and v in one launch, without allocating or waiting.

    Args:
        q: (batch, seq, heads, head_dim).
        k: the same shape with its own number of heads.
        q_out: output with the shape of q; it may be q.
        k_out: output with the shape of k; it may be k, and it has 0 heads if the rotated k is not returned.
        stored: v, the caches and slots.
        rotation: the rotation, which is not conjugate.
        norm: normalisation of each head before or after the rotation.
    """
    batch, seq, q_heads, head_dim = q.shape
    v, key_cache, value_cache, slots, _ = stored
    k_heads, value_dim = v.shape[2:]
    tokens = batch * seq
    if tokens == 0:
        return
    width = tiling.width(head_dim, rotation.num_pairs, not norm.is_none)
    block, shares, warps = tiling.tiles(tokens, q_heads + 2 * k_heads, width)
    shares = tiling.shares_of(shares, rotation.head_groups)
    with tiling.on(q.device):
        tiling.launch(
            store_kernel, (tiling.cdiv(tokens, block), shares), warps,
            *map(tiling.heads_of, (q, k, v, q_out)), tiling.heads_of(k_out) if k_out.shape[2] else None,
            tiling.heads_of(key_cache), tiling.heads_of(value_cache), slots,
            rotation.positions, rotation.frequencies, rotation.pair_axis, *tiling.norm_arguments(norm),
            tokens, seq, rotation.positions.shape[1], rotation.positions.stride(0), q_heads, k_heads,
            slots.shape[0], key_cache.shape[0] * key_cache.shape[1], key_cache.shape[1], rotation.attention_factor,
            CHANNELS=tiling.channels_of(head_dim, rotation.num_pairs, rotation.adjacent),
            VALUE_CHANNELS=tiling.channels_of(value_dim, 0), ANGLES=tiling.angles_of(rotation),
            COPY_Q_REST=q.data_ptr() != q_out.data_ptr(), COPY_K_REST=k.data_ptr() != k_out.data_ptr(), BLOCK=block,
            NORM_AFTER=norm.after,
        )  # fmt: skip
