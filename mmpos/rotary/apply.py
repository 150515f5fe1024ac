"""Rotate q and k, optionally into a paged cache, and compute cos, sin and angles for other kernels."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.rotary import cpu, operators, paged, reference
from mmpos.rotary.config import Rotary
from mmpos.rotary.device import (
    DevicePositions,
    Implementation,
    PositionIds,
    Positions,
    cache_of,
    check_heads,
    constants,
    ids_on,
    number_of,
    rotation_of,
)
from mmpos.rotary.memory import check_inference, check_inplace, check_no_tangent, check_written, shown
from mmpos.rotary.paged import Cache, Stored
from mmpos.rotary.reference import (
    FLOATS,
    NO_NORM,
    Norm,
    RotationArguments,
    checked_norm,
)
from mmpos.support.checks import boolean, instance, one_of

__all__ = ["angles", "apply_rotary", "cos_sin", "rotate_and_store", "rotate_into"]

Layout = Literal["thd", "bshd", "bhsd"]
TableLayout = Literal["pairs", "transformers", "torchtitan"]

_SHAPES: dict[Layout | None, str] = {
    "thd": "(tokens, heads, head_dim)",
    "bshd": "(batch, seq, heads, head_dim)",
    "bhsd": "(batch, heads, seq, head_dim)",
    None: "(tokens, heads, head_dim) or (batch, seq, heads, head_dim)",
}


def apply_rotary(
    q: Tensor,
    k: Tensor | None,
    positions: Positions,
    rotary: Rotary,
    *,
    layout: Layout | None = None,
    norm: Norm | None = None,
    cos_sin: Tensor | None = None,
    inplace: bool = False,
    conjugate: bool = False,
    implementation: Implementation = "auto",
    validate: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k by their positions; on a GPU, in one launch that reads the position table directly.

    Each pair of channels (a, b) with angle φ = position · inv_freq becomes (a·cos φ − b·sin φ, b·cos φ + a·sin φ),
    computed in float32 and rounded once at the end. With ``precision="exact"``, the error of cos and sin is below 2e-7
    for all int32 ids, even negative or fractional; ids not divisible by 2⁻³² add up to ω · 2⁻³² to it at ω rad per id.
    Source: kexue.fm 8265 (RoPE), kexue.fm 10040 (RoPE-Tie).

    Args:
        q: (tokens, num_heads, head_dim), (batch, seq, num_heads, head_dim) or (batch, num_heads, seq, head_dim),
            float32, bfloat16 or float16, with any strides: a view of a fused qkv is not copied.
        k: a tensor shaped like q but with num_kv_heads heads, or None.
        positions: DevicePositions (no copy), a PositionTable (one small copy), or dense integer or float64 ids of shape
            (axes, tokens) or (axes, batch, seq).
        rotary: the frequencies and their allocation to axes, channels and heads.
        layout: "thd", "bshd" or "bhsd"; None means thd for three dimensions and bshd for four, regardless of sizes.
        norm: normalisation of each head before or after the rotation, in the same launch without intermediate rounding.
        cos_sin: (max_position, rotary_dim) float32, bfloat16 or float16, an inference engine's cache that replaces the
            frequencies of rotary: for the integer id i, row i holds cos of all pairs, then sin. An id without a row
            raises an error on the host or with ``validate``; otherwise its pairs become NaN.
        inplace: write into q and k instead of new tensors; not allowed while they require gradients.
        conjugate: rotate by the negative angles, which inverts a rotation; norm and rotation keep their order.
        implementation: "triton", "reference" (plain torch), or "auto": Triton for CUDA tensors, the C extension on a
            CPU. All three give the same bits except for NaN, a norm, and the library cos and sin of precision "hf".
        validate: also check dense ids on a device and, with ``cos_sin``, the ids of a table; this waits for the device.

    Returns:
        rotated q and k (None if k is None), with the dtypes and layout of the inputs.

    Raises:
        InvalidInputError: the shapes, dtypes, devices, axes or token counts do not match.
        UnsupportedError: in-place rotation under autograd; forward-mode gradients; gradients of ``cos_sin``.
    """
    if cos_sin is None and norm is None and validate is False and implementation == "auto":
        rotated = cpu.rotated_at_once(q, k, positions, rotary, layout, inplace, conjugate)
        if rotated is not None:
            return rotated
    inplace, conjugate = boolean("inplace", inplace), boolean("conjugate", conjugate)
    checked = NO_NORM if norm is None else checked_norm(norm, q, k)
    q4, k4 = _views(q, k, layout)
    rotation = _arguments(q4, k4, positions, rotary, cos_sin, conjugate, implementation, validate)
    if inplace:
        check_inplace({"q": q} if k is None else {"q": q, "k": k}, checked.named())
        operators.call(operators.rotate_, q4, k4, *checked, *rotation)
        return q, k
    q_out, k_out = operators.call(operators.rotate, q4, k4, *checked, *rotation)
    return _as_layout(q_out, layout, q.dim()), None if k is None else _as_layout(k_out, layout, q.dim())


def rotate_into(
    outs: tuple[Tensor, Tensor | None],
    q: Tensor,
    k: Tensor | None,
    positions: Positions,
    rotary: Rotary,
    *,
    layout: Layout | None = None,
    conjugate: bool = False,
) -> None:
    """Rotate q and k into ``outs``, without gradients.

    ``outs`` have the shapes, dtypes and device of q and k, and may be q and k. The other arguments and the errors are
    those of ``apply_rotary`` with ``validate=True``.
    """
    q4, k4 = _views(q, k, layout)
    rotation = _arguments(q4, k4, positions, rotary, None, conjugate, "auto", True)
    operators.run(q4, k4, *_views(*outs, layout), NO_NORM, rotation)


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions,
    rotary: Rotary,
    cache: Cache,
    *,
    layout: Layout | None = None,
    norm: Norm | None = None,
    cos_sin: Tensor | None = None,
    return_k: bool = False,
    inplace: bool = False,
    implementation: Implementation = "auto",
    validate: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k and write k and v to a paged cache for inference, in one launch on a GPU.

    The results equal those of ``apply_rotary`` bit for bit.

    Args:
        q: as for ``apply_rotary``; this also holds for k, positions, rotary, layout, norm, cos_sin and implementation.
        k: rotated and written to the cache.
        v: written to the cache; same shape as k, except that its head_dim may differ.
        positions: positions of all tokens, including those that are not stored.
        rotary: the frequencies and their allocation to axes, channels and heads.
        cache: the paged cache of k and v.
        layout: layout of q, k and v.
        norm: normalisation of each head of q and k.
        cos_sin: an inference engine's cache of cos and sin.
        return_k: also return the rotated k, for example for attention over the prompt itself.
        inplace: write the rotated q into q and, with ``return_k``, the rotated k into k instead of new tensors.
        implementation: "auto", "triton" or "reference".
        validate: also check ids and slots on a device; this waits for the device.

    Returns:
        rotated q and k (None without ``return_k``), with the dtypes and layout of the inputs.

    Raises:
        InvalidInputError: arguments do not match; slots are checked on the host and with ``validate``.
        LimitExceededError: a cache has at least 2³¹ slots.
        UnsupportedError: a tensor requires gradients.
    """
    inplace, return_k = boolean("inplace", inplace), boolean("return_k", return_k)
    checked = NO_NORM if norm is None else checked_norm(norm, q, k)
    q4, k4 = _views(q, k, layout, stored=True)
    v4 = _values(v, k, k4, layout)
    rotation = _arguments(q4, k4, positions, rotary, cos_sin, False, implementation, validate)
    check_inference((tensors := {"q": q, "k": k, "v": v}) | checked.named())
    stored = _stored(cache, k4, v4, return_k, validate)
    tensors |= {"key_cache": cache.key_cache, "value_cache": cache.value_cache}
    check_written(tensors, ("key_cache", "value_cache", *("qk" if return_k else "q") * inplace))
    if inplace:
        operators.call(operators.rotate_and_store_, q4, k4, *stored, *checked, *rotation)
        return q, k if return_k else None
    q_out, k_out = operators.call(operators.rotate_and_store, q4, k4, *stored, *checked, *rotation)
    return _as_layout(q_out, layout, q.dim()), _as_layout(k_out, layout, q.dim()) if return_k else None


def cos_sin(
    rotary: Rotary, positions: Positions, layout: TableLayout = "pairs", device: torch.device | str | None = None
) -> tuple[Tensor, Tensor] | Tensor:
    """Compute cos and sin of all tokens in float32, multiplied by the attention factor.

    Args:
        rotary: the frequencies and their allocation to axes, channels and heads.
        positions: DevicePositions, a PositionTable, or dense ids.
        layout: "pairs": cos and sin of shape (tokens, pairs), or (batch, seq, pairs) if all documents have the same
            length. "transformers": cos and sin of shape (batch, seq, rotary_dim), batch 1 if packed, with one value per
            channel, in halves as Llama expects or in adjacent pairs as Cohere expects. (GLM, Helium, Ernie 4.5 and
            Moonshine repeat adjacent pairs themselves: pass them "pairs" twice, ``torch.cat((cos, cos), -1)``.)
            "torchtitan": one rope cache, cos then sin (…, 2·rotary_dim), or complex64 (…, pairs) for adjacent pairs.
            With head_axes or kv_heads, "pairs" are (…, kv_heads, pairs) and "transformers" is (batch, kv_heads, seq,
            rotary_dim), which MHRoPE's own code repeats for the q heads of each kv head.
        device: device of the results; None means the device of the positions.

    Returns:
        new tensors.

    Raises:
        InvalidInputError: the layout is unknown, or the axes of positions and rotary differ.
        UnsupportedError: layout "torchtitan" for a rotary with head_axes or kv_heads.
    """
    one_of("layout", layout, ("pairs", "transformers", "torchtitan"))
    ids = _ids_for_tables(rotary, positions, device)
    if layout == "torchtitan":
        _check_heads_turn_alike("layout 'torchtitan'", rotary)
    cos, sin = reference.cos_sin(rotation_of(ids, rotary), ids.tokens)
    if layout == "torchtitan" and rotary.pairing == "adjacent":
        return ids.as_rows(torch.complex(cos, sin))
    cos, sin = _per_head(cos, rotary), _per_head(sin, rotary)
    if layout == "pairs":
        return ids.as_rows(cos), ids.as_rows(sin)
    cos, sin = _per_channel(cos, rotary), _per_channel(sin, rotary)
    if layout == "torchtitan":
        return ids.as_rows(torch.cat((cos, sin), dim=-1))
    batched = len(ids.shape) == 2
    cos, sin = (ids.as_rows(x) if batched else x.unsqueeze(0) for x in (cos, sin))
    return (cos, sin) if not rotary.own_heads else (cos.transpose(1, 2), sin.transpose(1, 2))


def angles(rotary: Rotary, positions: Positions, device: torch.device | str | None = None) -> Tensor:
    """Compute exact angles wrapped to [−π, π] for the fused rotary kernels of Megatron and TransformerEngine.

    Args:
        rotary: the frequencies and their allocation to axes and channels, with precision "exact".
        positions: DevicePositions, a PositionTable, or dense ids.
        device: device of the result; None means the device of the positions.

    Returns:
        (tokens, 1, 1, rotary_dim) float32, or (seq, batch, 1, rotary_dim) if all documents have the same length.

    Raises:
        UnsupportedError: a rotary with precision "hf", head_axes or kv_heads.
        InvalidInputError: the axes of positions and rotary differ.
    """
    if instance("rotary", rotary, Rotary, "mmpos.rotary.Rotary").precision != "exact":
        raise UnsupportedError(
            "angles: got precision 'hf', want 'exact'; wrapped angles would differ from those of Transformers"
        )
    _check_heads_turn_alike("angles", rotary)
    ids = _ids_for_tables(rotary, positions, device)
    frequencies, pair_axis = constants(rotary, ids.tensor.device)
    fixed = reference.fixed_ids(ids.tensor, ids.mode, ids.tokens)
    wrapped = reference.angles_of_turns(reference.turns(fixed, pair_axis.to(torch.int64), frequencies))
    rows = ids.as_rows(_per_channel(wrapped, rotary))
    return rows.unsqueeze(1).unsqueeze(1) if rows.dim() == 2 else rows.transpose(0, 1).unsqueeze(2)


def _ids_for_tables(rotary: Rotary, positions: Positions, device: torch.device | str | None) -> PositionIds:
    instance("rotary", rotary, Rotary, "mmpos.rotary.Rotary")
    if device is None:
        device = positions.device if isinstance(positions, DevicePositions | Tensor) else "cpu"
    return ids_on(positions, rotary, torch.device(device))


def _check_heads_turn_alike(what: str, rotary: Rotary) -> None:
    if rotary.own_heads:
        raise UnsupportedError(f"{what}: got a rotary with {rotary.varies_by}, want one whose heads all rotate alike")


def _per_head(x: Tensor, rotary: Rotary) -> Tensor:
    """Repeat (tokens, groups, pairs) to (tokens, kv_heads, pairs) if heads rotate differently."""
    return x.repeat_interleave(rotary.own_heads // x.shape[1], dim=1) if rotary.own_heads else x


def _per_channel(x: Tensor, rotary: Rotary) -> Tensor:
    """Repeat (tokens, pairs) to (tokens, rotary_dim) in channel order."""
    return x.repeat_interleave(2, dim=-1) if rotary.pairing == "adjacent" else torch.cat((x, x), dim=-1)


def _arguments(
    q: Tensor,
    k: Tensor,
    positions: Positions,
    rotary: Rotary,
    cos_sin: Tensor | None,
    conjugate: bool,
    implementation: Implementation,
    validate: bool,
) -> RotationArguments:
    """Check positions and rotary against (batch, seq, heads, head_dim) q and k, and return them for the operators."""
    boolean("validate", validate)
    if q.shape[3] != instance("rotary", rotary, Rotary, "mmpos.rotary.Rotary").head_dim:
        raise InvalidInputError(f"q: got head_dim {q.shape[3]}, want {rotary.head_dim} as in rotary")
    check_heads("q", q, rotary, shared=True)
    if k.shape[2]:
        check_heads("k", k, rotary)
    ids = ids_on(positions, rotary, q.device, validate, like="q")
    batch, seq, heads, _ = q.shape
    if ids.tokens != batch * seq:
        hint = "; heads and seq may be swapped: see layout" if ids.tokens == batch * heads else ""
        raise InvalidInputError(f"positions: got {ids.tokens} tokens, want {batch * seq} as in q{hint}")
    row_length = ids.shape[1] if len(ids.shape) == 2 else 0
    known = row_length or ids.mode in (reference.TABLE_INTEGER, reference.TABLE_FRACTIONAL)
    if batch > 1 and known and row_length != seq:
        raise InvalidInputError(
            f"positions: got documents of {row_length or 'unequal'} tokens, want {seq}, the seq of q; "
            "pad the table, or use layout thd"
        )
    rotation = rotation_of(ids, rotary, conjugate, number_of(implementation, q.device))
    if cos_sin is None:
        return rotation
    # The cache already contains the attention factor.
    return rotation._replace(frequencies=cache_of(cos_sin, rotary, positions, ids, validate), attention_factor=1.0)


def _views(q: Tensor, k: Tensor | None, layout: Layout | None, *, stored: bool = False) -> tuple[Tensor, Tensor]:
    """Check q and k and view them as (batch, seq, heads, head_dim); a missing k gets 0 heads and cannot be stored."""
    if stored and k is None:
        raise InvalidInputError("k: got None, want a tensor; use apply_rotary to rotate q alone")
    if layout is not None:
        one_of("layout", layout, ("thd", "bshd", "bhsd"))
    for name, x in (("q", q), ("k", k)):
        if x is None and name == "k":
            continue
        if not isinstance(x, Tensor) or x.dtype not in FLOATS:
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise InvalidInputError(f"{name}: got {got}, want a tensor of float32, bfloat16 or float16")
        want = 3 if layout == "thd" else 4
        if (x.dim() != want) if layout is not None else (x.dim() not in (3, 4)):
            raise InvalidInputError(f"{name}: got shape {tuple(x.shape)}, want {_SHAPES[layout]}")
        check_no_tangent(name, x)
    q4 = _as_bshd(shown(q), layout)
    if k is None:
        return q4, q4.new_empty((*q4.shape[:2], 0, q4.shape[3]))
    if k.dtype != q.dtype or k.device != q.device or k.dim() != q.dim():
        raise InvalidInputError(
            f"k: got {k.dtype} on {k.device} with {k.dim()} dimensions, "
            f"want {q.dtype} on {q.device} with {q.dim()} as for q"
        )
    k4 = _as_bshd(shown(k), layout)
    if k4.shape[:2] != q4.shape[:2] or k4.shape[3] != q4.shape[3]:
        heads_first = layout is None and k.dim() == 4 and k.shape[2:] == q.shape[2:]
        hint = '; if heads come before seq, pass layout="bhsd"' if heads_first else ""
        raise InvalidInputError(
            f"k: got shape {tuple(k.shape)}, want {tuple(q.shape)} as for q, except for the heads{hint}"
        )
    return q4, k4


def _as_bshd(x: Tensor, layout: Layout | None) -> Tensor:
    """View as (batch, seq, heads, head_dim)."""
    if x.dim() == 3:
        return x.unsqueeze(0)
    return x.transpose(1, 2) if layout == "bhsd" else x


def _as_layout(x: Tensor, layout: Layout | None, dimensions: int) -> Tensor:
    """View (batch, seq, heads, head_dim) in a layout of three or four dimensions."""
    if dimensions == 3:
        return x.squeeze(0)
    return x.transpose(1, 2) if layout == "bhsd" else x


def _values(v: Tensor, k: Tensor, k4: Tensor, layout: Layout | None) -> Tensor:
    """Check v and view it as (batch, seq, heads, head_dim)."""
    if not isinstance(v, Tensor):
        raise InvalidInputError(f"v: got {type(v).__name__}, want a tensor of {k.dtype} as for k")
    if v.dtype != k.dtype or v.device != k.device or v.dim() != k.dim():
        raise InvalidInputError(
            f"v: got {v.dtype} on {v.device} with {v.dim()} dimensions, "
            f"want {k.dtype} on {k.device} with {k.dim()} as for k"
        )
    v4 = _as_bshd(shown(v), layout)
    if v4.shape[:3] != k4.shape[:3]:
        raise InvalidInputError(f"v: got shape {tuple(v.shape)}, want {tuple(k.shape)} as for k, except for head_dim")
    return v4


def _stored(cache: Cache, k: Tensor, v: Tensor, return_k: bool, validate: bool) -> Stored:
    """Check a cache and its slots against (batch, seq, heads, head_dim) k and v."""
    instance("cache", cache, Cache, "mmpos.rotary.Cache")
    keys, values = paged.pages_of(cache, "k", k), paged.pages_of(cache, "v", v)
    if keys.shape[:2] != values.shape[:2]:
        raise InvalidInputError(
            f"value_cache: got {values.shape[0]} blocks of {values.shape[1]} slots, "
            f"want {keys.shape[0]} of {keys.shape[1]} as for key_cache"
        )
    slots = paged.slots_of(cache.slot_mapping, k.shape[0], k.shape[1], keys, validate)
    return Stored(v, keys, values, slots, return_k)
