"""Test set-up: kernels run in Triton's interpreter where there is no GPU."""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Imported once, before doctests collect its modules one by one.
import mmpos  # noqa: F401

# Plugins for runs of their own, see tests/test_congruence.py; and what imports other projects, which takes seconds
# and fails where they are missing.
collect_ignore = ["tests/through_service.py", "tests/native_choice.py", "mmpos/bench/peers"]
