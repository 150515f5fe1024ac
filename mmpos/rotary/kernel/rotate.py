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
) -> bool:  # fmt: skip
    """Do what ``reference.rotate_all`` does, and store k and v, in one launch, without allocating or waiting."""
    batch, seq, q_heads, head_dim = q.shape
    tokens, k_heads = batch * seq, k.shape[2]
    if tokens == 0:
        return True
    v, key_cache, value_cache, slots, return_k = (None, None, None, None, True) if stored is None else stored
    width = tiling.width(head_dim, rotation.num_pairs, not norm.is_none)
    block, shares, warps = tiling.tiles(tokens, q_heads + k_heads * (1 if stored is None else 2), width)
    shares = tiling.shares_of(shares, rotation.head_groups)
    of = tiling.pieces_of if norm.is_none and stored is None else tiling.channels_of
    channels = of(head_dim, rotation.num_pairs, rotation.adjacent)
    rows = max(block * width // channels.pairs_padded, tiling.power_of_two(channels.pieces))
    sizes = (
        (0, 1, 1) if slots is None else (slots.shape[0], key_cache.shape[0] * key_cache.shape[1], key_cache.shape[1])
    )
    with tiling.on(q.device):
        tiling.launch(
            rotary_kernel, (tiling.cdiv(tokens, rows // channels.pieces), shares), warps,
            *map(tiling.heads_of, (q, k, v, q_out, k_out if return_k else None, key_cache, value_cache)), slots,
            rotation.positions, rotation.frequencies, rotation.pair_axis, *tiling.norm_arguments(norm),
            tokens, seq, rotation.positions.shape[1], rotation.positions.stride(0), q_heads, k_heads, *sizes,
            rotation.attention_factor,
            CHANNELS=channels, VALUE_CHANNELS=tiling.channels_of(head_dim if v is None else v.shape[3], 0),
            ANGLES=tiling.angles_of(rotation), COPY_Q_REST=q.data_ptr() != q_out.data_ptr(),
            COPY_K_REST=k.data_ptr() != k_out.data_ptr(), BLOCK=rows, NORM_AFTER=norm.after,
        )  # fmt: skip
    return True
