"""Self-attention with any position encoding: an additive table, an attention bias, or a rotation of q and k."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from mmpos.encodings.base import (
    AdditiveTable,
    AttentionBias,
    Encoding,
    LearnedBias,
    LearnedTable,
    Rotation,
    real_positions,
)
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
        self.causal = boolean("causal", causal)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.encoding = _positioned(encoding, positions, dim, num_heads)
        self._hide()

    def place(self, positions: npt.ArrayLike) -> None:
        """Replace the positions; their number may change.

        Args:
            positions: (seq,), or (axes, seq) for a rotation. Later calls expect seq tokens in x.
        """
        self.encoding.place(positions)
        self._hide()

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


class _PositionedEncoding(nn.Module):
    """Base class of encodings at fixed positions. It encodes nothing; subclasses override add, rotate or bias."""

    weights: nn.Parameter | None
    """Learned weights, or None."""
    index: Tensor
    """Indices of the weight rows to use, as int64."""
    values: Tensor
    """Values of an encoding without weights: floats, or the bits of float64 positions as int64."""

    def __init__(self, encoding: Any, positions: npt.ArrayLike) -> None:
        super().__init__()
        self.encoding = encoding
        learned = isinstance(encoding, LearnedTable | LearnedBias)
        weights = torch.tensor(encoding.weights, dtype=torch.get_default_dtype()) if learned else None
        self.register_parameter("weights", None if weights is None else nn.Parameter(weights))
        self.register_buffer("index", torch.empty(0, dtype=torch.int64), persistent=False)
        self.register_buffer("values", torch.empty(0), persistent=False)
        self.positions = np.empty(0)
        self.place(positions)

    def place(self, positions: npt.ArrayLike) -> None:
        """Compute the buffers for new positions, keeping their dtype and device."""
        array = host_array("positions", positions)
        if array.ndim != 1 and not isinstance(self.encoding, Rotation):
            raise InvalidInputError(f"positions: got shape {array.shape}, want (seq,)")
        before, self.positions = self.positions, array
        try:
            self.fill()
        except InvalidInputError:
            self.positions = before  # the buffers still hold these positions
            raise

    @property
    def seq(self) -> int:
        """Number of tokens."""
        return self.positions.shape[-1]

    def fill(self) -> None:
        """Compute the buffers."""
        raise NotImplementedError

    def add(self, x: Tensor) -> Tensor:
        """Add the table to embeddings of shape (batch, seq, dim)."""
        return x

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q and k of shape (batch, seq, heads, head_dim)."""
        return q, k

    def bias(self) -> Tensor | None:
        """Return the (heads, seq, seq) bias of the scores, or None."""
        return None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _PositionedEncoding:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.fill()  # recomputed, because a cast from float32 to float64 would keep the float32 rounding
        return self


class _Table(_PositionedEncoding):
    def fill(self) -> None:
        if self.weights is not None:
            self.index = torch.from_numpy(self.encoding.index(self.positions)).to(self.index)
        else:
            self.values = torch.from_numpy(self.encoding.table(self.positions)).to(self.values)

    def add(self, x: Tensor) -> Tensor:
        return x + (self.values if self.weights is None else self.weights[self.index])


class _Bias(_PositionedEncoding):
    def fill(self) -> None:
        if self.weights is not None:
            self.index = torch.from_numpy(self.encoding.index(self.positions, self.positions)).to(self.index)
        else:
            self.values = torch.from_numpy(self.encoding.bias(self.positions, self.positions)).to(self.values)

    def bias(self) -> Tensor:
        return self.values if self.weights is None else self.weights[self.index].permute(2, 0, 1)


class _Rotation(_PositionedEncoding):
    def fill(self) -> None:
        self.encoding.angles(self.positions)  # raises an error unless the shape matches the axes
        ids = real_positions("positions", self.positions)
        bits = torch.from_numpy(ids).expand(self.encoding.axes, -1).contiguous().view(torch.int64)
        self.values = bits.to(self.values.device)  # stored as int64, because casting a model changes only floats

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if q.dtype == torch.float64:
            return self._rotate_float64(q), self._rotate_float64(k)
        batched = self.values.view(torch.float64)[:, None].expand(-1, len(q), -1)
        turned, keys = apply_rotary(q, k, batched, self.encoding.rotary, layout="bshd")
        assert keys is not None
        return turned, keys

    def _rotate_float64(self, x: Tensor) -> Tensor:
        """Rotate in float64 under autograd, for gradient checks; apply_rotary computes its phases in float32."""
        angles = torch.from_numpy(self.encoding.angles(self.positions)).to(x.device)
        angles = angles if angles.dim() == 3 else angles[:, None]
        cos, sin = (f(angles) * self.encoding.rotary.attention_factor for f in (torch.cos, torch.sin))
        first, second = (torch.from_numpy(channels).to(x.device) for channels in self.encoding.pair_channels)
        a, b = x[..., first], x[..., second]
        turned = x.index_copy(-1, first, a * cos - b * sin)
        return turned.index_copy(-1, second, a * sin + b * cos)


def _positioned(encoding: Encoding, positions: npt.ArrayLike, dim: int, num_heads: int) -> _PositionedEncoding:
    """Build the module for an encoding; raise an error unless it has the channels and heads of the block."""
    if isinstance(encoding, AdditiveTable):
        return _fitting(_Table, "dim", encoding.dim, dim)(encoding, positions)
    if isinstance(encoding, AttentionBias):
        return _fitting(_Bias, "num_heads", encoding.num_heads, num_heads)(encoding, positions)
    if isinstance(encoding, Rotation):
        if encoding.rotary.own_heads:
            _fitting(_Rotation, "num_heads", encoding.rotary.own_heads, num_heads)
        return _fitting(_Rotation, "head_dim", encoding.rotary.head_dim, dim // num_heads)(encoding, positions)
    raise InvalidInputError(f"encoding: got {encoding!r}, want an AdditiveTable, an AttentionBias or a Rotation")


def _fitting(kind: type[_PositionedEncoding], name: str, got: int, want: int) -> type[_PositionedEncoding]:
    if got != want:
        raise InvalidInputError(f"encoding.{name}: got {got}, want {want} as in the block")
    return kind
