"""Norm and rotation as registered torch operators: the rotation's arguments, weights before them, own gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mmpos.rotary import cpu, norm_reference, reference
from mmpos.rotary.norms import Norm
from mmpos.rotary.operator import (
    ARGUMENTS,
    AUTO,
    LIBRARY,
    TRITON,
    cos_sin,
    nothing,
    outside_of_graphs,
    rotate,
    shapes,
    written,
)
from mmpos.support import native

NORM = "Tensor? q_weight, Tensor? k_weight, float eps, float offset"
"""What follows q and k; a Norm. After it comes what the rotation takes."""

LIBRARY.define(
    f"norm_rotate(Tensor q, Tensor k, {NORM}, {ARGUMENTS}) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag
)
LIBRARY.define(f"norm_rotate_(Tensor(a!) q, Tensor(b!) k, {NORM}, {ARGUMENTS}) -> ()", tags=torch.Tag.pt2_compliant_tag)
LIBRARY.define(
    f"norm_rotate_backward(Tensor q_grad, Tensor k_grad, Tensor q, Tensor k, bool[4] wanted, {NORM}, {ARGUMENTS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
norm_rotate = torch.ops.mmpos.norm_rotate.default
"""Normalised and rotated q and k."""
norm_rotate_ = torch.ops.mmpos.norm_rotate_.default
"""Normalise and rotate q and k in place."""
norm_rotate_backward = torch.ops.mmpos.norm_rotate_backward.default
"""Gradients of q, k and both weights; those that are not wanted are empty."""


def _norm_rotate(q: Tensor, k: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    _run(q, k, q_out, k_out, *arguments)
    return q_out, k_out


def _norm_rotate_in_place(q: Tensor, k: Tensor, *arguments: Any) -> None:
    _run(q, k, q, k, *arguments)
    written(q, k)


def _run(q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, *arguments: Any) -> None:
    norm, rest = Norm(*arguments[:4]), arguments[4:]
    if rest[-1] == TRITON:
        from mmpos.rotary import kernel

        kernel.launch(q, k, q_out, k_out, *rest[:3], norm=norm, **_numbers(*rest))
    elif q.shape[0] * q.shape[1]:
        turn = _turn(q, *rest)
        for x, out, weight in zip((q, k), (q_out, k_out), norm.weights(), strict=True):
            if weight is None:
                reference.rotate_by(turn, x, out, 2 * rest[2].shape[0])
            else:
                norm_reference.rotate(x, out, weight, arguments[2], turn)


def _norm_rotate_backward(
    q_grad: Tensor, k_grad: Tensor, q: Tensor, k: Tensor, wanted: list[bool], *arguments: Any
) -> tuple[Tensor, ...]:
    norm, rest = Norm(*arguments[:4]), arguments[4:]
    outs = [torch.empty_like(x) if want else None for x, want in zip((q, k), wanted[:2], strict=True)]
    sums: list[Tensor | None] = [q.new_zeros(q.shape[3], dtype=torch.float32) if want else None for want in wanted[2:]]
    *tensors, mode, adjacent, attention_factor, conjugate, implementation = rest
    back = *tensors, mode, adjacent, attention_factor, not conjugate, implementation
    if not q.shape[0] * q.shape[1]:
        pass
    elif implementation == TRITON:
        from mmpos.rotary import kernel

        sums = kernel.launch_backward(
            (q_grad, k_grad), (q, k), outs, wanted[2:], *tensors, norm=norm, **_numbers(*back)
        )
    else:
        turn = _turn(q, *back)
        for grad, x, out, weight, total in zip((q_grad, k_grad), (q, k), outs, norm.weights(), sums, strict=True):
            if weight is not None:
                norm_reference.backward(grad, x, weight, arguments[2], turn, out, total)
            elif out is not None:
                reference.rotate_by(turn, grad, out, 2 * rest[2].shape[0])
    given = *outs, *(None if x is None or w is None else x.to(w.dtype) for x, w in zip(sums, norm[:2], strict=True))
    return tuple(q.new_empty(0) if x is None else x for x in given)


def _numbers(
    _positions: Tensor, frequencies: Tensor, _pair_axis: Tensor, mode: int, adjacent: bool, attention_factor: float,
    conjugate: bool, _implementation: int,
) -> dict[str, Any]:  # fmt: skip
    """What launches take by name."""
    return {
        "mode": mode, "adjacent": adjacent, "as_hf": frequencies.dtype == torch.float32,
        "attention_factor": attention_factor, "conjugate": conjugate,
    }  # fmt: skip


def _turn(
    q: Tensor, positions: Tensor, frequencies: Tensor, pair_axis: Tensor, mode: int, adjacent: bool,
    attention_factor: float, conjugate: bool, implementation: int,
) -> reference.Turn:  # fmt: skip
    """What turns blocks: the extension in C where it is wanted and there, else plain torch, with the same bits."""
    batch, seq = q.shape[:2]
    given = positions, frequencies, pair_axis, mode, batch * seq, attention_factor

    @cache
    def plain() -> reference.Turn:
        cos, sin = (x.view(batch, seq, -1) for x in cos_sin(*given))
        return reference.turning(cos, -sin if conjugate else sin, adjacent)

    if implementation != AUTO or native.core is None or q.device.type != "cpu":
        return plain()
    source = cpu.tables(*cos_sin(*given)) if frequencies.dtype == torch.float32 else cpu.exact(*given)
    if source is None:
        return plain()
    return cpu.turning(source, seq, adjacent=adjacent, conjugate=conjugate, otherwise=plain)


def _backward_shapes(
    _q_grad: Tensor, _k_grad: Tensor, q: Tensor, k: Tensor, wanted: list[bool], *arguments: Any
) -> tuple[Tensor, ...]:
    like = (q, k, *arguments[:2])
    return tuple(torch.empty_like(x) if want else q.new_empty(0) for x, want in zip(like, wanted, strict=True))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, q_weight, k_weight, ctx.eps, ctx.offset, *tensors, mode, adjacent, factor, conjugate, by = inputs
    ctx.numbers = mode, adjacent, factor, conjugate, by
    # What is not normalised goes back without being there.
    kept = (None if w is None else x for x, w in ((q, q_weight), (k, k_weight)))
    ctx.save_for_backward(*kept, q_weight, k_weight, *tensors)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, q_weight, k_weight, positions, frequencies, pair_axis = ctx.saved_tensors
    weights, wanted = (q_weight, k_weight), list(ctx.needs_input_grad[:4])
    xs = [grad if x is None else x for grad, x in zip(grads, inputs, strict=True)]
    given = list(grads)
    for i in range(2):
        if not (wanted[i] or wanted[2 + i]):  # left out, as a tensor without heads
            given[i], xs[i] = given[i][:, :, :0], xs[i][:, :, :0]
    turned = positions, frequencies, pair_axis, *ctx.numbers
    if torch.is_grad_enabled():
        found = _differentiable(given, xs, weights, ctx.eps, ctx.offset, turned)
    else:
        found = norm_rotate_backward(*given, *xs, wanted, *weights, ctx.eps, ctx.offset, *turned)
    return *(x if want else None for x, want in zip(found, wanted, strict=True)), *(None,) * 10


def _differentiable(
    grads: list[Tensor], xs: list[Tensor], weights: Sequence[Tensor | None], eps: float, offset: float, turned: Any
) -> tuple[Tensor | None, ...]:
    """The same gradients by operations that have gradients of their own, for derivatives of derivatives."""
    *tensors, mode, adjacent, attention_factor, conjugate, implementation = turned
    back = *tensors, mode, adjacent, attention_factor, not conjugate, implementation
    straight = rotate(*(grad.to(torch.float32) for grad in grads), *back)
    found = [
        norm_reference.gradients(grad, x, weight, eps, offset)
        for grad, x, weight in zip(straight, xs, weights, strict=True)
    ]
    return *(x for x, _ in found), *(weight for _, weight in found)


for _name, _function in (
    ("norm_rotate", _norm_rotate),
    ("norm_rotate_", _norm_rotate_in_place),
    ("norm_rotate_backward", _norm_rotate_backward),
):
    LIBRARY.impl(_name, outside_of_graphs(_function), "CompositeExplicitAutograd")
torch.library.register_fake("mmpos::norm_rotate", shapes, lib=LIBRARY)
torch.library.register_fake("mmpos::norm_rotate_", nothing, lib=LIBRARY)
torch.library.register_fake("mmpos::norm_rotate_backward", _backward_shapes, lib=LIBRARY)
torch.library.register_autograd("mmpos::norm_rotate", _backward, setup_context=_remember, lib=LIBRARY)
