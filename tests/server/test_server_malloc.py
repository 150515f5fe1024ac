"""Memory of a process that has grown is given back when it rests."""

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
if tuned and not (malloc.keep_large_blocks() and malloc.give_back_at_rest(0.05)):
    sys.exit(7)
first = malloc._resident_bytes()
blocks = [b"a" * {BLOCK_BYTES} for _ in range({BLOCKS})]
del blocks[:-1]  # the last one is at the end of the heap, which cannot shrink
kept = malloc._resident_bytes()
end = time.monotonic() + 60
while tuned and malloc._resident_bytes() > first + malloc._GROWN_BYTES and time.monotonic() < end:
    time.sleep(0.3)  # looking takes time, too
print(kept - first, malloc._resident_bytes() - first)
"""


def grown(setting: str) -> tuple[int, int]:
    """Return the bytes by which a process has grown when its blocks are free, and when it has rested."""
    command = [sys.executable, "-c", GROWING, setting]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 7:
        pytest.skip("only glibc keeps memory so, and can give it back")
    kept, rest = map(int, done.stdout.split())
    return kept, rest


def test_memory_of_a_peak_is_kept_until_rest_and_then_given_back() -> None:
    (kept, rest), (untuned, _) = grown("tuned"), grown("plain")
    assert kept - untuned > BLOCKS * BLOCK_BYTES / 2
    assert rest <= malloc._GROWN_BYTES
