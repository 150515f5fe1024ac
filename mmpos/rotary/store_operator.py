"""The rotation that also writes to a paged cache, as a registered torch operator: for inference, without gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpos.rotary import operator, paged

_TENSORS = "Tensor v, Tensor({}!) key_cache, Tensor({}!) value_cache, Tensor slots"
_LAST = f"{operator.ARGUMENTS}, bool return_k"
"""q, k and v are (batch, seq, heads, head_dim), caches (blocks, block_size, heads, head_dim), all in any strides.

    slots: (n,) int32 or int64 slots of the first n tokens; those that the caches do not have are skipped.
    return_k: whether rotated k is wanted outside of the cache too.
"""

operator.LIBRARY.define(
    f"rotate_and_store(Tensor q, Tensor k, {_TENSORS.format('a', 'b')}, {_LAST}) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
operator.LIBRARY.define(
    f"rotate_and_store_(Tensor(a!) q, Tensor(b!) k, {_TENSORS.format('c', 'd')}, {_LAST}) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)
rotate_and_store = torch.ops.mmpos.rotate_and_store.default
"""Rotated q, and rotated k or a tensor without heads."""
rotate_and_store_ = torch.ops.mmpos.rotate_and_store_.default
"""Rotate q in place, and k where it is wanted."""


def _store(q: Tensor, k: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    q_out, k_out = _shapes(q, k, *arguments)
    _run(q, k, q_out, k_out, *arguments)
    return q_out, k_out


def _store_in_place(q: Tensor, k: Tensor, *arguments: Any) -> None:
    return_k = arguments[-1]
    _run(q, k, q, k if return_k else k[:, :, :0], *arguments)
    _written(q, *([k] if return_k else []))


def _run(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor,
    slots: Tensor, positions: Tensor, frequencies: Tensor, pair_axis: Tensor,
    mode: int, adjacent: bool, attention_factor: float, conjugate: bool, implementation: int, return_k: bool,
) -> None:  # fmt: skip
    if implementation == operator.TRITON:
        from mmpos.rotary import kernel

        kernel.launch_store(
            q, k, v, q_out, k_out, key_cache, value_cache, slots, positions, frequencies, pair_axis, mode=mode,
            adjacent=adjacent, as_hf=frequencies.dtype == torch.float32, attention_factor=attention_factor,
            return_k=return_k,
        )  # fmt: skip
    else:
        turned = k_out if return_k else torch.empty_like(k)
        operator._run(
            q, k, q_out, turned, positions, frequencies, pair_axis,
            mode, adjacent, attention_factor, conjugate, implementation,
        )  # fmt: skip
        paged.write((key_cache, value_cache), (turned, v), slots)
    _written(key_cache, value_cache)


def _written(*tensors: Tensor) -> None:
    """Autograd refuses to go back through what was saved before."""
    torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])


def _shapes(q: Tensor, k: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return_k = arguments[-1]
    return torch.empty_like(q), torch.empty_like(k) if return_k else k.new_empty((*k.shape[:2], 0, k.shape[3]))


operator.LIBRARY.impl("rotate_and_store", operator._outside_of_graphs(_store), "CompositeExplicitAutograd")
operator.LIBRARY.impl("rotate_and_store_", operator._outside_of_graphs(_store_in_place), "CompositeExplicitAutograd")
torch.library.register_fake("mmpos::rotate_and_store", _shapes, lib=operator.LIBRARY)
torch.library.register_fake("mmpos::rotate_and_store_", lambda *_: None, lib=operator.LIBRARY)
