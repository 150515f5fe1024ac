"""Bounds on the difference between two correct results, from dtypes, sizes and magnitudes, and all other tolerances.

Where one code path computes both sides, tests compare bits. Elsewhere, each side has rounding errors: one operation
changes a result by a factor 1 + δ with |δ| ≤ u, the unit roundoff, and n in a row change it by a factor 1 + θ with |θ|
≤ γₙ = n·u / (1 − n·u). A sum of n products is off by at most γₙ·Σ|a||b|, in any order, with vectors of any width and
with fused operations [1, 3.1]. The bounds here apply to the difference between two computed sides, so they are twice
the bound of one side.

[1] Higham, Accuracy and Stability of Numerical Algorithms, second edition, 2002.
[2] Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41, 2019.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

INTERPRETED = not torch.cuda.is_available() and "standin" not in sys.modules
"""Whether kernels run in Triton's interpreter, which truncates to bfloat16 instead of rounding."""

LIBRARY = 4
"""Errors of sin, cos and pow in units in the last place: at most 4 in numpy's vector code and 3.5 in torch's."""

FREQUENCY = 2 * LIBRARY + 16 + 1
"""Roundings of a library frequency θ^−x: in the power, in x (which counts x·ln θ < 16 times), in the reciprocal."""

EXACT = 2e-7
"""Error of cos and sin of exact angles, at every id, as docs/transformers.md promises."""


def truncation(way: str, dtype: torch.dtype) -> int:
    """Return the error of an implementation in units in the last place, if the interpreter truncates to its dtype."""
    return int(INTERPRETED and way == "triton" and dtype == torch.bfloat16)


def unit(dtype: Any) -> float:
    """Return the unit roundoff: half the distance from 1 to the next number."""
    return float((torch if isinstance(dtype, torch.dtype) else np).finfo(dtype).eps) / 2


def gamma(n: float, dtype: Any = torch.float32) -> float:
    """Return the largest relative error of n roundings in a row."""
    share = n * unit(dtype)
    return share / (1 - share)


ARITHMETIC = sqrt(2) * EXACT + gamma(3)
"""Error of an exact rotation in float32, relative to the length of its pair (a, b): a·cos ∓ b·sin, times a factor."""


def cos_sin(angles: Any = 0.0, roundings: float = 0, dtype: Any = torch.float32) -> Any:
    """Bound the difference from another library's cos and sin, if each side rounds an angle ``roundings`` times."""
    return 2 * (LIBRARY * unit(dtype) + gamma(roundings, dtype) * abs(angles))


def rotations(x: Any, off: float = 0.0) -> Any:
    """Bound, for each head, (…, 1), the difference from heads rotated by another formula, with cos and sin ``off``.

    A channel is a·cos ∓ b·sin, times an attention factor, so each term is rounded three times. By Cauchy–Schwarz,
    |a·cos| + |b·sin| ≤ √(a² + b²), the length of the pair, which rotations preserve and which is at most √2·max|x|.
    """
    most = abs(x).max(-1, keepdims=True) if isinstance(x, np.ndarray) else x.detach().abs().amax(-1, keepdim=True)
    dtype = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype  # dtype of the rotation
    return sqrt(2) * most * (2 * gamma(3, dtype) + sqrt(2) * off)


def rounded(x: Tensor, bound: Any) -> Any:
    """Bound how far x and another result differ, given that they differed by ``bound`` before rounding to x's dtype."""
    return bound + 2 * unit(x.dtype) * (x.detach().double().abs() + bound)


def normalised(mean: Sequence[float], std: Sequence[float]) -> float:
    """Bound the difference that folded constants make to (byte / 255 − mean) / std in float32: four roundings."""
    return max(2 * gamma(4) * (1 + m) / s for m, s in zip(mean, std, strict=True))


def rounding(
    run: Callable[[], Tensor | Iterable[Tensor]], tensors: Iterable[Tensor], length: int = 0, dtype: Any = None
) -> list[float]:
    """Bound how far results differ from those of kernels that sum in another order or fuse operations.

    A rounded sum of n products is the exact sum of perturbed numbers, each with a relative error of at most γₙ [1,
    3.1], and of about √n·u in practice, since errors of both signs cancel [2]. This function therefore perturbs each
    number of ``tensors``, such as a model's weights, eight times by √n·u, up or down at random, where n is the largest
    side, or ``length``. The change in each result of ``run`` estimates the effect of rounding; the result is a sum
    itself, and is also perturbed by √n·u. All else (norms, softmax, rotations) rounds a number only a few times.
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
    """Copy one tensor or several into a list."""
    return [x.detach().clone() for x in ([tensors] if isinstance(tensors, Tensor) else tensors)]


def printed(text: str) -> object:
    """Compare with a number printed in a source, within half a unit of its last digit."""
    exponent = Decimal(text).as_tuple().exponent
    assert isinstance(exponent, int)
    return pytest.approx(float(text), rel=0, abs=(0.5 + 1e-9) * 10.0**exponent)


def assert_within(actual: Any, expected: Any, bound: Any) -> None:
    """Assert that every number in arrays or sequences of arrays is within a bound of the expected number."""
    if isinstance(actual, list | tuple) and not isinstance(actual[0], float):
        bounds = bound if isinstance(bound, list) else [bound] * len(actual)
        for triple in zip(actual, expected, bounds, strict=True):
            assert_within(*triple)
        return
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype
    got, want, limit = (doubles(x) for x in (actual, expected, bound[0] if isinstance(bound, list) else bound))
    assert got.shape == want.shape
    difference = np.abs(got - want)
    wrong = ~(difference <= limit)  # so that NaN is wrong
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} are wrong, the first at {np.argwhere(wrong)[0].tolist()}: got {got[wrong][0]}, "
        f"want {want[wrong][0]} within {np.broadcast_to(limit, got.shape)[wrong][0]:.3g}"
    )


def doubles(x: Any) -> Any:
    """Convert numbers to a double-precision numpy array."""
    if isinstance(x, Tensor):
        x = x.detach().cpu()
        return (x.to(torch.complex128) if x.is_complex() else x.double()).numpy()
    return np.asarray(x, np.result_type(np.asarray(x).dtype, np.float64))
