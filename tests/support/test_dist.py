"""The files of a release: their contents, and how they work in environments where nothing else is installed.

The tests build a source archive and a wheel. `make dist` passes the files that it has built instead: pytest --release
FOLDER.
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
from dataclasses import dataclass
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
    """Run a program, check its exit code, and return its output."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout or done.stderr


def tracked(folder: str = ".") -> set[str]:
    """Return the files tracked by git, relative to the folder."""
    return set(run("git", "ls-files", cwd=ROOT / folder).splitlines())


@pytest.fixture(scope="session")
def release(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that contains the release."""
    option: str | None = pytestconfig.getoption("release")
    if option is not None:
        return ROOT / option
    clone, folder = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("release")
    for name in tracked():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    run(UV, "build", "--no-create-gitignore", "--python", sys.executable, PINNED[1], "--out-dir", folder, cwd=clone)
    return folder


def test_the_release_consists_of_a_source_archive_and_wheels_for_every_python(release: Path) -> None:
    *wheels, sdist = sorted(path.name for path in release.iterdir())
    assert sdist == f"{NAME}.tar.gz"
    named = [
        re.fullmatch(rf"{re.escape(NAME)}-cp311-abi3-(?:many)?linux[\w.]*_(x86_64|aarch64)\.whl", n) for n in wheels
    ]
    assert [match and match[1] for match in named] in ([platform.machine()], ["aarch64", "x86_64"])


def test_wheels_contain_the_three_packages_and_the_extension(release: Path) -> None:
    packages = {f"mmpos/{name}" for name in tracked("mmpos")} | tracked("server")
    packages |= {name for name in tracked("benchmarks") if name.startswith("mmpos_bench/")}
    written = ["METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt"]
    licenses = [f"licenses/{name}" for name in ("LICENSE", "mmpos/photos/LICENSES.md")]
    about = {f"{NAME}.dist-info/{name}" for name in [*written, *licenses]}
    for wheel in release.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            names = {member.filename for member in archive.infolist() if not member.is_dir()}
        assert names == packages | {"mmpos/_native.abi3.so"} | about


def test_the_source_archive_contains_all_tracked_files(release: Path) -> None:
    with tarfile.open(release / f"{NAME}.tar.gz") as archive:
        names = {member.name for member in archive if member.isfile()}
    written = {"PKG-INFO", "setup.cfg"}
    about = ["PKG-INFO", "SOURCES.txt", "dependency_links.txt", "entry_points.txt", "requires.txt", "top_level.txt"]
    written |= {f"multimodal_positions.egg-info/{name}" for name in about}
    assert names == {f"{NAME}/{name}" for name in tracked() | written}


Command = list[str | Path]


@dataclass(frozen=True)
class Bare:
    """The commands and variables of an empty environment, and a working folder outside the tree."""

    here: Path
    python: Command
    program: Command
    install: Command
    variables: Mapping[str, str]

    def run(self, *command: str | Path, code: int = 0) -> str:
        return run(*command, code=code, cwd=self.here, env=self.variables)

    def mmpos(self, *arguments: str, code: int = 0) -> str:
        return self.run(*self.program, *arguments, code=code)

    def info(self) -> dict[str, str]:
        return dict(line.split(maxsplit=1) for line in self.mmpos("info").splitlines())


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


def bare_environment(here: Path, *, compiler: bool = True) -> Bare:
    """Create an environment for the Python that runs the tests."""
    run(UV, "venv", "--python", sys.executable, "../environment", cwd=here)
    programs = here.parent / "environment/bin"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if not compiler:
        variables |= {"PATH": str(programs), "CC": "no-such-compiler"}
    install: Command = [UV, "pip", "install", "--python", programs / "python", *PINNED]
    return Bare(here, [programs / "python"], [programs / "mmpos"], install, variables)


def bare_arm64(here: Path) -> Bare:
    """Create an environment for an ARM64 Python in an emulator."""
    site, binary = here.parent / "site", (ARM64 / "python").resolve()
    python: Command = ["qemu-aarch64", "-L", ARM64, binary]
    target = f"--python-version={binary.name.removeprefix('python')} --python-platform=aarch64-manylinux_2_28".split()
    install: Command = [UV, "pip", "install", "--target", site, *target, "--only-binary=:all:", *PINNED]
    return Bare(here, python, [*python, "-m", "mmpos"], install, {**os.environ, "PYTHONPATH": str(site)})


TYPED = """
from typing import assert_type
import mmpos_bench.command
import mmpos_server.options
from mmpos import PositionTable, SegmentTable, Text, place
from mmpos.data import Batch, BatchDataset, PackedCollator, Packer, Preprocess, Reader

assert_type(place(SegmentTable.from_documents([[Text(3)]])), PositionTable)

def check(shards: list[Reader], preprocess: Preprocess) -> None:
    for batch in BatchDataset(shards, preprocess, Packer(100), PackedCollator()):
        assert_type(batch, Batch)
"""
"""Type checkers must read this without torch."""


def check_demo(bare: Bare) -> None:
    """Check that the demo prints the same as in this environment and draws a valid picture."""
    output = bare.mmpos("demo", "-o", "demo.png")
    assert [path.name for path in bare.here.iterdir()] == ["demo.png"]
    with Image.open(bare.here / "demo.png") as picture:
        picture.verify()
    assert output == run(sys.executable, "-m", "mmpos", "demo", "-o", "demo.png", cwd=bare.here)


def test_the_wheel_runs_and_names_the_pip_command_for_a_missing_package(release: Path, here: Path) -> None:
    bare = bare_environment(here)
    (wheel,) = release.glob(f"*{platform.machine()}.whl")
    bare.run(*bare.install, wheel)
    info = bare.info()
    assert (info["mmpos"], info["extension"], info["torch"]) == (mmpos.__version__, "built", "not installed")
    hint = bare.mmpos("demo", code=1)
    assert hint == f"mmpos: error: the command line: typer is not installed; install it with: {pip_install('cli')}\n"
    pip, install, *wanted = shlex.split(pip_install("cli").partition(" (")[0])
    assert (pip, install) == ("pip", "install")
    bare.run(*bare.install, *wanted)  # keeps the packages already installed
    check_demo(bare)
    (bare.here / "typed.py").write_text(TYPED)
    checker = [sys.executable, "-m", "mypy", "--python-executable", *bare.python, "--cache-dir", os.devnull]
    bare.run(*checker, "--ignore-missing-imports", "typed.py")
    (bare.here / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    bare.run(Path(sys.executable).with_name("basedpyright"), "--pythonpath", *bare.python, "typed.py")


def test_the_wheel_for_another_processor_runs_on_that_processor(release: Path, here: Path) -> None:
    wheel = next(release.glob("*_aarch64.whl"), None)
    if wheel is None or platform.machine() == "aarch64":
        pytest.skip("the release has no wheel for another processor")
    bare = bare_arm64(here)
    bare.run(*bare.install, f"multimodal-positions[cli] @ {wheel.as_uri()}", "pytest", "hypothesis")
    info = bare.info()
    assert (info["extension"], info["machine"]) == ("built", "Linux aarch64")
    check_demo(bare)
    tests = [ROOT / "tests/support/test_native.py", ROOT / "tests/positions/test_native_cut.py"]
    assert " passed" in run(
        *bare.python, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=ROOT, env=bare.variables
    )


def test_the_source_archive_uses_numpy_without_a_compiler(release: Path, here: Path) -> None:
    bare = bare_environment(here, compiler=False)
    built_again = ["--refresh-package", "multimodal-positions"]  # uv caches the wheels it builds
    bare.run(*bare.install, *built_again, release / f"{NAME}.tar.gz")
    assert bare.info()["extension"] == "not built, numpy is used"
