"""Views of the packed output of one projection: what goes into a rotation as it lies, for attention with a gate too."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mmpos.errors import InvalidInputError
from mmpos.support.checks import boolean, integer

__all__ = ["QKV", "split_qkv"]


class QKV(NamedTuple):
    """Views of a packed tensor.

    Attributes:
        q: (tokens, num_heads, head_dim) or (batch, seq, num_heads, head_dim).
        k: as q, with num_kv_heads.
        v: as q, with num_kv_heads.
        gate: as q, what multiplies the output of attention once a sigmoid is taken of it; None where there is none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor | None


def split_qkv(qkv: Tensor, *, num_heads: int, num_kv_heads: int, head_dim: int, gate: bool = False) -> QKV:
    """Split the packed output of a projection into q, k, v and a gate, without a copy.

    ``apply_rotary`` and ``rotate_and_store`` take the views as they are: with ``inplace=True`` they write rotated q and
    k into the packed tensor itself, in one launch as for separate tensors, and leave everything else in it alone.

    Args:
        qkv: (tokens, width) or (batch, seq, width), any strides, width (num_heads + 2·num_kv_heads)·head_dim: all
            heads of q, then of k, then of v. With a gate num_heads counts twice.
        num_heads: heads of q.
        num_kv_heads: heads of k and of v.
        head_dim: channels of a head.
        gate: whether each head of q is followed by its gate, of as many channels, as Qwen3-Next and Qwen3.5 have it.

    Returns:
        views of qkv.

    Raises:
        InvalidInputError: heads do not fit the width.
    """
    if not isinstance(qkv, Tensor):
        raise InvalidInputError(f"qkv: got {type(qkv).__name__}, want a tensor")
    if qkv.dim() not in (2, 3):
        raise InvalidInputError(f"qkv: got shape {tuple(qkv.shape)}, want (tokens, width) or (batch, seq, width)")
    integer("num_heads", num_heads, minimum=1)
    integer("num_kv_heads", num_kv_heads, minimum=1)
    integer("head_dim", head_dim, minimum=1)
    parts = 2 if boolean("gate", gate) else 1
    sizes = [num_heads * parts * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    if qkv.shape[-1] != sum(sizes):
        other = sum(sizes) + (-num_heads if gate else num_heads) * head_dim
        hint = f"; it would fit gate={not gate}" if qkv.shape[-1] == other else ""
        raise InvalidInputError(
            f"qkv: got width {qkv.shape[-1]}, want {sum(sizes)} = ({'2·' if gate else ''}{num_heads} num_heads "
            f"+ 2·{num_kv_heads} num_kv_heads)·{head_dim} head_dim{hint}"
        )
    q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in qkv.split(sizes, dim=-1))
    if not gate:
        return QKV(q, k, v, None)
    return QKV(q[..., 0::2, :], k, v, q[..., 1::2, :])
