"""Split the packed output of a qkv projection, with or without a gate, into views for the rotation."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mmpos.errors import InvalidInputError
from mmpos.support.checks import boolean, integer

__all__ = ["QKV", "split_qkv"]


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
        hint = f"; this width matches gate={not gate}" if qkv.shape[-1] == other else ""
        raise InvalidInputError(
            f"qkv: got width {qkv.shape[-1]}, want {sum(sizes)} = ({'2·' if gate else ''}{num_heads} num_heads "
            f"+ 2·{num_kv_heads} num_kv_heads)·{head_dim} head_dim{hint}"
        )
    q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in qkv.split(sizes, dim=-1))
    if not gate:
        return QKV(q, k, v, None)
    return QKV(q[..., 0::2, :], k, v, q[..., 1::2, :])
