"""The generated code of the protocol is up to date; `make check` reports missing comments and breaking changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
FOLDER = "mmpos/rpc/v1"
"""Folder of the protocol in proto, and of its generated code."""


def test_generated_code_is_current(tmp_path: Path) -> None:
    outputs = f"--python_out={tmp_path}", f"--mypy_out={tmp_path}"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iproto", *outputs]
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    sources = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "proto" / FOLDER).glob("*.proto"))]
    subprocess.run([*command, *sources], cwd=ROOT, env=environment, check=True, capture_output=True)
    fresh = {path.name: path.read_text() for path in (tmp_path / FOLDER).iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / FOLDER).glob("*_pb2.py*")}
    assert len(fresh) == 2 * len(sources)
    assert sorted(committed) == sorted(fresh)
    assert [name for name in fresh if fresh[name] != committed[name]] == [], "run `make proto`"
