"""The optional C extension, which does the same as the Python code next to it; ``core`` is None if it was not built.

Its functions either return a result or decline. Input that they decline, including invalid input, is handled by the
Python code, which raises the error messages. Each function is described where it is defined in csrc/; where a
description says "array", any object with a buffer is accepted.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from mmpos.support.checks import IntArray

__all__ = ["INT64", "core", "int64"]

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
