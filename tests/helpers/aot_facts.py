"""Facts of kernels that are compiled ahead of time, by ``aot_compile.py`` in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("aot_compile.py")


def each_on_one(names: list[str]) -> list[str]:
    """Every case on one of the GPUs, in turns: what takes its shape hardly depends on the GPU."""
    return [f"{name}, sm_{(80, 90, 100)[i % 3]}" for i, name in enumerate(names)]


def facts_of(names: list[str], cache: Path) -> dict[str, dict[str, int]]:
    """Compile these cases in a process of their own, and give its counts by case and architecture."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, str(SCRIPT), *names]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    facts: dict[str, dict[str, int]] = json.loads(found.stdout)
    assert len(facts) == sum(1 if ", sm_" in name or ", gfx" in name else 3 for name in names)
    return facts


def those(names: list[str], cases: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Facts of some cases."""
    found = {case: facts for case, facts in cases.items() if case.split(", sm_")[0] in names}
    assert len(found) >= len(names)
    return found
