"""Rows of ids and delta of a request, for the serving engines that rotate by three rows of integers."""

from __future__ import annotations

import numpy as np

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.positions.table import PositionTable
from mmpos.support.checks import counted
from mmpos.support.extras import needed_for

with needed_for("ids for an engine", extra="all"):
    import torch
    from torch import Tensor

__all__ = ["request_ids"]

ROWS = ((0, 0, 0), (0, 0, 1), (0, 1, 2))
"""Axis for each row of ids, with one, two and three axes."""


def request_ids(positions: PositionTable) -> tuple[Tensor, int]:
    """Return the ids of a prompt, (3, tokens) int64 in a new tensor, and the delta of the tokens generated after it.

    With two axes, the rows are row, row, column, so that an engine's config has no pairs in its first section.

    Raises:
        InvalidInputError: positions do not contain exactly one document, or contain padding or a negative id.
        UnsupportedError: there are more than three axes, ids may be fractions, or the scheme has no next position.
    """
    if not isinstance(positions, PositionTable):
        raise InvalidInputError(f"positions: got {type(positions).__name__}, want a PositionTable")
    if positions.num_documents != 1:
        raise InvalidInputError(f"positions: got {counted(positions.num_documents, 'document')}, want 1")
    if positions.axes > len(ROWS):
        raise UnsupportedError(f"positions: got {positions.axes} axes, want at most 3, one per row of ids in an engine")
    if positions.fractional:
        raise UnsupportedError(
            f"positions: got scheme {positions.scheme!r}, whose ids may be fractions, want integers; an id is a row of "
            "the engine's cos/sin cache, and each generated token uses the next row"
        )
    if positions.is_padding.any():
        raise InvalidInputError("positions: got padding, want none; engines pack requests")
    ids = positions.dense(dtype=np.int64, axes=ROWS[positions.axes - 1])
    if ids.size and ids.min() < 0:
        raise InvalidInputError(f"positions: got id {ids.min()}, want >= 0; ids are rows of the cos/sin cache")
    return torch.from_numpy(ids), int(positions.next_positions[0]) - positions.num_tokens
