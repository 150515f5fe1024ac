"""The files of a release, which `make dist` built: what they hold, and how they run where nothing else is installed."""

import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from PIL import Image

import mmpos
from mmpos.support.extras import pip_install

ROOT = Path(__file__).parents[2]
NAME = f"multimodal_positions-{mmpos.__version__}"

pytestmark = pytest.mark.dist


def release(pattern: str) -> Path:
    (path,) = (ROOT / "dist").glob(pattern)
    return path


def run(*command: str | Path, code: int = 0, cwd: Path = ROOT, env: Mapping[str, str] = os.environ) -> str:
    """Run a program that ends with this code, and give its output."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout or done.stderr


def tracked(folder: str = ".") -> set[str]:
    """The files that git knows of, relative to the folder."""
    return set(run("git", "ls-files", cwd=ROOT / folder).splitlines())


def test_the_release_is_a_source_archive_and_a_wheel_for_every_python_and_most_of_linux() -> None:
    wheel, sdist = sorted(path.name for path in (ROOT / "dist").iterdir())
    assert sdist == f"{NAME}.tar.gz"
    assert re.fullmatch(rf"{re.escape(NAME)}-cp311-abi3-manylinux[\w.]+\.whl", wheel)


def test_the_wheel_holds_the_two_packages_and_the_extension() -> None:
    packages = {f"mmpos/{name}" for name in tracked("mmpos")} | tracked("server")
    written = ["METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt"]
    licenses = [f"licenses/{name}" for name in ("LICENSE", "mmpos/photos/LICENSES.md")]
    about = {f"{NAME}.dist-info/{name}" for name in [*written, *licenses]}
    with zipfile.ZipFile(release("*.whl")) as archive:
        names = {member.filename for member in archive.infolist() if not member.is_dir()}
    assert names == packages | {"mmpos/_native.abi3.so"} | about


def test_the_source_archive_holds_all_that_git_tracks() -> None:
    with tarfile.open(release("*.tar.gz")) as archive:
        names = {member.name for member in archive if member.isfile()}
    written = {"PKG-INFO", "setup.cfg"}
    about = ["PKG-INFO", "SOURCES.txt", "dependency_links.txt", "entry_points.txt", "requires.txt", "top_level.txt"]
    written |= {f"multimodal_positions.egg-info/{name}" for name in about}
    assert names == {f"{NAME}/{name}" for name in tracked() | written}


@pytest.mark.parametrize(
    ("pattern", "compiler", "extension"),
    [("*.whl", False, "built"), ("*.tar.gz", True, "built"), ("*.tar.gz", False, "not built, numpy is used")],
    ids=["wheel", "source", "source-without-compiler"],
)
def test_the_demo_runs_in_a_bare_environment(pattern: str, compiler: bool, extension: str, tmp_path: Path) -> None:
    programs, here = tmp_path / "environment/bin", tmp_path / "here"
    here.mkdir()
    run(sys.executable, "-m", "venv", programs.parent)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PIP_CONSTRAINT"] = str(ROOT / "constraints.txt")
    if not compiler:
        environment |= {"PATH": str(programs), "CC": "no-such-compiler"}

    def bare(program: str, *arguments: str, code: int = 0) -> str:
        return run(programs / program, *arguments, code=code, cwd=here, env=environment)

    bare("pip", "install", "--no-cache-dir", str(release(pattern)))  # pip keeps the wheels that it builds
    hint = bare("mmpos", "demo", code=1)
    assert hint == f"mmpos: error: the command line: typer is not installed, want {pip_install('cli')}\n"
    bare(*shlex.split(pip_install("cli")))  # keeps what is installed
    said = bare("mmpos", "demo", "-o", "demo.png")
    assert [path.name for path in here.iterdir()] == ["demo.png"]
    with Image.open(here / "demo.png") as picture:
        picture.verify()
    assert said == run(sys.executable, "-m", "mmpos", "demo", "-o", "demo.png", cwd=tmp_path)
    info = dict(line.split(maxsplit=1) for line in bare("mmpos", "info").splitlines())
    assert (info["mmpos"], info["extension"], info["torch"]) == (mmpos.__version__, extension, "not installed")
