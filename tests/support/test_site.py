"""The site builds without warnings, documents every public name, and opens in a browser without network access."""

import os
import pkgutil
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import browser
import pytest
from mkdocstrings import Inventory

ROOT = Path(__file__).parents[2]
REFERENCE = "".join(page.read_text() for page in (ROOT / "docs/reference/api").glob("*.md"))
ROOMS = [
    *("mmpos.positions", "mmpos.sequence"),  # the reference lists their names under mmpos
    *re.findall(r"^::: (\S+)$", REFERENCE, re.MULTILINE),
]
OPENED = [
    "index.html",
    "start.html",
    "tutorials/train.html",
    "tutorials/check.html",
    "service-operation.html",
    "schemes.html",
    "gallery.html",
    "reference/api/mmpos.html",
    "reference/api/rotary.html",
    "explanations/table.html",
]
LOOK = """[
    document.querySelector("h1").textContent.length > 1,
    Math.max(0, document.documentElement.scrollWidth - innerWidth),
    performance.getEntriesByType("resource").map(entry => entry.name).filter(name => !name.startsWith(location.origin)),
]"""

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("site")]  # one worker builds the site for all tests
in_a_browser = pytest.mark.skipif(
    browser.CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium"
)


class Quiet(SimpleHTTPRequestHandler):
    """A handler that serves files without logging."""

    def log_message(self, *_: object) -> None:
        pass


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


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serve the site on this machine, and yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    with (site / "objects.inv").open("rb") as file:
        documented = set(Inventory.parse_sphinx(file))
    for name in ROOMS:
        room = pkgutil.resolve_name(name)
        for public in getattr(room, "__all__", ()):
            value = getattr(room, public)
            home = f"{getattr(value, '__module__', name)}.{public}"  # a module may have the same name as its function
            assert isinstance(value, ModuleType) or {f"{name}.{public}", home} & documented, home


@in_a_browser
def test_pages_open_without_errors_or_external_requests_at_two_widths(address: str, tmp_path: Path) -> None:
    async def steps(page: browser.Page) -> list[object]:
        results: list[object] = []
        for width in (400, 1400):
            for name in OPENED:
                await page.open(f"{address}/{name}", width=width, dark=width == 400)
                results.append([width, name, *await page.evaluate(LOOK)])
        return results + page.errors

    assert browser.run(tmp_path, steps) == [[width, name, True, 0, []] for width in (400, 1400) for name in OPENED]
