"""The optional C extension, which does the same as the Python code next to it; ``core`` is None if it was not built.

Its functions either return a result or decline. Input that they decline, including invalid input, is handled by the
Python code, which raises the error messages. Each function is described where it is defined in csrc/; where a
description says "array", any object with a buffer is accepted.
"""

from __future__ import annotations

import inspect
import warnings
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from mmpos.support.checks import IntArray
from mmpos.support.extras import REINSTALL

__all__ = ["INT64", "core", "int64", "warn_slow"]

INT64 = np.dtype(np.int64)
"""int64 as a dtype object, with which numpy creates arrays in two thirds of the time that the scalar class takes."""


def int64(data: bytes) -> IntArray:
    """View bytes as a read-only int64 array without copying them."""
    return np.frombuffer(data, INT64)


core: Any
try:
    core = import_module("mmpos._native")
except ImportError:
    core = None


@cache
def warn_slow() -> None:
    """Warn once, at the line outside mmpos that led here, that ``core`` is None."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals["__name__"].partition(".")[0] == "mmpos":
        level, frame = level + 1, frame.f_back
    warnings.warn(
        "the C extension of mmpos was not built, so calls take 10 to 300 times as long, with the same results; "
        f"install a C compiler, then build the extension: {REINSTALL}",
        RuntimeWarning,
        stacklevel=level,
    )
