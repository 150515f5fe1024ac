"""Equality before timing: what differs is not timed."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmpos.errors import MmposError

__all__ = ["NotEqualError", "close", "equal", "holds"]


class NotEqualError(MmposError):
    """A contestant gives something else than it should: nothing of its case is timed."""


def equal(got: Any, want: Any) -> None:
    """Every value of two arrays or tensors is the same; their dtypes may differ.

    Args:
        got: what a contestant gives.
        want: what it should give, of the same shape.

    Raises:
        NotEqualError: naming the first difference.
    """
    close(got, want, 0)


def close(got: Any, want: Any, at_most: float) -> None:
    """No value is further from its counterpart than this; NaN equals nothing.

    Args:
        got: what a contestant gives.
        want: what it should give, of the same shape.
        at_most: the greatest difference.

    Raises:
        NotEqualError: naming the first difference.
    """
    found, wanted = np.asarray(got), np.asarray(want)
    if found.shape != wanted.shape:
        raise NotEqualError(f"got shape {found.shape}, want {wanted.shape}")
    same = found == wanted if at_most == 0 else np.abs(found - wanted.astype(np.float64)) <= at_most
    if not same.all():
        place = tuple(int(i) for i in np.argwhere(~same)[0])
        within = f" within {at_most:g}" if at_most else ""
        raise NotEqualError(f"{list(place)}: got {found[place]}, want {wanted[place]}{within}")


def holds(fact: bool, got: object, want: object) -> None:
    """Something is so.

    Raises:
        NotEqualError: it is not.
    """
    if not fact:
        raise NotEqualError(f"got {got}, want {want}")
