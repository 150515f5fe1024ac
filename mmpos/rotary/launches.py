"""Relaunch compiled kernels: a call whose form has passed all checks before skips the checks and launches its kernel.

The form of a call consists of all arguments that are not tensors, and of the dtypes, shapes, strides and devices of its
tensors. Addresses, on which checks and compiled kernels also depend, are not part of the form and are checked in every
call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mmpos.rotary import paged
from mmpos.rotary.config import Rotary
from mmpos.rotary.device import DevicePositions, Positions
from mmpos.rotary.memory import Span, are_apart, is_unseen, mark_written, may_have_tangents, spans_of
from mmpos.rotary.paged import Cache, Stored
from mmpos.rotary.reference import Norm, RotationArguments

Form: TypeAlias = tuple[Any, ...]
"""Properties that all calls of one compiled kernel share."""

MOST = 1024
"""Maximum number of cached forms; one more form clears the cache."""


class _Known(NamedTuple):
    """Cache entry of a form.

    Args:
        bound: bound kernel; None if the kernel cannot be bound or the form has been seen only once.
        spans: memory extents of the tensors that must not overlap.
        seen: number of calls with this form, counted up to 2.
    """

    bound: Any = None
    spans: tuple[Span, ...] = ()
    seen: int = 1


_KNOWN: dict[Form, _Known] = {}


def form_of(
    tensors: Sequence[Tensor | None], positions: object, rotary: Rotary, norm: Norm | None, *options: object
) -> Form | None:
    """Return the form of a call; None if the call needs the operators, for example under autograd or torch.compile.

    Args:
        tensors: all tensors except positions and weights.
        positions: positions as the caller passed them.
        rotary: the rotary of the call.
        norm: the norm of the call, or None.
        options: all other arguments that affect the call.
    """
    if torch.compiler.is_compiling() or may_have_tangents() or type(rotary) is not Rotary:
        return None
    if type(positions) is not DevicePositions or not (norm is None or type(norm) is Norm):
        return None
    of_norm: tuple[Any, ...] = ()
    if norm is not None:
        of_norm = *norm[2:], type(norm.after), norm.q_weight is None, norm.k_weight is None
        tensors = *tensors, *_weights(norm)
    if positions.form is None or not is_unseen(*tensors):
        return None
    forms = [(x.dtype, x.shape, x.stride(), x.get_device()) for x in tensors if x is not None]
    return *options, *map(type, options), rotary.text, positions.form, *of_norm, *forms  # types, since True == 1


def form_of_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: object,
    rotary: Rotary,
    norm: Norm | None,
    cache: Cache,
    *options: object,
) -> Form | None:
    """Return the form of a call that stores k and v; None if the call has scales or non-contiguous slots."""
    if type(cache) is not Cache or cache[4:] != (None, None, None):
        return None
    form = form_of((q, k, v, *cache[:3]), positions, rotary, norm, cache.layout, *options)
    return form if form is not None and cache.slot_mapping.is_contiguous() else None


def rotated(
    form: Form, q: Tensor, k: Tensor | None, positions: Positions, norm: Norm | None, inplace: bool
) -> tuple[Tensor, Tensor] | None:
    """Rotate like ``apply_rotary``; return None, with nothing written, if the operators are required."""
    assert isinstance(positions, DevicePositions)  # form_of returns None for other positions
    assert k is not None  # form_of returns None without k
    table, weights = positions.table, _weights(norm)
    known = _known(form, (q, k, table, *weights))
    if known is None or (inplace and not are_apart((q, k), known.spans, 2)):
        return None
    outs = (q, k) if inplace else (torch.empty_like(q), torch.empty_like(k))
    known.bound.launch(q, k, *outs, table, *weights)
    if inplace:
        mark_written(q, k)
    return outs


def stored(
    form: Form, q: Tensor, k: Tensor, v: Tensor, positions: Positions, norm: Norm | None, cache: Cache, inplace: bool
) -> tuple[Tensor, None] | None:
    """Rotate and store like ``rotate_and_store``; return None, with nothing written, if the operators are required."""
    assert isinstance(positions, DevicePositions)  # form_of returns None for other positions
    table, weights = positions.table, _weights(norm)
    keys, values, slots = cache.key_cache, cache.value_cache, cache.slot_mapping
    known = _known(form, (q, k, v, keys, values, slots, table, *weights))
    if known is None or not are_apart((keys, values, q, k, v), known.spans, 3 if inplace else 2):
        return None
    if not slots.is_cuda:
        paged.check_slots(slots.numpy(), keys.numel() * positions.num_tokens // k.numel(), paged.STORED)
    q_out = q if inplace else torch.empty_like(q)
    known.bound.launch(q, k, v, q_out, keys, values, slots, table, *weights)
    mark_written(keys, values, *((q,) if inplace else ()))
    return q_out, None


def learn_rotation(
    form: Form, q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, rotation: RotationArguments, norm: Norm
) -> None:
    """Bind a rotation's kernel when its form is seen for the second time; see ``launch_rotate`` for the arguments."""
    if _is_second_call(form, (q, k, rotation.positions, *_weights(norm))):
        from mmpos.rotary import kernel

        bind = partial(kernel.bind, kernel.ROTATED)
        bound = kernel.launch_rotate(q, k, q_out, k_out, rotation, norm, start=bind)
        _KNOWN[form] = _Known(bound, spans_of(q, k), 2)


def learn_store(
    form: Form, q: Tensor, k: Tensor, q_out: Tensor, stored: Stored, rotation: RotationArguments, norm: Norm
) -> None:
    """Bind the kernel of a call that stores k and v; see ``learn_rotation``, and ``launch_store`` for the arguments."""
    if _is_second_call(form, (q, k, *stored[:4], rotation.positions, *_weights(norm))):
        from mmpos.rotary import kernel

        bind = partial(kernel.bind, kernel.STORED)
        bound = kernel.launch_store(q, k, q_out, k[:, :, :0], stored, rotation, norm, start=bind)
        _KNOWN[form] = _Known(bound, spans_of(*stored.caches, q, k, stored.v), 2)


def _is_second_call(form: Form, tensors: Sequence[Tensor]) -> bool:
    known = _KNOWN.get(form)
    if known is None:
        if len(_KNOWN) >= MOST:
            _KNOWN.clear()
        _KNOWN[form] = _Known()
        return False
    return known.seen == 1 and _are_aligned(tensors)


def _known(form: Form, tensors: Sequence[Tensor]) -> _Known | None:
    """Return the cache entry of a form if its kernel can be launched with these tensors, else None."""
    try:
        known, first = _KNOWN.get(form), tensors[0]
    except TypeError:  # an argument is not hashable; the operators' checks will report this
        return None
    if known is None or known.bound is None or not _are_aligned(tensors):
        return None
    return None if first.is_cuda and first.get_device() != torch.cuda.current_device() else known


def _are_aligned(tensors: Sequence[Tensor]) -> bool:
    """Return whether all addresses are multiples of 16 bytes; Triton compiles different code for other addresses."""
    address = 0
    for x in tensors:
        address |= x.data_ptr()
    return address % 16 == 0


def _weights(norm: Norm | None) -> list[Tensor]:
    return [] if norm is None else [x for x in norm[:2] if x is not None]
