"""Whether tensors can be written to: what shares memory with itself or with another cannot."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.rotary.norms import Norm


def check_inplace(q: Tensor, k: Tensor | None, norm: Norm) -> None:
    """Refuse tensors that gradients go through, or whose elements would be read after they were written.

    Args:
        q: (batch, seq, heads, head_dim).
        k: likewise, or None.
        norm: whose weights may not require gradients either.

    Raises:
        UnsupportedError: something requires gradients.
        InvalidInputError: elements share memory.
    """
    for name, weight in (("q_norm_weight", norm.q_weight), ("k_norm_weight", norm.k_weight)):
        if weight is not None and torch.is_grad_enabled() and weight.requires_grad:
            raise UnsupportedError(f"inplace: got {name} that requires gradients, want inplace=False")
    for name, x in (("q", q), ("k", k)):
        if x is None:
            continue
        if torch.is_grad_enabled() and x.requires_grad:
            raise UnsupportedError(f"inplace: got {name} that requires gradients, want inplace=False")
        # A graph that is being traced has no addresses yet.
        if not torch.compiler.is_compiling() and not nested(steps(x)):
            raise InvalidInputError(f"{name}: got a tensor whose elements share memory, want inplace=False")
    if k is not None and not torch.compiler.is_compiling() and not apart(q, k):
        raise InvalidInputError("k: got the memory of q, want inplace=False")


def steps(x: Tensor) -> list[tuple[int, int]]:
    """Strides and sizes, the largest stride first, without the dimensions of one element."""
    return sorted(((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1), reverse=True)


def _reach(steps: list[tuple[int, int]]) -> int:
    return sum(stride * (size - 1) for stride, size in steps)


def nested(steps: list[tuple[int, int]]) -> bool:
    """Whether no two elements share memory: every step passes all that lies below it."""
    return all(stride > _reach(steps[i + 1 :]) for i, (stride, _) in enumerate(steps))


def apart(q: Tensor, k: Tensor) -> bool:
    """Whether two views share no element: one lies behind the other, in all or within equal outer steps."""
    if not q.numel() or not k.numel():
        return True
    low, high = sorted((q, k), key=Tensor.data_ptr)
    gap = (high.data_ptr() - low.data_ptr()) // q.element_size()
    inner, other = steps(low), steps(high)
    while _reach(inner) >= gap:
        if not inner or not other or inner[0] != other[0] or inner[0][0] <= gap + _reach(other[1:]):
            return False
        inner, other = inner[1:], other[1:]
    return True
