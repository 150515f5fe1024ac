"""Rows and their positions as the batch that a processor gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import BatchFeature

from mmpos.errors import InvalidInputError
from mmpos.integrations.hf.processor_options import Options
from mmpos.integrations.hf.processor_rows import Rows
from mmpos.positions.table import PositionTable, Side
from mmpos.support.checks import IntArray

__all__ = ["PositionBatch", "padded", "per_token"]

_NOT_TENSORS = ["positions", "offset_mapping"]  # read token by token, which tensors are slow at


class PositionBatch(BatchFeature):
    """A BatchFeature whose position ids keep their numbers when it is cast to another dtype."""

    skip_tensor_conversion = _NOT_TENSORS  # of the class, since Transformers forgets that of a pickled batch

    def __init__(self, data: dict[str, Any], tensor_type: str | None = None) -> None:
        super().__init__(data, tensor_type=tensor_type, skip_tensor_conversion=_NOT_TENSORS)

    def convert_to_tensors(self, tensor_type: Any = None, skip_tensor_conversion: Any = None) -> PositionBatch:
        """All lists of rows of one length as tensors, in the shapes that a call with ``return_tensors`` gives."""
        ids = self.data.get("mm_position_ids")
        if tensor_type is not None and isinstance(ids, list) and len({rows.shape for rows in ids}) == 1:
            self.data["mm_position_ids"] = np.stack(ids, axis=1)
        super().convert_to_tensors(tensor_type, skip_tensor_conversion)
        return self

    def to(self, *args: Any, **kwargs: Any) -> PositionBatch:
        """All tensors moved, and floating ones cast, save fractional position ids, which bfloat16 would round."""
        ids = self.data.get("mm_position_ids")
        super().to(*args, **kwargs)
        if ids is not None and hasattr(ids, "to"):
            self.data["mm_position_ids"] = ids.to(self.data["mm_position_ids"].device)
        return self


def per_token(
    values: dict[str, npt.NDArray[Any]], rows: Rows, positions: PositionTable, tokenizer: Any, options: Options
) -> dict[str, Any]:
    """All that has an entry for every token, and the table of it: padded arrays, or a list with one for each row.

    Args:
        values: (tokens, …) of all rows, one after the other; what is padded is 0, but for input_ids.
        rows: how long they are.
        positions: of all rows, without padding.
        tokenizer: which side is padded, and with what.
        options: how the rows become equally long, if they do.
    """
    width = options.width(rows.lengths, tokenizer)
    dtype = None if positions.fractional else np.int64
    if width is None:
        split = rows.lengths.cumsum()[:-1]
        found: dict[str, Any] = {name: np.split(each, split) for name, each in values.items()}
        found["attention_mask"] = np.split(np.ones(rows.input_ids.size, np.int64), split)
        found["mm_position_ids"] = np.split(positions.dense(dtype=dtype), split, axis=1)
    else:
        side: Side = options.side(tokenizer)
        fill = tokenizer.pad_token_id
        if fill is None and (rows.lengths < width).any():
            raise InvalidInputError("tokenizer.pad_token: got None, want a token to pad with")
        fills = {"input_ids": fill or 0}
        found = {name: padded(each, rows.lengths, width, side, fills.get(name, 0)) for name, each in values.items()}
        ids, found["attention_mask"] = positions.padded(width, side, dtype)
        found["mm_position_ids"] = ids if options.return_tensors else list(ids.swapaxes(0, 1))
        positions = positions.pad(width, side)
    for name in found.keys() - {"mm_position_ids"}:
        if options.return_tensors is None or name in _NOT_TENSORS:
            found[name] = [row.tolist() for row in found[name]]
    return {**found, "positions": positions}


def padded(values: npt.NDArray[Any], lengths: IntArray, width: int, side: str, fill: int = 0) -> npt.NDArray[Any]:
    """(rows, width, …) of the values of all rows, one after the other, filled up on one side."""
    out = np.full((lengths.size, width, *values.shape[1:]), fill, values.dtype)
    column = np.arange(width)
    real = column < lengths[:, None] if side == "right" else column >= width - lengths[:, None]
    out[real] = values
    return out
