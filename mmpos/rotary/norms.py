"""What a norm before the rotation is: weights of q and of k, and the two numbers that go with them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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


NONE = Norm(None, None, None, None)
"""No norm."""
