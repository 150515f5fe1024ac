"""The rotation as a registered torch operator: tensors and numbers in, its own backward by a flag."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpos.rotary import phases, reference

CPU_BLOCK = 256
"""Tokens whose cos and sin are made at a time on a CPU."""


@torch.library.custom_op("mmpos::rotate", mutates_args=())
def rotate(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    pair_axis: Tensor,
    kind: int,
    adjacent: bool,
    attention_factor: float,
    conjugate: bool,
    triton: bool,
) -> tuple[Tensor, Tensor]:
    """Rotated q and k.

    Args:
        q: (batch, seq, num_heads, head_dim), any strides.
        k: (batch, seq, num_kv_heads, head_dim); zero heads where there is no k.
        positions: a table or dense ids, as the mode says.
        frequencies: (3, pairs) int64 words of exact turns, or (pairs,) float32 as in Transformers.
        pair_axis: (pairs,) int32 axis of each pair.
        kind: what positions holds, the mode of phases; torch's modes take the name for themselves.
        adjacent: whether pair j is channels (2j, 2j + 1).
        attention_factor: multiplies cos and sin.
        conjugate: rotate backwards.
        triton: by the kernel instead of plain torch.
    """
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    _run(q, k, q_out, k_out, positions, frequencies, pair_axis, kind, adjacent, attention_factor, conjugate, triton)
    return q_out, k_out


@torch.library.custom_op("mmpos::rotate_", mutates_args=("q", "k"))
def rotate_(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    pair_axis: Tensor,
    kind: int,
    adjacent: bool,
    attention_factor: float,
    conjugate: bool,
    triton: bool,
) -> None:
    """Rotate q and k in place; arguments as for ``rotate``."""
    _run(q, k, q, k, positions, frequencies, pair_axis, kind, adjacent, attention_factor, conjugate, triton)


def cos_sin(
    positions: Tensor, frequencies: Tensor, pair_axis: Tensor, mode: int, tokens: int, attention_factor: float
) -> tuple[Tensor, Tensor]:
    """(tokens, pairs) float32 cos and sin, times the attention factor."""
    fixed = phases.fixed_positions(positions, mode, tokens)
    axis = pair_axis.to(torch.int64)
    as_hf, fractional = frequencies.dtype == torch.float32, mode in (phases.TABLE_FRACTIONAL, phases.DENSE_FIXED)
    # On a CPU in blocks that stay in its cache; on a device at once.
    block = CPU_BLOCK if fixed.device.type == "cpu" else max(1, tokens)
    cos = torch.empty((tokens, axis.shape[0]), dtype=torch.float32, device=fixed.device)
    sin = torch.empty_like(cos)
    for start in range(0, tokens, block):
        part = slice(start, start + block)
        if as_hf:
            cos[part], sin[part] = phases.cos_sin_as_hf(fixed[:, part], axis, frequencies)
        else:
            cos[part], sin[part] = phases.cos_sin(fixed[:, part], axis, frequencies, fractional)
    return (cos, sin) if attention_factor == 1.0 else (cos.mul_(attention_factor), sin.mul_(attention_factor))


def _run(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, positions: Tensor, frequencies: Tensor, pair_axis: Tensor,
    mode: int, adjacent: bool, attention_factor: float, conjugate: bool, triton: bool,
) -> None:  # fmt: skip
    if triton:
        from mmpos.rotary import kernel

        kernel.launch(
            q, k, q_out, k_out, positions, frequencies, pair_axis, mode=mode, adjacent=adjacent,
            as_hf=frequencies.dtype == torch.float32, attention_factor=attention_factor, conjugate=conjugate,
        )  # fmt: skip
        return
    batch, seq = q.shape[:2]
    if batch * seq == 0:
        return
    cos, sin = cos_sin(positions, frequencies, pair_axis, mode, batch * seq, attention_factor)
    cos, sin = cos.view(batch, seq, -1), sin.view(batch, seq, -1)
    if conjugate:
        sin = -sin
    reference.rotate([(q, q_out), (k, k_out)], cos, sin, adjacent=adjacent)


@rotate.register_fake
def _(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, positions, frequencies, pair_axis, *ctx.numbers = inputs
    ctx.save_for_backward(positions, frequencies, pair_axis)


def _backward(ctx: Any, q_grad: Tensor, k_grad: Tensor) -> tuple[Tensor | None, ...]:
    mode, adjacent, attention_factor, conjugate, triton = ctx.numbers
    # What needs no gradient is left out, as a tensor without heads.
    wanted = [
        grad if needed else grad.new_empty((*grad.shape[:2], 0, grad.shape[3]))
        for grad, needed in zip((q_grad, k_grad), ctx.needs_input_grad[:2], strict=True)
    ]
    q_back, k_back = rotate(*wanted, *ctx.saved_tensors, mode, adjacent, attention_factor, not conjugate, triton)
    needs_q, needs_k = ctx.needs_input_grad[:2]
    return q_back if needs_q else None, k_back if needs_k else None, *(None,) * 8


rotate.register_autograd(_backward, setup_context=_remember)
