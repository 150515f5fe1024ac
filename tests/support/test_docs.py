"""Every example in the documents runs, and prints the output shown in the document."""

import contextlib
import io
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmpos.__main__ import main
from mmpos_server.testing import running

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md"]
ADDRESS = "localhost:50051"
CLI_ONLY = [
    *("README.md", "docs/index.md", "docs/start.md", "docs/models.md", "docs/positions.md", "docs/schemes.md"),
    *("docs/sequences.md", "docs/tutorials/check.md", "docs/tutorials/scheme.md"),
]
"""Pages whose examples run after `make demo`, which installs only the extra cli."""
NAMES_NO_EXTRA = [
    name
    for page in DOCUMENTS
    if (name := page.relative_to(ROOT).as_posix()) not in CLI_ONLY
    and "```python\n" in page.read_text()
    and not re.search(r'"\.\[(?!cli\])', page.read_text())
]
"""The other pages with examples that name no extra, so that readers expect to need none."""
RUN_WITHOUT_OTHER_EXTRAS = """
import json, sys

blocked = "datasets", "google", "grpc", "pyarrow", "tokenizers", "torch", "torchvision", "transformers"
sys.modules.update(dict.fromkeys(blocked))  # to import them raises ModuleNotFoundError
for page, codes in json.load(sys.stdin).items():
    for code in codes:
        exec(compile(code, page, "exec"), {"__name__": "example"})
"""
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
    """Start a server, and yield its address, which replaces the address in the documents."""
    with running() as address:
        yield address


@pytest.mark.parametrize(("code", "output"), blocks("python"))
def test_a_python_block_prints_the_text_block_after_it(
    code: str, output: str | None, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = io.StringIO()
    # Examples that use files from the tree must run in the root of the tree.
    monkeypatch.chdir(ROOT if re.search("examples/|mmpos/photos/", code) else tmp_path)
    code = _served(code, request)
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "example", "exec"), {"__name__": "example"})
    assert printed.getvalue() == (output or "")


def test_examples_on_first_pages_and_on_pages_that_name_no_extra_need_only_cli(tmp_path: Path) -> None:
    codes = {
        page: [match[3] for match in BLOCK.finditer((ROOT / page).read_text()) if match[1] == "python" and not match[2]]
        for page in CLI_ONLY + NAMES_NO_EXTRA
    }
    assert all(codes.values())
    command = [sys.executable, "-c", RUN_WITHOUT_OTHER_EXTRAS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, input=json.dumps(codes), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("code", "output"), blocks("console"))
def test_console_lines_succeed_and_print_the_text_block_after_them(
    code: str,
    output: str | None,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in _served(code, request).splitlines():
        assert line.startswith("$ mmpos ")
        assert main(shlex.split(line.removeprefix("$ mmpos "))) == 0, line
    assert output is None or capsys.readouterr().out == output


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_existing_files_and_headings(path: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        target, _, heading = link.partition("#")
        page = path.parent / target if target else path
        assert page.exists(), link
        generated = page.resolve().parent == ROOT / "docs/reference/api"  # the site build checks these anchors
        assert not heading or generated or heading in headings(page), link


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_and_paths_in_page_text_exist(path: Path) -> None:
    text = BLOCK.sub("", path.read_text())
    for name in re.findall(r"`(mmpos\w*(?:\.\w+)+)", text):
        pkgutil.resolve_name(name)
    for file in re.findall(r"`((?:mmpos|csrc|proto|server|benchmarks|tests|docs|examples|deploy)/[\w/.-]+)`", text):
        assert (ROOT / file).exists(), file


def headings(page: Path) -> list[str]:
    """Return the heading anchors of a Markdown page."""
    titles = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


def test_the_readme_is_short_and_links_to_every_page_outside_the_site() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.encode()) <= 8_000
    linked = {(ROOT / link).resolve() for link in re.findall(r"\]\(([^)#]+)", readme)}
    assert len(re.findall(r"^\| \*\*", readme, re.MULTILINE)) == 5  # the rows of ways in
    outside = {page for page in PAGES if ROOT / "docs" not in page.parents and page.name != "README.md"}
    assert (outside | {ROOT / "docs/index.md"}) - linked == set()


def test_the_site_lists_every_page_and_its_pages_are_short_and_link_only_within_the_site() -> None:
    folder = ROOT / "docs"
    pages = {page.relative_to(folder).as_posix() for page in folder.rglob("*.md")}
    listed = re.findall(r'"([^"]+\.md)"', (ROOT / "zensical.toml").read_text())
    assert sorted(listed) == sorted(pages)
    for page in folder.rglob("*.md"):
        assert page.stat().st_size <= 12 * 1024, page.name
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert folder in (page.parent / link).resolve().parents, (page.name, link)


def _served(code: str, request: pytest.FixtureRequest) -> str:
    """Replace the address in an example with the address of a running server."""
    return code.replace(ADDRESS, request.getfixturevalue("server")) if ADDRESS in code else code


def test_tests_named_on_the_differences_page_exist() -> None:
    named = set(
        re.findall(r"`(test_\w+)`", "".join(page.read_text() for page in (ROOT / "docs").glob("differences*.md")))
    )
    existing = {
        name
        for folder in ("tests", "contrib")
        for path in (ROOT / folder).rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert len(named) > 10
    assert named - existing == set()
