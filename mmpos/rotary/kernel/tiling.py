"""Launch kernels: cut the work into programs, and gather what is compiled into a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mmpos.rotary.reference import Norm, RotationArguments


class Heads(NamedTuple):
    """Heads as a kernel takes them: (batch, seq, heads, head_dim), or (blocks, block_size, heads, head_dim) of a cache.

    Args:
        data: the tensor; a pointer in a kernel.
        batch: stride of the first dimension, like all strides in elements.
        token: stride of the second.
        head: stride of the third.
        channel: stride of the last.
    """

    data: Any
    batch: Any
    token: Any
    head: Any
    channel: Any


class HeadChannels(NamedTuple):
    """The channels of a head, known when a kernel is compiled.

    Args:
        pairs: pairs of channels that turn.
        pairs_padded: the power of two that holds them, or a piece of them.
        rest: channels behind them.
        rest_padded: likewise, at least one.
        adjacent: whether pair j is channels (2j, 2j + 1) instead of (j, j + pairs).
        pieces: rows of a program that hold a token together, each some of its pairs.
    """

    pairs: int
    pairs_padded: int
    rest: int
    rest_padded: int
    adjacent: bool
    pieces: int = 1


class Angles(NamedTuple):
    """Form of positions and of their angles, known when a kernel is compiled.

    Args:
        axes: position axes.
        from_table: whether positions are a table, not dense ids.
        fractional: whether ids may be fractions.
        as_hf: whether angles are the float32 products of Transformers.
        conjugate: whether to rotate by the negative angles.
        scaled: whether cos and sin are multiplied by a factor.
        cache_rows: rows of an engine's cache that cos and sin are read from; 0 where they are computed.
        head_groups: groups of heads with axes of their own, each a row of pair_axis; 0 where all heads turn alike.
        own_frequencies: whether these groups have frequencies of their own, too.
    """

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
    """Launch a kernel whose products and sums are rounded one by one.

    Args:
        kernel: the kernel.
        grid: programs in each of two dimensions.
        warps: of a program.
        arguments: of the kernel, in its order: tensors, ``Heads``, numbers, or None for no parameter.
        constants: known when it is compiled.
    """
    kernel[grid](*arguments, **constants, num_warps=warps, enable_fp_fusion=False)


class Bound(NamedTuple):
    """A compiled kernel and its arguments, of which tensors may be others of the same form, at addresses of 16 bytes.

    Args:
        run: launches the kernel.
        arguments: all of a launch, constants too.
        places: of the tensors among them.
        strides: of those that are ``Heads``, else None.
    """

    run: Callable[..., object]
    arguments: list[Any]
    places: Sequence[int]
    strides: Sequence[tuple[int, ...] | None]

    def launch(self, *tensors: Tensor) -> None:
        """Launch with other tensors in these places."""
        arguments = self.arguments.copy()
        for place, strides, x in zip(self.places, self.strides, tensors, strict=True):
            arguments[place] = x if strides is None else Heads._make((x, *strides))
        self.run(*arguments)


def bind(
    places: Sequence[int], kernel: Any, grid: tuple[int, int], warps: int, *arguments: Any, **constants: Any
) -> Bound | None:
    """Take a launch as ``launch`` does, to make it again and again without Triton's binding, which takes 30 µs.

    Returns:
        None in the interpreter, and on devices of AMD, for which kernels depend on sizes of memory too.
    """
    if not isinstance(kernel, triton.JITFunction) or torch.version.hip is not None:
        return None
    compiled = kernel.warmup(*arguments, **constants, grid=grid, num_warps=warps, enable_fp_fusion=False)
    every = [*arguments, *(constants[name] for name in kernel.arg_names[len(arguments) :])]
    given = [place for place in places if every[place] is not None]
    strides = [every[place][1:] if isinstance(every[place], Heads) else None for place in given]
    return Bound(compiled[(*grid, 1)], every, given, strides)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launch on the tensors' device, which need not be the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def heads_of(x: Tensor) -> Heads:
    """Return a tensor of four dimensions with its strides."""
    return Heads(x, *x.stride())


@lru_cache
def channels_of(head_dim: int, pairs: int, adjacent: bool = False) -> HeadChannels:
    """Return the channels of a head of which some pairs turn."""
    rest = head_dim - 2 * pairs
    return HeadChannels(pairs, power_of_two(pairs), rest, power_of_two(rest), adjacent)


@lru_cache
def pieces_of(head_dim: int, pairs: int, adjacent: bool) -> HeadChannels:
    """Return the channels of a head in pieces that are a power of two, where its pairs are none, or else whole.

    Threads would idle where a power of two is more than there are pairs: 37 % of them for heads of 80. Nothing may be
    summed over a head, and none of its channels lie behind the pairs.
    """
    whole = channels_of(head_dim, pairs, adjacent)
    piece = pairs & -pairs
    if whole.rest or piece < LEAST_PIECE or piece == pairs:
        return whole
    return whole._replace(pairs_padded=piece, pieces=pairs // piece)


def angles_of(rotation: RotationArguments) -> Angles:
    """Return how a rotation makes its angles."""
    return Angles(
        rotation.axes,
        rotation.is_table,
        rotation.fractional,
        rotation.as_hf,
        rotation.conjugate,
        rotation.attention_factor != 1.0,
        rotation.cache_rows,
        rotation.head_groups,
        rotation.own_frequencies,
    )


def norm_arguments(norm: Norm) -> tuple[Any, ...]:
    """Return both weights, eps and offset; without a norm None for each, which is no parameter of a kernel."""
    return (None,) * 4 if norm.is_none else (norm.q_weight, norm.k_weight, norm.eps, norm.offset)


LEAST_PIECE = 4
"""Least pairs in a row of a program: 8 bytes of half a head in bfloat16."""

MOST_HEADS = 16
"""Heads of a program one after the other: with more, the last programs run alone for long."""


def tiles(tokens: int, heads: int, pairs: int) -> tuple[int, int, int]:
    """Choose tokens per program, programs that share the heads of these tokens, and warps per program.

    A program makes its phases once, in as many instructions as six or seven heads take, so it should have many heads;
    but a device is only full with a few thousand warps, and needs fewer where it waits for phases more than for heads.
    A thread holds eight pairs of a head: two loads of 16 bytes.
    """
    warps, wanted = (4, 4096) if tokens >= 2048 else (1, 2048)
    block = max(1, 32 * warps * 8 // pairs)
    shares = max(wanted // (warps * cdiv(tokens, block)), cdiv(heads, MOST_HEADS))
    return block, max(1, min(cdiv(heads, 2), shares)), warps


def shares_of(shares: int, groups: int) -> int:
    """Round up to as many programs for each group of heads: a program has phases of one group alone."""
    return groups * cdiv(shares, groups) if groups else shares


def width(head_dim: int, pairs: int, whole: bool) -> int:
    """Count the pairs of a head that threads share: those that turn, or half of all channels, as a norm needs."""
    return power_of_two(max(pairs, head_dim // 2) if whole else pairs)


def cdiv(total: int, size: int) -> int:
    """Count the parts of a size that hold a total, as ``triton.cdiv``, which a kernel may call and takes 2 µs."""
    return -(-total // size)


def power_of_two(count: int) -> int:
    """Return the least power of two that is no less, as ``triton.next_power_of_2``, but 1 for none."""
    return 1 << max(count - 1, 0).bit_length()
