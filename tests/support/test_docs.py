"""Every example in the documents runs and prints what the document says."""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mmpos
from mmpos.data import Example, collate_packed
from mmpos_server.testing import running

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ADDRESS = "localhost:50051"
BLOCK = re.compile(r"^```(\w+)( no-run)?\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[object]:
    return [
        pytest.param(code, output, id=f"{path.name}:{path.read_text()[: match.start()].count(chr(10)) + 1}")
        for path in DOCUMENTS
        for match in BLOCK.finditer(path.read_text())
        for name, skipped, code, output in [match.groups()]
        if name == language and not skipped
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """What stands behind the address that the documents name."""
    with running() as address:
        yield address


@pytest.mark.parametrize(("code", "output"), blocks("python"))
def test_a_python_block_prints_the_text_block_after_it(
    code: str, output: str | None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = io.StringIO()
    monkeypatch.chdir(ROOT)
    code = _served(code, request)
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "example", "exec"), {"__name__": "example"})
    assert printed.getvalue() == (output or "")


def test_the_model_of_the_readme_takes_packs_with_and_without_images() -> None:
    (code,) = (match[3] for match in BLOCK.finditer(DOCUMENTS[0].read_text()) if "class Tiny" in match[3])
    names: dict[str, Any] = {}
    exec(compile(code.partition("\ncaptions = ")[0], "example", "exec"), names)
    model = names["Tiny"]()
    builder = mmpos.SequenceBuilder(images=mmpos.ImageProcessor("pillow", order="merged", max_tokens=4))
    for parts in (["text"], ["text", ROOT / "mmpos/photos/coffee.jpg"]):
        sequence = builder.build(parts)
        found = model(collate_packed([Example("a", sequence, sequence.input_ids)]))
        assert found.shape == (sequence.input_ids.size, 259)
        assert found.isfinite().all()


@pytest.mark.parametrize(("code", "output"), blocks("console"))
def test_console_lines_succeed(code: str, output: str | None, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for line in _served(code, request).splitlines():
        assert line.startswith("$ mmpos ")
        command = [sys.executable, "-m", *shlex.split(line.removeprefix("$ "))]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def _served(code: str, request: pytest.FixtureRequest) -> str:
    """The example with the address of a server that is there, if it names one."""
    return code.replace(ADDRESS, request.getfixturevalue("server")) if ADDRESS in code else code


def test_the_tests_that_the_page_of_differences_names_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/differences.md").read_text()))
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert len(named) > 10
    assert named - there == set()
