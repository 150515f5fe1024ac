"""From the call of a model to each of its attentions: positions become cos and sin once, and go down beside the states.

Nothing is kept on a module between calls: what a call brings travels in its own arguments, also through checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.hf.positions import Rows, rows_of
from mmpos.positions import PositionTable
from mmpos.rotary.config import Rotary
from mmpos.rotary.device import DevicePositions

__all__ = ["ARGUMENT", "HandDown", "Take"]

ARGUMENT = "mm_position_ids"
"""The argument of the model."""

_HANDED = "mm_turns"
"""The argument of its layers."""


class Turns:
    """What a call hands to the attentions of its layers: per layer type cos and sin, or positions and their Rotary."""

    def __init__(self, pairs: Mapping[str | None, tuple[Any, Any]]) -> None:
        self.pairs = pairs
        self.reached = False


class HandDown:
    """Hook before the model below the head: takes positions out of its arguments, and puts turns there for the layers.

    Args:
        rotaries: one per layer type; None stands for all layers.
        fused: "always", "never", or "cuda": on tensors there; rotations are then made of positions in each layer.
    """

    def __init__(self, rotaries: Mapping[str | None, Rotary], fused: str) -> None:
        self.rotaries = dict(rotaries)
        self.fused = fused

    def __call__(self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """New arguments, if positions are among them."""
        if ARGUMENT not in kwargs:
            return None
        kwargs = dict(kwargs)
        ids = kwargs.pop(ARGUMENT)
        if ids is None:
            return args, kwargs
        tokens = _tokens(args, kwargs)
        rows = Rows(tokens.shape[0], tokens.shape[1], tokens.device)
        if isinstance(ids, PositionTable):
            kwargs |= _packed(ids, rows, args, kwargs)
        positions = rows_of(ids, rows, next(iter(self.rotaries.values())))
        pairs: dict[str | None, tuple[Any, Any]]
        if self.fused == "always" or (self.fused == "cuda" and rows.device.type == "cuda"):
            pairs = {kind: (positions, rotary) for kind, rotary in self.rotaries.items()}
        else:
            dtype = tokens.dtype if tokens.is_floating_point() else base.get_input_embeddings().weight.dtype
            pairs = {kind: _cos_sin(rotary, positions, rows, dtype) for kind, rotary in self.rotaries.items()}
        return args, {**kwargs, _HANDED: Turns(pairs)}


class Take:
    """Hook before an attention: turns that were handed down take the place of the model's own cos and sin."""

    def __init__(self, layer_type: str | None) -> None:
        self.layer_type = layer_type

    def __call__(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """New arguments, if turns are among them."""
        if _HANDED not in kwargs:
            return None
        kwargs = dict(kwargs)
        turns = kwargs.pop(_HANDED)
        turns.reached = True
        first, second = turns.pairs[self.layer_type]
        if not isinstance(second, Rotary):
            # Autocast, offloading and split models decide on dtype and device late: follow the model's own.
            own = kwargs["position_embeddings"][0]
            first, second = first.to(own), second.to(own)
        return args, {**kwargs, "position_embeddings": (first, second)}


def check_reached(base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Hook after the model below the head: no positions are lost in silence."""
    turns = kwargs.get(_HANDED)
    if turns is not None and not turns.reached:
        name = type(base).__name__
        raise UnsupportedError(
            f"model: got {name}, which hands no arguments of others to its layers, want one that does"
        )


def _tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """input_ids, or the embeddings that stand for them."""
    embeds = kwargs.get("inputs_embeds", args[4] if len(args) > 4 else None)
    tokens = embeds if embeds is not None else kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(tokens, Tensor):
        raise InvalidInputError("mm_position_ids: got neither input_ids nor inputs_embeds beside it, want one of them")
    return tokens


def _packed(table: PositionTable, rows: Rows, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by which Transformers keeps the documents of one packed row apart, where the caller told none."""
    told = ("attention_mask", "position_ids", "past_key_values")
    if rows.batch > 1 or table.num_documents < 2 or len(args) > 1 or any(kwargs.get(name) is not None for name in told):
        return {}
    if kwargs.get("use_cache"):
        raise UnsupportedError("use_cache: got True for packed documents, want False: no cache keeps them apart")
    first = torch.from_numpy(table.cu_seqlens[:-1].repeat(table.lengths)).to(rows.device, torch.int64)
    token = torch.arange(rows.seq, device=rows.device)
    return {"position_ids": (token - first)[None], "use_cache": False}


def _cos_sin(
    rotary: Rotary, positions: DevicePositions | Tensor, rows: Rows, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    cos, sin = rotary.cos_sin(positions, "transformers")
    shape = (rows.batch, rows.seq, rotary.rotary_dim)
    return cos.reshape(shape).to(dtype), sin.reshape(shape).to(dtype)
