"""The module that takes the place of torchtitan's rope in an attention layer; it has no cache to run past."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mmpos.errors import InvalidInputError
from mmpos.positions.columns import AXES, OFFSET
from mmpos.rotary import DevicePositions, RotaryEmbedding
from mmpos.rotary.device import Positions

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
            query: (batch, seq, num_heads, head_dim), or (tokens, num_heads, head_dim) of a folded batch; float32,
                bfloat16 or float16.
            key: likewise with num_kv_heads.
            positions: what its shape says: (1, 1, columns) a ``table_tensor`` of all tokens; (batch, seq) or (1, seq),
                or (tokens,), ids of text, equal on all axes; (batch, seq, axes), or (tokens, axes), ids, integer or
                float64; None for text from 0 on. Of a sharded query, the positions of the local tokens.

        Returns:
            query and key rotated, new tensors in the dtypes and placements that came.

        Raises:
            InvalidInputError: positions, or the heads, do not fit; no positions for tokens on several ranks.
        """
        local_query, local_key = _local("query", query), _local("key", key)
        tokens = local_query.shape[:-2]
        if local_key.dim() != local_query.dim():
            raise InvalidInputError(f"key: got shape {tuple(key.shape)}, want {local_query.dim()} dimensions as query")
        placements = query.placements if isinstance(query, DTensor) else ()
        if positions is None and any(part.is_shard(len(tokens) - 1) for part in placements):
            raise InvalidInputError("positions: got None for tokens on several ranks, want those of the local tokens")
        given = self._positions(positions, tokens, local_query.device)
        q, k = super().forward(local_query, local_key, given, layout="bshd" if len(tokens) == 2 else "thd")
        assert k is not None
        return _as(query, q), _as(key, k)

    def _positions(self, positions: Tensor | None, tokens: torch.Size, device: torch.device) -> Positions:
        """What rotates: a table, or ids with the axes first; tokens are (batch, seq) or (tokens,)."""
        axes = self.rotary.axes
        assert axes is not None
        if positions is None:
            return torch.arange(tokens[-1], dtype=torch.int32, device=device).expand(axes, *tokens)
        if not isinstance(positions, Tensor):
            raise InvalidInputError(f"positions: got {type(positions).__name__}, want a tensor, as from table_tensor")
        positions = local(positions)
        if positions.shape == (*tokens, axes):
            return positions.movedim(-1, 0)
        if positions.shape == tokens or (len(tokens) == 2 and positions.shape == (1, tokens[1])):
            return positions.expand(axes, *tokens)
        # No ids have this shape, since a table has more columns than there are axes.
        if positions.dim() == 3 and positions.shape[:2] == (1, 1):
            return _table(positions, axes, tokens)
        raise InvalidInputError(
            f"positions: got shape {tuple(positions.shape)}, want (1, 1, columns) of a table, "
            f"{tuple(tokens)} or {(*tokens, axes)}"
        )


def _table(positions: Tensor, axes: int, tokens: torch.Size) -> DevicePositions:
    rows = AXES + 4 * axes
    if positions.dtype != torch.int64 or positions.numel() == 0 or positions.numel() % rows:
        raise InvalidInputError(
            f"positions: got {positions.dtype} {tuple(positions.shape)}, want int64 (1, 1, columns) of a table_tensor "
            f"with {axes} axes, a multiple of {rows}"
        )
    table = positions.view(rows, -1)
    if not torch.compiler.is_compiling():
        _check_tokens(table, tokens)
    # Whether ids are fractions is not in the table; denominators are, and those of integers are 1.
    return DevicePositions(table, tokens.numel(), tokens[-1], fractional=True)


def _check_tokens(table: Tensor, tokens: torch.Size) -> None:
    """The last column, which no token reaches, begins at the token count."""
    end = table[OFFSET, -1]
    if table.device.type == "cpu":
        if int(end) != tokens.numel():
            want = "·".join(map(str, tokens))
            raise InvalidInputError(f"positions: got a table of {int(end)} tokens, want {want} as in query")
    elif table.is_cuda:
        torch._assert_async(end == tokens.numel(), f"positions: want a table of {tokens.numel()} tokens, as in query")


def local(x: Tensor) -> Tensor:
    """What this rank holds of a DTensor; a tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def _local(name: str, x: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or x.dim() not in (3, 4):
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        want = "(batch, seq, num_heads, head_dim) or (tokens, num_heads, head_dim)"
        raise InvalidInputError(f"{name}: got {got}, want {want}")
    return local(x)


def _as(like: Tensor, x: Tensor) -> Tensor:
    """The local result as a DTensor where one came: a rotation keeps rows, tokens and heads where they are."""
    if not isinstance(like, DTensor):
        return x
    return DTensor.from_local(
        x, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
