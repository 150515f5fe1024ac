"""Equality checks before timing: contestants with wrong results are not timed."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import numpy as np
import numpy.typing as npt

from mmpos.errors import MmposError


class NotEqualError(MmposError):
    """A contestant returned a wrong result, so its case is not timed."""


def equal(got: object, want: object, at_most: float = 0.0) -> None:
    """Check every number of a result; NaN is not equal to NaN.

    Args:
        got: a contestant's result: an array, tensor or list of numbers of any dtype; a tuple of results; or a
            dataclass, whose arrays must have the same dtypes as those of ``want``.
        want: the correct result, with the same shape.
        at_most: largest allowed difference between two numbers.

    Raises:
        NotEqualError: the results differ; the message names the first difference.
    """
    if isinstance(want, tuple):
        results = tuple(got) if isinstance(got, tuple | list) else (got,)
        holds(len(results) == len(want), f"{len(results)} results", f"{len(want)}")
        for got_item, want_item in zip(results, want, strict=True):
            equal(got_item, want_item, at_most)
    elif is_dataclass(want):
        holds(type(got) is type(want), f"a {type(got).__name__}", f"a {type(want).__name__}")
        for name in (field.name for field in fields(want)):
            try:
                _equal_values(getattr(got, name), getattr(want, name))
            except NotEqualError as error:
                raise NotEqualError(f"{name}: {error}") from None
    else:
        _equal_arrays(np.asarray(got), np.asarray(want), at_most)


def _equal_values(got: object, want: object) -> None:
    """Check a field of a dataclass, including its dtype or type."""
    if isinstance(want, np.ndarray):
        dtype = got.dtype if isinstance(got, np.ndarray) else type(got).__name__
        holds(dtype == want.dtype, dtype, want.dtype)
    if isinstance(want, np.ndarray) or is_dataclass(want):
        equal(got, want)
    else:
        holds(type(got) is type(want) and got == want, repr(got), repr(want))


def _equal_arrays(got: npt.NDArray[np.generic], want: npt.NDArray[np.generic], at_most: float) -> None:
    holds(got.shape == want.shape, f"shape {got.shape}", want.shape)
    same = got == want if at_most == 0 else np.abs(got - want.astype(np.float64)) <= at_most
    if not np.all(same):
        at = tuple(int(i) for i in np.argwhere(~same)[0])
        within = f" within {at_most:g}" if at_most else ""
        raise NotEqualError(f"{list(at)}: got {got[at]}, want {want[at]}{within}")


def holds(fact: bool, got: object, want: object) -> None:
    """Check a condition.

    Raises:
        NotEqualError: the condition is false.
    """
    if not fact:
        raise NotEqualError(f"got {got}, want {want}")
