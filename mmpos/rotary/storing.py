"""The door of the rotation that writes k and v to a paged cache: check, and call the operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.rotary import paged, store_operator
from mmpos.rotary.apply import Implementation, Layout, as_bshd, back, check_positions, chosen, views
from mmpos.rotary.config import Rotary
from mmpos.rotary.memory import apart, nested, steps
from mmpos.rotary.norms import check_no_tangent, norm_of
from mmpos.rotary.paged import CacheLayout
from mmpos.rotary.sources import Positions, constants, source_of
from mmpos.support.checks import one_of

__all__ = ["rotate_and_store"]


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions,
    rotary: Rotary,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cache_layout: CacheLayout = "NHD",
    layout: Layout | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_weight_offset: float = 0.0,
    return_k: bool = False,
    inplace: bool = False,
    implementation: Implementation = "auto",
    validate: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k, and write k and v into a paged cache: in one launch on a GPU, for inference.

    The rotation, and the norm before it, are those of ``apply_rotary``, to the bit. Slot s of a cache is offset
    s mod block_size of block s // block_size. A token whose slot is negative is rotated and not stored, and so is
    one without a slot behind the end of the mapping, by which engines pad, and on a device one whose slot is too
    large. A slot for several tokens is an error where slots are read: on the host, and with ``validate``; unread, on a
    device or in a compiled graph, it gets some elements of each. Sources: vLLM's reshape_and_cache_flash,
    FlashInfer's append_paged_kv_cache.

    Args:
        q: as for ``apply_rotary``.
        k: likewise.
        v: likewise, with num_kv_heads as k; its head_dim may be another one.
        positions: as for ``apply_rotary``, of every token, stored or not.
        rotary: likewise.
        key_cache: (blocks, block_size, num_kv_heads, head_dim) "NHD", (blocks, num_kv_heads, block_size, head_dim)
            "HND", or (slots, num_kv_heads, head_dim), in the dtype of k, any strides: a view of what holds k and v
            together, or all layers, is written where it lies.
        value_cache: likewise, with the head_dim of v.
        slot_mapping: (tokens,) or (batch, seq) int32 or int64, or a row of fewer for the first tokens.
        cache_layout: "NHD" or "HND".
        layout: of q, k and v, as for ``apply_rotary``.
        q_norm_weight: (head_dim,) of a norm of each head of q before the rotation, as for ``apply_rotary``.
        k_norm_weight: likewise of k.
        norm_eps: added to the mean of squares.
        norm_weight_offset: added to both weights: 1 for Gemma's.
        return_k: also give rotated k outside of the cache, as attention over the prompt itself may want it.
        inplace: write rotated q into q, and with ``return_k`` k into k, instead of new tensors.
        implementation: as for ``apply_rotary``.
        validate: also check ids and slots that lie on a device, which waits for the device.

    Returns:
        q rotated, and k rotated if ``return_k``, else None, in the dtypes and layout that came.

    Raises:
        InvalidInputError: shapes, dtypes, devices, axes or token counts do not fit together; a slot on the host, or
            of validated ones, that the caches do not have or that an earlier token has.
        LimitExceededError: 2³¹ slots or more in a cache.
        UnsupportedError: under autograd; a cache of 8 bits, which needs scales.
    """
    norm = norm_of(q, k, q_norm_weight, k_norm_weight, norm_eps, norm_weight_offset)
    q4, k4 = views(q, k, layout)
    if k4 is None:
        raise InvalidInputError("k: got None, want a tensor: apply_rotary rotates q alone")
    v4 = _values(v, k, k4, layout)
    batch, seq, _, head_dim = q4.shape
    if head_dim != rotary.head_dim:
        raise InvalidInputError(f"q: got head_dim {head_dim}, want {rotary.head_dim} as in rotary")
    source = source_of(positions, q.device, validate)
    check_positions(source, rotary, q4)
    caches = _caches(key_cache, value_cache, cache_layout, k4, v4)
    tensors = {"q": q, "k": k, "v": v, "key_cache": key_cache, "value_cache": value_cache}
    _check_inference(tensors | {"q_norm_weight": norm.q_weight, "k_norm_weight": norm.k_weight})
    slots = paged.slots_of(slot_mapping, batch, seq, caches[0], validate)
    _check_memory(tensors, ("key_cache", "value_cache", *("qk" if return_k else "q") * inplace))
    arguments = (
        v4, *caches, slots, return_k, *norm, source.positions, *constants(rotary, q.device), source.mode,
        rotary.pairing == "adjacent", rotary.attention_factor, False, chosen(implementation, q.device),
    )  # fmt: skip
    if inplace:
        store_operator.rotate_and_store_(q4, k4, *arguments)
        return q, k if return_k else None
    q_out, k_out = store_operator.rotate_and_store(q4, k4, *arguments)
    return back(q_out, q, layout), back(k_out, k, layout) if return_k else None


def _values(v: Tensor, k: Tensor, k4: Tensor, layout: Layout | None) -> Tensor:
    """v as (batch, seq, heads, head_dim)."""
    if not isinstance(v, Tensor):
        raise InvalidInputError(f"v: got {type(v).__name__}, want a tensor of {k.dtype} as k")
    if v.dtype != k.dtype or v.device != k.device or v.dim() != k.dim():
        raise InvalidInputError(
            f"v: got {v.dtype} on {v.device} with {v.dim()} dimensions, "
            f"want {k.dtype} on {k.device} with {k.dim()} as k"
        )
    v4 = as_bshd(v, layout)
    if v4.shape[:3] != k4.shape[:3]:
        raise InvalidInputError(f"v: got shape {tuple(v.shape)}, want that of k, {tuple(k.shape)}, but for head_dim")
    return v4


def _caches(
    key_cache: Tensor, value_cache: Tensor, cache_layout: CacheLayout, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Both caches as (blocks, block_size, heads, head_dim)."""
    one_of("cache_layout", cache_layout, ("NHD", "HND"))
    keys = paged.pages_of("key_cache", key_cache, cache_layout, ("k", k))
    values = paged.pages_of("value_cache", value_cache, cache_layout, ("v", v))
    if keys.shape[:2] != values.shape[:2]:
        raise InvalidInputError(
            f"value_cache: got {values.shape[0]} blocks of {values.shape[1]} slots, "
            f"want {keys.shape[0]} of {keys.shape[1]} as key_cache"
        )
    return keys, values


def _check_inference(tensors: Mapping[str, Tensor | None]) -> None:
    for name, x in tensors.items():
        if x is None:
            continue
        if torch.is_grad_enabled() and x.requires_grad:
            raise UnsupportedError(f"{name}: got a tensor that requires gradients, want torch.no_grad(): none are made")
        check_no_tangent(name, x)


def _check_memory(tensors: Mapping[str, Tensor], written: Sequence[str]) -> None:
    """Refuse to write where anything else lies."""
    for name in written:
        x = tensors[name]
        # A graph that is being traced has no addresses yet, but it has the same tensor twice.
        traced = torch.compiler.is_compiling()
        if not traced and not nested(steps(x)):
            raise InvalidInputError(f"{name}: got a tensor whose elements share memory, want each by itself")
        for other, y in tensors.items():
            if other != name and (x is y or not (traced or _apart(x, y))):
                raise InvalidInputError(f"{name}: got the memory of {other}, want memory of its own")


def _apart(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr() or apart(x, y)
