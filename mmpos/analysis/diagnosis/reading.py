"""The ids of a pipeline, in whichever of the usual shapes they come, as the ids of the table's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.positions.table import PositionTable, Side
from mmpos.support.checks import IntArray, host_array, one_of

Array = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Dump:
    """Ids of tokens, padding apart.

    Args:
        ids: (axes, tokens), or (1, tokens) of 1-D ids, without padding.
        mask: (batch, length) which places of a padded batch are tokens; None if the ids were packed.
        padding: (axes or 1, padded places) the ids there.
        places: (2, padded places) document, and place in its row, of each.
    """

    ids: Array
    mask: Flags | None
    padding: Array
    places: IntArray

    @property
    def column(self) -> IntArray | None:
        """(tokens,) place of every token in its padded row."""
        return None if self.mask is None else self.mask.nonzero()[1]

    @property
    def length(self) -> int:
        """Places of a padded row."""
        return 0 if self.mask is None else self.mask.shape[1]


def read_ids(ids: npt.ArrayLike, positions: PositionTable, attention_mask: npt.ArrayLike | None, side: Side) -> Dump:
    """The ids of the table's tokens.

    Args:
        ids: (axes, tokens) packed, (axes, batch, length) padded, or either without axes.
        positions: the table, which may hold padding.
        attention_mask: (batch, length) of 0 and 1.
        side: where padding is, if neither a mask nor the table says so.

    Raises:
        InvalidInputError: no numbers, NaN, or a shape that is not that of the table.
    """
    array = _numbers(host_array("ids", ids))
    one_of("side", side, ("left", "right"))
    packed, batch = _shapes(array, positions)
    tokens = positions.per_token(~positions.is_padding).astype(np.bool_)
    if packed and (attention_mask is None or batch is None):
        if attention_mask is not None:
            raise InvalidInputError(f"attention_mask: got one with packed ids of shape {array.shape}, want none")
        rows = array.reshape(_rows(array, 1), positions.num_tokens)
        (where,) = (~tokens).nonzero()
        document = positions.cu_seqlens.searchsorted(where, side="right") - 1
        places = np.stack([document, where - positions.cu_seqlens[document]])
        return Dump(rows[:, tokens], None, rows[:, where], places)
    if batch is None:
        raise _shape_error(array, positions)
    mask = _mask(positions, tokens, attention_mask, side, batch)
    rows = array.reshape(_rows(array, 2), prod(batch))
    return Dump(rows[:, mask.ravel()], mask, rows[:, ~mask.ravel()], np.stack((~mask).nonzero()))


def _numbers(array: Array) -> Array:
    if array.dtype.kind not in "iuf":
        raise InvalidInputError(f"ids: got dtype {array.dtype}, want integers or floats (bfloat16: save ids.float())")
    if array.dtype.kind == "f" and np.isnan(array).any():
        at = ", ".join(map(str, np.argwhere(np.isnan(array))[0].tolist()))
        raise InvalidInputError(f"ids[{at}]: got nan, want a number")
    return array.astype(np.float64) if array.dtype == np.longdouble else array  # what JSON and Python have


def _shapes(array: Array, positions: PositionTable) -> tuple[bool, tuple[int, int] | None]:
    """Whether ids can be packed ones, and their batch and length if they can be padded ones."""
    shape, has_axes = array.shape, array.shape[:1] in ((1,), (positions.axes,))
    packed = shape[-1:] == (positions.num_tokens,) and (
        array.ndim == 1 or (has_axes and (array.ndim == 2 or (array.ndim == 3 and shape[1] == 1)))
    )
    padded = (array.ndim == 2 or (array.ndim == 3 and has_axes)) and (
        shape[-2] == positions.num_documents and shape[-1] >= positions.max_seqlen
    )
    return packed, (shape[-2], shape[-1]) if padded else None


def _rows(array: Array, places: int) -> int:
    """Rows of ids, where the last so many dimensions are places; told, since no ids have any number of rows."""
    return array.shape[0] if array.ndim > places else 1


def _mask(
    positions: PositionTable, tokens: Flags, attention_mask: npt.ArrayLike | None, side: Side, shape: tuple[int, int]
) -> Flags:
    """(batch, length) which places are tokens: as the mask says, as the table does, or by the side."""
    real = np.add.reduceat(np.append(tokens, np.False_), positions.cu_seqlens[:-1], dtype=np.int64)
    real[positions.lengths == 0] = 0
    place = np.arange(shape[1])
    if attention_mask is not None:
        given = host_array("attention_mask", attention_mask)
        if given.shape != shape:
            raise InvalidInputError(f"attention_mask: got shape {given.shape}, want {shape}")
        mask = given != 0
        if (mask.sum(axis=1) != real).any():
            d = int((mask.sum(axis=1) != real).argmax())
            raise InvalidInputError(f"attention_mask[{d}]: got {mask[d].sum()} tokens, want {real[d]}")
        return mask
    if not tokens.all():
        mask = place < positions.lengths[:, None]
        mask[mask] = tokens
        return mask
    return place >= shape[1] - real[:, None] if side == "left" else place < real[:, None]


def _shape_error(array: Array, positions: PositionTable) -> InvalidInputError:
    axes, tokens, documents = positions.axes, positions.num_tokens, positions.num_documents
    longest = positions.max_seqlen
    hint = ""
    patches = int(positions.segment_lengths[positions.is_grid].sum())
    for side in (2, 3, 4):
        if patches and array.ndim and array.shape[-1] == tokens + patches * (side * side - 1):
            hint = f"; these are as many tokens as before merging {side}x{side} patches, and grids are told after it"
    return InvalidInputError(
        f"ids: got shape {array.shape}, want ({axes}, {tokens}) packed or ({axes}, {documents}, {longest}) padded, or "
        f"either without axes for 1-D ids{hint}"
    )
