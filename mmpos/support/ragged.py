"""Arrays of rows with different lengths: ranges per owner, and runs in a mask."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mmpos.support.checks import IntArray

__all__ = ["ragged_arange", "true_runs"]


def ragged_arange(counts: IntArray, starts: IntArray | int = 0) -> tuple[IntArray, IntArray]:
    """Concatenate ``counts[i]`` consecutive integers that begin at ``starts[i]``, for each owner i.

    >>> owner, number = ragged_arange(np.array([2, 0, 3]), np.array([10, 20, 30]))
    >>> owner.tolist(), number.tolist()
    ([0, 0, 2, 2, 2], [10, 11, 30, 31, 32])

    Args:
        counts: (owners,) number of integers for each owner, at least 0.
        starts: (owners,) first number of each owner, or one integer for all.

    Returns:
        (numbers,) index of the owner of each number, ascending, and (numbers,) the numbers themselves; both new arrays.
    """
    owner = np.arange(counts.size).repeat(counts)
    return owner, np.arange(owner.size) - (counts.cumsum() - counts - starts)[owner]


def true_runs(mask: npt.NDArray[np.bool_], starts: IntArray | None = None) -> IntArray:
    """Find the runs of True in a mask; return their first and one-past-last indices (runs, 2) in ascending order.

    >>> true_runs(np.array([False, True, True, True, False, True]), np.array([2])).tolist()
    [[1, 2], [2, 4], [5, 6]]

    Args:
        mask: (tokens,) bool.
        starts: indices at which a new run begins even if it directly follows another run, or None.
    """
    edge = np.ones(mask.size + 1, np.bool_)
    np.not_equal(mask[1:], mask[:-1], out=edge[1:-1])
    if starts is not None:
        edge[starts] = True
    (at,) = edge.nonzero()
    return np.stack([at[:-1], at[1:]], axis=1)[mask[at[:-1]]]
