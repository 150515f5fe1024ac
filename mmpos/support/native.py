"""The optional extension in C, which does the same as the Python beside it; ``core`` is None where it was not built.

Its functions answer or decline. What they decline, mistakes included, takes the way in Python, which has the words.
Each is described where it is defined in csrc/; what is an array there may be anything with a buffer.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from mmpos.support.checks import IntArray

__all__ = ["core", "int64"]


def int64(data: bytes) -> IntArray:
    """Read int64 numbers from bytes; read-only, not copied."""
    return np.frombuffer(data, np.int64)


core: Any
try:
    core = import_module("mmpos._native")
except ImportError:
    core = None
