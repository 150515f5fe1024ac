"""The site is built without a warning, and names every public name."""

import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from mkdocstrings import Inventory

ROOT = Path(__file__).parents[2]
ROOMS = [
    "mmpos",
    "mmpos.analysis.compare",
    "mmpos.analysis.conformance",
    "mmpos.analysis.diagnosis",
    "mmpos.analysis.plot",
    "mmpos.analysis.probe",
    "mmpos.client",
    "mmpos.data",
    "mmpos.encodings",
    "mmpos.errors",
    "mmpos.images",
    "mmpos.integrations.diffusers",
    "mmpos.integrations.hf",
    "mmpos.integrations.models",
    "mmpos.integrations.sections",
    "mmpos.integrations.vllm",
    "mmpos.positions",
    "mmpos.rotary",
    "mmpos.schemes",
    "mmpos.segments",
    "mmpos.sequence",
]


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


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    with (site / "objects.inv").open("rb") as file:
        documented = set(Inventory.parse_sphinx(file))
    for name in ROOMS:
        room = import_module(name)
        for public in room.__all__:
            value = getattr(room, public)
            home = f"{getattr(value, '__module__', name)}.{public}"  # where a module has the name of its function
            assert isinstance(value, ModuleType | int) or {f"{name}.{public}", home} & documented, home
