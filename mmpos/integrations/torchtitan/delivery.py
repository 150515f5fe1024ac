"""From a batch to the layers: multimodal positions travel beside those that masks and losses are made of."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mmpos.errors import InvalidInputError
from mmpos.integrations.torchtitan.rope import local
from mmpos.support.checks import integer

__all__ = ["deliver_positions"]

NAME = "mm_position_ids"


def deliver_positions(model: nn.Module, rank: int = 0) -> RemovableHandle:
    """Let a model, or a stage of a pipeline, take ``mm_position_ids`` and hand them to its layers as positions.

    torchtitan's trainer gives whatever else a batch holds to every stage as keyword arguments. Its masks and losses
    keep the ``positions`` of the batch, since those are made before this and are read outside of the model.

    Args:
        model: a part of torchtitan's ``model_parts``, whose RoPE is that of this room.
        rank: this rank among the context-parallel ones: which table of ``shard_tensors`` is its own.

    Returns:
        A handle whose ``remove`` undoes it.
    """
    rank = integer("rank", rank, minimum=0)

    def swap(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = kwargs.get(NAME)
        kept = {name: value for name, value in kwargs.items() if name != NAME}
        if given is None:
            return args, kept
        if kept.get("mrope_positions") is not None:
            raise InvalidInputError(f"mrope_positions: got ids beside {NAME}, want build_mrope_positions=False")
        return args, {**kept, "positions": _own(given, rank)}

    return model.register_forward_pre_hook(swap, with_kwargs=True)


def _own(given: Tensor, rank: int) -> Tensor:
    if not isinstance(given, Tensor) or given.dim() not in (2, 3, 4):
        got = f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        want = (
            "a table_tensor, (world_size, 1, 1, columns) of shard_tensors, or ids (batch, seq, axes) or (tokens, axes)"
        )
        raise InvalidInputError(f"{NAME}: got {got}, want {want}")
    given = local(given)  # where the trainer wrapped all that it passes on
    if given.dim() != 4:
        return given
    if rank >= given.shape[0]:
        raise InvalidInputError(f"{NAME}: got tables of {given.shape[0]} ranks, want one for rank {rank}")
    return given[rank]
