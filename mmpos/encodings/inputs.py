"""Checks of the positions that encodings are asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.rotary.frequencies import Float64Array
from mmpos.support.checks import IntArray, host_array

__all__ = ["Float64Array", "IntArray", "distances", "real_positions", "whole_positions"]

_HALF = 2**62  # the difference of two positions below it is an int64
_INT64_MAX = 2**63 - 1


def real_positions(name: str, value: Any, ndim: int | None = None) -> Float64Array:
    """Finite float64 numbers from integers or floats, of any shape or of so many dimensions."""
    array = _shaped(name, value, ndim)
    if array.dtype.kind not in "iuf" and array.size:
        raise InvalidInputError(f"{name}: got dtype {array.dtype}, want integers or floats")
    found = array.astype(np.float64)
    _refuse(name, found, ~np.isfinite(found), "a finite number")
    return found


def distances(query_positions: Any, key_positions: Any) -> IntArray:
    """(n, m) int64 j − i of every key (m,) from every query (n,), whole numbers within ±2⁶²."""
    queries = whole_positions("query_positions", query_positions, 1, minimum=-_HALF, below=_HALF)
    return whole_positions("key_positions", key_positions, 1, minimum=-_HALF, below=_HALF) - queries[:, None]


def whole_positions(
    name: str, value: Any, ndim: int | None = None, *, minimum: int | None = None, below: int | None = None
) -> IntArray:
    """int64 numbers from integers, of any shape or of so many dimensions, within minimum <= p < below."""
    array = _shaped(name, value, ndim)
    if array.dtype.kind not in "iu" and array.size:
        raise InvalidInputError(f"{name}: got dtype {array.dtype}, want integers")
    _refuse(name, array, array > _INT64_MAX, f"<= {_INT64_MAX}")
    found = array.astype(np.int64)
    if minimum is not None:
        _refuse(name, found, found < minimum, f">= {minimum}")
    if below is not None:
        _refuse(name, found, found >= below, f"< {below}")
    return found


def _shaped(name: str, value: Any, ndim: int | None) -> npt.NDArray[Any]:
    array = host_array(name, value)
    if ndim is not None and array.ndim != ndim:
        raise InvalidInputError(f"{name}: got shape {array.shape}, want {ndim} dimension{'s' * (ndim != 1)}")
    return array


def _refuse(name: str, values: npt.NDArray[Any], wrong: npt.NDArray[np.bool_], want: str) -> None:
    """Raise for the first position that is wrong, with its index in the name."""
    if not wrong.any():
        return
    at = tuple(int(i) for i in np.unravel_index(int(wrong.argmax()), wrong.shape))
    index = f"[{', '.join(map(str, at))}]" if at else ""
    raise InvalidInputError(f"{name}{index}: got {values[at]}, want {want}")
