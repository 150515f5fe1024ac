"""A sentence about one token of a placed table."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import numpy as np

from mmpos.positions.columns import FIRST_TOKEN, Columns


class _Place(NamedTuple):
    """Where a token lies: its segment, its place in the grid, whether it is one, and what it is in words."""

    segment: int
    frame: int
    row: int
    col: int
    in_grid: bool
    what: str


def describe(table: Columns, token: int) -> str:
    """What a token is: row 0, column 1 of a grid of width 3 (segment 1)."""
    return _place(table, token).what


def explain(table: Columns, token: int) -> str:
    """Where a token lies and why its position is what it is.

    The sentence reads: token 4 (documents[0], token 4) is row 0, column 1 of a grid of width 3 (segment 1):
    position (6, 8) = (6, 5) + 0·(4, 0) + 1·(0, 3).
    """
    s, frame, row, col, in_grid, what = _place(table, token)
    d = int(np.searchsorted(table.documents[FIRST_TOKEN], token, side="right")) - 1

    def vector(values: list[int]) -> str:
        return "(" + ", ".join(str(Fraction(v, int(table.denominator[s]))) for v in values) + ")"

    origin, frames, rows, cols = (
        part[:, s].tolist() for part in (table.origin, table.step_frame, table.step_row, table.step_col)
    )
    position = [o + frame * f + row * r + col * c for o, f, r, c in zip(origin, frames, rows, cols, strict=True)]
    sentence = (
        f"token {token} (documents[{d}], token {token - int(table.documents[FIRST_TOKEN, d])}) is {what}: "
        f"position {vector(position)}"
    )
    if not in_grid:
        return sentence
    terms = [vector(origin)] + [
        f"{n}·{vector(step)}" for n, step in ((frame, frames), (row, rows), (col, cols)) if any(step)
    ]
    return f"{sentence} = {' + '.join(terms)}"


def _place(table: Columns, token: int) -> _Place:
    s = int(np.searchsorted(table.offset, token, side="right")) - 1
    index = int(table.skip[s]) + token - int(table.offset[s])
    row, col = divmod(index, int(table.width[s]))
    frame, row = divmod(row, int(table.height[s]))
    in_grid = bool(table.is_grid[s])
    if in_grid:
        what = f"row {row}, column {col} of a grid of width {table.width[s]}"
        what = f"frame {frame}, {what}" if table.step_frame[:, s].any() else what
    else:
        what = "padding" if table.is_padding[s] else f"place {col} of a run of text"
    return _Place(s, frame, row, col, in_grid, f"{what} (segment {s})")
