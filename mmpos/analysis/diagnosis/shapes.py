"""Read position ids in any of the shapes that pipelines use: packed or padded, with or without axes."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.analysis.diagnosis.deviation import Flags
from mmpos.errors import InvalidInputError
from mmpos.positions.table import PositionTable, Side
from mmpos.positions.table_rows import AXES, DENOMINATOR, FIRST_TOKEN, HEIGHT, NO_POSITION, OFFSET, WIDTH
from mmpos.support.checks import INT32_MAX, IntArray, host_array, one_of

Array = npt.NDArray[Any]


def read_ids(
    ids: npt.ArrayLike,
    positions: PositionTable,
    attention_mask: npt.ArrayLike | None,
    side: Side,
    shape: tuple[int, ...] | None = None,
    default_scheme: bool = False,
) -> tuple[Array, Flags | None]:
    """Read the ids of the table's tokens, without padding, from any of the usual shapes.

    Args:
        ids: (axes, tokens) packed, (axes, batch, length) padded, or either without axes.
        positions: the table, which may hold padding.
        attention_mask: (batch, length) of 0s and 1s.
        side: the padding side, if neither the mask nor the table shows it.
        shape: the shape named in errors; None means the shape of ids.
        default_scheme: whether the scheme is the default, so that an error about the number of axes says so.

    Returns:
        (axes, tokens) ids, or (1, tokens) for 1-D ids; and the (batch, length) token mask of a padded batch, or None if
        the ids were packed.

    Raises:
        InvalidInputError: ids are not numbers, are NaN, or have a shape that does not match the table.
    """
    array = _numbers(host_array("ids", ids))
    one_of("side", side, ("left", "right"))
    packed, batch = _shapes(array, positions)
    tokens = positions.per_token(~positions.is_padding).astype(np.bool_)
    if packed and (attention_mask is None or batch is None):
        if attention_mask is not None:
            raise InvalidInputError(f"attention_mask requires padded ids, got packed ids of shape {array.shape}")
        return array.reshape(_rows(array, 1), positions.num_tokens)[:, tokens], None
    if batch is None:
        raise _shape_error(array.shape if shape is None else shape, positions, default_scheme)
    mask = _mask(positions, tokens, attention_mask, side, batch)
    return array.reshape(_rows(array, 2), prod(batch))[:, mask.ravel()], mask


def _numbers(array: Array) -> Array:
    if array.dtype.kind not in "iuf":
        raise InvalidInputError(f"ids: got dtype {array.dtype}, want integers or floats (bfloat16: save ids.float())")
    if array.dtype.kind == "f" and np.isnan(array).any():
        at = ", ".join(map(str, np.argwhere(np.isnan(array))[0].tolist()))
        raise InvalidInputError(f"ids[{at}]: got nan, want a number")
    return array.astype(np.float64) if array.dtype == np.longdouble else array  # JSON and Python have no longdouble


def _shapes(array: Array, positions: PositionTable) -> tuple[bool, tuple[int, int] | None]:
    """Return whether the shape fits packed ids, and the batch and length if it fits padded ids."""
    shape, has_axes = array.shape, array.shape[:1] in ((1,), (positions.axes,))
    packed = shape[-1:] == (positions.num_tokens,) and (
        array.ndim == 1 or (has_axes and (array.ndim == 2 or (array.ndim == 3 and shape[1] == 1)))
    )
    padded = (array.ndim == 2 or (array.ndim == 3 and has_axes)) and (
        shape[-2] == positions.num_documents and shape[-1] >= positions.max_seqlen
    )
    return packed, (shape[-2], shape[-1]) if padded else None


def _rows(array: Array, token_dims: int) -> int:
    """Return the number of rows before the token dimensions; reshape cannot infer it without tokens."""
    return array.shape[0] if array.ndim > token_dims else 1


def _mask(
    positions: PositionTable, tokens: Flags, attention_mask: npt.ArrayLike | None, side: Side, shape: tuple[int, int]
) -> Flags:
    """Return the (batch, length) token mask, from the attention mask, else from the table, else from the side."""
    real = np.add.reduceat(np.append(tokens, np.False_), positions.cu_seqlens[:-1], dtype=np.int64)
    real[positions.lengths == 0] = 0
    column = np.arange(shape[1])
    if attention_mask is not None:
        flags = host_array("attention_mask", attention_mask)
        if flags.shape != shape:
            raise InvalidInputError(f"attention_mask: got shape {flags.shape}, want {shape}")
        mask = flags != 0
        if (mask.sum(axis=1) != real).any():
            d = int((mask.sum(axis=1) != real).argmax())
            raise InvalidInputError(f"attention_mask[{d}]: got {mask[d].sum()} tokens, want {real[d]}")
        return mask
    if not tokens.all():
        mask = column < positions.lengths[:, None]
        mask[mask] = tokens
        return mask
    return column >= shape[1] - real[:, None] if side == "left" else column < real[:, None]


def _shape_error(shape: tuple[int, ...], positions: PositionTable, default_scheme: bool) -> InvalidInputError:
    axes, tokens, documents = positions.axes, positions.num_tokens, positions.num_documents
    longest = positions.max_seqlen
    hint = ""
    patches = int(positions.segment_lengths[positions.is_grid].sum())
    for side in (2, 3, 4):
        if patches and shape and shape[-1] == tokens + patches * (side * side - 1):
            hint = f"; the ids have one token per patch before {side}x{side} merging, want one per merged patch"
    text_row = "with Transformers' text row before the axes"
    if shape == (axes + 1, tokens):
        hint = f"; {text_row}, want {(axes + 1, 1, tokens)}: ids[:, None]"
    elif len(shape) == 3 and shape[0] == documents and shape[1] in (axes, axes + 1):
        rows = f"{shape[1]} rows" + (f", {text_row}," if shape[1] > axes else "")
        hint = f"; these are batch first, as in verl: want the {rows} first: ids.swapaxes(0, 1)"
    if default_scheme and len(shape) > 1 and shape[0] not in (1, axes):
        default = f"these shapes are for scheme {positions.scheme}, the default"
        hint = f"; {default}; choose another with --scheme or scheme={hint}"
    return InvalidInputError(
        f"ids: got shape {shape}, want ({axes}, {tokens}) packed or ({axes}, {documents}, {longest}) padded, or "
        f"either without axes for 1-D ids{hint}"
    )


def table_of_ids(numerators: IntArray, denominators: IntArray | None, lengths: IntArray, scheme: str) -> PositionTable:
    """Build a table from (axes, tokens) fractions or integers, with a run of text wherever ids increase by 1."""
    tokens = numerators.shape[1]
    denominators = np.ones((1, 1), np.int64) if denominators is None else denominators
    over = np.broadcast_to(np.lcm.reduce(denominators, axis=0), tokens)
    if (over > INT32_MAX).any() or (over < 1).any():
        raise InvalidInputError("position_ids: got fractions of a token without a common denominator below 2**31")
    scaled, first = numerators * (over // denominators), lengths.cumsum() - lengths
    begins = np.ones(tokens, np.bool_)
    begins[1:] = (np.diff(scaled) != 1).any(axis=0) | (np.diff(over) != 0)
    begins[first[first < tokens]] = True
    (starts,) = begins.nonzero()
    table = np.zeros((AXES + 4 * len(scaled), starts.size), np.int64)
    table[OFFSET], table[HEIGHT], table[WIDTH] = starts, 1, np.diff(np.append(starts, tokens))
    table[DENOMINATOR], table[AXES::4], table[AXES + 3 :: 4] = over[starts], scaled[:, starts], 1
    documents = np.full((4, lengths.size), NO_POSITION)
    documents[:FIRST_TOKEN], documents[FIRST_TOKEN] = starts.searchsorted(first), first
    return PositionTable(table, documents, tokens, bool((over > 1).any()), scheme)
