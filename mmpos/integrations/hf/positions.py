"""What mm_position_ids may be, whether it fits the tokens of a call, and which documents it keeps apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.positions.table import PositionTable
from mmpos.rotary.config import Rotary
from mmpos.rotary.device import DevicePositions
from mmpos.support.checks import counted

__all__ = ["Rows", "apart", "check_length", "rows_of", "tokens_of"]


class Rows(NamedTuple):
    """The tokens of a call: rows, tokens in a row, and where they are."""

    batch: int
    seq: int
    device: torch.device


def tokens_of(*candidates: Any) -> Tensor:
    """The first that is there of input_ids and the embeddings that stand for them."""
    for tokens in candidates:
        if isinstance(tokens, Tensor) and tokens.dim() > 1:
            return tokens
    raise InvalidInputError("mm_position_ids: got neither input_ids nor inputs_embeds beside it, want one of them")


def rows_of(ids: Any, rows: Rows, rotaries: Sequence[Rotary]) -> DevicePositions | Tensor:
    """Positions where kernels can read them, one for every token of the call.

    Raises:
        InvalidInputError: another type or dtype, or axes, tokens, rows or device that differ from the call's.
    """
    if isinstance(ids, PositionTable):
        check_length(ids, rotaries)
        ids = DevicePositions.from_table(ids, rows.device)
    if isinstance(ids, DevicePositions):
        _check_table(ids, rows, rotaries[0].axes)
    elif isinstance(ids, Tensor):
        want = (rotaries[0].axes, rows.batch, rows.seq)
        if ids.shape != want:
            raise InvalidInputError(f"mm_position_ids: got shape {tuple(ids.shape)}, want {want}: (axes, batch, seq)")
        if ids.dtype not in (torch.int32, torch.int64, torch.float64):
            raise InvalidInputError(f"mm_position_ids: got dtype {ids.dtype}, want int32, int64 or float64")
    else:
        got = type(ids).__name__
        raise InvalidInputError(f"mm_position_ids: got {got}, want a PositionTable, DevicePositions or a tensor of ids")
    if ids.device != rows.device:
        raise InvalidInputError(f"mm_position_ids: got a tensor on {ids.device}, want {rows.device} as the tokens")
    return ids


def check_length(table: PositionTable, rotaries: Sequence[Rotary]) -> None:
    """Refuse a table whose cursor passes what a Rotary was made for, where its scaling depends on that."""
    scaled = [rotary for rotary in rotaries if rotary.scaling is not None]
    if not scaled or not table.num_documents:
        return
    cursor = max(1, int(table.next_positions.max()))
    for rotary in scaled:
        served = rotary.for_length(cursor).length or 0
        if served > (rotary.length or 0):
            raise InvalidInputError(
                f"mm_position_ids: got ids that go on at {cursor}, beyond those that rotary serves, "
                f"want a patch with rotary.for_length({cursor}) or longer"
            )


def apart(ids: Any, rows: Rows, given: Mapping[str, Any], packs: bool) -> dict[str, Any]:
    """Arguments by which Transformers keeps the documents of one packed row apart.

    Its masks see documents by ``position_ids`` that restart, and only without a cache and without another mask.

    Args:
        ids: positions; a table says where documents end, DevicePositions only that there are several.
        rows: the tokens of the call.
        given: its other arguments.
        packs: whether the model keeps documents apart at all.
    """
    if rows.batch > 1 or not _several(ids, rows):
        return {}
    if not packs:
        raise UnsupportedError(
            "mm_position_ids: got several documents in one row, which this model does not keep apart, want a row each"
        )
    return _restarts(ids, rows, given) if isinstance(ids, PositionTable) else _told(ids, given)


def _several(ids: Any, rows: Rows) -> bool:
    """Whether one row holds more than one document; ids alone do not tell."""
    if isinstance(ids, PositionTable):
        return int((ids.lengths > 0).sum()) > 1
    return isinstance(ids, DevicePositions) and ids.num_tokens == rows.seq != ids.row_length


def _told(ids: DevicePositions, given: Mapping[str, Any]) -> dict[str, Any]:
    mask, told = given.get("attention_mask"), ("position_ids", "past_key_values")
    whole = mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)
    if whole and all(given.get(name) is None for name in told):
        raise InvalidInputError(
            "mm_position_ids: got DevicePositions of several documents, which do not say where these end, want "
            "position_ids that restart with each beside them, or the PositionTable"
        )
    return {}


def _restarts(table: PositionTable, rows: Rows, given: Mapping[str, Any]) -> dict[str, Any]:
    mask = given.get("attention_mask")
    if given.get("past_key_values") is not None:
        raise UnsupportedError(
            "past_key_values: got a cache beside packed documents, want None: a cache does not keep them apart"
        )
    if isinstance(mask, Tensor) and mask.dim() == 2:
        raise InvalidInputError(
            f"attention_mask: got shape {tuple(mask.shape)} beside packed documents, which it cannot keep apart, "
            "want None, or a mask of your own with four dimensions"
        )
    if mask is not None:
        return {}
    if given.get("use_cache"):
        raise UnsupportedError("use_cache: got True for packed documents, want False: a cache does not keep them apart")
    if given.get("position_ids") is not None:
        return {"use_cache": False}
    first = torch.from_numpy(table.cu_seqlens[:-1].repeat(table.lengths)).to(rows.device, torch.int64)
    token = torch.arange(rows.seq, device=rows.device)
    return {"position_ids": (token - first)[None], "use_cache": False}


def _check_table(ids: DevicePositions, rows: Rows, axes: int) -> None:
    if ids.axes != axes:
        raise InvalidInputError(f"mm_position_ids: got {counted(ids.axes, 'axis')}, want {axes} as in rotary")
    if ids.num_tokens != rows.batch * rows.seq:
        want = f"{rows.batch * rows.seq} in {rows.batch} rows of {rows.seq}"
        raise InvalidInputError(f"mm_position_ids: got {ids.num_tokens} tokens, want {want}")
    if rows.batch > 1 and ids.row_length != rows.seq:
        got = ids.row_length or "unequal numbers of"
        raise InvalidInputError(
            f"mm_position_ids: got documents of {got} tokens, want {rows.seq}, the length of a row: pad the table"
        )
