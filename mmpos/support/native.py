"""The optional extension in C, which does the same as the Python beside it; ``core`` is None where it was not built.

Its functions answer or decline. What they decline, mistakes included, takes the way in Python, which has the words.
Each is described where it is defined in csrc/; what is an array there may be anything with a buffer.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from mmpos.support.checks import IntArray

__all__ = ["INT64", "core", "int64"]

INT64 = np.dtype(np.int64)
"""As a dtype object, since numpy creates arrays from it in two thirds of the time that the scalar class takes."""


def int64(data: bytes) -> IntArray:
    """View bytes as a read-only int64 array, without a copy."""
    return np.frombuffer(data, INT64)


core: Any
try:
    core = import_module("mmpos._native")
except ImportError:
    core = None
