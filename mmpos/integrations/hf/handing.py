"""From the call of a model to each of its attentions: positions become cos and sin once, and go down beside the states.

Nothing is kept on a module between calls: what a call brings travels in its own arguments, also through checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.integrations.hf.positions import Rows, apart, rows_of, tokens_of
from mmpos.positions.table import PositionTable
from mmpos.rotary.apply import cos_sin
from mmpos.rotary.config import Rotary
from mmpos.rotary.device import DevicePositions

__all__ = ["ARGUMENT", "HandDown", "Take", "check_reached"]

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
        fused: "always", "never", or on "cuda": whether layers are given positions in place of cos and sin.
        names: arguments of the model, in order.
        packs: whether the model keeps documents of one row apart.
    """

    def __init__(self, rotaries: Mapping[str | None, Rotary], fused: str, names: Sequence[str], packs: bool) -> None:
        self.rotaries = dict(rotaries)
        self.fused = fused
        self.names = tuple(names)
        self.packs = packs

    def __call__(self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """New arguments, if positions are among them."""
        told = kwargs.get("position_ids")
        if isinstance(told, PositionTable | DevicePositions):
            raise InvalidInputError(f"position_ids: got {type(told).__name__}, want it as {ARGUMENT}")
        if ARGUMENT not in kwargs:
            return None
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        ids = given.pop(ARGUMENT)
        if ids is None:
            return (), given
        tokens = tokens_of(given.get("inputs_embeds"), given.get("input_ids"))
        rows = Rows(tokens.shape[0], tokens.shape[1], tokens.device)
        given |= apart(ids, rows, given, self.packs)
        return (), {**given, _HANDED: self._turns(ids, rows)}

    def _turns(self, ids: Any, rows: Rows) -> Turns:
        positions = rows_of(ids, rows, list(self.rotaries.values()))
        if self.fused == "always" or (self.fused == "cuda" and rows.device.type == "cuda"):
            return Turns({kind: (positions, rotary) for kind, rotary in self.rotaries.items()})
        return Turns({kind: _cos_sin(rotary, positions, rows) for kind, rotary in self.rotaries.items()})


class Take:
    """Hook before an attention: turns that were handed down take the place of the model's own cos and sin."""

    def __init__(self, layer_type: str | None) -> None:
        self.layer_type = layer_type

    def __call__(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """New arguments, if turns are among them."""
        if _HANDED not in kwargs:
            return None
        given = dict(kwargs)
        turns = given.pop(_HANDED)
        turns.reached = True
        first, second = turns.pairs[self.layer_type]
        # Autocast, offloading and split models decide on dtype and device late: follow the model's own.
        own = given["position_embeddings"][0]
        fused = isinstance(second, Rotary)
        width = second.rotary_dim if fused else first.shape[-1]
        if own.dim() != 3 or own.shape[-1] != width:
            got = f"{type(attention).__name__}, whose cos has shape {tuple(own.shape)}"
            raise UnsupportedError(f"model: got {got}, want (batch, seq, {width}) as in Llama")
        first, second = (first.to(own.device), second) if fused else (first.to(own), second.to(own))
        return args, {**given, "position_embeddings": (first, second)}


def check_reached(base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Hook after the model below the head: no positions are lost in silence."""
    turns = kwargs.get(_HANDED)
    if turns is not None and not turns.reached:
        name = type(base).__name__
        raise UnsupportedError(
            f"model: got {name}, which hands no arguments of others to its layers, want one that does"
        )


def _cos_sin(rotary: Rotary, positions: DevicePositions | Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin(rotary, positions, "transformers")
    shape = (rows.batch, rows.seq, rotary.rotary_dim)
    return cos.reshape(shape), sin.reshape(shape)
