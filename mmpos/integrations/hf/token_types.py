"""Token types, as passed to ``get_rope_index``: they are copied to the host, and ids are copied back to the device."""

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
    "check_tensors",
    "ids_and_deltas",
    "merge_grids",
    "on_device",
    "on_host",
    "scan_tensors",
    "shapes",
]

Ids = tuple[Tensor, Tensor]
"""(axes, batch, seq) position ids and (batch, 1) deltas."""

IMAGE, VIDEO = 1, 2
"""Values of mm_token_type_ids; text is 0."""

_TYPES = Placeholders(IMAGE, VIDEO)

_MASKS = (torch.int64, torch.bool, torch.int32, torch.uint8)


def check_tensors(**named: Tensor | None) -> list[Tensor]:
    """Return the arguments that are tensors, after checking their types and that token arguments have equal shapes."""
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
            got = tuple(tensors[name].shape)
            raise InvalidInputError(f"{name}: got shape {got}, want {tuple(shape)} as for input_ids")
    return [*tensors.values()]


def scan_tensors(
    input_ids: Tensor,
    tokens: tuple[int, ...],
    merging: Merging,
    image_grid_thw: Tensor | None,
    video_grid_thw: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> tuple[SegmentTable, IntArray | None] | None:
    """Build the table from token ids or token types in a single pass in C; see ``mmpos.segments.table.scan``.

    All tensors must be on the host. The result is None if the pass does not support the input, such as masks with
    holes.
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
    )


def on_host(*tensors: Tensor | None) -> list[Tensor | None]:
    """Copy tensors to the host, in a single copy if all of them are on the same device."""
    remote = [tensor for tensor in tensors if tensor is not None and not tensor.is_cpu]
    if not remote:
        return [*tensors]
    if len({tensor.device for tensor in remote}) != 1:
        return [tensor if tensor is None else tensor.cpu() for tensor in tensors]
    remote.sort(key=lambda tensor: -tensor.element_size())  # widest first, so that every dtype is aligned
    joined = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in remote]).cpu()
    parts = joined.split([tensor.numel() * tensor.element_size() for tensor in remote])
    copies = {
        id(source): part.view(source.dtype).view(source.shape) for source, part in zip(remote, parts, strict=True)
    }
    return [copies.get(id(tensor), tensor) for tensor in tensors]


@dataclass(frozen=True, eq=False)
class TokenTypes:
    """Token types of a batch.

    Args:
        types: (batch, seq) types, 0 for padding; or, if the mask has holes, the (tokens,) types that the mask keeps.
        real: (batch, seq) mask, flattened to (batch · seq,) if it has holes; None if it keeps every token.
        cu_seqlens: (batch + 1,) first token of each row, then the total, if the types are packed; else None.
    """

    types: IntArray
    real: npt.NDArray[np.bool_] | None = None
    cu_seqlens: IntArray | None = None

    @classmethod
    def of(cls, mm_token_type_ids: Tensor | None, mask: Tensor | None, most: int = VIDEO) -> TokenTypes:
        """Build TokenTypes from types of at most ``most`` and a mask of the same shape, both on the host."""
        assert mm_token_type_ids is not None, "checked by the caller"
        types = mm_token_type_ids.numpy()
        if types.dtype.kind not in "biu":
            raise InvalidInputError(f"mm_token_type_ids: got {mm_token_type_ids.dtype}, want integers")
        if types.dtype not in (np.int32, np.int64):
            types = types.astype(np.int64)
        if mask is None or (real := mask.numpy()).all():
            return cls(_checked(types, most))
        lengths = real.sum(axis=1)
        if not lengths.all():
            row = int((lengths == 0).argmax())
            raise InvalidInputError(f"attention_mask[{row}]: got no tokens, want at least one")
        runs = (real[:, 1:] & ~real[:, :-1]).sum(axis=1) + real[:, 0]
        if (runs == 1).all():
            types = np.where(real, types, np.zeros((), types.dtype))
            return cls(_checked(types, most), real)
        return cls(_checked(types[real], most), real.ravel(), np.append(0, lengths.cumsum()))

    def used(
        self,
        name: str,
        grid_thw: Tensor | None,
        kind: int,
        merge: IntArray,
        frames_apart: bool = False,
        separators: int = 0,
    ) -> IntArray | None:
        """Merge the grids of one kind, add ``separators`` columns to them, and drop trailing grids without tokens.

        With ``frames_apart``, a video becomes one grid per frame, and no grid if it has 0 frames.
        """
        room = int(np.count_nonzero(self.types == kind))
        grids = merge_grids(name, grid_thw, merge, room, frames_apart, separators)
        if grids is None or not frames_apart:
            return grids
        if grids.prod(axis=1, dtype=np.float64).sum() <= room:
            return grids[grids[:, 0] > 0]
        grids = grids.repeat(np.minimum(grids[:, 0], room), axis=0)
        grids[:, 0] = 1
        return _first_grids(room, grids)

    def segments(
        self,
        image_grid_thw: IntArray | None,
        video_grid_thw: IntArray | None = None,
        placeholders: Placeholders = _TYPES,
        **more: Any,
    ) -> SegmentTable:
        """Build segments from types used as token ids; ``more`` is passed to ``SegmentTable.from_input_ids``."""
        return SegmentTable.from_input_ids(
            self.types,
            placeholders,
            image_grid_thw,
            video_grid_thw,
            cu_seqlens=self.cu_seqlens,
            attention_mask=self.real if self.cu_seqlens is None else None,
            **more,
        )

    def packed(self) -> TokenTypes:
        """Remove padding and pack all rows."""
        if self.cu_seqlens is not None:
            return self
        if self.real is None:
            batch, seq = self.types.shape
            return replace(self, types=self.types.ravel(), cu_seqlens=np.arange(batch + 1) * seq)
        cu_seqlens = np.append(0, self.real.sum(axis=1).cumsum())
        return replace(self, types=self.types[self.real], real=self.real.ravel(), cu_seqlens=cu_seqlens)

    @property
    def packed_index(self) -> npt.NDArray[np.bool_] | slice:
        """Index that selects the packed tokens from the tokens of the batch."""
        return slice(None) if self.real is None else self.real


def ids_and_deltas(
    positions: PositionTable, input_ids: Tensor, tokens: TokenTypes | None = None, padding: int = 0
) -> Ids:
    """Return ids in the dtype of input_ids and int64 deltas, copied together to the device of input_ids.

    Args:
        positions: table in which every document has a next position.
        input_ids: (batch, seq) tensor with the shape, dtype and device of the ids.
        tokens: types with the mask of the batch; None if the table has batch · seq tokens.
        padding: id of tokens whose mask is 0.
    """
    (batch, seq), axes, dtype = input_ids.shape, positions.axes, input_ids.dtype
    if tokens is None and input_ids.is_cpu and dtype in (torch.int64, torch.int32):
        ids = input_ids.new_empty((axes, batch, seq))
        positions.dense(out=ids.numpy().reshape(axes, batch * seq))
        return ids, torch.from_numpy(positions.documents[DELTA, :, None].copy())
    size = axes * batch * seq
    numbers = np.empty(size + batch, np.int64)
    dense = numbers[:size].reshape(axes, batch * seq)
    if tokens is None or tokens.cu_seqlens is None:
        positions.dense(out=dense)
    else:
        dense[:] = 0
        dense[:, tokens.real] = positions.dense()
    if padding and tokens is not None and tokens.real is not None:
        dense[:, ~tokens.real.ravel()] = padding
    numbers[size:] = positions.documents[DELTA]
    ids, deltas = on_device(numbers, input_ids, axes)
    return ids.to(dtype), deltas


def on_device(numbers: npt.NDArray[Any], input_ids: Tensor, axes: int) -> Ids:
    """Copy the ids of a batch, followed by its deltas, to the device of input_ids in one copy."""
    batch, seq = input_ids.shape
    copied = torch.from_numpy(numbers).to(input_ids.device, non_blocking=input_ids.device.type == "cuda")
    ids, deltas = copied.split([axes * batch * seq, batch])
    # A model keeps the deltas; if they were a view, the memory of the ids would stay allocated.
    return ids.view(axes, batch, seq), deltas.view(batch, 1).clone()


def merge_grids(
    name: str,
    grid_thw: Tensor | None,
    merge: IntArray,
    room: int | None = None,
    frames_apart: bool = False,
    separators: int = 0,
) -> IntArray | None:
    """Divide (grids, sizes) patch counts by ``merge`` (sizes,); a size whose ``merge`` is 0 becomes 1.

    The last size, the width, then grows by ``separators``.

    If ``room``, the number of tokens, is set, drop trailing grids without tokens, whatever their sizes.
    With ``frames_apart``, allow grids of 0 frames.
    """
    if grid_thw is None:
        return None
    patches = int_array(name, grid_thw.numpy(), (None, merge.size))
    grids = np.where(merge > 0, patches // np.maximum(merge, 1), 1)
    grids[:, -1] += separators
    if room is not None:
        grids = _first_grids(room, grids)
    too_small = (patches[: len(grids)] < merge).any(axis=1)
    if frames_apart:
        too_small &= patches[: len(grids), 0] != 0
    if too_small.any():
        g, least = int(too_small.argmax()), tuple(merge.tolist())
        raise InvalidInputError(f"{name}[{g}]: got {tuple(patches[g].tolist())}, want at least {least}, one token")
    return grids


def _first_grids(tokens: int, grids: IntArray) -> IntArray:
    """Return the grids up to the one that contains the last of ``tokens`` tokens."""
    stops = grids.clip(0).prod(axis=1, dtype=np.float64).cumsum()
    return grids[: np.searchsorted(stops, tokens) + (tokens > 0)]


def _checked(types: Array, most: int) -> Array:
    """Return types after checking that they are from 0 to ``most``."""
    least, highest = (int(types.min()), int(types.max())) if types.size else (0, 0)
    if least < 0 or highest > most:
        got = least if least < 0 else highest
        raise InvalidInputError(f"mm_token_type_ids: got {got}, want 0, {IMAGE} or {VIDEO}")
    return types


def shapes(input_ids: Tensor, *_: object) -> Ids:
    """Return uninitialised results with the right shapes and dtypes, for tracing."""
    batch, seq = input_ids.shape
    return input_ids.new_empty((3, batch, seq)), input_ids.new_empty((batch, 1), dtype=torch.int64)
