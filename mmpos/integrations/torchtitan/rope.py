"""torchtitan's RoPE module with multimodal positions: its config as a Rotary, its call, and its way into the layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.positions.rows import AXES, OFFSET
from mmpos.rotary import DevicePositions, Llama3, Rotary, RotaryEmbedding, Scaling, YaRN
from mmpos.rotary.device import Positions
from mmpos.support.checks import integer

if TYPE_CHECKING:
    from torchtitan.models.common.rope import RoPE as TitanRoPE

__all__ = ["RoPE", "deliver_positions", "local", "rotary_from_config"]

PAIRINGS = {"ComplexRoPE.Config": "adjacent", "CosSinRoPE.Config": "half"}
"""Pairs of channels by the config's class, or one that it inherits from."""


def rotary_from_config(config: TitanRoPE.Config, **overrides: Any) -> Rotary:
    """Make a Rotary of a torchtitan RoPE config, with the axes that images need.

    Theta, dim and scaling are the config's; max_seq_len is not needed. MRoPE's sections come with its allocation.
    YaRN has no attention factor here, as torchtitan folds it into the scale of the softmax.

    Args:
        config: a ``CosSinRoPE.Config``, ``ComplexRoPE.Config``, or one that inherits from them.
        overrides: arguments of Rotary that replace those of the config, such as axes and allocation.

    Raises:
        InvalidInputError: another object.
        UnsupportedError: a scaling that is not known, or that torchtitan refuses for this class.
    """
    names = [base.__qualname__ for base in type(config).__mro__]
    pairing = next((PAIRINGS[name] for name in names if name in PAIRINGS), None)
    if pairing is None:
        raise InvalidInputError(f"config: got {names[0]}, want {' or '.join(PAIRINGS)}")
    arguments = {
        "head_dim": config.dim,
        "theta": config.theta,
        "pairing": pairing,
        "scaling": _scaling(config, pairing),
    }
    if "MRoPE.Config" in names and "allocation" not in overrides:
        arguments |= {"axes": 3, "allocation": "mrope-interleaved", "mrope_section": config.mrope_section}
    return Rotary(**{**arguments, **overrides})


def _scaling(config: TitanRoPE.Config, pairing: str) -> Scaling | None:
    if config.scaling == "llama" and pairing == "adjacent":
        return Llama3(
            config.scaling_factor,
            config.low_freq_factor,
            config.high_freq_factor,
            config.original_max_position_embeddings,
        )
    if config.scaling == "yarn":
        if config.rope_factor <= 1:
            return None
        return YaRN(
            config.rope_factor,
            config.original_seq_len,
            beta_fast=config.beta_fast,
            beta_slow=config.beta_slow,
            attention_factor=1.0,
            truncate=config.truncate,
        )
    if config.scaling != "none":
        raise UnsupportedError(f"config.scaling: got {config.scaling!r} for pairs of the sort {pairing!r}")
    return None


class RoPE(RotaryEmbedding):
    """Module that rotates queries and keys as torchtitan's RoPE modules do, for any id, past max_seq_len too.

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
            positions: by shape: (1, 1, columns) a ``table_tensor`` of all tokens; (batch, seq) or (1, seq),
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
        local_positions = self._positions(positions, tokens, local_query.device)
        q, k = super().forward(local_query, local_key, local_positions, layout="bshd" if len(tokens) == 2 else "thd")
        assert k is not None
        return _as(query, q), _as(key, k)

    def _positions(self, positions: Tensor | None, tokens: torch.Size, device: torch.device) -> Positions:
        """Return a table, or ids with the axes first; tokens are (batch, seq) or (tokens,)."""
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
    """Compare the token count with the last column of the table, which begins there."""
    end = table[OFFSET, -1]
    if table.device.type == "cpu":
        if int(end) != tokens.numel():
            want = "·".join(map(str, tokens))
            raise InvalidInputError(f"positions: got a table of {int(end)} tokens, want {want} as in query")
    elif table.is_cuda:
        torch._assert_async(end == tokens.numel(), f"positions: want a table of {tokens.numel()} tokens, as in query")


def local(x: Tensor) -> Tensor:
    """Return the part of a DTensor on this rank; a tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def _local(name: str, x: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or x.dim() not in (3, 4):
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        want = "(batch, seq, num_heads, head_dim) or (tokens, num_heads, head_dim)"
        raise InvalidInputError(f"{name}: got {got}, want {want}")
    return local(x)


def _as(like: Tensor, x: Tensor) -> Tensor:
    """Wrap the local result as a DTensor like the input: a rotation keeps rows, tokens and heads in place."""
    if not isinstance(like, DTensor):
        return x
    return DTensor.from_local(
        x, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


NAME = "mm_position_ids"


def deliver_positions(model: nn.Module, rank: int = 0) -> RemovableHandle:
    """Let a model, or a stage of a pipeline, take ``mm_position_ids`` and pass them to its layers as positions.

    torchtitan's trainer gives whatever else a batch holds to every stage as keyword arguments. Its masks and losses
    keep the ``positions`` of the batch, since those are made before this and are read outside of the model.

    Args:
        model: a part of torchtitan's ``model_parts``, whose RoPE is that of this room.
        rank: this rank among the context-parallel ones: which table of ``shard_tensors`` is its own.

    Returns:
        A handle whose ``remove`` undoes it.
    """
    rank = integer("rank", rank, minimum=0)

    def swap(
        _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        positions = kwargs.get(NAME)
        kept = {name: value for name, value in kwargs.items() if name != NAME}
        if positions is None:
            return args, kept
        if kept.get("mrope_positions") is not None:
            raise InvalidInputError(f"mrope_positions: got ids beside {NAME}, want build_mrope_positions=False")
        return args, {**kept, "positions": _own(positions, rank)}

    return model.register_forward_pre_hook(swap, with_kwargs=True)


def _own(positions: object, rank: int) -> Tensor:
    if not isinstance(positions, Tensor) or positions.dim() not in (2, 3, 4):
        got = f"shape {tuple(positions.shape)}" if isinstance(positions, Tensor) else type(positions).__name__
        want = (
            "a table_tensor, (world_size, 1, 1, columns) of shard_tensors, or ids (batch, seq, axes) or (tokens, axes)"
        )
        raise InvalidInputError(f"{NAME}: got {got}, want {want}")
    positions = local(positions)  # where the trainer wrapped all that it passes on
    if positions.dim() != 4:
        return positions
    if rank >= positions.shape[0]:
        raise InvalidInputError(f"{NAME}: got tables of {positions.shape[0]} ranks, want one for rank {rank}")
    return positions[rank]
