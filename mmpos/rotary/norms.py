"""What a norm before the rotation is: weights of q and of k, and the two numbers that go with them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mmpos.errors import InvalidInputError, UnsupportedError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of what is rotated, and of weights."""

LEAST_EPS = 2.0**-126
"""The least normal float32: the kernel takes less than that for zero, whose inverse root is no number."""

LARGEST = 2.0**127
"""Beyond it float32 has infinity, times which a channel of zero is no number."""


class Norm(NamedTuple):
    """RMSNorm of each head: x / √(mean(x²) + eps) · (weight + offset), over all its channels.

    Args:
        q_weight: (head_dim,) contiguous, or None where q is not normalised.
        k_weight: likewise of k.
        eps: added to the mean of squares; None without weights.
        offset: added to the weights: 1.0 in Gemma; None without weights.
    """

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float | None
    offset: float | None

    def weights(self) -> tuple[Tensor | None, Tensor | None]:
        """(head_dim,) float32 weights of q and of k, offset included."""
        return _offset(self.q_weight, self.offset), _offset(self.k_weight, self.offset)


def norm_of(
    q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, offset: float
) -> Norm:
    """The norm that arguments ask for, which is ``NONE`` without weights.

    Raises:
        InvalidInputError: a weight does not fit q or k, or a number is out of range.
        UnsupportedError: a weight has a forward-mode tangent.
    """
    if q_weight is None and k_weight is None:
        return NONE
    if k is None and k_weight is not None:
        raise InvalidInputError("k_norm_weight: got a weight without k, want None")
    if not (isinstance(eps, int | float) and LEAST_EPS <= eps <= LARGEST):
        raise InvalidInputError(f"norm_eps: got {eps!r}, want an int or float from 2⁻¹²⁶ to 2¹²⁷")
    if not (isinstance(offset, int | float) and abs(offset) <= LARGEST):
        raise InvalidInputError(f"norm_weight_offset: got {offset!r}, want an int or float from -2¹²⁷ to 2¹²⁷")
    weights = _checked("q", q, q_weight), _checked("k", k, k_weight)
    return Norm(*weights, float(eps), float(offset))


def _checked(name: str, x: object, weight: Tensor | None) -> Tensor | None:
    if weight is None or not isinstance(x, Tensor):
        return None  # what is no tensor is refused with q and k
    if not isinstance(weight, Tensor) or weight.dtype not in FLOATS:
        got = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise InvalidInputError(f"{name}_norm_weight: got {got}, want a tensor of float32, bfloat16 or float16")
    if weight.shape != x.shape[-1:]:
        raise InvalidInputError(f"{name}_norm_weight: got shape {tuple(weight.shape)}, want {tuple(x.shape[-1:])}")
    if weight.device != x.device:
        raise InvalidInputError(f"{name}_norm_weight: got a tensor on {weight.device}, want {x.device} as {name}")
    check_no_tangent(f"{name}_norm_weight", weight)
    return weight.contiguous()


def check_no_tangent(name: str, x: Tensor) -> None:
    """Refuse gradients in forward mode, which the operators would leave out."""
    if not torch.compiler.is_compiling() and forward_ad.unpack_dual(x).tangent is not None:
        raise UnsupportedError(f"{name}: got a forward-mode tangent, want reverse-mode gradients")


def _offset(weight: Tensor | None, offset: float | None) -> Tensor | None:
    if weight is None or offset is None:
        return None
    weight = weight.to(torch.float32)
    return weight + offset if offset else weight


NONE = Norm(None, None, None, None)
"""No norm."""
