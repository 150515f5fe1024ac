"""Detect autograd, tracing and dispatch modes, and refuse writes to memory that tensors share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from mmpos.errors import InvalidInputError, UnsupportedError

_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
"""Number of active dispatch modes, which no public function returns; 1 if torch lacks the private function."""


def is_plain(*tensors: Tensor, allocated: bool = True) -> bool:
    """Return whether a call may bypass torch's dispatcher, which takes longer than a small rotation.

    This requires that no graph is traced, no dispatch or forward mode is active, no tensor needs a gradient, and every
    tensor has allocated storage, which is not checked without ``allocated``.
    """
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[no-untyped-call, attr-defined]
    if traced or _modes() or getattr(forward_ad, "_current_level", 0) >= 0:
        return False
    grad = torch.is_grad_enabled()
    try:
        for x in tensors:
            if type(x) not in _TYPES or (grad and x.requires_grad) or x.is_neg():
                return False
            if allocated and not x.data_ptr() and x.numel():
                return False
    except RuntimeError:  # tensors under vmap and other transforms have no address
        return False
    return True


_TYPES = (Tensor, Parameter)


def has_tangent(x: Tensor) -> bool:
    """Return whether x has a forward-mode gradient, which the operators do not support."""
    return forward_ad.unpack_dual(x).tangent is not None


class Form(NamedTuple):
    """All that the checks of a tensor depend on, except its values and its address.

    Args:
        dtype: its dtype.
        shape: its shape.
        stride: its strides.
        device: its device.
        graded: whether the call must have a gradient for it.
        tangent: whether it has a forward-mode gradient.
    """

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device
    graded: bool
    tangent: bool


class TensorWithoutStrides:
    """Type that error messages show for sparse and nested tensors."""


def form_of(x: object) -> Form | type:
    """Return the form of a tensor, or a type: of any other object, or for a tensor without strides."""
    if not isinstance(x, Tensor):
        return type(x)
    if x.layout is not torch.strided:
        return TensorWithoutStrides
    graded = x.requires_grad and torch.is_grad_enabled()
    # Without a level, no tensor has a forward-mode gradient, and unpacking takes longer than the other fields.
    level = not torch.compiler.is_compiling() and getattr(forward_ad, "_current_level", 0) >= 0
    return Form(x.dtype, x.shape, x.stride(), x.device, graded, level and has_tangent(x))


def got(form: Form | type) -> object:
    """Return the dtype of a tensor or the type of another object, as error messages show it."""
    return form.dtype if isinstance(form, Form) else form.__name__


_cached = lru_cache(maxsize=1 << 12, typed=True)
"""Cache for functions of forms and distances, which take longer than a kernel launch."""


def checked_once(check: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what a check returns, by all its arguments: calls that are alike are checked once, unless traced."""
    known = _cached(check)

    def checked(*arguments: Any) -> Any:
        if not torch.compiler.is_compiling():
            with suppress(TypeError):  # an argument has no hash
                return known(*arguments)
        return check(*arguments)

    return checked


def check_floats(name: str, form: Form | type) -> Form:
    """Return the form of a tensor that can be rotated or be a weight."""
    if not isinstance(form, Form) or form.dtype not in FLOATS:
        raise InvalidInputError(f"{name}: got {got(form)}, want a tensor of float32, bfloat16 or float16")
    check_no_tangent(name, form)
    return form


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of tensors that can be rotated, and of weights."""


def check_no_tangent(name: str, form: Form) -> None:
    """Raise if a tensor has a forward-mode gradient."""
    if form.tangent:
        raise UnsupportedError(f"{name}: got a forward-mode tangent, want reverse-mode gradients")


def check_inference(forms: Mapping[str, Form | type]) -> None:
    """Raise if a tensor requires gradients or has a forward-mode gradient."""
    for name, form in forms.items():
        if isinstance(form, Form) and form.graded:
            raise UnsupportedError(f"{name}: got a tensor that requires gradients, want torch.no_grad()")
        if isinstance(form, Form):
            check_no_tangent(name, form)


def mark_written(*tensors: Tensor) -> None:
    """Increment the versions of written tensors, so that autograd refuses to use stale saved values."""
    torch.autograd.graph.increment_version(tensors)  # tensors from inference mode have no version and are skipped


def check_written(tensors: Mapping[str, Tensor], written: Sequence[str], want: str | None = None) -> None:
    """Raise if a written tensor shares memory with another tensor or overlaps itself.

    Args:
        tensors: all tensors that are read or written, by name.
        written: names of the tensors that are written.
        want: what error messages suggest instead; None means separate memory.
    """
    # Without addresses, only the identity of tensors can be checked.
    known = not torch.compiler.is_compiling() and tensors[written[0]].untyped_storage().device.type != "meta"
    memory = {
        name: (x.data_ptr(), *_steps_of(x.stride(), x.shape, x.element_size())) if known else (0, 0, (), True)
        for name, x in tensors.items()
    }
    for name in written:
        x, (begin, reach, steps, separate) = tensors[name], memory[name]
        if known and x.is_neg():
            raise UnsupportedError(f"{name}: got a negative view, want {want or 'its base tensor'}")
        if not separate:
            raise InvalidInputError(
                f"{name}: got a tensor whose elements share memory, want {want or 'separate elements'}"
            )
        for other, (start, extent, others, _) in memory.items():
            near = reach and extent and begin < start + extent and start < begin + reach
            pair = (steps, others) if begin <= start else (others, steps)
            if other != name and (x is tensors[other] or (near and not _interleaved(*pair, abs(begin - start)))):
                raise InvalidInputError(f"{name}: got the memory of {other}, want {want or 'separate memory'}")


_Steps = tuple[tuple[int, int], ...]


@_cached
def _steps_of(strides: tuple[int, ...], sizes: tuple[int, ...], width: int) -> tuple[int, _Steps, bool]:
    """Return a view's extent in bytes, its strides in bytes with sizes, largest first, and whether no elements overlap.

    Elements are separate if every stride is larger than the extent of the inner dimensions.
    """
    if 0 in sizes:  # an empty tensor may have any strides
        return 0, (), True
    by_element = ((stride * width, size) for stride, size in zip(strides, sizes, strict=True))
    steps = tuple(sorted((step for step in (*by_element, (1, width)) if step[1] > 1), reverse=True))
    separate = all(stride > _reach(steps[i + 1 :]) for i, (stride, _) in enumerate(steps))
    return _reach(steps) + 1, steps, separate


def _reach(steps: _Steps) -> int:
    return sum(stride * (size - 1) for stride, size in steps)


@_cached
def _interleaved(inner: _Steps, other: _Steps, gap: int) -> bool:
    """Return whether two views share no byte: the second begins a gap later, within equal outer strides."""
    while _reach(inner) >= gap:
        if not inner or not other or inner[0] != other[0] or inner[0][0] <= gap + _reach(other[1:]):
            return False
        inner, other = inner[1:], other[1:]
    return True
