"""Register the rotations as torch operators with their own gradients.

Operators accept only tensors and numbers, so ``RotationArguments``, ``Norm`` and ``Stored`` are unpacked into the
operators' arguments and rebuilt by the operators' functions. q, k and v are (batch, seq, heads, head_dim) with any
strides; a missing k has 0 heads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from mmpos.rotary import cpu, paged, reference
from mmpos.rotary.memory import is_plain, mark_written
from mmpos.rotary.paged import Stored
from mmpos.rotary.reference import AUTO, NO_NORM, TRITON, Norm, RotationArguments

__all__ = [
    "call",
    "define_operator",
    "rerotate_",
    "rotate",
    "rotate_",
    "rotate_and_store",
    "rotate_and_store_",
    "rotate_backward",
]

_ROTATION = (
    "Tensor positions, Tensor frequencies, Tensor pair_axis, "
    "int kind, bool adjacent, float attention_factor, bool conjugate, int implementation"
)
"""Schema of RotationArguments, whose mode is named kind because torch reserves "mode"."""

_NORM = "Tensor? q_weight, Tensor? k_weight, float eps, float offset, bool after"
"""Schema of Norm."""

_STORE = "Tensor v, Tensor(c!) key_cache, Tensor(d!) value_cache, Tensor slots, bool return_k"
"""Schema of Stored; caches may have any strides, and slots contains the (n,) int32 or int64 slots of the
first n tokens.
"""

# The operators that rotate, with the norm before or after the rotation.


def _rotate(q: Tensor, k: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    rotate_into(q, k, q_out, k_out, *_rotation_and_norm(arguments))
    return q_out, k_out


def _rotate_in_place(q: Tensor, k: Tensor, *arguments: Any) -> None:
    rotate_into(q, k, q, k, *_rotation_and_norm(arguments))
    mark_written(q, k)


def _rotation_and_norm(arguments: Sequence[Any]) -> tuple[RotationArguments, Norm]:
    count = len(NO_NORM)
    return RotationArguments(*arguments[count:]), Norm(*arguments[:count])


def rotate_into(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, rotation: RotationArguments, norm: Norm = NO_NORM,
    stored: Stored | None = None,
) -> None:  # fmt: skip
    """Do what ``reference.rotate_all`` does with the kernel, the extension or the reference, and store k and v."""
    if rotation.implementation == TRITON:
        from mmpos.rotary import kernel

        kernel.launch_rotate(q, k, q_out, k_out, rotation, norm, stored)
        return
    if rotation.implementation != AUTO or not cpu.rotate(q, k, q_out, k_out, rotation, norm):
        reference.rotate_all(q, k, q_out, k_out, rotation, norm)
    if stored is not None:
        paged.write((stored.key_cache, stored.value_cache), (k_out, stored.v), stored.slots)


def _rotate_backward(
    q_grad: Tensor, k_grad: Tensor, q: Tensor, k: Tensor, wanted: list[bool], *arguments: Any
) -> tuple[Tensor, ...]:
    rotation, norm = _rotation_and_norm(arguments)
    back, (batch, seq) = rotation._replace(conjugate=not rotation.conjugate), q.shape[:2]
    outs = [torch.empty_like(x) if want else None for x, want in zip((q, k), wanted[:2], strict=True)]
    sums: list[Tensor | None] = [q.new_zeros(q.shape[3], dtype=torch.float32) if want else None for want in wanted[2:]]
    if not batch * seq:
        pass
    elif rotation.implementation == TRITON:
        from mmpos.rotary import kernel

        sums = kernel.launch_backward((q_grad, k_grad), (q, k), outs, wanted[2:], back, norm)
    else:
        forward = partial(_rotated, rotation) if norm.after else None
        for i, (grad, x, out, weight) in enumerate(zip((q_grad, k_grad), (q, k), outs, norm.factors(), strict=True)):
            if weight is not None:
                backward = partial(_rotated, back)
                x_grad, weight_grad = reference.norm_backward(grad, x, weight, norm.eps, forward, backward)
                sums[i] = weight_grad if wanted[2 + i] else None
                if out is not None:
                    out.copy_(x_grad)
            elif out is not None:
                rotate_into(grad, grad[:, :, :0], out, out[:, :, :0], back)
    weights = (norm.q_weight, norm.k_weight)
    gradients = *outs, *(None if x is None or w is None else x.to(w.dtype) for x, w in zip(sums, weights, strict=True))
    return tuple(q.new_empty(0) if x is None else x for x in gradients)


def _rotated(rotation: RotationArguments, heads: Tensor) -> Tensor:
    """Return rotated (batch, seq, heads, head_dim) heads."""
    out, no_k = heads.new_empty(heads.shape), heads[:, :, :0]
    rotate_into(heads, no_k, out, no_k, rotation)
    return out


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, *arguments = inputs
    ctx.rotation, ctx.norm = _rotation_and_norm(arguments)
    # The gradient of a tensor that is not normalised does not depend on the tensor, so do not save it.
    weights = ctx.norm[:2]
    kept = (None if weight is None else x for x, weight in zip((q, k), weights, strict=True))
    ctx.save_for_backward(*kept, *weights, *ctx.rotation[:3])
    ctx.rotation, ctx.norm = ctx.rotation[3:], ctx.norm[2:]


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    q, k, q_weight, k_weight, *tensors = ctx.saved_tensors
    norm, rotation = Norm(q_weight, k_weight, *ctx.norm), RotationArguments(*tensors, *ctx.rotation)
    wanted = list(ctx.needs_input_grad[:4])
    # A tensor whose gradients are not wanted is passed with 0 heads.
    kept = [x if wanted[i] or wanted[2 + i] else None if x is None else x[:, :, :0] for i, x in enumerate((q, k))]
    grads = tuple(x if wanted[i] or wanted[2 + i] else x[:, :, :0] for i, x in enumerate(grads))
    if q_weight is None and k_weight is None:
        gradients = *rotate(*grads, *NO_NORM, *rotation._replace(conjugate=not rotation.conjugate)), None, None
    elif torch.is_grad_enabled():
        gradients = _differentiable_gradients(grads, kept, wanted, norm, rotation)
    else:
        inputs = [grad if x is None else x for grad, x in zip(grads, kept, strict=True)]
        gradients = rotate_backward(*grads, *inputs, wanted, *norm, *rotation)
    needed = (x if want else None for x, want in zip(gradients, wanted, strict=True))
    return *needed, *(None,) * (len(ctx.norm) + len(rotation))


def _differentiable_gradients(
    grads: Sequence[Tensor], kept: Sequence[Tensor | None], wanted: Sequence[bool], norm: Norm,
    rotation: RotationArguments,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Compute the gradients with differentiable torch operations, for higher derivatives."""
    # The gradient of a tensor that is not normalised does not depend on the tensor: use zeros.
    inputs = [
        torch.zeros_like(grad, requires_grad=True) if x is None else x for grad, x in zip(grads, kept, strict=True)
    ]
    weights = (norm.q_weight, norm.k_weight)
    outs: Sequence[Tensor] = [x.to(torch.float32) for x in inputs]
    if norm.after:
        outs = rotate(*outs, *NO_NORM, *rotation)
    outs = [reference.normalised(x, weight, norm.eps) for x, weight in zip(outs, norm.factors(), strict=True)]
    if not norm.after:
        outs = rotate(*outs, *NO_NORM, *rotation)
    sources = [x for x, want in zip((*inputs, *weights), wanted, strict=True) if want]
    grads = [grad.to(torch.float32) for grad in grads]
    gradients = iter(torch.autograd.grad(outs, sources, grads, create_graph=True))  # type: ignore[arg-type]
    return tuple(next(gradients) if want else None for want in wanted)


# The operators for the paged cache, which are for inference and have no gradients.


def _store(q: Tensor, k: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    q_out, k_out = _fake_store(q, k, *arguments)
    _store_into(q, k, q_out, k_out, *arguments)
    return q_out, k_out


def _store_in_place(q: Tensor, k: Tensor, *arguments: Any) -> None:
    stored = _store_into(q, k, q, k, *arguments)
    mark_written(q, *(k,) * stored.return_k)


def _store_into(q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, *arguments: Any) -> Stored:
    """Rotate q, and k if it is returned, into q_out and k_out, and write rotated k and v to a cache."""
    count = len(Stored._fields)
    stored, (rotation, norm) = Stored(*arguments[:count]), _rotation_and_norm(arguments[count:])
    k_rotated = k_out if stored.return_k or rotation.implementation == TRITON else torch.empty_like(k)
    rotate_into(q, k, q_out, k_rotated, rotation, norm, stored)
    mark_written(stored.key_cache, stored.value_cache)
    return stored


def _rerotate_in_place(pages: Tensor, slots: Tensor, from_positions: Tensor, from_mode: int, *arguments: Any) -> None:
    stop = RotationArguments(*arguments)
    start = stop._replace(positions=from_positions, mode=from_mode)
    if stop.implementation == TRITON:
        from mmpos.rotary import kernel

        kernel.launch_rerotate(pages, slots, start, stop)
    elif slots.shape[0] and pages.numel():
        keys = paged.read(pages, slots).unsqueeze(0)
        cos, sin = (x.unsqueeze(0) for x in reference.cos_sin_between(start, stop, slots.shape[0]))
        reference.rotate(keys, keys, reference.head_rotation(cos, sin, stop.adjacent), stop.num_pairs)
        paged.write((pages,), (keys,), slots)
    mark_written(pages)


# Fake implementations for tracing, which return shapes without values.


def _fake_rotate(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


def _fake_backward(
    _q_grad: Tensor, _k_grad: Tensor, q: Tensor, k: Tensor, wanted: list[bool], *arguments: Any
) -> tuple[Tensor, ...]:
    like = (q, k, *arguments[:2])
    return tuple(torch.empty_like(x) if want else q.new_empty(0) for x, want in zip(like, wanted, strict=True))


def _fake_store(q: Tensor, k: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    stored = Stored(*arguments[: len(Stored._fields)])
    return torch.empty_like(q), (torch.empty_like(k) if stored.return_k else k.new_empty((*k.shape[:2], 0, k.shape[3])))


def _fake_in_place(*_: Any) -> None:
    pass


# The operators.

# ``custom_op`` is not used: its first call imports the compiler, which takes seconds.
_LIBRARY = torch.library.Library("mmpos", "FRAGMENT")


def define_operator(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function as the torch operator ``torch.ops.mmpos.<name>`` and return the operator.

    Args:
        schema: name, arguments and results in the schema language of ``torch.library``.
        function: computes the results; the compiler does not trace into it.
        fake: returns results with the same shapes and dtypes but without values, for tracing.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(name, _outside_of_graphs(function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"mmpos::{name}", fake, lib=_LIBRARY)
    operator: Callable[..., Any] = getattr(torch.ops.mmpos, name).default
    _FUNCTIONS[operator] = function
    return operator


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {}


def call(operator: Callable[..., Any], *arguments: Any) -> Any:
    """Call an operator, or its function directly if torch's dispatcher is not needed."""
    plain = is_plain(*[x for x in arguments if isinstance(x, Tensor)])
    return (_FUNCTIONS[operator] if plain else operator)(*arguments)


def _outside_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hide a function from the compiler once the compiler is imported."""
    hidden = cache(lambda: torch.compiler.disable(function))

    def call(*arguments: Any) -> Any:
        return (hidden() if "torch._dynamo" in sys.modules else function)(*arguments)

    return call


rotate = define_operator(f"rotate(Tensor q, Tensor k, {_NORM}, {_ROTATION}) -> (Tensor, Tensor)", _rotate, _fake_rotate)
"""Normalise and rotate q and k into new tensors."""
rotate_ = define_operator(
    f"rotate_(Tensor(a!) q, Tensor(b!) k, {_NORM}, {_ROTATION}) -> ()", _rotate_in_place, _fake_in_place
)
"""Normalise and rotate q and k in place."""
rotate_backward = define_operator(
    f"rotate_backward(Tensor q_grad, Tensor k_grad, Tensor q, Tensor k, bool[4] wanted, {_NORM}, {_ROTATION})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _rotate_backward,
    _fake_backward,
)
"""Compute the gradients of q, k and both weights of a norm; unwanted gradients are empty."""
rotate_and_store = define_operator(
    f"rotate_and_store(Tensor q, Tensor k, {_STORE}, {_NORM}, {_ROTATION}) -> (Tensor, Tensor)",
    _store,
    _fake_store,
)
"""Rotate q, and k if return_k, into new tensors, and write rotated k and v to a cache."""
rotate_and_store_ = define_operator(
    f"rotate_and_store_(Tensor(a!) q, Tensor(b!) k, {_STORE}, {_NORM}, {_ROTATION}) -> ()",
    _store_in_place,
    _fake_in_place,
)
"""Rotate q in place, and k if return_k, and write rotated k and v to a cache."""
rerotate_ = define_operator(
    f"rerotate_(Tensor(a!) pages, Tensor slots, Tensor from_positions, int from_kind, {_ROTATION}) -> ()",
    _rerotate_in_place,
    _fake_in_place,
)
"""Rotate keys in a cache, (blocks, block_size, heads, head_dim), from from_positions to positions."""

torch.library.register_autograd("mmpos::rotate", _backward, setup_context=_save, lib=_LIBRARY)
