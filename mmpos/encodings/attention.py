"""Self-attention with any position encoding: an additive table, an attention bias, or a rotation of q and k."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from mmpos.encodings.base import AdditiveTable, AttentionBias, Encoding, LearnedBias, real_positions
from mmpos.encodings.rotation import Rotation
from mmpos.encodings.tables import LearnedAbsolute
from mmpos.errors import InvalidInputError
from mmpos.rotary import apply_rotary
from mmpos.support.checks import boolean, host_array, integer

__all__ = ["SelfAttention"]


class SelfAttention(nn.Module):
    """Self-attention at fixed positions: softmax(q·k/√d + bias)·v between two linear layers without bias.

    A table is added to x, a bias is added to the scores, and a rotation is applied to q and k. A learned encoding
    trains the parameter ``encoding.weights``. Everything else that depends on the positions is stored in non-persistent
    buffers, so it is not part of a checkpoint.

    Args:
        dim: channels of x.
        num_heads: number of heads, a divisor of dim.
        encoding: an Encoding whose dim, num_heads or head_dim matches these arguments.
        positions: (seq,) positions of the tokens, or (axes, seq) for a rotation.
        causal: whether a token attends only to itself and earlier tokens.

    Raises:
        InvalidInputError: the encoding does not match dim and num_heads, or does not accept the positions.
    """

    hidden: Tensor | None
    """(seq, seq) True where a query may not attend to a key; None without a causal mask."""

    def __init__(
        self, dim: int, num_heads: int, encoding: Encoding, positions: npt.ArrayLike, *, causal: bool = False
    ) -> None:
        super().__init__()
        integer("dim", dim, minimum=1)
        self.num_heads = integer("num_heads", num_heads, minimum=1)
        if dim % num_heads:
            raise InvalidInputError(f"dim: got {dim}, want a multiple of num_heads={num_heads}")
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        _check_sizes(encoding, dim, num_heads)
        self.encoding = _PositionedEncoding(encoding, positions)
        seq = self.encoding.seq
        later = torch.ones(seq, seq, dtype=torch.bool).triu(1)
        self.register_buffer("hidden", later if boolean("causal", causal) else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the attention.

        Args:
            x: (batch, seq, dim) embeddings with the dtype of the parameters.

        Returns:
            (batch, seq, dim), new.
        """
        if x.dim() != 3 or x.shape[1:] != (self.encoding.seq, self.qkv.in_features):
            want = f"(batch, {self.encoding.seq}, {self.qkv.in_features})"
            raise InvalidInputError(f"x: got shape {tuple(x.shape)}, want {want}")
        q, k, v = self.qkv(self.encoding.add(x)).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        q, k = self.encoding.rotate(q, k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mask = self.encoding.bias()
        if self.hidden is not None:
            mask = ~self.hidden if mask is None else mask.masked_fill(self.hidden, -torch.inf)
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(seen.transpose(1, 2).flatten(2))


class _PositionedEncoding(nn.Module):
    """An encoding at fixed positions, with a method for each of the three places where it may act."""

    weights: nn.Parameter | None
    """Learned weights, or None."""
    index: Tensor
    """Indices of the weight rows to use, as int64."""
    values: Tensor
    """Values of an encoding without weights: floats, or the bits of float64 positions as int64."""

    def __init__(self, encoding: Any, positions: npt.ArrayLike) -> None:
        super().__init__()
        self.encoding, self.positions = encoding, host_array("positions", positions)
        if self.positions.ndim != 1 and not isinstance(encoding, Rotation):
            raise InvalidInputError(f"positions: got shape {self.positions.shape}, want (seq,)")
        learned = isinstance(encoding, LearnedAbsolute | LearnedBias)
        weights = torch.tensor(encoding.weights, dtype=torch.get_default_dtype()) if learned else None
        self.register_parameter("weights", None if weights is None else nn.Parameter(weights))
        self.register_buffer("index", torch.empty(0, dtype=torch.int64), persistent=False)
        self.register_buffer("values", torch.empty(0), persistent=False)
        self._fill()

    @property
    def seq(self) -> int:
        """Number of tokens."""
        return self.positions.shape[-1]

    def add(self, x: Tensor) -> Tensor:
        """Add the table to embeddings of shape (batch, seq, dim)."""
        return x + self._rows() if isinstance(self.encoding, AdditiveTable) else x

    def bias(self) -> Tensor | None:
        """Return the (heads, seq, seq) bias of the scores, or None."""
        if not isinstance(self.encoding, AttentionBias):
            return None
        return self._rows() if self.weights is None else self._rows().permute(2, 0, 1)

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q and k of shape (batch, seq, heads, head_dim)."""
        if not isinstance(self.encoding, Rotation):
            return q, k
        if q.dtype == torch.float64:
            return self._rotate_float64(q), self._rotate_float64(k)
        batched = self.values.view(torch.float64)[:, None].expand(-1, len(q), -1)
        turned, keys = apply_rotary(q, k, batched, self.encoding.rotary, layout="bshd")
        assert keys is not None
        return turned, keys

    def _rows(self) -> Tensor:
        return self.values if self.weights is None else self.weights[self.index]

    def _fill(self) -> None:
        """Compute the buffers."""
        if isinstance(self.encoding, Rotation):
            self.encoding.angles(self.positions)  # raises an error unless the shape matches the axes
            ids = torch.from_numpy(real_positions("positions", self.positions))
            bits = ids.expand(self.encoding.rotary.axes, -1).contiguous().view(torch.int64)
            self.values = bits.to(self.values.device)  # stored as int64, because casting a model changes only floats
            return
        is_bias = isinstance(self.encoding, AttentionBias)
        arguments = [self.positions] * (2 if is_bias else 1)
        if self.weights is not None:
            self.index = torch.from_numpy(self.encoding.index(*arguments)).to(self.index)
        else:
            compute = self.encoding.bias if is_bias else self.encoding.table
            self.values = torch.from_numpy(compute(*arguments)).to(self.values)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _PositionedEncoding:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._fill()  # recomputed, because a cast from float32 to float64 would keep the float32 rounding
        return self

    def _rotate_float64(self, x: Tensor) -> Tensor:
        """Rotate in float64 under autograd, for gradient checks; apply_rotary computes its phases in float32."""
        angles = torch.from_numpy(self.encoding.angles(self.positions)).to(x.device)
        angles = angles if angles.dim() == 3 else angles[:, None]
        cos, sin = (f(angles) * self.encoding.rotary.attention_factor for f in (torch.cos, torch.sin))
        first, second = (torch.from_numpy(channels).to(x.device) for channels in self.encoding.pair_channels)
        a, b = x[..., first], x[..., second]
        turned = x.index_copy(-1, first, a * cos - b * sin)
        return turned.index_copy(-1, second, a * sin + b * cos)


def _check_sizes(encoding: Encoding, dim: int, num_heads: int) -> None:
    """Raise an error unless the encoding has the channels and heads of the block."""
    if isinstance(encoding, AdditiveTable):
        sizes = [("dim", encoding.dim, dim)]
    elif isinstance(encoding, AttentionBias):
        sizes = [("num_heads", encoding.num_heads, num_heads)]
    elif isinstance(encoding, Rotation):
        own = encoding.rotary.own_heads or num_heads
        sizes = [("num_heads", own, num_heads), ("head_dim", encoding.rotary.head_dim, dim // num_heads)]
    else:
        raise InvalidInputError(f"encoding: got {encoding!r}, want an AdditiveTable, an AttentionBias or a Rotation")
    for name, got, want in sizes:
        if got != want:
            raise InvalidInputError(f"encoding.{name}: got {got}, want {want} as in the block")
