"""Encodings at given positions, as modules: each kind enters attention at one of three places."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mmpos.encodings.base import AdditiveTable, AttentionBias, Encoding, Rotation
from mmpos.encodings.inputs import real_positions
from mmpos.encodings.learned import LearnedBias, LearnedTable
from mmpos.errors import InvalidInputError
from mmpos.rotary import apply_rotary
from mmpos.support.checks import host_array

__all__ = ["Placed", "placed"]


class Placed(nn.Module):
    """An encoding at positions, which does nothing; a kind overrides the verb that is its own."""

    weights: nn.Parameter | None
    """What is learned."""
    index: Tensor
    """The rows of the weights that are used, int64."""
    values: Tensor
    """What is used of an encoding that is not learned; float, or the bits of float64 positions as int64."""

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
        """Make the buffers for positions, in the dtype and on the device of those that are there."""
        array = host_array("positions", positions)
        if array.ndim != 1 and not isinstance(self.encoding, Rotation):
            raise InvalidInputError(f"positions: got shape {array.shape}, want (seq,)")
        before, self.positions = self.positions, array
        try:
            self.fill()
        except InvalidInputError:
            self.positions = before  # those that the buffers are of
            raise

    @property
    def seq(self) -> int:
        """Tokens."""
        return self.positions.shape[-1]

    def fill(self) -> None:
        """Make the buffers."""
        raise NotImplementedError

    def add(self, x: Tensor) -> Tensor:
        """(batch, seq, dim) embeddings, with their positions."""
        return x

    def turn(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, seq, heads, head_dim) q and k, with their positions."""
        return q, k

    def bias(self) -> Tensor | None:
        """(heads, seq, seq) what is added to scores."""
        return None

    def _apply(self, fn: Any, recurse: bool = True) -> Placed:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.fill()  # anew, since a table that was float32 does not become exact in float64
        return self


class _Table(Placed):
    def fill(self) -> None:
        if self.weights is not None:
            self.index = torch.from_numpy(self.encoding.index(self.positions)).to(self.index)
        else:
            self.values = torch.from_numpy(self.encoding.table(self.positions)).to(self.values)

    def add(self, x: Tensor) -> Tensor:
        return x + (self.values if self.weights is None else self.weights[self.index])


class _Bias(Placed):
    def fill(self) -> None:
        if self.weights is not None:
            self.index = torch.from_numpy(self.encoding.index(self.positions, self.positions)).to(self.index)
        else:
            self.values = torch.from_numpy(self.encoding.bias(self.positions, self.positions)).to(self.values)

    def bias(self) -> Tensor:
        return self.values if self.weights is None else self.weights[self.index].permute(2, 0, 1)


class _Turn(Placed):
    def fill(self) -> None:
        self.encoding.angles(self.positions)  # refuses what is not positions of these axes
        ids = real_positions("positions", self.positions)
        bits = torch.from_numpy(ids).expand(self.encoding.axes, -1).contiguous().view(torch.int64)
        self.values = bits.to(self.values.device)  # casts of a model touch floats only

    def turn(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if q.dtype == torch.float64:
            return self._turn_float64(q), self._turn_float64(k)
        batched = self.values.view(torch.float64)[:, None].expand(-1, len(q), -1)
        turned, keys = apply_rotary(q, k, batched, self.encoding.rotary, layout="bshd")
        assert keys is not None
        return turned, keys

    def _turn_float64(self, x: Tensor) -> Tensor:
        """As ``Rotation.rotate``, under autograd: apply_rotary has float32 phases, which checks of gradients see."""
        angles = torch.from_numpy(self.encoding.angles(self.positions)).to(x.device)[:, None]
        cos, sin = (f(angles) * self.encoding.rotary.attention_factor for f in (torch.cos, torch.sin))
        first, second = (torch.from_numpy(channels).to(x.device) for channels in self.encoding.pair_channels)
        a, b = x[..., first], x[..., second]
        turned = x.index_copy(-1, first, a * cos - b * sin)
        return turned.index_copy(-1, second, a * sin + b * cos)


def placed(encoding: Encoding, positions: npt.ArrayLike, dim: int, num_heads: int) -> Placed:
    """The encoding at positions, if it fits a block of this many channels and heads.

    Args:
        encoding: of any of the three kinds.
        positions: (seq,), or (axes, seq) for a rotation.
        dim: channels of the block.
        num_heads: its heads.

    Raises:
        InvalidInputError: the encoding does not fit, or has no such positions.
    """
    if isinstance(encoding, AdditiveTable):
        return _fitting(_Table, "dim", encoding.dim, dim)(encoding, positions)
    if isinstance(encoding, AttentionBias):
        return _fitting(_Bias, "num_heads", encoding.num_heads, num_heads)(encoding, positions)
    if isinstance(encoding, Rotation):
        return _fitting(_Turn, "head_dim", encoding.rotary.head_dim, dim // num_heads)(encoding, positions)
    raise InvalidInputError(f"encoding: got {encoding!r}, want an AdditiveTable, an AttentionBias or a Rotation")


def _fitting(kind: type[Placed], name: str, got: int, want: int) -> type[Placed]:
    if got != want:
        raise InvalidInputError(f"encoding.{name}: got {got}, want {want} as in the block")
    return kind
