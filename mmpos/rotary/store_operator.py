"""The rotation that also writes to a paged cache, as a registered torch operator: for inference, without gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpos.rotary import norm_operator, operator, paged
from mmpos.rotary.norms import NONE, Norm

_TENSORS = "Tensor v, Tensor({}!) key_cache, Tensor({}!) value_cache, Tensor slots"
_NUMBERS = f"bool return_k, Tensor? q_weight, Tensor? k_weight, float? eps, float? offset, {operator.ARGUMENTS}"
"""q, k and v are (batch, seq, heads, head_dim), caches (blocks, block_size, heads, head_dim), all in any strides.

    slots: (n,) int32 or int64 slots of the first n tokens; those that the caches do not have are skipped.
    return_k: whether rotated k is wanted outside of the cache too.
    q_weight, k_weight, eps, offset: a Norm.
"""

operator.LIBRARY.define(
    f"rotate_and_store(Tensor q, Tensor k, {_TENSORS.format('a', 'b')}, {_NUMBERS}) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
operator.LIBRARY.define(
    f"rotate_and_store_(Tensor(a!) q, Tensor(b!) k, {_TENSORS.format('c', 'd')}, {_NUMBERS}) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)
rotate_and_store = torch.ops.mmpos.rotate_and_store.default
"""Rotated q, and rotated k or a tensor without heads."""
rotate_and_store_ = torch.ops.mmpos.rotate_and_store_.default
"""Rotate q in place, and k where it is wanted."""


def _store(
    q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, return_k: bool,
    *arguments: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    norm, rotation = _norm(arguments), arguments[4:]
    if rotation[-1] == operator.TRITON:
        q_out, k_out = _shapes(q, k, v, key_cache, value_cache, slots, return_k)
        _launch(q, k, v, q_out, k_out, key_cache, value_cache, slots, norm, *rotation)
    else:
        rotate: Any = operator.rotate if norm is NONE else norm_operator.norm_rotate
        q_out, turned = rotate(q, k, *_given(norm), *rotation)
        paged.write((key_cache, value_cache), (turned, v), slots)
        k_out = turned if return_k else _nothing(k)
    operator.written(key_cache, value_cache)
    return q_out, k_out


def _store_in_place(
    q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, return_k: bool,
    *arguments: Any,
) -> None:  # fmt: skip
    norm, rotation = _norm(arguments), arguments[4:]
    if rotation[-1] == operator.TRITON:
        _launch(q, k, v, q, k if return_k else _nothing(k), key_cache, value_cache, slots, norm, *rotation)
        operator.written(q, *([k] if return_k else []))
    else:
        rotate: Any = operator.rotate_ if norm is NONE else norm_operator.norm_rotate_
        turned = k if return_k else k.clone()
        rotate(q, turned, *_given(norm), *rotation)
        paged.write((key_cache, value_cache), (turned, v), slots)
    operator.written(key_cache, value_cache)


def _launch(
    q: Tensor, k: Tensor, v: Tensor, q_out: Tensor, k_out: Tensor, key_cache: Tensor, value_cache: Tensor,
    slots: Tensor, norm: Norm, positions: Tensor, frequencies: Tensor, pair_axis: Tensor,
    mode: int, adjacent: bool, attention_factor: float, _conjugate: bool, _implementation: int,
) -> None:  # fmt: skip
    from mmpos.rotary import kernel

    kernel.launch_store(
        q, k, v, q_out, k_out, key_cache, value_cache, slots, positions, frequencies, pair_axis, mode=mode,
        adjacent=adjacent, as_hf=frequencies.dtype == torch.float32, attention_factor=attention_factor, norm=norm,
    )  # fmt: skip


def _norm(arguments: Any) -> Norm:
    return NONE if arguments[0] is None and arguments[1] is None else Norm(*arguments[:4])


def _given(norm: Norm) -> tuple[Any, ...]:
    """What an operator of the rotation takes before its own arguments."""
    return () if norm is NONE else norm


def _nothing(k: Tensor) -> Tensor:
    """A k without heads."""
    return k.new_empty((*k.shape[:2], 0, k.shape[3]))


def _shapes(
    q: Tensor, k: Tensor, _v: Tensor, _key_cache: Tensor, _value_cache: Tensor, _slots: Tensor, return_k: bool, *_: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k) if return_k else _nothing(k)


operator.LIBRARY.impl("rotate_and_store", operator.outside_of_graphs(_store), "CompositeExplicitAutograd")
operator.LIBRARY.impl("rotate_and_store_", operator.outside_of_graphs(_store_in_place), "CompositeExplicitAutograd")
torch.library.register_fake("mmpos::rotate_and_store", _shapes, lib=operator.LIBRARY)
torch.library.register_fake("mmpos::rotate_and_store_", operator.nothing, lib=operator.LIBRARY)
