"""``mm_position_ids`` of calls and of generation: checks, and the ids of generated tokens."""

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
    "check_length",
    "checked_positions",
    "generate",
    "prepare_inputs_for_generation",
    "separating_arguments",
    "tokens_of",
]

ARGUMENT = "mm_position_ids"
"""Name of the argument that a patched model accepts."""


def tokens_of(*candidates: object) -> Tensor:
    """Return the first candidate that is a tensor; candidates are input_ids and inputs_embeds."""
    for tokens in candidates:
        if isinstance(tokens, Tensor) and tokens.dim() > 1:
            return tokens
    raise InvalidInputError("mm_position_ids requires input_ids or inputs_embeds, got neither")


def checked_positions(ids: object, tokens: Tensor, rotaries: Sequence[Rotary]) -> DevicePositions | Tensor:
    """Check that every token has a position, and copy a table to the device of the tokens.

    Raises:
        InvalidInputError: the type or dtype is wrong, or the axes, tokens, rows or device do not match the call.
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
        raise InvalidInputError(
            f"mm_position_ids: got a tensor on {ids.device}, want {tokens.device}, the device of the tokens"
        )
    return ids


def check_length(table: PositionTable, rotaries: Sequence[Rotary]) -> None:
    """Refuse a table whose next position is beyond the length that a scaled Rotary covers."""
    scaled = [rotary for rotary in rotaries if rotary.scaling is not None]
    if not scaled or not table.num_documents:
        return
    cursor = max(1, int(table.next_positions.max()))
    for rotary in scaled:
        if (rotary.for_length(cursor).length or 0) > (rotary.length or 0):
            raise InvalidInputError(
                f"mm_position_ids: got next position {cursor}, beyond the length that rotary is scaled for, "
                f"want a patch with rotary.for_length({cursor}) or longer"
            )


def separating_arguments(
    ids: object, tokens: Tensor, arguments: Mapping[str, object], packs: bool
) -> dict[str, object]:
    """Return arguments that make Transformers separate the documents of a packed row.

    When Transformers builds masks, it detects documents by ``position_ids`` that restart at 0, but only if there is no
    cache and no other mask.

    Args:
        ids: positions; a table contains the document boundaries, but DevicePositions only reveal whether there are
            several documents.
        tokens: (batch, seq, …) tokens of the call; several rows need no further arguments.
        arguments: the other arguments of the call.
        packs: whether the model can separate documents at all.
    """
    if len(tokens) > 1 or not _several(ids, tokens.shape[1]):
        return {}
    if not packs:
        raise UnsupportedError(
            "mm_position_ids: got several documents in one row, which this model cannot separate, want one per row"
        )
    if isinstance(ids, PositionTable):
        return _restarts(ids, tokens, arguments)
    _check_boundaries(arguments)
    return {}


def _several(ids: object, seq: int) -> bool:
    """Return whether a single row contains several documents; False for dense ids, which have no boundaries."""
    if isinstance(ids, PositionTable):
        return int((ids.lengths > 0).sum()) > 1
    return isinstance(ids, DevicePositions) and ids.num_tokens == seq != ids.row_length


def _caches(arguments: Mapping[str, object]) -> list[str]:
    """Return the names of cache arguments: ``cache`` since Transformers 5.24, ``past_key_values`` before."""
    return [name for name in ("cache", "past_key_values") if arguments.get(name) is not None]


def _check_boundaries(arguments: Mapping[str, object]) -> None:
    """Refuse DevicePositions of several documents if no other argument separates the documents."""
    mask = arguments.get("attention_mask")
    unseparated = mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)
    if unseparated and arguments.get("position_ids") is None and not _caches(arguments):
        raise InvalidInputError(
            "mm_position_ids: got DevicePositions of several documents, which contain no boundaries, "
            "want position_ids that restart at each document as well, or the PositionTable instead"
        )


def _restarts(table: PositionTable, tokens: Tensor, arguments: Mapping[str, object]) -> dict[str, object]:
    mask = arguments.get("attention_mask")
    if names := _caches(arguments):
        raise UnsupportedError(f"{names[0]} cannot be combined with packed documents, which a cache does not separate")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        raise InvalidInputError(
            f"attention_mask: got shape {tuple(mask.shape)} for packed documents, which it cannot separate, "
            "want None or a mask with four dimensions"
        )
    if mask is not None:
        return {}
    if arguments.get("use_cache"):
        raise UnsupportedError("use_cache: got True for packed documents, want False; a cache does not separate them")
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
            f"mm_position_ids: got documents of {got} tokens, want {seq}, the length of a row; pad the table"
        )


@dataclass(frozen=True, eq=False)
class Prompt:
    """Ids of prompts and of the tokens after them. A Prompt is not a tensor, so ``generate`` passes it on unchanged.

    Args:
        ids: (axes, batch, seq) ids, starting at the first token in the cache.
        next_positions: (batch,) id of the token after each prompt, equal on all axes.
    """

    ids: Tensor
    next_positions: Tensor

    @classmethod
    def of(
        cls, positions: object, next_positions: object, rotaries: Sequence[Rotary], tokens: Tensor, cached: bool
    ) -> Prompt:
        """Check the arguments of ``generate`` and build a Prompt from them.

        Args:
            positions: a PositionTable, or ids with next_positions.
            next_positions: (batch,) integers; None for a table, which contains these ids.
            rotaries: rotations of the layers.
            tokens: (batch, seq, …) tokens of the prompts; with a cache, only those after the cached tokens.
            cached: whether there is a cache.
        """
        batch, ids = tokens.shape[0], positions
        if isinstance(positions, PositionTable):
            if next_positions is not None:
                raise InvalidInputError(
                    "mm_next_positions cannot be combined with a PositionTable, which already contains them"
                )
            ids, next_ids = _from_table(positions, batch, tokens.device)
            check_length(positions, rotaries)
        else:
            next_ids = _checked_next(next_positions, batch, positions)
            if isinstance(positions, DevicePositions) and positions.num_tokens % batch == 0:
                ids = positions.dense().reshape(positions.axes, batch, -1)
        want = (rotaries[0].axes, batch, tokens.shape[1])
        shape = tuple(ids.shape) if isinstance(ids, Tensor) else None
        longer = shape is not None and len(shape) == 3 and shape[:2] == want[:2] and shape[2] > want[2]
        if not isinstance(ids, Tensor) or (shape != want and not (cached and longer)):
            got = type(ids).__name__ if shape is None else shape
            raise InvalidInputError(f"mm_position_ids: got {got}, want {want}: (axes, batch, seq)")
        return cls(ids, next_ids.to(ids.device))

    def columns(self, start: int | Tensor, length: int, rows: int) -> Tensor:
        """Return the (axes, rows, length) ids of ``length`` tokens from ``start`` on, in the prompt or after it.

        Each row of the batch is repeated rows / batch times, once for each sequence generated from it.
        """
        seq = self.ids.shape[2]
        token = start + torch.arange(length, device=self.ids.device)
        after = self.next_positions[:, None] + (token - seq)  # int64, so that ids beyond int32 do not wrap around
        ids = torch.where(token < seq, self.ids[:, :, token.clamp(max=seq - 1)], after)
        return ids.repeat_interleave(rows // self.ids.shape[1], dim=1)


def _from_table(table: PositionTable, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    nonempty = table.lengths > 0  # a slice may contain empty documents
    lengths = table.lengths[nonempty]
    if len(lengths) != batch or (lengths != lengths[0]).any():
        raise InvalidInputError(
            f"mm_position_ids: got {counted(len(lengths), 'document')} of {lengths.tolist()} tokens, "
            f'want {batch} of one length; pad the table with side="left"'
        )
    last = table.cu_seqlens[1:][nonempty] - 1
    ends_padded = table.is_padding[np.searchsorted(table.offset, last, side="right") - 1]
    if ends_padded.any():
        row = int(ends_padded.argmax())
        raise InvalidInputError(
            f"mm_position_ids: got padding after prompt {row}, want it before the prompt, because generation "
            'continues from the last token; pad the table with side="left"'
        )
    ids = torch.from_numpy(table.dense().reshape(table.axes, batch, -1))
    return ids.to(device), torch.from_numpy(table.next_positions[nonempty]).to(device)


def _checked_next(next_positions: object, batch: int, positions: object) -> Tensor:
    """Check that next positions are (batch,) integers, and return them."""
    if next_positions is None:
        raise InvalidInputError(
            f"mm_next_positions: got None with {type(positions).__name__}, want the (batch,) ids of the next tokens, "
            "or a PositionTable, which contains them"
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
    """Call the model class's ``generate`` method with the prompt's positions.

    Args:
        model: the model.
        rotaries: rotations of the model's layers.
        inputs: as for ``generate`` in Transformers.
        args: as for ``generate`` in Transformers.
        mm_position_ids: a PositionTable with one document per row, all of the same length; or (axes, batch, seq) dense
            ids or DevicePositions, with mm_next_positions. With a cache, positions must include the cached tokens.
        mm_next_positions: (batch,) id of the token after each prompt; None for a table, which contains these ids.
        kwargs: as for ``generate`` in Transformers.
    """
    if mm_position_ids is None and mm_next_positions is not None:
        raise InvalidInputError("mm_next_positions requires mm_position_ids")
    if mm_position_ids is not None and not isinstance(mm_position_ids, Prompt):  # an assistant model receives a Prompt
        tokens = tokens_of(kwargs.get("inputs_embeds"), inputs, kwargs.get("input_ids"))
        cached = bool(_caches(kwargs))
        _check_guidance(model, args, kwargs)
        mm_position_ids = Prompt.of(mm_position_ids, mm_next_positions, rotaries, tokens, cached)
    if mm_position_ids is not None:
        kwargs[ARGUMENT] = mm_position_ids
    return type(model).generate(model, inputs, *args, **kwargs)


def _check_guidance(model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Refuse classifier-free guidance, because Transformers runs its second branch without ``mm_position_ids``."""
    config = kwargs.get("generation_config") or next(iter(args), None) or model.generation_config
    scale = kwargs.get("guidance_scale", getattr(config, "guidance_scale", None))
    if scale not in (None, 1):
        raise UnsupportedError(
            f"guidance_scale: got {scale}, want 1, because the unconditional branch takes no mm_position_ids"
        )


def prepare_inputs_for_generation(
    model: Any,
    input_ids: Tensor,
    *,
    inputs_embeds: Tensor | None = None,
    mm_position_ids: Prompt | None = None,
    **kwargs: Any,
) -> dict[str, object]:
    """Call the method of the model's class, and add the ids for the tokens in its result.

    Transformers inspects the parameter names of this method to validate the arguments of ``generate``.
    """
    prepared = type(model).prepare_inputs_for_generation(model, input_ids, inputs_embeds=inputs_embeds, **kwargs)
    if mm_position_ids is None:
        return prepared
    tokens = tokens_of(prepared.get("inputs_embeds"), prepared.get("input_ids"))
    start = next((kwargs[name].get_seq_length() for name in _caches(kwargs)), 0)
    prepared[ARGUMENT] = mm_position_ids.columns(start, tokens.shape[1], tokens.shape[0]).to(tokens.device)
    return prepared
