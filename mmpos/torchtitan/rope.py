"""The module that takes the place of torchtitan's rope in an attention layer; it has no cache to run past."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mmpos.columns import AXES, OFFSET
from mmpos.errors import InvalidInputError
from mmpos.rotary import DevicePositions, RotaryEmbedding
from mmpos.rotary.sources import Positions

__all__ = ["RoPE", "local"]


class RoPE(RotaryEmbedding):
    """Rotates queries and keys as torchtitan's RoPE modules are called; any id has its angle, past max_seq_len too.

    Args:
        rotary: frequencies, and how they are allotted to axes and channels.
    """

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate query and key, local tensors or DTensors whose heads, rows or tokens are sharded.

        Args:
            query: (batch, seq, num_heads, head_dim) float32, bfloat16 or float16.
            key: likewise with num_kv_heads.
            positions: what its dimensions say: (columns,) a ``table_tensor`` of batch·seq tokens; (batch, seq) or
                (1, seq) ids of text, equal on all axes; (batch, seq, axes) ids, integer or float64; None for
                text from 0 on. Of a sharded query, the positions of the local tokens.

        Returns:
            query and key rotated, new tensors in the dtypes and placements that came.

        Raises:
            InvalidInputError: positions, or the heads, do not fit; no positions for tokens on several ranks.
        """
        if positions is None and isinstance(query, DTensor) and any(part.is_shard(1) for part in query.placements):
            raise InvalidInputError("positions: got None for tokens on several ranks, want those of the local tokens")
        local_query, local_key = _local("query", query), _local("key", key)
        batch, seq = local_query.shape[:2]
        given = self._positions(positions, batch, seq, local_query.device)
        q, k = super().forward(local_query, local_key, given, layout="bshd")
        assert k is not None
        return _as(query, q), _as(key, k)

    def _positions(self, positions: Tensor | None, batch: int, seq: int, device: torch.device) -> Positions:
        axes = self.rotary.axes
        assert axes is not None
        if positions is None:
            return torch.arange(seq, dtype=torch.int32, device=device).expand(axes, batch, seq)
        if not isinstance(positions, Tensor):
            raise InvalidInputError(f"positions: got {type(positions).__name__}, want a tensor, as from table_tensor")
        positions = local(positions)
        if positions.dim() == 1:
            return _table(positions, axes, batch, seq)
        if positions.dim() == 2 and positions.shape in ((batch, seq), (1, seq)):
            return positions.expand(axes, batch, seq)
        if positions.shape == (batch, seq, axes):
            return positions.permute(2, 0, 1)
        raise InvalidInputError(
            f"positions: got shape {tuple(positions.shape)}, want (columns,) of a table, "
            f"{(batch, seq)} or {(batch, seq, axes)}"
        )


def _table(positions: Tensor, axes: int, batch: int, seq: int) -> DevicePositions:
    rows, tokens = AXES + 4 * axes, batch * seq
    if positions.dtype != torch.int64 or positions.numel() == 0 or positions.numel() % rows:
        raise InvalidInputError(
            f"positions: got {positions.dtype} {tuple(positions.shape)}, want int64 (columns,) of a table_tensor "
            f"with {axes} axes, a multiple of {rows}"
        )
    table = positions.view(rows, -1)
    if not torch.compiler.is_compiling():
        _check_tokens(table, tokens, batch, seq)
    # Whether ids are fractions is not in the table; denominators are, and those of integers are 1.
    return DevicePositions(table, tokens, seq, fractional=True)


def _check_tokens(table: Tensor, tokens: int, batch: int, seq: int) -> None:
    """The last column, which no token reaches, begins at the token count."""
    end = table[OFFSET, -1]
    if table.device.type == "cpu":
        if int(end) != tokens:
            raise InvalidInputError(f"positions: got a table of {int(end)} tokens, want {batch}·{seq} as in query")
    elif table.is_cuda:
        torch._assert_async(end == tokens, f"positions: want a table of {tokens} tokens, as in query")


def local(x: Tensor) -> Tensor:
    """What this rank holds of a DTensor; a tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def _local(name: str, x: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or x.dim() != 4:
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise InvalidInputError(f"{name}: got {got}, want (batch, seq, num_heads, head_dim)")
    return local(x)


def _as(like: Tensor, x: Tensor) -> Tensor:
    """The local result as a DTensor where one came: a rotation keeps rows, tokens and heads where they are."""
    if not isinstance(like, DTensor):
        return x
    return DTensor.from_local(
        x, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
