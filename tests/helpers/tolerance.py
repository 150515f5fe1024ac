"""Bounds of how far apart two right answers may lie, from dtypes, sizes and magnitudes: the one place of tolerances.

Bits are compared where one code path makes both sides. Elsewhere each side is off by what it rounds: an operation by a
factor 1 + δ with |δ| ≤ u, the unit roundoff, and n in a row by a factor 1 + θ with |θ| ≤ γₙ = n·u / (1 − n·u). A sum of
n products is off by γₙ·Σ|a||b| at most, in any order, with vectors of any width and with fused operations [1, 3.1].
Bounds here are between two computed sides, and so twice that of one.

[1] Higham, Accuracy and Stability of Numerical Algorithms, second edition, 2002.
[2] Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41, 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

LIBRARY = 4
"""Units in the last place by which sin, cos and pow may err: those of numpy's vectors by 4, of torch's by 3.5."""

FREQUENCY = 2 * LIBRARY + 16 + 1
"""Roundings of a frequency θ^−x of a library: of the power, of x (which counts x·ln θ < 16 times), of 1 over it."""

EXACT = 2e-7
"""Error of cos and sin of exact turns, at every id, as docs/transformers.md promises."""


def unit(dtype: Any) -> float:
    """The unit roundoff: half the step from 1 to the next number."""
    return float((torch if isinstance(dtype, torch.dtype) else np).finfo(dtype).eps) / 2


def gamma(n: float, dtype: Any = torch.float32) -> float:
    """The most by which n roundings in a row move a number, as a share of it."""
    share = n * unit(dtype)
    return share / (1 - share)


ARITHMETIC = sqrt(2) * EXACT + gamma(3)
"""Error of an exact rotation in float32, of the length of its pair (a, b): for a·cos ∓ b·sin, times a factor."""


def cos_sin(angles: Any = 0.0, roundings: float = 0, dtype: Any = torch.float32) -> Any:
    """Bound of cos and sin against those of another library: a unit in the last place of a number below 1 is u at most.

    Args:
        angles: in radians.
        roundings: those that made an angle, on each side; 0 if both sides take the same angles.
        dtype: of the angles.
    """
    return 2 * (LIBRARY * unit(dtype) + gamma(roundings, dtype) * abs(angles))


def rotations(x: Any, off: float = 0.0) -> Any:
    """Bound of rotated heads against the same by another formula.

    A channel is a·cos ∓ b·sin, times a factor of attention: three roundings of each term. By Cauchy and Schwarz,
    |a·cos| + |b·sin| ≤ √(a² + b²), the length of the pair, which rotations keep: √2·max|x| at most.

    Args:
        x: (…, head_dim), rotated.
        off: bound of cos and sin of one side against those of the other; 0 if they are the same numbers.

    Returns:
        (…, 1).
    """
    most = abs(x).max(-1, keepdims=True) if isinstance(x, np.ndarray) else x.detach().abs().amax(-1, keepdim=True)
    dtype = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype  # in which heads are rotated
    return sqrt(2) * most * (2 * gamma(3, dtype) + sqrt(2) * off)


def rounded(x: Tensor, bound: Any) -> Any:
    """Bound after both sides, which were within a bound, were rounded to the dtype of x, one of them."""
    return bound + 2 * unit(x.dtype) * (x.detach().double().abs() + bound)


def normalised(mean: Sequence[float], std: Sequence[float]) -> float:
    """Bound of (byte / 255 − mean) / std in float32 against the same with its constants folded: four roundings."""
    return max(2 * gamma(4) * (1 + m) / s for m, s in zip(mean, std, strict=True))


def rounding(
    run: Callable[[], Tensor | Iterable[Tensor]], tensors: Iterable[Tensor], length: int = 0, dtype: Any = None
) -> list[float]:
    """Bound of what some kernels give against what others give: kernels that sum in another order, or fuse operations.

    A rounded sum of n products is the exact sum of numbers that were moved: by a share of γₙ at most [1, 3.1], and of
    about √n·u, as errors of either sign cancel [2]. So each number that goes in is moved by √n·u, up or down by chance,
    eight times, where n is the longest sum; by how much a result changes is how far rounding moves it, and as a sum of
    its own it is moved by √n·u. All else (norms, softmax, rotations) rounds a number a few times, not √n.

    Args:
        run: gives a tensor, or a sequence of them.
        tensors: what goes in, such as the weights of a model; as before in the end.
        length: the longest sum, where it is longer than any side of the tensors.
        dtype: in which run rounds the most, where it is not that of the tensors.

    Returns:
        One for each tensor that run gives.
    """
    kept = [(tensor.data, tensor.detach().clone()) for tensor in tensors]
    n = max(length, *(side for _, tensor in kept for side in tensor.shape))
    share = sqrt(n) * unit(dtype or kept[0][1].dtype)
    generator, right = torch.Generator().manual_seed(0), listed(run())
    moves = [0.0] * len(right)
    for _ in range(8):
        for data, tensor in kept:
            sign = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor) * 2 - 1
            data.copy_(tensor * (1 + share * sign))
        moved = [float((x - y).abs().max()) for x, y in zip(listed(run()), right, strict=True)]
        moves = [max(pair) for pair in zip(moves, moved, strict=True)]
    for data, tensor in kept:
        data.copy_(tensor)
    return [2 * (moved + share * float(x.abs().max())) for moved, x in zip(moves, right, strict=True)]


def listed(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Copy tensors, of which one may come alone."""
    return [x.detach().clone() for x in ([tensors] if isinstance(tensors, Tensor) else tensors)]


def printed(text: str) -> object:
    """A number as a source prints it: good to half a unit of its last digit."""
    exponent = Decimal(text).as_tuple().exponent
    assert isinstance(exponent, int)
    return pytest.approx(float(text), rel=0, abs=(0.5 + 1e-9) * 10.0**exponent)


def assert_within(actual: Any, expected: Any, bound: Any) -> None:
    """Check that every number is within a bound of the one expected; either may be an array or a sequence of arrays."""
    if isinstance(actual, list | tuple) and not isinstance(actual[0], float):
        bounds = bound if isinstance(bound, list) else [bound] * len(actual)
        for each in zip(actual, expected, bounds, strict=True):
            assert_within(*each)
        return
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype
    got, want, most = (doubles(x) for x in (actual, expected, bound[0] if isinstance(bound, list) else bound))
    assert got.shape == want.shape
    apart = np.abs(got - want)
    wrong = ~(apart <= most)  # so that NaN is wrong
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} are wrong, the first at {np.argwhere(wrong)[0].tolist()}: got {got[wrong][0]}, "
        f"want {want[wrong][0]} within {np.broadcast_to(most, got.shape)[wrong][0]:.3g}"
    )


def doubles(x: Any) -> Any:
    """Numbers as an array of numpy in double precision."""
    if isinstance(x, Tensor):
        x = x.detach().cpu()
        return (x.to(torch.complex128) if x.is_complex() else x.double()).numpy()
    return np.asarray(x, np.result_type(np.asarray(x).dtype, np.float64))
