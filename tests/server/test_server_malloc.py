"""Test that a process that has grown returns memory to the system once it is idle."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mmpos_server import malloc

BLOCKS, BLOCK_BYTES = 200, 2**20

GROWING = f"""
import sys, time
from mmpos_server import malloc

tuned = sys.argv[1] == "tuned"
if tuned and not (malloc.keep_large_blocks() and malloc.release_memory_when_idle(0.05)):
    sys.exit(7)
first = malloc._resident_bytes()
blocks = [b"a" * {BLOCK_BYTES} for _ in range({BLOCKS})]
del blocks[:-1]  # the last one is at the end of the heap, which cannot shrink
kept = malloc._resident_bytes()
end = time.monotonic() + 60
while tuned and malloc._resident_bytes() > first + malloc._GROWN_BYTES and time.monotonic() < end:
    time.sleep(0.3)  # the measurement takes time as well
print(kept - first, malloc._resident_bytes() - first)
"""


def grown(setting: str) -> tuple[int, int]:
    """Return by how many bytes a process has grown after freeing its blocks, and after being idle."""
    command = [sys.executable, "-c", GROWING, setting]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if completed.returncode == 7:
        pytest.skip("only glibc keeps freed memory and can return it")
    kept, idle = map(int, completed.stdout.split())
    return kept, idle


def test_peak_memory_is_kept_until_the_process_is_idle() -> None:
    (kept, idle), (untuned, _) = grown("tuned"), grown("plain")
    assert kept - untuned > BLOCKS * BLOCK_BYTES / 2
    assert idle <= malloc._GROWN_BYTES
