"""Words and types that several files share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError

Array = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]


def counted(count: int, noun: str) -> str:
    """Format a number and its noun, which is plural unless the number is 1.

    >>> counted(1, "token"), counted(2, "token")
    ('1 token', '2 tokens')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def host_array(name: str, value: object) -> Array:
    """Convert a list, an array or a tensor on the host to a numpy array, which may be a view or a copy."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(f"{name}: got {type(value).__name__}, want an array on the host ({error})") from None
