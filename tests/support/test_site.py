"""The site builds without warnings, documents every public name, and its pages load no files of others."""

import os
import pkgutil
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
from mkdocstrings import Inventory

ROOT = Path(__file__).parents[2]
REFERENCE = "".join(page.read_text() for page in (ROOT / "docs/reference/api").glob("*.md"))
ROOMS = [
    *("mmpos.positions", "mmpos.sequence"),  # the reference lists their names under mmpos
    *re.findall(r"^::: (\S+)$", REFERENCE, re.MULTILINE),
]
LOADED = {"script": "src", "img": "src", "source": "src", "iframe": "src", "link": "href"}
"""Elements that make a browser load a file, and the attribute that names it."""
RELATED = {"canonical", "next", "prev"}
"""Links to other pages, which a browser does not load."""

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("site")]  # one worker builds the site for all tests


class Page(HTMLParser):
    """The names of a page's headings, and the addresses of the files that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.headings, self.loaded = 0, list[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.headings += tag == "h1"
        if values.get("rel") not in RELATED and (address := values.get(LOADED.get(tag, ""))):
            self.loaded.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site from a copy of the pages, and return its folder."""
    project = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "zensical.toml", project)
    shutil.copytree(ROOT / "docs", project / "docs")
    for folder in ("mmpos", "server", "examples"):
        (project / folder).symlink_to(ROOT / folder)
    environment = {**os.environ, "PYTHONPATH": str(project / "docs/extension"), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "griffe:" not in done.stdout + done.stderr
    return project / "build/site"


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    with (site / "objects.inv").open("rb") as file:
        documented = set(Inventory.parse_sphinx(file))
    for name in ROOMS:
        room = pkgutil.resolve_name(name)
        for public in getattr(room, "__all__", ()):
            value = getattr(room, public)
            home = f"{getattr(value, '__module__', name)}.{public}"  # a module may have the same name as its function
            assert isinstance(value, ModuleType) or {f"{name}.{public}", home} & documented, home


def test_pages_have_a_heading_and_load_only_files_of_the_site(site: Path) -> None:
    pages = [path for path in site.rglob("*.html") if path.name != "404.html"]
    assert len(pages) >= len([*(ROOT / "docs").rglob("*.md")])
    for path in pages:
        page = Page(path)
        assert page.headings == 1, path
        assert page.loaded
        for address in page.loaded:
            assert (path.parent / address.partition("?")[0].partition("#")[0]).exists(), (path, address)
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import\s*)[\"']?(?:https?:)?//[^)]*", styles) == []
