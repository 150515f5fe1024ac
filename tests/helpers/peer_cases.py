"""Shared parts of the peer tests: pairwise test designs, the peers' rotation, and bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import sqrt
from typing import Any, NamedTuple

import pytest
import torch
from tolerance import LIBRARY, gamma, unit
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""The device of all tensors: a GPU runs the kernel, a CPU the extension or plain torch."""

SIDE = sqrt(2) * LIBRARY * unit(torch.float32) + gamma(3)
"""Error of one rotation in float32, relative to its pair's length: a library's cos and sin, and three roundings."""


class Tolerance(NamedTuple):
    """The difference that a peer accepts: atol + rtol · |reference|."""

    rtol: float
    atol: float


def pairwise_cases(factors: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Return a few cases that together contain every pair of values of any two factors, as pytest.param with an id.

    Each case begins with a pair that no case contains yet, and uses for every other factor the value that adds the most
    new pairs. Such a design finds bugs that depend on one setting or on a combination of two. It is the same in every
    run.

    >>> [case.values for case in pairwise_cases({"a": "xy", "b": (1, 2), "c": (True, False)})]
    [('x', 1, True), ('x', 2, False), ('y', 1, False), ('y', 2, True)]

    Args:
        factors: maps the name of each parameter to its values.
    """
    values = list(factors.values())
    return [
        pytest.param(*(values[factor][i] for factor, i in enumerate(case)), id="-".join(map(str, case)))
        for case in _covering([len(choices) for choices in values])
    ]


def _covering(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield cases as value indices, one per factor."""
    left = {
        (a, i, b, j) for a, b in combinations(range(len(sizes)), 2) for i in range(sizes[a]) for j in range(sizes[b])
    }
    while left:
        a, i, b, j = min(left)
        case = {a: i, b: j}
        for factor in range(len(sizes)):
            if factor not in case:
                gains = [
                    sum(_pair(factor, value, *other) in left for other in case.items())
                    for value in range(sizes[factor])
                ]
                case[factor] = gains.index(max(gains))
        left -= {_pair(*first, *second) for first, second in combinations(sorted(case.items()), 2)}
        yield tuple(case[factor] for factor in range(len(sizes)))


def _pair(a: int, i: int, b: int, j: int) -> tuple[int, int, int, int]:
    return (a, i, b, j) if a < b else (b, j, a, i)


def float32_angles(ids: Tensor, dim: int, theta: float) -> Tensor:
    """Return (…, dim/2) angles as all peers compute them, with float32 frequencies and float32 products."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return ids.float()[..., None] * (1.0 / torch.pow(theta, exponents)).to(ids.device)


def channels(width: int, adjacent: bool) -> tuple[slice, slice]:
    """Return the slices that select the first and second channels of the pairs."""
    return (slice(0, width, 2), slice(1, width, 2)) if adjacent else (slice(width // 2), slice(width // 2, width))


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, adjacent: bool) -> Tensor:
    """Rotate by the peers' formula: (a, b) becomes (a·cos − b·sin, b·cos + a·sin); channels after the pairs are kept.

    Args:
        x: (…, head_dim), rounded to its dtype after each operation.
        cos: (…, pairs), broadcast against x.
        sin: (…, pairs), broadcast against x.
        adjacent: whether pair j is channels (2j, 2j + 1).
    """
    first, second = channels(2 * cos.shape[-1], adjacent)
    out = x.clone()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def assert_rotations_agree(
    ours: Tensor | None,
    theirs: Tensor,
    x: Tensor,
    pairs: int,
    adjacent: bool,
    *,
    peer: Tolerance | None = None,
) -> None:
    """Assert that two rotations of x agree within the rounding error, and within the peer's tolerance.

    Each rotation may be off by SIDE times the length of each pair, and is rounded to its dtype; unrotated channels must
    be equal.

    Args:
        ours: the result of this library.
        theirs: the result of the peer's formula, in the same dtype.
        x: the rotated heads, in the same layout.
        pairs: number of rotated pairs, which come first.
        adjacent: as for ``rotate_pairs``.
        peer: the peer's tolerance.
    """
    assert ours is not None
    assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
    first, second = channels(2 * pairs, adjacent)
    of_pairs = torch.hypot(x[..., first].float(), x[..., second].float()) * 2 * SIDE
    rounding = torch.finfo(ours.dtype).eps * torch.maximum(ours.abs(), theirs.abs()).float()
    room = torch.zeros_like(rounding)
    room[..., first], room[..., second] = of_pairs + rounding[..., first], of_pairs + rounding[..., second]
    difference = (ours.float() - theirs.float()).abs() - torch.finfo(ours.dtype).smallest_normal
    worst = int((difference - room).argmax())
    assert (difference <= room).all(), (
        f"{difference.flatten()[worst]:.3g} apart at {worst}, want {room.flatten()[worst]:.3g}"
    )
    if peer is not None:
        torch.testing.assert_close(ours, theirs, rtol=peer.rtol, atol=peer.atol)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Draw normally distributed numbers, the same in every run."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)
