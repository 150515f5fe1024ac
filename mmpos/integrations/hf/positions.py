"""``mm_position_ids`` of a call and of generation: their checks, and the ids of the tokens that are generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.positions.table import PositionTable
from mmpos.rotary.config import Rotary
from mmpos.rotary.device import DevicePositions
from mmpos.support.checks import counted

__all__ = [
    "ARGUMENT",
    "Prompt",
    "apart",
    "check_length",
    "generate",
    "prepare_inputs_for_generation",
    "rows_of",
    "tokens_of",
]

ARGUMENT = "mm_position_ids"
"""The argument of a patched model."""


def tokens_of(*candidates: object) -> Tensor:
    """Return the first that is there of input_ids and the embeddings in their place."""
    for tokens in candidates:
        if isinstance(tokens, Tensor) and tokens.dim() > 1:
            return tokens
    raise InvalidInputError("mm_position_ids: got neither input_ids nor inputs_embeds beside it, want one of them")


def rows_of(ids: object, tokens: Tensor, rotaries: Sequence[Rotary]) -> DevicePositions | Tensor:
    """Check positions of a call, one for every token, and move a table to where kernels can read it.

    Raises:
        InvalidInputError: another type or dtype, or axes, tokens, rows or device that differ from the call's.
    """
    if isinstance(ids, PositionTable):
        check_length(ids, rotaries)
        ids = DevicePositions.from_table(ids, tokens.device)
    if isinstance(ids, DevicePositions):
        _check_table(ids, tokens, rotaries[0].axes)
    elif isinstance(ids, Tensor):
        want = (rotaries[0].axes, *tokens.shape[:2])
        if ids.shape != want:
            raise InvalidInputError(f"mm_position_ids: got shape {tuple(ids.shape)}, want {want}: (axes, batch, seq)")
        if ids.dtype not in (torch.int32, torch.int64, torch.float64):
            raise InvalidInputError(f"mm_position_ids: got dtype {ids.dtype}, want int32, int64 or float64")
    else:
        got = type(ids).__name__
        raise InvalidInputError(f"mm_position_ids: got {got}, want a PositionTable, DevicePositions or a tensor of ids")
    if ids.device != tokens.device:
        raise InvalidInputError(f"mm_position_ids: got a tensor on {ids.device}, want {tokens.device} as the tokens")
    return ids


def check_length(table: PositionTable, rotaries: Sequence[Rotary]) -> None:
    """Refuse a table whose next position passes the length that a Rotary is scaled for."""
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


def apart(ids: object, tokens: Tensor, arguments: Mapping[str, object], packs: bool) -> dict[str, object]:
    """Return arguments by which Transformers keeps the documents of one packed row apart.

    Its masks see documents by ``position_ids`` that restart, and only without a cache and without another mask.

    Args:
        ids: positions; a table says where documents end, DevicePositions only that there are several.
        tokens: (1, seq, …) of the call, or of several rows.
        arguments: its other arguments.
        packs: whether the model keeps documents apart at all.
    """
    if len(tokens) > 1 or not _several(ids, tokens.shape[1]):
        return {}
    if not packs:
        raise UnsupportedError(
            "mm_position_ids: got several documents in one row, which this model does not keep apart, want a row each"
        )
    if isinstance(ids, PositionTable):
        return _restarts(ids, tokens, arguments)
    _check_boundaries(arguments)
    return {}


def _several(ids: object, seq: int) -> bool:
    """Whether one row holds more than one document; ids alone do not tell."""
    if isinstance(ids, PositionTable):
        return int((ids.lengths > 0).sum()) > 1
    return isinstance(ids, DevicePositions) and ids.num_tokens == seq != ids.row_length


def _caches(arguments: Mapping[str, object]) -> list[str]:
    """Name the arguments that are a cache: ``cache`` since Transformers 5.24, ``past_key_values`` before."""
    return [name for name in ("cache", "past_key_values") if arguments.get(name) is not None]


def _check_boundaries(arguments: Mapping[str, object]) -> None:
    """Refuse DevicePositions of several documents, if no other argument keeps these apart."""
    mask = arguments.get("attention_mask")
    whole = mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)
    if whole and arguments.get("position_ids") is None and not _caches(arguments):
        raise InvalidInputError(
            "mm_position_ids: got DevicePositions of several documents, which do not say where these end, want "
            "position_ids that restart with each beside them, or the PositionTable"
        )


def _restarts(table: PositionTable, tokens: Tensor, arguments: Mapping[str, object]) -> dict[str, object]:
    mask = arguments.get("attention_mask")
    if names := _caches(arguments):
        raise UnsupportedError(
            f"{names[0]}: got one beside packed documents, want None: a cache does not keep them apart"
        )
    if isinstance(mask, Tensor) and mask.dim() == 2:
        raise InvalidInputError(
            f"attention_mask: got shape {tuple(mask.shape)} beside packed documents, which it cannot keep apart, "
            "want None, or a mask of your own with four dimensions"
        )
    if mask is not None:
        return {}
    if arguments.get("use_cache"):
        raise UnsupportedError("use_cache: got True for packed documents, want False: a cache does not keep them apart")
    if arguments.get("position_ids") is not None:
        return {"use_cache": False}
    first = torch.from_numpy(table.cu_seqlens[:-1].repeat(table.lengths)).to(tokens.device, torch.int64)
    token = torch.arange(tokens.shape[1], device=tokens.device)
    return {"position_ids": (token - first)[None], "use_cache": False}


def _check_table(ids: DevicePositions, tokens: Tensor, axes: int) -> None:
    batch, seq = tokens.shape[:2]
    if ids.axes != axes:
        raise InvalidInputError(f"mm_position_ids: got {counted(ids.axes, 'axis')}, want {axes} as in rotary")
    if ids.num_tokens != batch * seq:
        want = f"{batch * seq} in {batch} rows of {seq}"
        raise InvalidInputError(f"mm_position_ids: got {ids.num_tokens} tokens, want {want}")
    if batch > 1 and ids.row_length != seq:
        got = ids.row_length or "unequal numbers of"
        raise InvalidInputError(
            f"mm_position_ids: got documents of {got} tokens, want {seq}, the length of a row: pad the table"
        )


@dataclass(frozen=True, eq=False)
class Prompt:
    """Ids of prompts, and how they go on; not a tensor, so that generation passes it on as it is.

    Args:
        ids: (axes, batch, seq) ids from the first token in the cache on.
        next_positions: (batch,) the id, equal on all axes, of the token after each prompt.
    """

    ids: Tensor
    next_positions: Tensor

    @classmethod
    def of(
        cls, positions: object, next_positions: object, rotaries: Sequence[Rotary], tokens: Tensor, cached: bool
    ) -> Prompt:
        """Check the arguments of generate, and make a prompt of them.

        Args:
            positions: a PositionTable, or ids with next_positions beside them.
            next_positions: (batch,) integers, or None for a table, which knows.
            rotaries: the rotations that take the ids.
            tokens: (batch, seq, …) the tokens of the prompts, or those after a cache.
            cached: whether there is a cache, whose tokens come first.
        """
        batch, ids = tokens.shape[0], positions
        if isinstance(positions, PositionTable):
            if next_positions is not None:
                raise InvalidInputError("mm_next_positions: got it beside a table, want None: the table knows")
            ids, following = _from_table(positions, batch, tokens.device)
            check_length(positions, rotaries)
        else:
            following = _checked_next(next_positions, batch, positions)
            if isinstance(positions, DevicePositions) and positions.num_tokens % batch == 0:
                ids = positions.dense().reshape(positions.axes, batch, -1)
        want = (rotaries[0].axes, batch, tokens.shape[1])
        shape = tuple(ids.shape) if isinstance(ids, Tensor) else None
        longer = shape is not None and len(shape) == 3 and shape[:2] == want[:2] and shape[2] > want[2]
        if not isinstance(ids, Tensor) or (shape != want and not (cached and longer)):
            got = type(ids).__name__ if shape is None else shape
            raise InvalidInputError(f"mm_position_ids: got {got}, want {want}: (axes, batch, seq)")
        return cls(ids, following.to(ids.device))

    def columns(self, start: int | Tensor, length: int, rows: int) -> Tensor:
        """Return (axes, rows, length) ids of the tokens from start on, in the prompt and after it.

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


def _checked_next(next_positions: object, batch: int, positions: object) -> Tensor:
    """Return the next positions that stand beside ids, which are (batch,) integers."""
    if next_positions is None:
        raise InvalidInputError(
            f"mm_next_positions: got None beside {type(positions).__name__}, want (batch,) ids of the tokens to come: "
            "ids do not tell them, a PositionTable does"
        )
    got = type(next_positions).__name__
    if isinstance(next_positions, Tensor):
        if next_positions.shape == (batch,) and next_positions.dtype in (torch.int32, torch.int64):
            return next_positions
        got = f"{next_positions.dtype} {tuple(next_positions.shape)}"
    raise InvalidInputError(f"mm_next_positions: got {got}, want a tensor of {batch} integers")


def generate(
    model: Any,
    rotaries: Sequence[Rotary],
    inputs: Tensor | None = None,
    *args: object,
    mm_position_ids: object = None,
    mm_next_positions: Tensor | None = None,
    **kwargs: object,
) -> object:
    """Call ``generate`` of the model's class with positions of the prompt.

    Args:
        model: the model.
        rotaries: the rotations of its layers.
        inputs: as there.
        args: as there.
        mm_position_ids: a PositionTable with a document for every row, all of one length; or dense ids (axes, batch,
            seq), or DevicePositions, with mm_next_positions. With a cache they are those of the cached tokens
            and of the new ones.
        mm_next_positions: (batch,) the id of the token after each prompt; a table knows it.
        kwargs: as there.
    """
    if mm_position_ids is None and mm_next_positions is not None:
        raise InvalidInputError("mm_next_positions: got it without mm_position_ids, want these beside it")
    if mm_position_ids is not None and not isinstance(mm_position_ids, Prompt):  # an assistant is handed a Prompt
        tokens = tokens_of(kwargs.get("inputs_embeds"), inputs, kwargs.get("input_ids"))
        cached = bool(_caches(kwargs))
        _check_guidance(model, args, kwargs)
        mm_position_ids = Prompt.of(mm_position_ids, mm_next_positions, rotaries, tokens, cached)
    if mm_position_ids is not None:
        kwargs[ARGUMENT] = mm_position_ids
    return type(model).generate(model, inputs, *args, **kwargs)


def _check_guidance(model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Refuse a second branch, which Transformers runs through the model without our arguments."""
    config = kwargs.get("generation_config") or next(iter(args), None) or model.generation_config
    scale = kwargs.get("guidance_scale", getattr(config, "guidance_scale", None))
    if scale not in (None, 1):
        raise UnsupportedError(f"guidance_scale: got {scale}, want 1: the branch that guides takes no mm_position_ids")


def prepare_inputs_for_generation(
    model: Any,
    input_ids: Tensor,
    *,
    inputs_embeds: Tensor | None = None,
    mm_position_ids: Prompt | None = None,
    **kwargs: Any,
) -> dict[str, object]:
    """Call the method of the model's class, and add the ids of the tokens that it chooses.

    Transformers reads the names of its arguments to know which ones ``generate`` may be given.
    """
    prepared = type(model).prepare_inputs_for_generation(model, input_ids, inputs_embeds=inputs_embeds, **kwargs)
    if mm_position_ids is None:
        return prepared
    tokens = tokens_of(prepared.get("inputs_embeds"), prepared.get("input_ids"))
    start = next((kwargs[name].get_seq_length() for name in _caches(kwargs)), 0)
    prepared[ARGUMENT] = mm_position_ids.columns(start, tokens.shape[1], tokens.shape[0]).to(tokens.device)
    return prepared
