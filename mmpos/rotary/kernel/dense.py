"""The ids of a table as a dense tensor, made on its device in one launch."""

# mypy: ignore-errors
# ruff: noqa: N803  (constants of a kernel are upper case)

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmpos.rotary.kernel.positions import cell, numerator, segments_of
from mmpos.rotary.kernel.tiling import on


@triton.jit(do_not_specialize=["tokens", "segments", "row_stride"])
def dense_kernel(
    table, ids, tokens, segments, row_stride, AXES: tl.constexpr, FRACTIONAL: tl.constexpr, BLOCK: tl.constexpr
):
    """(axes, tokens) ids of a table: int32, or float64 for fractional schemes."""
    first = tl.program_id(0) * BLOCK
    stop = tl.minimum(first + BLOCK, tokens)
    token = first + tl.arange(0, BLOCK)
    column = table + segments_of(table, segments, token, first, stop, BLOCK)
    frame, row, col = cell(column, row_stride, token)
    for axis in tl.static_range(AXES):
        target = ids + axis * tl.cast(tokens, tl.int64) + token
        if FRACTIONAL:
            over = numerator(column, row_stride, frame, row, col, axis, tl.int64)
            value = over.to(tl.float64) / tl.load(column + 4 * row_stride).to(tl.float64)
        else:
            value = numerator(column, row_stride, frame, row, col, axis, tl.int32)
        tl.store(target, value, mask=token < tokens)


def launch_dense(table: Tensor, tokens: int, axes: int, fractional: bool) -> Tensor:
    """(axes, tokens) ids of a table on its device, in one launch."""
    ids = torch.empty((axes, tokens), dtype=torch.float64 if fractional else torch.int32, device=table.device)
    if tokens:
        with on(table.device):
            dense_kernel[(triton.cdiv(tokens, 256),)](
                table, ids, tokens, table.shape[1], table.stride(0), AXES=axes, FRACTIONAL=fractional, BLOCK=256
            )
    return ids
