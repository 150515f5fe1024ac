"""Detect autograd, tracing and dispatch modes, and refuse writes to memory that tensors share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from mmpos.errors import InvalidInputError, UnsupportedError

_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
"""Number of active dispatch modes, which no public function returns; 1 if torch lacks the private function."""


def is_plain(*tensors: Tensor) -> bool:
    """Return whether a call may bypass torch's dispatcher, which takes longer than a small rotation.

    This requires that no graph is traced, no dispatch mode is active, no tensor needs a gradient, and every tensor has
    allocated storage.
    """
    if not is_unseen(*tensors):
        return False
    try:
        return all(x.data_ptr() or not x.numel() for x in tensors)
    except RuntimeError:  # tensors under vmap and other transforms have no address
        return False


def is_unseen(*tensors: Tensor) -> bool:
    """Return whether all conditions of ``is_plain`` hold, except that tensors need not have allocated storage."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[no-untyped-call, attr-defined]
    if traced or _modes():
        return False
    grad = torch.is_grad_enabled()
    for x in tensors:  # noqa: SIM110  # all(…) is slower
        if type(x) not in _TYPES or (grad and x.requires_grad) or x.is_neg():
            return False
    return True


_TYPES = (Tensor, Parameter)


def shown(x: Tensor) -> Tensor:
    """Return x with its actual values in memory: a negative view stores them with the opposite sign."""
    return x.resolve_neg() if not torch.compiler.is_compiling() and x.is_neg() else x


def has_tangent(x: Tensor) -> bool:
    """Return whether x has a forward-mode gradient, which the operators do not support."""
    active = getattr(forward_ad, "_current_level", 0) >= 0  # without a level, no tensor has a forward-mode gradient
    return active and forward_ad.unpack_dual(x).tangent is not None


def check_no_tangent(name: str, x: Tensor) -> None:
    """Raise if x has a forward-mode gradient."""
    if not torch.compiler.is_compiling() and has_tangent(x):
        raise UnsupportedError(f"{name}: got a forward-mode tangent, want reverse-mode gradients")


def mark_written(*tensors: Tensor) -> None:
    """Increment the versions of written tensors, so that autograd refuses to use stale saved values."""
    torch.autograd.graph.increment_version(tensors)  # tensors from inference mode have no version and are skipped


def check_inference(tensors: Mapping[str, Tensor | None]) -> None:
    """Raise if a tensor requires gradients or has a forward-mode gradient."""
    grad = torch.is_grad_enabled()
    for name, x in tensors.items():
        if x is None:
            continue
        if grad and x.requires_grad:
            raise UnsupportedError(f"{name}: got a tensor that requires gradients, want torch.no_grad()")
        check_no_tangent(name, x)


def check_inplace(tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor | None]) -> None:
    """Raise if tensors or weights require gradients, or if tensors that are rotated in place share memory."""
    for name, x in {**weights, **tensors}.items():
        if x is not None and torch.is_grad_enabled() and x.requires_grad:
            raise UnsupportedError(f"inplace: got {name} that requires gradients, want inplace=False")
    check_written(tensors, [*tensors][::-1], want="inplace=False")


def check_written(tensors: Mapping[str, Tensor], written: Sequence[str], want: str | None = None) -> None:
    """Raise if a written tensor shares memory with another tensor or overlaps itself.

    Args:
        tensors: all tensors that are read or written, by name.
        written: names of the tensors that are written.
        want: what error messages suggest instead; None means separate memory.
    """
    # Without addresses, only the identity of tensors can be checked.
    memory = {name: _memory_of(x) for name, x in tensors.items()} if _has_address(tensors[written[0]]) else {}
    for name in written:
        if memory and tensors[name].is_neg():
            raise UnsupportedError(f"{name}: got a negative view, want {want or 'its base tensor'}")
        if memory and not _nested(memory[name].steps):
            raise InvalidInputError(
                f"{name}: got a tensor whose elements share memory, want {want or 'separate elements'}"
            )
        for other, y in tensors.items():
            if other != name and (tensors[name] is y or (memory and not _disjoint(memory[name], memory[other]))):
                raise InvalidInputError(f"{name}: got the memory of {other}, want {want or 'separate memory'}")


_Steps = tuple[tuple[int, int], ...]

_cached = lru_cache(maxsize=1 << 12)
"""Cache for functions of shapes, strides and distances, which take longer than a kernel launch."""


class _Memory(NamedTuple):
    """Memory of a tensor: its address, bytes to its end, and strides and sizes of its dimensions."""

    begin: int
    reach: int
    steps: _Steps


def _has_address(x: Tensor) -> bool:
    """Return whether a tensor has allocated storage: it must not be traced, on the meta device, or a FakeTensor."""
    return not torch.compiler.is_compiling() and x.untyped_storage().device.type != "meta"


def _memory_of(x: Tensor) -> _Memory:
    return _Memory(x.data_ptr(), *_steps_of(x.stride(), x.shape, x.element_size()))


@_cached
def _steps_of(strides: tuple[int, ...], sizes: tuple[int, ...], width: int) -> tuple[int, _Steps]:
    """Return a view's extent in bytes, and the strides (in bytes) and sizes of its dimensions, by descending stride."""
    if 0 in sizes:  # an empty tensor may have any strides
        return 0, ()
    by_element = ((stride * width, size) for stride, size in zip(strides, sizes, strict=True))
    steps = tuple(sorted((step for step in (*by_element, (1, width)) if step[1] > 1), reverse=True))
    return _reach(steps) + 1, steps


def _reach(steps: _Steps) -> int:
    return sum(stride * (size - 1) for stride, size in steps)


@_cached
def _nested(steps: _Steps) -> bool:
    """Return whether all elements are separate: every stride is larger than the extent of the inner dimensions."""
    return all(stride > _reach(steps[i + 1 :]) for i, (stride, _) in enumerate(steps))


def _disjoint(x: _Memory, y: _Memory) -> bool:
    """Return whether two views share no byte: one lies after the other, entirely or within equal outer strides."""
    low, high = (x, y) if x.begin <= y.begin else (y, x)
    gap = high.begin - low.begin
    return gap >= low.reach or not high.reach or _interleaved(low.steps, high.steps, gap)


@_cached
def _interleaved(inner: _Steps, other: _Steps, gap: int) -> bool:
    while _reach(inner) >= gap:
        if not inner or not other or inner[0] != other[0] or inner[0][0] <= gap + _reach(other[1:]):
            return False
        inner, other = inner[1:], other[1:]
    return True
