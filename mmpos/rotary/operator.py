"""The rotation as a registered torch operator: tensors and numbers in, its own backward by a flag."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mmpos.rotary import cpu, phases, reference

CPU_BLOCK = 256
"""Tokens whose cos and sin are made at a time on a CPU."""

REFERENCE, TRITON, AUTO = range(3)
"""Implementations: plain torch, the kernel, and the extension where it takes the tensors, else plain torch."""

ARGUMENTS = (
    "Tensor positions, Tensor frequencies, Tensor pair_axis, "
    "int kind, bool adjacent, float attention_factor, bool conjugate, int implementation"
)
"""What follows q and k, (batch, seq, heads, head_dim) in any strides, where zero heads are no k.

    positions: a table or dense ids, as the mode says.
    frequencies: (3, pairs) int64 words of exact turns, or (pairs,) float32 as in Transformers.
    pair_axis: (pairs,) int32 axis of each pair.
    kind: what positions holds, the mode of phases; torch's modes take the name for themselves.
    adjacent: whether pair j is channels (2j, 2j + 1).
    attention_factor: multiplies cos and sin.
    conjugate: rotate backwards.
    implementation: REFERENCE, TRITON or AUTO.
"""

# Not by ``custom_op``, whose first call takes seconds: it imports what compiles graphs.
LIBRARY = torch.library.Library("mmpos", "FRAGMENT")
LIBRARY.define(f"rotate(Tensor q, Tensor k, {ARGUMENTS}) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag)
LIBRARY.define(f"rotate_(Tensor(a!) q, Tensor(b!) k, {ARGUMENTS}) -> ()", tags=torch.Tag.pt2_compliant_tag)
rotate = torch.ops.mmpos.rotate.default
"""Rotated q and k."""
rotate_ = torch.ops.mmpos.rotate_.default
"""Rotate q and k in place."""


def cos_sin(
    positions: Tensor, frequencies: Tensor, pair_axis: Tensor, mode: int, tokens: int, attention_factor: float
) -> tuple[Tensor, Tensor]:
    """(tokens, pairs) float32 cos and sin, times the attention factor."""
    fixed = phases.fixed_positions(positions, mode, tokens)
    axis = pair_axis.to(torch.int64)
    as_hf, fractional = frequencies.dtype == torch.float32, mode in (phases.TABLE_FRACTIONAL, phases.DENSE_FIXED)

    def of(part: Tensor) -> tuple[Tensor, Tensor]:
        if as_hf:
            return phases.cos_sin_as_hf(part, axis, frequencies)
        return phases.cos_sin(part, axis, frequencies, fractional)

    # On a CPU in blocks that stay in its cache; on a device at once, and in graphs, which would count the blocks.
    if fixed.device.type != "cpu" or torch.compiler.is_compiling():
        cos, sin = of(fixed)
    else:
        cos = torch.empty((tokens, axis.shape[0]), dtype=torch.float32)
        sin = torch.empty_like(cos)
        for start in range(0, tokens, CPU_BLOCK):
            block = slice(start, start + CPU_BLOCK)
            cos[block], sin[block] = of(fixed[:, block])
    return (cos, sin) if attention_factor == 1.0 else (cos.mul_(attention_factor), sin.mul_(attention_factor))


def _rotate(q: Tensor, k: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    _run(q, k, q_out, k_out, *arguments)
    return q_out, k_out


def _rotate_in_place(q: Tensor, k: Tensor, *arguments: Any) -> None:
    _run(q, k, q, k, *arguments)
    written(q, k)


def written(*tensors: Tensor) -> None:
    """Tell autograd of tensors that were written to: it refuses to go back through what was saved before."""
    torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])


def _run(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, positions: Tensor, frequencies: Tensor, pair_axis: Tensor,
    mode: int, adjacent: bool, attention_factor: float, conjugate: bool, implementation: int,
) -> None:  # fmt: skip
    tensors = (q, k, q_out, k_out)
    if implementation == TRITON:
        from mmpos.rotary import kernel

        kernel.launch(
            *tensors, positions, frequencies, pair_axis, mode=mode, adjacent=adjacent,
            as_hf=frequencies.dtype == torch.float32, attention_factor=attention_factor, conjugate=conjugate,
        )  # fmt: skip
        return
    batch, seq = q.shape[:2]
    if batch * seq == 0:
        return
    given = positions, frequencies, pair_axis, mode, batch * seq, attention_factor
    if implementation == AUTO and cpu.takes(*tensors):
        as_hf = frequencies.dtype == torch.float32
        source = cpu.tables(*cos_sin(*given)) if as_hf else cpu.exact(*given)
        if source is not None and cpu.rotate(*tensors, source, adjacent=adjacent, conjugate=conjugate):
            return
    cos, sin = (x.view(batch, seq, -1) for x in cos_sin(*given))
    reference.rotate([(q, q_out), (k, k_out)], cos, -sin if conjugate else sin, adjacent=adjacent)


def shapes(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """What an operator gives that makes new tensors."""
    return torch.empty_like(q), torch.empty_like(k)


def nothing(*_: Any) -> None:
    """What an operator gives that writes in place."""


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, positions, frequencies, pair_axis, *ctx.numbers = inputs
    ctx.save_for_backward(positions, frequencies, pair_axis)


def _backward(ctx: Any, q_grad: Tensor, k_grad: Tensor) -> tuple[Tensor | None, ...]:
    mode, adjacent, attention_factor, conjugate, implementation = ctx.numbers
    # What needs no gradient is left out, as a tensor without heads.
    wanted = [
        grad if needed else grad.new_empty((*grad.shape[:2], 0, grad.shape[3]))
        for grad, needed in zip((q_grad, k_grad), ctx.needs_input_grad[:2], strict=True)
    ]
    q_back, k_back = rotate(
        *wanted, *ctx.saved_tensors, mode, adjacent, attention_factor, not conjugate, implementation
    )
    needs_q, needs_k = ctx.needs_input_grad[:2]
    return q_back if needs_q else None, k_back if needs_k else None, *(None,) * 8


def outside_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function out of sight of what compiles graphs, once that is there."""
    hidden = cache(lambda: torch.compiler.disable(function))

    def call(*arguments: Any) -> Any:
        return (hidden() if "torch._dynamo" in sys.modules else function)(*arguments)

    return call


LIBRARY.impl("rotate", outside_of_graphs(_rotate), "CompositeExplicitAutograd")
LIBRARY.impl("rotate_", outside_of_graphs(_rotate_in_place), "CompositeExplicitAutograd")
torch.library.register_fake("mmpos::rotate", shapes, lib=LIBRARY)
torch.library.register_fake("mmpos::rotate_", nothing, lib=LIBRARY)
torch.library.register_autograd("mmpos::rotate", _backward, setup_context=_remember, lib=LIBRARY)
