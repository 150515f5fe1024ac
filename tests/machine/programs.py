"""Run the programs of this folder, which compile kernels instead of interpreting them, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDERS = [str(Path(__file__).parents[1] / name) for name in ("machine", "gpu", "helpers", "oracles")]


def run(program: str, *arguments: object, **variables: str) -> Any:
    """Run a program in a process without the interpreter, and return what it prints."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | variables
    environment["PYTHONPATH"] = os.pathsep.join([*FOLDERS, environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(Path(__file__).with_name(program)), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
