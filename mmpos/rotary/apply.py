"""Rotate q and k, also into a paged cache, and keys within one; compute cos, sin and angles for other kernels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import NoneType
from typing import Any, Literal, NamedTuple

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
    ids_on,
    number_of,
    rotation_of,
)
from mmpos.rotary.memory import Form, check_floats, check_inference, check_written, checked_once, form_of
from mmpos.rotary.paged import Cache, SlotNames, Stored
from mmpos.rotary.reference import NO_NORM, Norm, RotationArguments, check_norm
from mmpos.support.checks import boolean, instance, integer, one_of

__all__ = ["QKV", "angles", "apply_rotary", "cos_sin", "rerotate", "rotate_and_store", "split_qkv"]

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
    call = _prepared((q, k), positions, rotary, norm, cos_sin, layout, inplace, conjugate, implementation, validate)
    (q4, k4), checked, rotation, graded = call
    if inplace:
        check_written({"q": q} if k is None else {"k": k, "q": q}, ("q",) if k is None else ("k", "q"), "inplace=False")
        operators.call(operators.rotate_, q4, k4, *checked, *rotation)
        return q, k
    arguments = q4, k4, *checked, *rotation
    outs = operators.rotate(*arguments) if graded else operators.call(operators.rotate, *arguments)
    q_out, k_out = (x.squeeze(0) if q.dim() == 3 else x.transpose(1, 2) if layout == "bhsd" else x for x in outs)
    return q_out, None if k is None else k_out


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
    boolean("return_k", return_k)
    call = _prepared((q, k, v), positions, rotary, norm, cos_sin, layout, inplace, False, implementation, validate)
    (q4, k4, v4), checked, rotation, _ = call
    pages = paged.pages_of(cache, k4, v4)
    slots = paged.slots_of(cache.slot_mapping, q4.shape[0], q4.shape[1], pages[0], validate)
    stored = Stored(v4, pages[0], pages[1], slots, return_k)
    tensors = {"q": q, "k": k, "v": v, "key_cache": cache.key_cache, "value_cache": cache.value_cache}
    check_written(tensors, ("key_cache", "value_cache", *("qk" if return_k else "q") * inplace))
    if inplace:
        operators.call(operators.rotate_and_store_, q4, k4, *stored, *checked, *rotation)
        return q, k if return_k else None
    outs = operators.call(operators.rotate_and_store, q4, k4, *stored, *checked, *rotation)
    q_out, k_out = (x.squeeze(0) if q.dim() == 3 else x.transpose(1, 2) if layout == "bhsd" else x for x in outs)
    return q_out, k_out if return_k else None


def rerotate(
    k_cache: Tensor,
    slots: Tensor,
    from_positions: Positions,
    to_positions: Positions,
    rotary: Rotary,
    *,
    implementation: Implementation = "auto",
    validate: bool = False,
) -> None:
    """Rotate keys in a paged cache in place from their old positions to new ones, in one launch on a GPU.

    Each key is rotated by the difference of its positions and rounded once; if the positions are equal, its bits do not
    change. A chunk of tokens can thus be moved without recomputing k or its projection.

    Apart from the rotation, a key does not change. If the text or images before a chunk change, only the first layer's
    keys equal those of a recomputed prompt; in deeper layers, the cached k and v are approximations because they depend
    on prior tokens.

    Args:
        k_cache: (blocks, block_size, num_kv_heads, head_dim) or (slots, num_kv_heads, head_dim), with any strides, in
            float32, bfloat16 or float16. Pass ``cache.transpose(1, 2)`` for a cache in layout "HND".
        slots: (tokens,) or (batch, seq) int32 or int64 slots, or a shorter vector for the first tokens. Negative slots
            are skipped; on a device, so are slots that are too large.
        from_positions: old positions: DevicePositions, a PositionTable or dense ids, as for ``apply_rotary``.
        to_positions: new positions; their type may differ from that of from_positions.
        rotary: the rotation by which the cached keys were rotated; its attention factor is not applied again.
        implementation: "triton", "reference" (plain torch), or "auto" (Triton for CUDA tensors); results are bit-equal.
        validate: also check ids and slots on a device; this waits for the device.

    Raises:
        InvalidInputError: arguments do not match; on the host or with ``validate``, also if a slot is too large or
            repeated.
        LimitExceededError: the cache has at least 2³¹ slots.
        UnsupportedError: a tensor requires gradients.
    """
    variable = os.environ.get("TRITON_INTERPRET") if implementation == "triton" else None
    number = _check_keys(form_of(k_cache), rotary, validate, implementation, variable)
    pages = k_cache.unsqueeze(1) if k_cache.dim() == 3 else k_cache
    start = ids_on(from_positions, rotary, pages.device, validate, "from_positions", "k_cache")
    stop = ids_on(to_positions, rotary, pages.device, validate, "to_positions", "k_cache")
    if start.tokens != stop.tokens:
        raise InvalidInputError(f"to_positions: got {stop.tokens} tokens, want {start.tokens} as in from_positions")
    batch, seq = start.shape if len(start.shape) == 2 else (1, start.tokens)
    row = paged.slots_of(slots, batch, seq, pages, validate, MOVED)
    check_written({"k_cache": k_cache}, ("k_cache",))
    rotation = rotation_of(stop, rotary, implementation=number)  # the operator ignores the rotation's attention factor
    operators.call(operators.rerotate_, pages, row, start.tensor, start.mode, *rotation)


MOVED = SlotNames("slots", "from_positions", "k_cache")
"""Argument names of ``rerotate``."""


class QKV(NamedTuple):
    """Views of a packed qkv tensor.

    Attributes:
        q: (tokens, num_heads, head_dim) or (batch, seq, num_heads, head_dim).
        k: like q, with num_kv_heads.
        v: like q, with num_kv_heads.
        gate: like q; attention output is multiplied by its sigmoid. None if there is no gate.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor | None


def split_qkv(qkv: Tensor, *, num_heads: int, num_kv_heads: int, head_dim: int, gate: bool = False) -> QKV:
    """Split the packed output of a projection into q, k, v and an optional gate without a copy.

    ``apply_rotary`` and ``rotate_and_store`` accept these views. With ``inplace=True``, they write the rotated q and k
    to the packed tensor itself, in one launch as for separate tensors, and leave its other elements unchanged.

    Args:
        qkv: (tokens, width) or (batch, seq, width), with any strides and width (num_heads + 2·num_kv_heads)·head_dim:
            all heads of q, then of k, then of v. With a gate, num_heads counts twice.
        num_heads: number of q heads.
        num_kv_heads: number of k heads and of v heads.
        head_dim: channels per head.
        gate: whether each q head is followed by a gate of head_dim channels, as in Qwen3-Next and Qwen3.5.

    Returns:
        views of qkv.

    Raises:
        InvalidInputError: the width does not match the heads.
    """
    if not isinstance(form := form_of(qkv), Form):
        raise InvalidInputError(f"qkv: got {form.__name__}, want a tensor")
    if qkv.dim() not in (2, 3):
        raise InvalidInputError(f"qkv: got shape {tuple(qkv.shape)}, want (tokens, width) or (batch, seq, width)")
    for name, count in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
        integer(name, count, minimum=1)
    parts = 2 if boolean("gate", gate) else 1
    sizes = [num_heads * parts * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    if qkv.shape[-1] != sum(sizes):
        other = sum(sizes) + (-num_heads if gate else num_heads) * head_dim
        hint = f"; this width matches gate={not gate}" if qkv.shape[-1] == other else ""
        raise InvalidInputError(
            f"qkv: got width {qkv.shape[-1]}, want {sum(sizes)} = ({'2·' if gate else ''}{num_heads} num_heads "
            f"+ 2·{num_kv_heads} num_kv_heads)·{head_dim} head_dim{hint}"
        )
    q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in qkv.split(sizes, dim=-1))
    return QKV(q[..., 0::2, :], k, v, q[..., 1::2, :]) if gate else QKV(q, k, v, None)


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
    cos, sin = (ids.as_rows(x) if len(ids.shape) == 2 else x.unsqueeze(0) for x in (cos, sin))
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
    rotation, fixed = rotation_of(ids, rotary), reference.fixed_ids(ids.tensor, ids.mode, ids.tokens)
    turns = reference.turns(fixed, rotation.pair_axis.to(torch.int64), rotation.frequencies)
    rows = ids.as_rows(_per_channel(reference.angles_of_turns(turns), rotary))
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


def _prepared(
    tensors: Sequence[Tensor | None], positions: Positions, rotary: Rotary, norm: Norm | None, cos_sin: Tensor | None,
    layout: Layout | None, inplace: bool, conjugate: bool, implementation: Implementation, validate: bool,
) -> tuple[list[Tensor], Norm, RotationArguments, bool]:  # fmt: skip
    """Check all arguments, and return them for the operators, and whether autograd must see the call.

    ``tensors`` are q and k, and v if it is stored; they are returned as (batch, seq, heads, head_dim), a missing k with
    0 heads.
    """
    norm = NO_NORM if norm is None else norm
    q_weight, k_weight, *numbers = norm if isinstance(norm, Norm) else (None, None, norm)
    forms = tuple([form_of(x) for x in tensors])
    variable = os.environ.get("TRITON_INTERPRET") if implementation == "triton" else None
    options = layout, inplace, conjugate, validate, implementation, variable
    number, graded, *numbers = _check(forms, form_of(q_weight), form_of(k_weight), rotary, *options, *numbers)
    views: list[Tensor] = []
    for x in tensors:
        if x is None:
            views.append(views[0].new_empty((*views[0].shape[:2], 0, views[0].shape[3])))
            continue
        x = x.resolve_neg() if not torch.compiler.is_compiling() and x.is_neg() else x  # resolve signs in memory
        views.append(x.unsqueeze(0) if x.dim() == 3 else x.transpose(1, 2) if layout == "bhsd" else x)
    ids = ids_on(positions, rotary, views[0].device, validate, like="q")
    _check_tokens(views[0].shape, ids.tokens, ids.shape, ids.mode)
    rotation = rotation_of(ids, rotary, bool(conjugate), number)
    if cos_sin is not None:  # it already contains the attention factor
        cache = cache_of(cos_sin, rotary, positions, ids, validate)
        rotation = rotation._replace(frequencies=cache, attention_factor=1.0)
    q_weight, k_weight = (None if weight is None else weight.contiguous() for weight in (q_weight, k_weight))
    return views, Norm(q_weight, k_weight, *numbers), rotation, graded


@checked_once
def _check(
    tensors: Sequence[Form | type], q_weight: Form | type, k_weight: Form | type, rotary: Rotary,
    layout: Layout | None, inplace: bool, conjugate: bool, validate: bool, implementation: Implementation,
    _variable: str | None, *norm: Any,
) -> tuple[int, bool, float, float, bool]:  # fmt: skip
    """Check all that does not depend on positions, values and addresses.

    ``tensors`` are q and k, and v if it is stored; ``_variable`` is what ``number_of`` reads from the environment;
    ``norm`` are the numbers of a norm, or one object that is not a norm. Return the implementation's number, whether
    autograd must see the call, and the numbers of the norm.
    """
    q, k, *values = tensors
    for name, value in (("inplace", inplace), ("conjugate", conjugate), ("validate", validate)):
        boolean(name, value)
    if layout is not None:
        one_of("layout", layout, ("thd", "bshd", "bhsd"))
    if values and k is NoneType:
        raise InvalidInputError("k: got None, want a tensor; use apply_rotary to rotate q alone")
    for name, form in (("q", q), ("k", k))[: 1 if k is NoneType else 2]:
        shape = check_floats(name, form).shape
        if len(shape) not in ((3, 4) if layout is None else (3,) if layout == "thd" else (4,)):
            raise InvalidInputError(f"{name}: got shape {tuple(shape)}, want {_SHAPES[layout]}")
    assert isinstance(q, Form)
    if len(norm) != 3:
        instance("norm", norm[0], Norm, "mmpos.rotary.Norm")
    heads = 1 if layout == "bhsd" else len(q.shape) - 2
    if isinstance(k, Form):
        _check_alike("k", k, "q", q, heads, layout)
    if isinstance(k, Form) and values:
        _check_alike("v", values[0], "k", k, len(k.shape) - 1, layout)
    numbers = check_norm(q, k, q_weight, k_weight, *norm)
    if q.shape[-1] != instance("rotary", rotary, Rotary, "mmpos.rotary.Rotary").head_dim:
        raise InvalidInputError(f"q: got head_dim {q.shape[-1]}, want {rotary.head_dim} as in rotary")
    check_heads("q", q.shape[heads], rotary, shared=True)
    if isinstance(k, Form) and k.shape[heads]:
        check_heads("k", k.shape[heads], rotary)
    forms = {"norm.q_weight": q_weight, "norm.k_weight": k_weight, "q": q, "k": k}
    if values:
        check_inference(forms | {"v": values[0]})
    graded = [name for name, form in forms.items() if isinstance(form, Form) and form.graded]
    if inplace and graded:
        raise UnsupportedError(f"inplace: got {graded[0]} that requires gradients, want inplace=False")
    return number_of(implementation, q.device), bool(graded), *numbers


def _check_alike(name: str, x: Form | type, other: str, like: Form, free: int, layout: Layout | None) -> None:
    """Check that a tensor fits another one, except for one dimension."""
    dims = len(like.shape)
    if not isinstance(x, Form):
        raise InvalidInputError(f"{name}: got {x.__name__}, want a tensor of {like.dtype} as for {other}")
    if (x.dtype, x.device, len(x.shape)) != (like.dtype, like.device, dims):
        raise InvalidInputError(
            f"{name}: got {x.dtype} on {x.device} with {len(x.shape)} dimensions, "
            f"want {like.dtype} on {like.device} with {dims} as for {other}"
        )
    if any(x.shape[i] != like.shape[i] for i in range(dims) if i != free):
        but = "head_dim" if free == dims - 1 else "the heads"
        heads_first = (free, dims, layout) == (2, 4, None) and x.shape[2:] == like.shape[2:]
        hint = '; if heads come before seq, pass layout="bhsd"' if heads_first else ""
        got, want = tuple(x.shape), tuple(like.shape)
        raise InvalidInputError(f"{name}: got shape {got}, want {want} as for {other}, except for {but}{hint}")


@checked_once
def _check_tokens(q: Sequence[int], tokens: int, shape: Sequence[int], mode: int) -> None:
    """Check the number and the shape of tokens against (batch, seq, heads, head_dim) q."""
    batch, seq, heads, _ = q
    if tokens != batch * seq:
        hint = "; heads and seq may be swapped: see layout" if tokens == batch * heads else ""
        raise InvalidInputError(f"positions: got {tokens} tokens, want {batch * seq} as in q{hint}")
    row_length = shape[1] if len(shape) == 2 else 0
    known = row_length or mode in (reference.TABLE_INTEGER, reference.TABLE_FRACTIONAL)
    if batch > 1 and known and row_length != seq:
        raise InvalidInputError(
            f"positions: got documents of {row_length or 'unequal'} tokens, want {seq}, the seq of q; "
            "pad the table, or use layout thd"
        )


@checked_once
def _check_keys(
    form: Form | type, rotary: Rotary, validate: bool, implementation: Implementation, _variable: str | None
) -> int:
    """Check the arguments of ``rerotate`` apart from slots and positions; return the implementation's number."""
    boolean("validate", validate)
    instance("rotary", rotary, Rotary, "mmpos.rotary.Rotary")
    form = check_floats("k_cache", form)
    paged.check_pages("k_cache", form, "NHD", "heads", rotary.head_dim)
    check_heads("k_cache", form.shape[-2], rotary)
    return number_of(implementation, form.device)
