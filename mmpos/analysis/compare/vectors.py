"""What an encoding gives for positions and for pairs of them, in one form for all three kinds."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.encodings import AdditiveTable, AttentionBias, Rotation
from mmpos.errors import InvalidInputError
from mmpos.support.checks import IntArray

__all__ = ["Known", "first_positions", "scores", "vectors"]

Float64Array = npt.NDArray[np.float64]
Known = AdditiveTable | AttentionBias | Rotation
"""The kinds of encodings."""


def first_positions(encoding: Known, most: int) -> IntArray:
    """(n,) 0, 1, …, as many as asked for, or as the encoding has."""

    def refused(last: int) -> bool:
        try:
            vectors(encoding, np.array([last]))
        except InvalidInputError:
            return True
        return False

    return np.arange(bisect_left(range(most), True, key=refused))


def vectors(encoding: Known, positions: Any) -> Float64Array:
    """What tells positions from each other: rows of a table, a vector of ones that was turned, or the biases of all
    heads for a query at the position and a key at 0.

    Args:
        encoding: of any kind.
        positions: (n,); (axes, n) for rotations with several axes.

    Returns:
        (n, channels).
    """
    if isinstance(encoding, AdditiveTable):
        return encoding.table(positions)
    if isinstance(encoding, Rotation):
        return encoding.rotate(np.ones((np.shape(positions)[-1], encoding.rotary.head_dim)), positions)
    return encoding.bias(positions, [0])[..., 0].T


def scores(encoding: Known, positions: Any) -> Float64Array:
    """What attention sees of pairs of positions: the products of rows of a table, the score of one query and one key
    that were turned, or the bias.

    Args:
        encoding: of any kind.
        positions: (n,).

    Returns:
        (heads, n, n), one head where the encoding knows of none.
    """
    if isinstance(encoding, AdditiveTable):
        rows = encoding.table(positions)
        return (rows @ rows.T)[None]
    if isinstance(encoding, Rotation):
        # Any query and key do that are nothing special.
        q, k = np.random.default_rng(0).standard_normal((2, 1, encoding.rotary.head_dim)).repeat(len(positions), axis=1)
        return (encoding.rotate(q, positions) @ encoding.rotate(k, positions).T)[None]
    return encoding.bias(positions, positions)
