"""How the work of a launch is cut into programs, where it runs, and what is compiled into it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from torch import Tensor


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launch on the tensors' device, which need not be the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def tiles(tokens: int, heads: int, pairs: int) -> tuple[int, int, int]:
    """Tokens per program, programs that share the heads of these tokens, and warps per program.

    A program makes its phases once and uses them for all its heads, so it should have many; but a device
    is only full with a few thousand programs. A thread holds eight pairs of a head: two loads of 16 bytes.
    """
    warps = 4 if tokens >= 2048 else 1
    block = max(1, 32 * warps * 8 // pairs)
    programs = triton.cdiv(tokens, block)
    return block, max(1, min(triton.cdiv(heads, 2), 2048 // programs)), warps


def width(head_dim: int, pairs: int, whole: bool) -> int:
    """Pairs of a head that threads share: those that turn, or half of its channels where a norm holds all of them."""
    return triton.next_power_of_2(max(pairs, head_dim // 2) if whole else pairs)


def constants(
    q: Tensor, positions: Tensor, pair_axis: Tensor, mode: int, attention_factor: float
) -> dict[str, int | bool]:
    """What kernels of rotations are compiled for: channels of a head, axes of positions and how these are given."""
    pairs = pair_axis.shape[0]
    rest = q.shape[3] - 2 * pairs
    return {
        "PAIRS": pairs,
        "PAIRS_PADDED": triton.next_power_of_2(pairs),
        "REST": rest,
        "REST_PADDED": triton.next_power_of_2(max(rest, 1)),
        "AXES": (positions.shape[0] - 5) // 4 if mode < 2 else positions.shape[0],
        "MODE": mode,
        "SCALED": attention_factor != 1.0,
    }
