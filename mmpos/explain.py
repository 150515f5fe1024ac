"""A sentence about one token of a placed table."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from mmpos.columns import FIRST_TOKEN, Columns


def explain(table: Columns, token: int) -> str:
    """Where a token lies and why its position is what it is.

    The sentence reads: token 4 (documents[0], token 4) is row 0, column 1 of a grid of width 3 (segment 1):
    position (6, 8) = (6, 5) + 0·(4, 0) + 1·(0, 3).
    """
    s = int(np.searchsorted(table.offset, token, side="right")) - 1
    d = int(np.searchsorted(table.documents[FIRST_TOKEN], token, side="right")) - 1
    index = int(table.skip[s]) + token - int(table.offset[s])
    row, col = divmod(index, int(table.width[s]))
    frame, row = divmod(row, int(table.height[s]))
    head = f"token {token} (documents[{d}], token {token - int(table.documents[FIRST_TOKEN, d])}) is"

    def vector(values: list[int]) -> str:
        return "(" + ", ".join(str(Fraction(v, int(table.denominator[s]))) for v in values) + ")"

    origin, frames, rows, cols = (
        part[:, s].tolist() for part in (table.origin, table.step_frame, table.step_row, table.step_col)
    )
    position = [o + frame * f + row * r + col * c for o, f, r, c in zip(origin, frames, rows, cols, strict=True)]
    if table.is_padding[s]:
        return f"{head} padding (segment {s}): position {vector(position)}"
    if table.height[s] == 1 and not any(rows) and not any(frames):
        return f"{head} place {col} of a run of text (segment {s}): position {vector(position)}"
    place = f"row {row}, column {col} of a grid of width {table.width[s]} (segment {s})"
    place = f"frame {frame}, {place}" if any(frames) else place
    terms = [vector(origin)] + [
        f"{n}·{vector(step)}" for n, step in ((frame, frames), (row, rows), (col, cols)) if any(step)
    ]
    return f"{head} {place}: position {vector(position)} = {' + '.join(terms)}"
