"""Commands in this process, in an empty folder, with no colours asked for by the surroundings."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mmpos.__main__ import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command; gives its exit code, output and errors."""

    def command(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        return code, *capsys.readouterr()

    return command


@pytest.fixture
def fail(run: Run) -> Callable[..., tuple[int, str]]:
    """Run a wrong command; gives its exit code and the one line of its error."""

    def command(*arguments: str) -> tuple[int, str]:
        code, out, err = run(*arguments)
        assert out == ""
        assert re.fullmatch(r"mmpos: error: [^\n]+\n", err), err
        return code, err.removeprefix("mmpos: error: ").rstrip("\n")

    return command
