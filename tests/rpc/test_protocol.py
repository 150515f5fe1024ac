"""The protocol: its generated code is up to date, and `make check` reports missing comments and breaking changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
BASELINE = ROOT / "proto" / "baseline.binpb"
FOLDER = "mmpos/rpc/v1"
"""Folder of the protocol in proto, and of its generated code."""


def buf(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN / "buf", *arguments], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a folder with a copy of the protocol, which a test may change."""
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    return tmp_path


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


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("error.proto", "  string message = 2;\n", "", 'field "2" with name "message"'),
        ("positions.proto", "SIDE_LEFT = 1", "SIDE_START = 1", '"SIDE_LEFT" to "SIDE_START"'),
        ("info.proto", "rpc GetInfo(GetInfoRequest)", "rpc Get(GetInfoRequest)", "GetInfo"),
    ],
)
def test_a_breaking_change_is_reported(copy: Path, name: str, old: str, new: str, message: str) -> None:
    against = ["breaking", "--against", str(BASELINE)]
    assert buf(*against, cwd=copy).stdout == ""
    path = copy / "proto" / FOLDER / name
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    assert message in buf(*against, cwd=copy).stdout
