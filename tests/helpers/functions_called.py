"""The functions of mmpos that a call runs, as a measure of how much code a reader follows and a cache loads."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType


def functions_called(work: Callable[[], object]) -> int:
    """Return how many functions of mmpos and its server a warm call runs, without lambdas and generated code."""
    seen = set()

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        generated = code.co_filename.startswith("<") or code.co_name.startswith("<")
        if event == "call" and module.startswith("mmpos") and not generated:
            seen.add(code)

    work()
    gc.collect()  # so that no unrelated object is closed during the call
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return len(seen)
