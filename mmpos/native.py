"""The optional extension in C: fast ways of what the rooms say in Python; ``core`` is None where it was not built.

Its functions answer or decline. What they decline, mistakes included, takes the way in Python, which has the words.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol, cast

__all__ = ["core"]


class Core(Protocol):
    """The functions of csrc/; arrays are anything with a buffer."""

    def expand(self, table: Any, num_tokens: int, fractional: bool, out: Any, axes: bytes | None, /) -> bool:
        """Write the ids of these axes into the rows of out; False for anything but a table and rows that fit it."""


core: Core | None
try:
    core = cast(Core, import_module("mmpos._native"))
except ImportError:
    core = None
