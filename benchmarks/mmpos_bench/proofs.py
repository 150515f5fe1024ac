"""Equality before timing: what differs is not timed."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmpos.errors import MmposError

__all__ = ["NotEqualError", "close", "equal", "holds"]


class NotEqualError(MmposError):
    """A contestant gives something else than it should: nothing of its case is timed."""


def equal(got: Any, want: Any) -> None:
    """Check that every value of two arrays or tensors is the same; their dtypes may differ.

    Args:
        got: what a contestant gives.
        want: what it should give, of the same shape.

    Raises:
        NotEqualError: naming the first difference.
    """
    close(got, want, 0)


def close(got: Any, want: Any, at_most: float) -> None:
    """Check that no value is further from its counterpart than this; NaN equals nothing.

    Args:
        got: what a contestant gives.
        want: what it should give, of the same shape.
        at_most: the greatest difference.

    Raises:
        NotEqualError: naming the first difference.
    """
    values, wanted = np.asarray(got), np.asarray(want)
    if values.shape != wanted.shape:
        raise NotEqualError(f"got shape {values.shape}, want {wanted.shape}")
    same = values == wanted if at_most == 0 else np.abs(values - wanted.astype(np.float64)) <= at_most
    if not same.all():
        place = tuple(int(i) for i in np.argwhere(~same)[0])
        within = f" within {at_most:g}" if at_most else ""
        raise NotEqualError(f"{list(place)}: got {values[place]}, want {wanted[place]}{within}")


def holds(fact: bool, got: object, want: object) -> None:
    """Check a fact.

    Raises:
        NotEqualError: it is not.
    """
    if not fact:
        raise NotEqualError(f"got {got}, want {want}")
