"""Launch kernels: choose the number of programs per launch and collect compile-time constants."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmpos.rotary.reference import Norm, RotationArguments


class Heads(NamedTuple):
    """Kernel argument for a (batch, seq, heads, head_dim) tensor or a (blocks, block_size, heads, head_dim) cache.

    Args:
        data: the tensor; a pointer in a kernel.
        batch: stride of the first dimension; all strides are in elements.
        token: stride of the second dimension.
        head: stride of the third dimension.
        channel: stride of the last dimension.
    """

    data: Any
    batch: Any
    token: Any
    head: Any
    channel: Any


class HeadChannels(NamedTuple):
    """Compile-time description of the channels of a head.

    Args:
        pairs: number of rotated channel pairs.
        pairs_padded: pairs, or pairs per piece, rounded up to a power of two.
        rest: number of unrotated channels, which follow the pairs.
        rest_padded: rest rounded up to a power of two, at least 1.
        adjacent: whether pair j consists of channels (2j, 2j + 1) instead of (j, j + pairs).
        pieces: number of rows of a program over which the pairs of one token are split.
    """

    pairs: int
    pairs_padded: int
    rest: int
    rest_padded: int
    adjacent: bool
    pieces: int = 1


class Angles(NamedTuple):
    """Compile-time description of positions and how angles are computed: properties of ``RotationArguments``."""

    axes: int
    from_table: bool
    fractional: bool
    as_hf: bool
    conjugate: bool
    scaled: bool
    cache_rows: int = 0
    head_groups: int = 0
    own_frequencies: bool = False


def launch(kernel: Any, grid: tuple[int, int], warps: int, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel in which products and sums are rounded separately.

    Compiled kernels are kept by all that Triton's choice among them depends on, which takes longer than a launch.

    Args:
        kernel: the kernel.
        grid: number of programs in each of the two dimensions.
        warps: warps per program.
        arguments: positional arguments of the kernel: tensors, ``Heads``, numbers, or None for an absent argument.
        constants: compile-time constants by name.
    """
    forms = [
        (x[0].dtype, x[0].data_ptr() % 16, x[1:]) if type(x) is Heads
        else (x.dtype, x.data_ptr() % 16, x.device) if isinstance(x, Tensor) else x
        for x in arguments
    ]  # fmt: skip
    key = kernel, warps, *forms, *constants.values()
    compiled = _COMPILED.get(key)
    if compiled is not None:
        compiled[(*grid, 1)](*arguments, *constants.values())
        return
    compiled = kernel[grid](*arguments, **constants, num_warps=warps, enable_fp_fusion=False)
    if compiled is not None and torch.version.hip is None:  # AMD's choice also depends on sizes of memory
        if len(_COMPILED) >= MOST_COMPILED:
            _COMPILED.clear()
        _COMPILED[key] = compiled


_COMPILED: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels; the interpreter has none."""

MOST_COMPILED = 1 << 12


def on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that makes the tensors' device the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def heads_of(x: Tensor | None) -> Heads | None:
    """Return a 4-D tensor as ``Heads`` with its strides."""
    return None if x is None else Heads(x, *x.stride())


@lru_cache
def channels_of(head_dim: int, pairs: int, adjacent: bool = False) -> HeadChannels:
    """Return the channels of a head in one piece."""
    rest = head_dim - 2 * pairs
    return HeadChannels(pairs, power_of_two(pairs), rest, power_of_two(rest), adjacent)


@lru_cache
def pieces_of(head_dim: int, pairs: int, adjacent: bool) -> HeadChannels:
    """Return a head's channels in power-of-two pieces if its number of pairs is not a power of two, else in one piece.

    Padding pairs to a power of two leaves threads idle: 37 % of them for head_dim 80. Heads in pieces cannot be
    normalised and cannot have unrotated channels.
    """
    whole = channels_of(head_dim, pairs, adjacent)
    piece = pairs & -pairs
    if whole.rest or piece < LEAST_PIECE or piece == pairs:
        return whole
    return whole._replace(pairs_padded=piece, pieces=pairs // piece)


def angles_of(rotation: RotationArguments) -> Angles:
    """Return the compile-time description of a rotation's angles."""
    return Angles(*_ANGLES(rotation))


_ANGLES = attrgetter(*Angles._fields)


def norm_arguments(norm: Norm) -> tuple[Any, ...]:
    """Return both weights, eps and offset; four times None if there is no norm."""
    return (None,) * 4 if norm.is_none else norm[:4]


LEAST_PIECE = 4
"""Minimum number of pairs per piece: 8 bytes of each half of a bfloat16 head."""

MOST_HEADS = 16
"""Maximum number of heads that a program processes in sequence; with more, the last programs would run alone for a long
time.
"""


def tiles(tokens: int, heads: int, pairs: int) -> tuple[int, int, int]:
    """Choose tokens per program, programs that share the heads of a block of tokens, and warps per program.

    A program computes its phases once. This takes as many instructions as rotating six or seven heads, so a program
    should process many heads. But a few thousand warps are needed to fill a device (fewer for small inputs, where the
    latency of the phases dominates). A thread holds eight pairs of a head, which it reads in two 16-byte loads.
    """
    warps, wanted = (4, 4096) if tokens >= 2048 else (1, 2048)
    block = max(1, 32 * warps * 8 // pairs)
    shares = max(wanted // (warps * cdiv(tokens, block)), cdiv(heads, MOST_HEADS))
    return block, max(1, min(cdiv(heads, 2), shares)), warps


def shares_of(shares: int, groups: int) -> int:
    """Round shares up to a multiple of groups, since a program computes the phases of a single group."""
    return groups * cdiv(shares, groups) if groups else shares


def width(head_dim: int, pairs: int, whole: bool) -> int:
    """Return the padded number of pairs that threads share: the rotated pairs, or half of all channels if whole."""
    return power_of_two(max(pairs, head_dim // 2) if whole else pairs)


def cdiv(total: int, size: int) -> int:
    """Divide and round up, like ``triton.cdiv``, which takes 2 µs because kernels may also call it."""
    return -(-total // size)


def power_of_two(count: int) -> int:
    """Return the smallest power of two >= count, like ``triton.next_power_of_2`` but with 1 for 0."""
    return 1 << max(count - 1, 0).bit_length()
