"""Tell what gradients go through and who else sees a call, and refuse to write where anything else lies."""

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
"""Counts the modes that see operators, of which no public name tells; where it is gone there may always be one."""


def is_plain(*tensors: Tensor) -> bool:
    """Check that an operator may be called without torch's dispatcher, which takes longer than a small rotation.

    Nobody else sees the call: no graph is traced, no mode is on, no gradient goes through, and tensors are in memory.
    """
    if not is_unseen(*tensors):
        return False
    try:
        return all(x.data_ptr() or not x.numel() for x in tensors)
    except RuntimeError:  # those of vmap and other transforms have no address
        return False


def is_unseen(*tensors: Tensor | None) -> bool:
    """Check for plain tensors as ``is_plain`` does, but not whether they are in memory."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[no-untyped-call, attr-defined]
    if traced or _modes():
        return False
    grad = torch.is_grad_enabled()
    for x in tensors:  # noqa: SIM110  # all(…) would take longer
        if x is None or type(x) not in _TYPES or (grad and x.requires_grad) or x.is_neg():
            return False
    return True


_TYPES = (Tensor, Parameter)


def shown(x: Tensor) -> Tensor:
    """Return a tensor whose memory is what it shows, which a view of the negative has with the other sign."""
    return x.resolve_neg() if not torch.compiler.is_compiling() and x.is_neg() else x


def has_tangent(x: Tensor) -> bool:
    """Check for a gradient in forward mode, which the operators would leave out."""
    return may_have_tangents() and forward_ad.unpack_dual(x).tangent is not None


def may_have_tangents() -> bool:
    """Check whether any tensor may have a gradient in forward mode: outside of its levels none has."""
    return getattr(forward_ad, "_current_level", 0) >= 0  # where torch tells no level, there may always be one


def check_no_tangent(name: str, x: Tensor) -> None:
    """Refuse gradients in forward mode."""
    if not torch.compiler.is_compiling() and has_tangent(x):
        raise UnsupportedError(f"{name}: got a forward-mode tangent, want reverse-mode gradients")


def mark_written(*tensors: Tensor) -> None:
    """Tell autograd of tensors that were written to: it refuses to go back through what was saved before."""
    torch.autograd.graph.increment_version(tensors)  # not of those of inference mode, which have no version


def check_inference(tensors: Mapping[str, Tensor | None]) -> None:
    """Refuse tensors that gradients go through, in either mode."""
    grad = torch.is_grad_enabled()
    for name, x in tensors.items():
        if x is None:
            continue
        if grad and x.requires_grad:
            raise UnsupportedError(f"{name}: got a tensor that requires gradients, want torch.no_grad(): none are made")
        check_no_tangent(name, x)


def check_inplace(tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor | None]) -> None:
    """Refuse to rotate in place what gradients go through, or what shares memory."""
    for name, x in {**weights, **tensors}.items():
        if x is not None and torch.is_grad_enabled() and x.requires_grad:
            raise UnsupportedError(f"inplace: got {name} that requires gradients, want inplace=False")
    check_written(tensors, [*tensors][::-1], want="inplace=False")


def check_written(tensors: Mapping[str, Tensor], written: Sequence[str], want: str | None = None) -> None:
    """Refuse to write where anything else lies.

    Args:
        tensors: all that are read or written, by name.
        written: names of those that are written.
        want: of the caller, for messages; None is memory of their own.
    """
    # Where there are no addresses, there may still be the same tensor twice.
    memory = {name: _memory_of(x) for name, x in tensors.items()} if _has_address(tensors[written[0]]) else {}
    for name in written:
        if memory and tensors[name].is_neg():
            raise UnsupportedError(f"{name}: got a view of the negative, want {want or 'what it is a view of'}")
        if memory and not _nested(memory[name].steps):
            raise InvalidInputError(
                f"{name}: got a tensor whose elements share memory, want {want or 'each by itself'}"
            )
        for other, y in tensors.items():
            if other != name and (tensors[name] is y or (memory and not _disjoint(memory[name], memory[other]))):
                raise InvalidInputError(f"{name}: got the memory of {other}, want {want or 'memory of its own'}")


def spans_of(*tensors: Tensor) -> tuple[Span, ...]:
    """Return how far each tensor reaches, and its steps: the same for all of its shape, strides and dtype."""
    return tuple(_steps_of(x.stride(), x.shape, x.element_size()) for x in tensors)


def are_apart(tensors: Sequence[Tensor], spans: Sequence[Span], written: int) -> bool:
    """Check that nothing else lies where the first tensors are written, all of them in memory.

    Args:
        tensors: all that are read or written.
        spans: theirs.
        written: how many are written.
    """
    begins = [x.data_ptr() for x in tensors]
    for i in range(written):
        begin, (reach, steps) = begins[i], spans[i]
        if not _nested(steps):
            return False
        for j, other in enumerate(begins):
            beside = i == j or other + spans[j][0] <= begin or begin + reach <= other
            if not beside and not _disjoint(_Memory(begin, reach, steps), _Memory(other, *spans[j])):
                return False
    return True


_Steps = tuple[tuple[int, int], ...]
Span = tuple[int, _Steps]
"""How far a tensor reaches from its address, in bytes, and strides and sizes of its dimensions."""

_seen = lru_cache(maxsize=1 << 12)
"""Remembers what follows from shapes, strides and distances alone: it would take longer than a launch to find anew."""


class _Memory(NamedTuple):
    """Bytes of a tensor: its address, how far it reaches from there, and strides and sizes of its dimensions."""

    begin: int
    reach: int
    steps: _Steps


def _has_address(x: Tensor) -> bool:
    """Check whether a tensor lies in memory: neither in a graph that is being traced, nor on the meta device."""
    return not torch.compiler.is_compiling() and x.untyped_storage().device.type != "meta"  # nor a FakeTensor


def _memory_of(x: Tensor) -> _Memory:
    return _Memory(x.data_ptr(), *_steps_of(x.stride(), x.shape, x.element_size()))


@_seen
def _steps_of(strides: tuple[int, ...], sizes: tuple[int, ...], width: int) -> tuple[int, _Steps]:
    """Count what the dimensions span, and list their strides and sizes, the largest first, in bytes."""
    if 0 in sizes:  # strides of nothing may be anything
        return 0, ()
    by_element = ((stride * width, size) for stride, size in zip(strides, sizes, strict=True))
    steps = tuple(sorted((step for step in (*by_element, (1, width)) if step[1] > 1), reverse=True))
    return _reach(steps) + 1, steps


def _reach(steps: _Steps) -> int:
    return sum(stride * (size - 1) for stride, size in steps)


@_seen
def _nested(steps: _Steps) -> bool:
    """Check whether no two elements share memory: every step passes all that lies below it."""
    return all(stride > _reach(steps[i + 1 :]) for i, (stride, _) in enumerate(steps))


def _disjoint(x: _Memory, y: _Memory) -> bool:
    """Check whether two views share no byte: one lies behind the other, in all or within equal outer steps."""
    low, high = (x, y) if x.begin <= y.begin else (y, x)
    gap = high.begin - low.begin
    return gap >= low.reach or not high.reach or _interleaved(low.steps, high.steps, gap)


@_seen
def _interleaved(inner: _Steps, other: _Steps, gap: int) -> bool:
    while _reach(inner) >= gap:
        if not inner or not other or inner[0] != other[0] or inner[0][0] <= gap + _reach(other[1:]):
            return False
        inner, other = inner[1:], other[1:]
    return True
