"""The door of the rotations: check, look at the tensors as (batch, seq, heads, head_dim), and call the operator."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from mmpos.errors import InvalidInputError
from mmpos.rotary import norm_operator, operator, phases
from mmpos.rotary.config import Rotary
from mmpos.rotary.memory import check_inplace
from mmpos.rotary.norms import FLOATS, NONE, Norm, check_no_tangent, norm_of
from mmpos.rotary.sources import Positions, Source, constants, source_of
from mmpos.support.checks import counted, one_of
from mmpos.support.extras import missing

__all__ = ["apply_rotary", "rotate_with"]

Layout = Literal["thd", "bshd", "bhsd"]
Implementation = Literal["auto", "reference", "triton"]


def apply_rotary(
    q: Tensor,
    k: Tensor | None,
    positions: Positions,
    rotary: Rotary,
    *,
    layout: Layout | None = None,
    inplace: bool = False,
    conjugate: bool = False,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_weight_offset: float = 0.0,
    implementation: Implementation = "auto",
    validate: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k by their positions: in one launch on a GPU, straight from the table.

    Each pair of channels (a, b) with angle φ = position · inv_freq becomes (a·cos φ − b·sin φ, b·cos φ + a·sin φ),
    in float32 with one rounding at the end. With ``precision="exact"`` cos and sin are within 2e-7 of the truth for
    every int32 id, fractions and negative ids included, at frequencies up to 1 rad per id, as every theta has them.
    Source: kexue.fm 8265 (RoPE), kexue.fm 10040 (RoPE-Tie).

    With weights each head x is first x / √(mean(x²) + norm_eps) · (weight + norm_weight_offset), over all its channels,
    in the same launch and without a rounding between. Source: arXiv 1910.07467 (RMSNorm).

    Args:
        q: (tokens, num_heads, head_dim), (batch, seq, num_heads, head_dim) or (batch, num_heads, seq, head_dim),
            float32, bfloat16 or float16, any strides: a view of a fused qkv is not copied.
        k: likewise with num_kv_heads, or None.
        positions: DevicePositions (nothing is copied), a PositionTable (one small copy), or dense ids, integer or
            float64, of shape (axes, tokens) or (axes, batch, seq).
        rotary: frequencies, and how they are allotted to axes and channels.
        layout: "thd", "bshd" or "bhsd"; None is thd for three dimensions and bshd for four, never guessed from sizes.
        inplace: write into q and k instead of new tensors; not while they require gradients.
        conjugate: rotate by the negative angles, which undoes a rotation; a norm still comes before it.
        q_norm_weight: (head_dim,) of the norm of q, float32, bfloat16 or float16; None does not normalise q.
        k_norm_weight: likewise of k.
        norm_eps: added to the mean of squares; from 2⁻¹²⁶ to 2¹²⁷.
        norm_weight_offset: added to the weights; Gemma's are 1.0 less than what multiplies.
        implementation: "triton", "reference" (plain torch), or "auto": triton on CUDA tensors, the extension
            in C on those of a CPU where it was built; all give the same bits, but for those of a NaN, for a norm,
            whose sum has another order in the kernel, and for "hf", whose cos and sin are those of libraries.
        validate: also check dense ids that lie on a device for their range, which waits for the device.

    Returns:
        q and k rotated (None for no k), in the dtypes and layout that came.

    Raises:
        InvalidInputError: shapes, dtypes, devices, axes or token counts do not fit together.
        UnsupportedError: in place under autograd; gradients in forward mode.
    """
    return rotate_with(
        None,
        q,
        k,
        positions,
        rotary,
        layout=layout,
        inplace=inplace,
        conjugate=conjugate,
        norm=norm_of(q, k, q_norm_weight, k_norm_weight, norm_eps, norm_weight_offset),
        implementation=implementation,
        validate=validate,
    )


def rotate_with(
    frequencies: tuple[Tensor, Tensor] | None,
    q: Tensor,
    k: Tensor | None,
    positions: Positions,
    rotary: Rotary,
    *,
    layout: Layout | None,
    inplace: bool,
    conjugate: bool,
    norm: Norm,
    implementation: Implementation,
    validate: bool,
) -> tuple[Tensor, Tensor | None]:
    """``apply_rotary`` with frequencies and pair axes that the caller holds on the device; None makes them once."""
    q4, k4 = views(q, k, layout)
    batch, seq, _, head_dim = q4.shape
    if head_dim != rotary.head_dim:
        raise InvalidInputError(f"q: got head_dim {head_dim}, want {rotary.head_dim} as in rotary")
    source = source_of(positions, q.device, validate)
    check_positions(source, rotary, q4)
    numbers = (
        source.mode,
        rotary.pairing == "adjacent",
        rotary.attention_factor,
        conjugate,
        chosen(implementation, q.device),
    )
    held = constants(rotary, q.device) if frequencies is None else frequencies
    if held[0].device != q.device:
        raise InvalidInputError(f"q: got a tensor on {q.device}, want {held[0].device} as the frequencies")
    keys = q4.new_empty((batch, seq, 0, head_dim)) if k4 is None else k4
    if inplace:
        if k is q:  # seen also where a graph is traced
            raise InvalidInputError("k: got the memory of q, want inplace=False")
        check_inplace(q4, k4, norm)
        if norm is NONE:
            operator.rotate_(q4, keys, source.positions, *held, *numbers)
        else:
            norm_operator.norm_rotate_(q4, keys, *norm, source.positions, *held, *numbers)
        return q, k
    if norm is NONE:
        q_out, k_out = operator.rotate(q4, keys, source.positions, *held, *numbers)
    else:
        q_out, k_out = norm_operator.norm_rotate(q4, keys, *norm, source.positions, *held, *numbers)
    return back(q_out, q, layout), None if k is None else back(k_out, k, layout)


def views(q: Tensor, k: Tensor | None, layout: Layout | None) -> tuple[Tensor, Tensor | None]:
    """q and k as (batch, seq, heads, head_dim)."""
    if layout is not None:
        one_of("layout", layout, ("thd", "bshd", "bhsd"))
    for name, x in (("q", q), ("k", k)):
        if x is None:
            continue
        if not isinstance(x, Tensor) or x.dtype not in FLOATS:
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise InvalidInputError(f"{name}: got {got}, want a tensor of float32, bfloat16 or float16")
        want = 3 if layout == "thd" else 4
        if (x.dim() != want) if layout is not None else (x.dim() not in (3, 4)):
            raise InvalidInputError(f"{name}: got shape {tuple(x.shape)}, want {_wanted_shape(layout)}")
        check_no_tangent(name, x)
    q4 = as_bshd(q, layout)
    if k is None:
        return q4, None
    if k.dtype != q.dtype or k.device != q.device or k.dim() != q.dim():
        raise InvalidInputError(
            f"k: got {k.dtype} on {k.device} with {k.dim()} dimensions, "
            f"want {q.dtype} on {q.device} with {q.dim()} as q"
        )
    k4 = as_bshd(k, layout)
    if k4.shape[:2] != q4.shape[:2] or k4.shape[3] != q4.shape[3]:
        before = layout is None and k.dim() == 4 and k.shape[2:] == q.shape[2:]
        hint = '; heads before seq are layout="bhsd"' if before else ""
        raise InvalidInputError(
            f"k: got shape {tuple(k.shape)}, want that of q, {tuple(q.shape)}, but for the heads{hint}"
        )
    return q4, k4


def _wanted_shape(layout: Layout | None) -> str:
    three, four = "(tokens, heads, head_dim)", "(batch, seq, heads, head_dim)"
    return {"thd": three, "bshd": four, "bhsd": "(batch, heads, seq, head_dim)"}.get(layout or "", f"{three} or {four}")


def as_bshd(x: Tensor, layout: Layout | None) -> Tensor:
    if x.dim() == 3:
        return x.unsqueeze(0)
    return x.transpose(1, 2) if layout == "bhsd" else x


def back(out: Tensor, like: Tensor, layout: Layout | None) -> Tensor:
    if like.dim() == 3:
        return out.squeeze(0)
    return out.transpose(1, 2) if layout == "bhsd" else out


def check_positions(source: Source, rotary: Rotary, q: Tensor) -> None:
    batch, seq, heads, _ = q.shape
    if source.positions.device != q.device:
        raise InvalidInputError(f"positions: got a tensor on {source.positions.device}, want {q.device} as q")
    if source.axes != rotary.axes:
        raise InvalidInputError(f"positions: got {counted(source.axes, 'axis')}, want {rotary.axes} as in rotary")
    if source.tokens != batch * seq:
        hint = "; heads and seq would fit if they were exchanged, see layout" if source.tokens == batch * heads else ""
        raise InvalidInputError(f"positions: got {source.tokens} tokens, want {batch * seq} as in q{hint}")
    row_length = source.shape[1] if len(source.shape) == 2 else 0
    known = row_length or source.mode in (phases.TABLE_INTEGER, phases.TABLE_FRACTIONAL)
    if batch > 1 and known and row_length != seq:
        raise InvalidInputError(
            f"positions: got documents of {row_length or 'unequal'} tokens, want {seq}, the seq of q; "
            "pad the table, or use layout thd"
        )


def chosen(implementation: Implementation, device: torch.device) -> int:
    """The operator's number of an implementation that can run there."""
    one_of("implementation", implementation, ("auto", "reference", "triton"))
    if implementation == "auto":
        return operator.TRITON if device.type == "cuda" and _has_triton() else operator.AUTO
    if implementation == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise InvalidInputError(f"implementation: got 'triton' for tensors on {device}, want 'reference' there")
    if implementation == "triton" and not _has_triton():
        raise missing('implementation "triton"', "triton", extra="all")
    return operator.TRITON if implementation == "triton" else operator.REFERENCE


@lru_cache(maxsize=1)
def _found_triton() -> bool:
    return find_spec("triton") is not None


def _look_for_triton() -> bool:
    return _found_triton()


_has_triton: Any = _look_for_triton
_has_triton._dynamo_marked_constant = True  # as sources.constants: looking for a module is nothing for a graph
