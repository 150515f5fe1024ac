"""Fixtures that run commands in this process, in an empty folder, unaffected by colour settings in the environment."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main

from mmpos.__main__ import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create an empty working folder."""
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True, scope="package")
def commands() -> Iterator[None]:
    """Create typer's commands once, since this takes longer than most of them run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command and returns its exit code, output and errors."""

    def command(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        return code, *capsys.readouterr()

    return command


@pytest.fixture
def printed(run: Run) -> Callable[..., str]:
    """Return a function that runs a valid command and returns its output."""

    def command(*arguments: str) -> str:
        code, out, err = run(*arguments)
        assert (code, err) == (0, "")
        return out

    return command


@pytest.fixture
def fail(run: Run) -> Callable[..., tuple[int, str]]:
    """Return a function that runs an invalid command and returns its exit code and its one-line error."""

    def command(*arguments: str) -> tuple[int, str]:
        code, out, err = run(*arguments)
        assert out == ""
        assert re.fullmatch(r"mmpos: error: [^\n]+\n", err), err
        return code, err.removeprefix("mmpos: error: ").rstrip("\n")

    return command
