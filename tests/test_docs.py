"""Every example in the documents runs and prints what the document says."""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)( no-run)?\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[object]:
    return [
        pytest.param(code, output, id=f"{path.name}:{path.read_text()[: match.start()].count(chr(10)) + 1}")
        for path in DOCUMENTS
        for match in BLOCK.finditer(path.read_text())
        for name, skipped, code, output in [match.groups()]
        if name == language and not skipped
    ]


@pytest.mark.parametrize(("code", "output"), blocks("python"))
def test_a_python_block_prints_the_text_block_after_it(code: str, output: str | None) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "example", "exec"), {"__name__": "example"})
    assert printed.getvalue() == (output or "")


@pytest.mark.parametrize(("code", "output"), blocks("console"))
def test_console_lines_succeed(code: str, output: str | None, tmp_path: Path) -> None:
    for line in code.splitlines():
        assert line.startswith("$ mmpos ")
        command = [sys.executable, "-m", *shlex.split(line.removeprefix("$ "))]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target
