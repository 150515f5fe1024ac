"""Rotate keys in a paged cache from old positions to new ones: kernel and launch."""

# mypy: ignore-errors
# ruff: noqa: N803  (kernel constants are upper case)

import triton
import triton.language as tl
from torch import Tensor

from mmpos.rotary.kernel import tiling
from mmpos.rotary.kernel.heads import load_pairs, rotate_pairs, rows_of, share_of, store_pairs
from mmpos.rotary.kernel.phases import angles_of, cos_sin_of
from mmpos.rotary.kernel.rotate import slots_of
from mmpos.rotary.reference import RotationArguments


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
