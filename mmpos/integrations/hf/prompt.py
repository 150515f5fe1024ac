"""The positions of prompts that are generated from, and how they go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmpos.errors import InvalidInputError
from mmpos.integrations.hf.positions import check_length
from mmpos.positions.table import PositionTable
from mmpos.rotary.config import Rotary
from mmpos.rotary.device import DevicePositions
from mmpos.support.checks import counted

__all__ = ["Prompt"]


@dataclass(frozen=True, eq=False)
class Prompt:
    """Ids of prompts, and how they go on; not a tensor, so that generation hands it on as it is.

    Args:
        ids: (axes, batch, seq) ids from the first token in the cache on.
        next_positions: (batch,) the id, equal on all axes, of the token after each prompt.
    """

    ids: Tensor
    next_positions: Tensor

    @classmethod
    def of(
        cls, positions: Any, next_positions: Any, rotaries: Sequence[Rotary], tokens: Tensor, cached: bool
    ) -> Prompt:
        """The prompt that the arguments of generate tell, checked.

        Args:
            positions: a PositionTable, or ids with next_positions beside them.
            next_positions: (batch,) integers, or None for a table, which knows.
            rotaries: what the ids are for.
            tokens: (batch, seq, …) the tokens of the prompts, or those after a cache.
            cached: whether there is a cache, whose tokens come first.
        """
        batch = tokens.shape[0]
        if isinstance(positions, PositionTable):
            if next_positions is not None:
                raise InvalidInputError("mm_next_positions: got it beside a table, want None: the table knows")
            ids, next_positions = _from_table(positions, batch, tokens.device)
            check_length(positions, rotaries)
        else:
            _check_next(next_positions, batch, positions)
            ids = positions
            if isinstance(positions, DevicePositions) and positions.num_tokens % batch == 0:
                ids = positions.dense().reshape(positions.axes, batch, -1)
        want = (rotaries[0].axes, batch, tokens.shape[1])
        shape = tuple(ids.shape) if isinstance(ids, Tensor) else None
        longer = shape is not None and len(shape) == 3 and shape[:2] == want[:2] and shape[2] > want[2]
        if shape != want and not (cached and longer):
            got = type(ids).__name__ if shape is None else shape
            raise InvalidInputError(f"mm_position_ids: got {got}, want {want}: (axes, batch, seq)")
        return cls(ids, next_positions.to(ids.device))

    def columns(self, start: int | Tensor, length: int, rows: int) -> Tensor:
        """(axes, rows, length) ids of the tokens from start on, in the prompt and after it.

        Rows are those of the batch, each repeated for the sequences that grow out of it.
        """
        seq = self.ids.shape[2]
        token = start + torch.arange(length, device=self.ids.device)
        after = self.next_positions[:, None] + (token - seq)  # int64, lest ids beyond int32 wrap around
        ids = torch.where(token < seq, self.ids[:, :, token.clamp(max=seq - 1)], after)
        return ids.repeat_interleave(rows // self.ids.shape[1], dim=1)


def _from_table(table: PositionTable, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    held = table.lengths > 0  # a slice keeps the documents that it left behind
    lengths = table.lengths[held]
    if len(lengths) != batch or (lengths != lengths[0]).any():
        raise InvalidInputError(
            f"mm_position_ids: got {counted(len(lengths), 'document')} of {lengths.tolist()} tokens, "
            f'want {batch} of one length: pad the table with side="left"'
        )
    last = table.cu_seqlens[1:][held] - 1
    ends_padded = table.is_padding[np.searchsorted(table.offset, last, side="right") - 1]
    if ends_padded.any():
        row = int(ends_padded.argmax())
        raise InvalidInputError(
            f"mm_position_ids: got padding behind prompt {row}, want it before, as a row goes on from its last token: "
            'pad the table with side="left"'
        )
    ids = torch.from_numpy(table.dense().reshape(table.axes, batch, -1))
    return ids.to(device), torch.from_numpy(table.next_positions[held]).to(device)


def _check_next(next_positions: Any, batch: int, positions: Any) -> None:
    if next_positions is None:
        raise InvalidInputError(
            f"mm_next_positions: got None beside {type(positions).__name__}, want (batch,) ids of the tokens to come: "
            "ids do not tell them, a PositionTable does"
        )
    is_tensor = isinstance(next_positions, Tensor)
    if not is_tensor or next_positions.shape != (batch,) or next_positions.dtype not in (torch.int32, torch.int64):
        got = f"{next_positions.dtype} {tuple(next_positions.shape)}" if is_tensor else type(next_positions).__name__
        raise InvalidInputError(f"mm_next_positions: got {got}, want a tensor of {batch} integers")
