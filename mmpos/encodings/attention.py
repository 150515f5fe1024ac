"""Attention that takes any encoding: a table before it, a bias in it, or a rotation of its q and k."""

from __future__ import annotations

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from mmpos.encodings.base import Encoding
from mmpos.encodings.placed import placed
from mmpos.errors import InvalidInputError
from mmpos.support.checks import boolean, integer

__all__ = ["SelfAttention"]


class SelfAttention(nn.Module):
    """Attention of tokens at given positions: softmax(q·k/√d + bias)·v between two linear maps without constants.

    A table is added to x, a bias to the scores, a rotation turns q and k. What is learned of an encoding is the
    parameter ``encoding.weights``; everything else about positions is in buffers, which no checkpoint holds.

    Args:
        dim: channels of x.
        num_heads: heads, which divide dim.
        encoding: an Encoding whose dim, num_heads or head_dim fits.
        positions: (seq,) of the tokens, or (axes, seq) for a rotation.
        causal: whether a token sees only itself and those before it.

    Raises:
        InvalidInputError: the encoding does not fit, or has no such positions.
    """

    hidden: Tensor | None
    """(seq, seq) whether a key is hidden from a query, if the block is causal."""

    def __init__(
        self, dim: int, num_heads: int, encoding: Encoding, positions: npt.ArrayLike, *, causal: bool = False
    ) -> None:
        super().__init__()
        integer("dim", dim, minimum=1)
        self.num_heads = integer("num_heads", num_heads, minimum=1)
        if dim % num_heads:
            raise InvalidInputError(f"dim: got {dim}, want a multiple of num_heads={num_heads}")
        self.causal = boolean("causal", causal)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.encoding = placed(encoding, positions, dim, num_heads)
        self._hide()

    def place(self, positions: npt.ArrayLike) -> None:
        """Put other tokens, or as many elsewhere, in place of those so far.

        Args:
            positions: (seq,), or (axes, seq) for a rotation; x then has seq tokens.
        """
        self.encoding.place(positions)
        self._hide()

    def forward(self, x: Tensor) -> Tensor:
        """What every token takes from those that it sees.

        Args:
            x: (batch, seq, dim) embeddings, in the dtype of the parameters.

        Returns:
            (batch, seq, dim), new.
        """
        if x.dim() != 3 or x.shape[1:] != (self.encoding.seq, self.qkv.in_features):
            want = f"(batch, {self.encoding.seq}, {self.qkv.in_features})"
            raise InvalidInputError(f"x: got shape {tuple(x.shape)}, want {want}")
        q, k, v = self.qkv(self.encoding.add(x)).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        q, k = self.encoding.turn(q, k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=self._mask())
        return self.out(seen.transpose(1, 2).flatten(2))

    def _mask(self) -> Tensor | None:
        bias = self.encoding.bias()
        if self.hidden is None:
            return bias
        return ~self.hidden if bias is None else bias.masked_fill(self.hidden, -torch.inf)

    def _hide(self) -> None:
        seq = self.encoding.seq
        later = torch.ones(seq, seq, dtype=torch.bool, device=self.qkv.weight.device).triu(1)
        self.register_buffer("hidden", later if self.causal else None, persistent=False)
