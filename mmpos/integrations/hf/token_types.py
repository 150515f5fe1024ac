"""Tokens of a batch as ``get_rope_index`` is given them: read on the host, and its ids brought back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmpos.errors import InvalidInputError
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import DELTA
from mmpos.segments.placeholders import Merging, Placeholders
from mmpos.segments.table import SegmentTable, scan
from mmpos.support.checks import Array, IntArray, int_array

__all__ = [
    "IMAGE",
    "VIDEO",
    "Ids",
    "TokenTypes",
    "answer",
    "check_tensors",
    "merged",
    "moved",
    "on_host",
    "scan_tensors",
    "shapes",
]

Ids = tuple[Tensor, Tensor]
"""(axes, batch, seq) position ids and (batch, 1) deltas."""

IMAGE, VIDEO = 1, 2
"""Of mm_token_type_ids; text is 0."""

_MASKS = (torch.int64, torch.bool, torch.int32, torch.uint8)


def check_tensors(**named: Tensor | None) -> list[Tensor]:
    """Return the arguments that are there, but refuse what is no tensor, and other shapes of tokens than input_ids."""
    tensors = {}
    for name, value in named.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif value is not None or name in ("input_ids", "mm_token_type_ids"):
            raise InvalidInputError(f"{name}: got {type(value).__name__}, want a tensor")
    shape = tensors["input_ids"].shape
    if len(shape) != 2:
        raise InvalidInputError(f"input_ids: got shape {tuple(shape)}, want (batch, seq)")
    for name in ("mm_token_type_ids", "attention_mask"):
        if name in tensors and tensors[name].shape != shape:
            raise InvalidInputError(f"{name}: got shape {tuple(tensors[name].shape)}, want {tuple(shape)} as input_ids")
    return [*tensors.values()]


def scan_tensors(
    input_ids: Tensor,
    tokens: tuple[int, ...],
    merging: Merging,
    image_grid_thw: Tensor | None,
    video_grid_thw: Tensor | None = None,
    attention_mask: Tensor | None = None,
    images_per_document: Tensor | None = None,
    marker_ids: Tensor | None = None,
) -> tuple[SegmentTable, IntArray | None] | None:
    """Make the table of token ids, or of their types, in one pass in C; see ``mmpos.segments.table.scan``.

    Args are tensors on the host; None for all that the pass does not take, as masks with holes.
    """
    if attention_mask is not None and attention_mask.dtype not in _MASKS:
        return None
    return scan(
        input_ids.contiguous().numpy(),
        tokens,
        merging,
        None if image_grid_thw is None else image_grid_thw.numpy(),
        None if video_grid_thw is None else video_grid_thw.numpy(),
        attention_mask=None if attention_mask is None else attention_mask.numpy(),
        images_per_document=None if images_per_document is None else images_per_document.numpy(),
        marker_ids=None if marker_ids is None else marker_ids.contiguous().numpy(),
    )


def answer(positions: PositionTable, input_ids: Tensor) -> Ids:
    """Expand the ids of whole rows in the dtype of input_ids, and int64 deltas, on its device.

    Their scheme gives every document a next position.
    """
    (batch, seq), axes, dtype = input_ids.shape, positions.axes, input_ids.dtype
    if not input_ids.is_cpu:
        numbers = np.empty(axes * batch * seq + batch, np.int64)
        positions.dense(out=numbers[: numbers.size - batch].reshape(axes, -1))
        numbers[numbers.size - batch :] = positions.documents[DELTA]
        ids, after = moved(numbers, input_ids, axes)
        return ids.to(dtype), after
    exact = dtype in (torch.int64, torch.int32)
    ids = input_ids.new_empty((axes, batch, seq), dtype=dtype if exact else torch.int64)
    positions.dense(out=ids.numpy().reshape(axes, batch * seq))
    deltas = torch.from_numpy(positions.documents[DELTA, :, None].copy())
    return ids if exact else ids.to(dtype), deltas


def on_host(*tensors: Tensor | None) -> list[Tensor | None]:
    """Copy tensors to the host, those of one device in one copy."""
    away = [tensor for tensor in tensors if tensor is not None and not tensor.is_cpu]
    if not away:
        return [*tensors]
    if len({tensor.device for tensor in away}) != 1:
        return [tensor if tensor is None else tensor.cpu() for tensor in tensors]
    away.sort(key=lambda tensor: -tensor.element_size())  # the widest first, so that all stand at multiples of theirs
    joined = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in away]).cpu()
    parts = joined.split([tensor.numel() * tensor.element_size() for tensor in away])
    copies = {id(one): part.view(one.dtype).view(one.shape) for one, part in zip(away, parts, strict=True)}
    return [copies.get(id(tensor), tensor) for tensor in tensors]


@dataclass(frozen=True, eq=False)
class TokenTypes:
    """Token types of a batch.

    Args:
        types: (batch, seq), 0 under padding; or (tokens,) those alone that a mask with holes leaves.
        videos: whether tokens of videos are among them.
        real: (batch, seq) the mask, (batch · seq,) where it has holes; None where it leaves everything.
        cu_seqlens: (batch + 1,) first token of each row, then the total, if the mask has holes; else None.
    """

    types: IntArray
    videos: bool
    real: npt.NDArray[np.bool_] | None = None
    cu_seqlens: IntArray | None = None

    @classmethod
    def of(cls, mm_token_type_ids: Tensor | None, mask: Tensor | None, most: int = VIDEO) -> TokenTypes:
        """Read token types, at most ``most``, and a mask of the same shape, both on the host."""
        assert mm_token_type_ids is not None, "the call has looked"
        types = mm_token_type_ids.numpy()
        if types.dtype.kind not in "biu":
            raise InvalidInputError(f"mm_token_type_ids: got {mm_token_type_ids.dtype}, want integers")
        if types.dtype not in (np.int32, np.int64):
            types = types.astype(np.int64)
        if mask is None or (real := mask.numpy()).all():
            return cls(types, _has_videos(types, most))
        lengths = real.sum(axis=1)
        if not lengths.all():
            row = int((lengths == 0).argmax())
            raise InvalidInputError(f"attention_mask[{row}]: got no tokens, want at least one")
        runs = (real[:, 1:] & ~real[:, :-1]).sum(axis=1) + real[:, 0]
        if (runs == 1).all():
            types = np.where(real, types, np.zeros((), types.dtype))
            return cls(types, _has_videos(types, most), real)
        types = types[real]
        return cls(types, _has_videos(types, most), real.ravel(), np.append(0, lengths.cumsum()))

    def used(
        self, name: str, grid_thw: Tensor | None, kind: int, merge: IntArray, frames_apart: bool = False
    ) -> IntArray | None:
        """Merge the grids of a kind, and leave out those at the end that no token is left for.

        Videos whose frames are apart are as many grids as they have frames, and those of 0 frames none.
        """
        room = int(np.count_nonzero(self.types == kind))
        grids = merged(name, grid_thw, merge, room, frames_apart)
        if grids is None or not frames_apart:
            return grids
        if grids.prod(axis=1, dtype=np.float64).sum() <= room:
            return grids[grids[:, 0] > 0]
        grids = grids.repeat(np.minimum(grids[:, 0], room), axis=0)
        grids[:, 0] = 1
        return _up_to(room, grids)

    def segments(
        self,
        image_grid_thw: IntArray | None,
        video_grid_thw: IntArray | None = None,
        placeholders: Placeholders | None = None,
        **more: Any,
    ) -> SegmentTable:
        """Make segments of the types as if they were token ids; ``more`` is of ``SegmentTable.from_input_ids``."""
        if placeholders is None:
            placeholders = Placeholders(IMAGE, VIDEO if self.videos or video_grid_thw is not None else None)
        return SegmentTable.from_input_ids(
            self.types,
            placeholders,
            image_grid_thw,
            video_grid_thw,
            cu_seqlens=self.cu_seqlens,
            attention_mask=self.real if self.cu_seqlens is None else None,
            **more,
        )

    def answer(self, positions: PositionTable, input_ids: Tensor, padding: int = 0) -> Ids:
        """Copy ids, with this one under the mask, and int64 deltas to the device of input_ids, at once."""
        (batch, seq), axes = input_ids.shape, positions.axes
        size = axes * batch * seq
        numbers = np.empty(size + batch, np.int64)
        dense, deltas = numbers[:size].reshape(axes, -1), numbers[size:]
        if self.cu_seqlens is None:
            positions.dense(out=dense)
        else:
            dense[:] = 0
            dense[:, self.real] = positions.dense()
        if padding and self.real is not None:
            dense[:, ~self.real.ravel()] = padding
        deltas[:] = positions.deltas
        ids, after = moved(numbers, input_ids, axes)
        return ids.to(input_ids.dtype), after

    def packed(self) -> TokenTypes:
        """Leave padding out."""
        if self.cu_seqlens is not None:
            return self
        if self.real is None:
            batch, seq = self.types.shape
            return replace(self, types=self.types.ravel(), cu_seqlens=np.arange(batch + 1) * seq)
        cu_seqlens = np.append(0, self.real.sum(axis=1).cumsum())
        return replace(self, types=self.types[self.real], real=self.real.ravel(), cu_seqlens=cu_seqlens)

    @property
    def own(self) -> npt.NDArray[np.bool_] | slice:
        """The places of packed tokens among all, as an index."""
        return slice(None) if self.real is None else self.real


def moved(numbers: npt.NDArray[Any], input_ids: Tensor, axes: int) -> Ids:
    """Copy ids of the rows of input_ids, and the deltas behind them, to its device at once."""
    batch, seq = input_ids.shape
    whole = torch.from_numpy(numbers).to(input_ids.device, non_blocking=input_ids.device.type == "cuda")
    ids, after = whole.split([axes * batch * seq, batch])
    # A model keeps the deltas, which are not to hold the memory of the ids.
    return ids.view(axes, batch, seq), after.view(batch, 1).clone()


def merged(
    name: str, grid_thw: Tensor | None, merge: IntArray, room: int | None = None, frames_apart: bool = False
) -> IntArray | None:
    """Merge patches, (grids, sizes) by (sizes,); a 0 in ``merge`` makes that size 1.

    With ``room``, the number of tokens, grids after the last one that has a token are left out, whatever their sizes;
    with ``frames_apart``, a grid may have 0 frames.
    """
    if grid_thw is None:
        return None
    given = int_array(name, grid_thw.numpy(), (None, merge.size))
    grids = np.where(merge > 0, given // np.maximum(merge, 1), 1)
    if room is not None:
        grids = _up_to(room, grids)
    small = (given[: len(grids)] < merge).any(axis=1)
    if frames_apart:
        small &= given[: len(grids), 0] != 0
    if small.any():
        g, least = int(small.argmax()), tuple(merge.tolist())
        raise InvalidInputError(f"{name}[{g}]: got {tuple(given[g].tolist())}, want at least {least}, one token")
    return grids


def _up_to(room: int, grids: IntArray) -> IntArray:
    """Return the first grids, as many as these tokens need."""
    stops = grids.clip(0).prod(axis=1, dtype=np.float64).cumsum()
    return grids[: np.searchsorted(stops, room) + (room > 0)]


def _has_videos(types: Array, most: int) -> bool:
    """Check that types are 0 to ``most``; returns whether there are others than text and images."""
    least, highest = (int(types.min()), int(types.max())) if types.size else (0, 0)
    if least < 0 or highest > most:
        got = least if least < 0 else highest
        raise InvalidInputError(f"mm_token_type_ids: got {got}, want 0, {IMAGE} or {VIDEO}")
    return highest >= VIDEO


def shapes(input_ids: Tensor, *_: object) -> Ids:
    """Give results without values, for graphs that are traced."""
    batch, seq = input_ids.shape
    return input_ids.new_empty((3, batch, seq)), input_ids.new_empty((batch, 1), dtype=torch.int64)
