"""generate with positions: ids of the prompt at the first step, and the next positions of every row after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmpos.errors import InvalidInputError
from mmpos.hf.handing import ARGUMENT
from mmpos.positions import PositionTable
from mmpos.rotary.device import DevicePositions

__all__ = ["Prompt", "generate", "prepare_inputs_for_generation"]


@dataclass(frozen=True, eq=False)
class Prompt:
    """Ids of prompts, and how they go on.

    Args:
        ids: (axes, batch, seq) ids from the first token in the cache on.
        next_positions: (batch,) the id, equal on all axes, of the token after each prompt.
    """

    ids: Tensor
    next_positions: Tensor

    def columns(self, start: int | Tensor, length: int, rows: int) -> Tensor:
        """(axes, rows, length) ids of the tokens from start on, in the prompt and after it.

        Rows are those of the batch, each repeated for the sequences that grow out of it.
        """
        seq = self.ids.shape[2]
        token = start + torch.arange(length, device=self.ids.device)
        after = (self.next_positions[:, None] + (token - seq)).to(self.ids.dtype)
        ids = after.expand(self.ids.shape[0], -1, -1)
        if seq:
            ids = torch.where(token < seq, self.ids[:, :, token.clamp(max=seq - 1)], ids)
        return ids.repeat_interleave(rows // self.ids.shape[1], dim=1)


def generate(
    model: Any,
    axes: int,
    inputs: Tensor | None = None,
    *args: Any,
    mm_position_ids: Any = None,
    mm_next_positions: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """``generate`` of the model's class, with positions of the prompt."""
    if mm_position_ids is not None and not isinstance(mm_position_ids, Prompt):
        tokens = next(
            (x for x in (kwargs.get("inputs_embeds"), inputs, kwargs.get("input_ids")) if x is not None), None
        )
        if tokens is None:
            raise InvalidInputError("mm_position_ids: got no input_ids and no inputs_embeds beside it, want a prompt")
        mm_position_ids = _prompt(mm_position_ids, mm_next_positions, axes, tokens)
    if mm_position_ids is not None:
        kwargs[ARGUMENT] = mm_position_ids
    return type(model).generate(model, inputs, *args, **kwargs)


def prepare_inputs_for_generation(
    model: Any, input_ids: Tensor, *, inputs_embeds: Tensor | None = None, mm_position_ids: Any = None, **kwargs: Any
) -> Any:
    """``prepare_inputs_for_generation`` of the model's class, with the ids of the tokens that it chooses.

    Transformers reads the names of its arguments to know which ones ``generate`` may be given.
    """
    prepared = type(model).prepare_inputs_for_generation(model, input_ids, inputs_embeds=inputs_embeds, **kwargs)
    if mm_position_ids is None:
        return prepared
    tokens = prepared.get("inputs_embeds")
    tokens = prepared["input_ids"] if tokens is None else tokens
    cache = kwargs.get("past_key_values")
    start = 0 if cache is None else cache.get_seq_length()
    prepared[ARGUMENT] = mm_position_ids.columns(start, tokens.shape[1], tokens.shape[0]).to(tokens.device)
    return prepared


def _prompt(ids: Any, next_positions: Any, axes: int, tokens: Tensor) -> Prompt:
    batch, device = tokens.shape[0], tokens.device
    if isinstance(ids, PositionTable):
        if next_positions is not None:
            raise InvalidInputError("mm_next_positions: got it beside a table, want None: the table knows")
        lengths = ids.lengths
        if ids.num_documents != batch or (lengths != lengths[0]).any():
            raise InvalidInputError(
                f"mm_position_ids: got {ids.num_documents} documents of {lengths.tolist()} tokens, "
                f'want {batch} of one length: pad the table with side="left"'
            )
        dense = torch.from_numpy(ids.dense().reshape(ids.axes, batch, -1)).to(device)
        following = torch.from_numpy(ids.next_positions.copy()).to(device)
    else:
        if next_positions is None:
            raise InvalidInputError(
                f"mm_next_positions: got None beside {type(ids).__name__}, want (batch,) ids of the tokens to come: "
                "ids do not tell them, a PositionTable does"
            )
        dense = ids.dense().reshape(ids.axes, batch, -1) if isinstance(ids, DevicePositions) else ids
        following = next_positions
        if not isinstance(following, Tensor) or following.shape != (batch,) or following.is_floating_point():
            raise InvalidInputError(f"mm_next_positions: got {following!r}, want a tensor of {batch} integers")
    if not isinstance(dense, Tensor) or dense.dim() != 3 or dense.shape[:2] != (axes, batch):
        got = tuple(dense.shape) if isinstance(dense, Tensor) else type(dense).__name__
        raise InvalidInputError(f"mm_position_ids: got {got}, want ({axes}, {batch}, seq): (axes, batch, seq)")
    if dense.shape[2] < tokens.shape[1]:
        raise InvalidInputError(f"mm_position_ids: got {dense.shape[2]} tokens, want >= {tokens.shape[1]}, the prompt")
    return Prompt(dense, following)
