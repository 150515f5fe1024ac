"""What mm_position_ids may be, and whether it fits the tokens of a call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmpos.errors import InvalidInputError
from mmpos.positions import PositionTable
from mmpos.rotary.config import Rotary
from mmpos.rotary.device import DevicePositions

__all__ = ["Rows", "rows_of"]


class Rows(NamedTuple):
    """The tokens of a call: rows, tokens in a row, and where they are."""

    batch: int
    seq: int
    device: torch.device


def rows_of(ids: Any, rows: Rows, rotary: Rotary) -> DevicePositions | Tensor:
    """Positions where kernels can read them, one for every token of the call.

    Raises:
        InvalidInputError: another type, or axes, tokens, rows or device that differ from the call's.
    """
    if isinstance(ids, PositionTable):
        ids = DevicePositions.from_table(ids, rows.device)
    if isinstance(ids, DevicePositions):
        _check_table(ids, rows, rotary)
    elif isinstance(ids, Tensor):
        if ids.shape != (rotary.axes, rows.batch, rows.seq):
            want = (rotary.axes, rows.batch, rows.seq)
            raise InvalidInputError(f"mm_position_ids: got shape {tuple(ids.shape)}, want {want}: (axes, batch, seq)")
    else:
        got = type(ids).__name__
        raise InvalidInputError(f"mm_position_ids: got {got}, want a PositionTable, DevicePositions or a tensor of ids")
    if ids.device != rows.device:
        raise InvalidInputError(f"mm_position_ids: got a tensor on {ids.device}, want {rows.device} as the tokens")
    return ids


def _check_table(ids: DevicePositions, rows: Rows, rotary: Rotary) -> None:
    if ids.axes != rotary.axes:
        raise InvalidInputError(f"mm_position_ids: got {ids.axes} axes, want {rotary.axes} as in rotary")
    if ids.num_tokens != rows.batch * rows.seq:
        want = f"{rows.batch * rows.seq} in {rows.batch} rows of {rows.seq}"
        raise InvalidInputError(f"mm_position_ids: got {ids.num_tokens} tokens, want {want}")
    if rows.batch > 1 and ids.row_length != rows.seq:
        got = ids.row_length or "unequal numbers of"
        raise InvalidInputError(
            f"mm_position_ids: got documents of {got} tokens, want {rows.seq}, the length of a row: pad the table"
        )
