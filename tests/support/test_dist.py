"""The files of a release: what they hold, and how they run and are typed where nothing else is installed.

The tests build a source archive and a wheel. `make dist` lets them judge its own: pytest --release FOLDER.
"""

import os
import platform
import re
import shlex
import shutil
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
ARM64 = ROOT / ".venv-arm64"
NAME = f"multimodal_positions-{mmpos.__version__}"
UV = Path(sys.executable).with_name("uv")
PINNED = [f"--{kind}constraint={ROOT / 'constraints.txt'}" for kind in ("", "build-")]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("dist")]


def run(*command: str | Path, cwd: Path, code: int = 0, env: Mapping[str, str] = os.environ) -> str:
    """Run a program that ends with this code, and give its output."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout or done.stderr


def tracked(folder: str = ".") -> set[str]:
    """The files that git knows of, relative to the folder."""
    return set(run("git", "ls-files", cwd=ROOT / folder).splitlines())


@pytest.fixture(scope="session")
def release(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the release."""
    given: str | None = pytestconfig.getoption("release")
    if given is not None:
        return ROOT / given
    clone, folder = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("release")
    for name in tracked():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    run(UV, "build", "--no-create-gitignore", "--python", sys.executable, PINNED[1], "--out-dir", folder, cwd=clone)
    return folder


def test_the_release_is_a_source_archive_and_wheels_for_every_python(release: Path) -> None:
    *wheels, sdist = sorted(path.name for path in release.iterdir())
    assert sdist == f"{NAME}.tar.gz"
    named = [
        re.fullmatch(rf"{re.escape(NAME)}-cp311-abi3-(?:many)?linux[\w.]*_(x86_64|aarch64)\.whl", n) for n in wheels
    ]
    assert [match and match[1] for match in named] in ([platform.machine()], ["aarch64", "x86_64"])


def test_wheels_hold_the_three_packages_and_the_extension(release: Path) -> None:
    packages = {f"mmpos/{name}" for name in tracked("mmpos")} | tracked("server")
    packages |= {name for name in tracked("benchmarks") if name.startswith("mmpos_bench/")}
    written = ["METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt"]
    licenses = [f"licenses/{name}" for name in ("LICENSE", "mmpos/photos/LICENSES.md")]
    about = {f"{NAME}.dist-info/{name}" for name in [*written, *licenses]}
    for wheel in release.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            names = {member.filename for member in archive.infolist() if not member.is_dir()}
        assert names == packages | {"mmpos/_native.abi3.so"} | about


def test_the_source_archive_holds_all_that_git_tracks(release: Path) -> None:
    with tarfile.open(release / f"{NAME}.tar.gz") as archive:
        names = {member.name for member in archive if member.isfile()}
    written = {"PKG-INFO", "setup.cfg"}
    about = ["PKG-INFO", "SOURCES.txt", "dependency_links.txt", "entry_points.txt", "requires.txt", "top_level.txt"]
    written |= {f"multimodal_positions.egg-info/{name}" for name in about}
    assert names == {f"{NAME}/{name}" for name in tracked() | written}


class Bare:
    """An environment with nothing in it, and a folder to work in that is nobody's.

    Args:
        folder: where both are made.
        compiler: whether the environment has one.
    """

    def __init__(self, folder: Path, *, compiler: bool = True) -> None:
        self.here, self.environment = folder / "here", folder / "environment"
        self.here.mkdir()
        run(UV, "venv", "--python", sys.executable, self.environment, cwd=folder)
        programs = self.environment / "bin"
        self.python: list[str | Path] = [programs / "python"]
        self.install = [UV, "pip", "install", "--python", programs / "python", *PINNED]
        self.variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        if not compiler:
            self.variables |= {"PATH": str(programs), "CC": "no-such-compiler"}

    def run(self, *command: str | Path, code: int = 0) -> str:
        return run(*command, code=code, cwd=self.here, env=self.variables)

    def mmpos(self, *arguments: str, code: int = 0) -> str:
        return self.run(*self.python, "-m", "mmpos", *arguments, code=code)

    def info(self) -> dict[str, str]:
        return dict(line.split(maxsplit=1) for line in self.mmpos("info").splitlines())


class BareARM64(Bare):
    """Such an environment of another processor, in an emulator."""

    def __init__(self, folder: Path) -> None:
        self.here, site = folder / "here", folder / "site"
        self.here.mkdir()
        python = (ARM64 / "python").resolve()
        self.python = ["qemu-aarch64", "-L", ARM64, python]
        version = python.name.removeprefix("python")
        target = ["--target", site, "--python-version", version, "--python-platform", "aarch64-manylinux_2_28"]
        self.install = [UV, "pip", "install", *target, "--only-binary", ":all:", *PINNED]
        self.variables = {**os.environ, "PYTHONPATH": str(site)}


TYPED = """
from typing import assert_type
import mmpos_bench.command
import mmpos_server.options
from mmpos import PositionTable, SegmentTable, Text, place

assert_type(place(SegmentTable.from_documents([[Text(3)]])), PositionTable)
"""


def check_types(bare: Bare) -> None:
    """A type checker finds the packages and their types."""
    (bare.here / "typed.py").write_text(TYPED)
    checker = [sys.executable, "-m", "mypy", "--python-executable", *bare.python, "--cache-dir", os.devnull]
    bare.run(*checker, "--ignore-missing-imports", "typed.py")


def draw(bare: Bare) -> None:
    """The demo prints and draws what it does here."""
    said = bare.mmpos("demo", "-o", "demo.png")
    assert [path.name for path in bare.here.iterdir()] == ["demo.png"]
    with Image.open(bare.here / "demo.png") as picture:
        picture.verify()
    assert said == run(sys.executable, "-m", "mmpos", "demo", "-o", "demo.png", cwd=bare.here)


def test_the_wheel_runs_and_names_the_command_that_installs_what_it_lacks(release: Path, tmp_path: Path) -> None:
    bare = Bare(tmp_path)
    (wheel,) = release.glob(f"*{platform.machine()}.whl")
    bare.run(*bare.install, wheel)
    info = bare.info()
    assert (info["mmpos"], info["extension"], info["torch"]) == (mmpos.__version__, "built", "not installed")
    hint = bare.mmpos("demo", code=1)
    assert hint == f"mmpos: error: the command line: typer is not installed, want {pip_install('cli')}\n"
    pip, install, *wanted = shlex.split(pip_install("cli"))
    assert (pip, install) == ("pip", "install")
    bare.run(*bare.install, *wanted)  # keeps what is installed
    draw(bare)
    check_types(bare)


def test_the_wheel_for_another_processor_runs_there(release: Path, tmp_path: Path) -> None:
    wheel = next(release.glob("*_aarch64.whl"), None)
    if wheel is None or platform.machine() == "aarch64":
        pytest.skip("the release has no wheel for another processor")
    bare = BareARM64(tmp_path)
    bare.run(*bare.install, f"multimodal-positions[cli] @ {wheel.as_uri()}", "pytest", "hypothesis")
    info = bare.info()
    assert (info["extension"], info["machine"]) == ("built", "Linux aarch64")
    draw(bare)
    tests = [ROOT / "tests/support/test_native.py", ROOT / "tests/images/test_native_walk.py"]
    assert " passed" in run(
        *bare.python, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=ROOT, env=bare.variables
    )


def test_the_source_archive_without_a_compiler_uses_numpy(release: Path, tmp_path: Path) -> None:
    bare = Bare(tmp_path, compiler=False)
    bare.run(
        *bare.install, "--refresh-package", "multimodal-positions", release / f"{NAME}.tar.gz"
    )  # never a kept wheel
    assert bare.info()["extension"] == "not built, numpy is used"
