"""Run the tests with the oldest and the newest versions that pyproject.toml allows, and with other Python versions.

python tests/helpers/versions.py                 everything
python tests/helpers/versions.py oldest 3.13     only these

oldest           all tests, including those with torch, with the lower bound of every requirement
newest           all tests with the newest version of everything in the index
grpc             the service and client tests with the oldest and the newest grpcio and protobuf
extras           each extra that needs no torch, alone, oldest and newest, with a program that uses it
engines          the extra hf beside the requirements of each serving engine: resolved, not installed
3.12 and so on   all tests with the newest versions in that Python, if it is installed

uv rebuilds the environments in build/versions, one at a time; the resolved versions stay there.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "versions"
ENVIRONMENT = BUILD / "environment"
PYTHON = ENVIRONMENT / "bin" / "python"
UV = Path(sys.executable).with_name("uv")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

RESOLUTIONS = {"oldest": "lowest-direct", "newest": "highest"}
# Triton 3.6 raises this warning in its interpreter.
FLAGS = {"oldest": ["-W", "ignore:Conversion of an array with ndim:DeprecationWarning"]}
PYTHONS = ("3.12", "3.13", "3.14", "3.15")
ENGINES = ("sglang==0.5.23", "vllm==0.33.0")
"""The versions that docs/sglang.md and docs/vllm.md describe."""

PLACE = """
from mmpos import Grid, SegmentTable, Text, place
assert place(SegmentTable.from_documents([[Text(1), Grid(1, 2)]])).dense().shape == (2, 3)
"""
IMAGE = """
import mmpos
from pathlib import Path
photo = min(Path(mmpos.__file__).with_name("photos").glob("*.jpg")).read_bytes()
mmpos.ImageProcessor(backend="pillow").process(photo)
"""
SERVE = """
from mmpos import SegmentTable, Text
from mmpos.client import Client
from mmpos_server.testing import running
with running() as address, Client(address) as client:
    assert client.place(SegmentTable.from_documents([[Text(2)]])).dense().shape == (2, 2)
"""
EXTRAS = {
    "": PLACE,
    "pillow": IMAGE,
    "video": "from mmpos.sequence.video_file import require_av; require_av()",
    "tokenizers": "import tokenizers",
    "cli": "from mmpos.__main__ import main; main(['demo', '-o', 'demo.png'])",
    "client": "from mmpos.client import Client; Client('localhost:1').close()",
    "server": SERVE,
    "server otel": "import mmpos_server.app, opentelemetry.distro, opentelemetry.instrumentation.grpc",
}
"""A program for each extra that needs no torch; the environments of all tests cover the others."""


def parse_parts(description: str | None, known: list[str]) -> list[str]:
    """Parse the parts selected on the command line; without any, all parts are selected."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one or more of {', '.join(known)}")
    chosen = parser.parse_args().parts or known
    if unknown := set(chosen) - set(known):
        parser.error(f"got {', '.join(sorted(unknown))}, want one or more of {', '.join(known)}")
    return list(chosen)


def uv(*words: str | Path) -> None:
    """Run uv; end the program if uv fails, which prints the reason itself."""
    if subprocess.run([UV, *words, "--quiet"], cwd=ROOT, check=False).returncode:
        raise SystemExit(f"uv {words[0]} {words[1]} failed")


def resolve(name: str, age: str, *extras: str, python: str = sys.executable) -> Path:
    """Write a requirements file with the oldest or the newest versions that these extras need."""
    path = BUILD / f"{name}.txt"
    resolution = ["--upgrade", "--resolution", RESOLUTIONS[age], "--python", python]
    uv("pip", "compile", *resolution, *extras, "--no-header", "--output-file", path, "pyproject.toml")
    return path


def install(python: str, *packages: str | Path) -> None:
    """Rebuild the environment, and install these packages in it."""
    uv("venv", "--clear", "--python", python, ENVIRONMENT)
    uv("pip", "install", "--python", PYTHON, *packages)


def run(*words: str | Path) -> bool:
    """Run the environment's Python, and return whether it succeeded."""
    return subprocess.run([PYTHON, *words], cwd=ROOT, check=False).returncode == 0


def run_tests(part: str, python: str = sys.executable) -> bool:
    """Run all tests with the oldest or the newest versions."""
    age = "oldest" if part == "oldest" else "newest"
    versions = resolve(part, age, "--all-extras", python=python)
    untested = untrue_bounds(versions) if age == "oldest" else []
    print(*untested, sep="\n", end="\n" if untested else "")
    overrides = BUILD / "overrides.txt"  # grpcio-tools requires protobuf 6, but the code that it generates runs with 7
    overrides.write_text("\n".join(re.findall(r"^protobuf==.*", versions.read_text(encoding="utf-8"), re.MULTILINE)))
    install(python, "--constraint", versions, "--override", overrides, "--group", "dev", "--editable", ".")
    tests = run("-m", "pytest", "-q", "-n", "3", "--dist", "worksteal", *FLAGS.get(part, ()))
    gil = run("-m", "pytest", "-q", "-m", "slow", "-k", "gil", "tests/support/test_native.py")
    return tests and gil and not untested


def run_grpc() -> bool:
    """Run the service and client tests with other versions of gRPC and protobuf in this environment."""
    green = True
    for age in RESOLUTIONS:
        text = resolve(f"{age} grpc", age, "--extra=server").read_text(encoding="utf-8")
        packages = re.findall(r"^(?:grpcio[\w-]*|protobuf)==[\w.]+", text, re.MULTILINE)
        print(" ", age, *packages, flush=True)
        folder = BUILD / f"{age}-grpc"
        uv("pip", "install", "--python", sys.executable, "--no-deps", "--target", folder, *packages)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT, ROOT / "server")))}
        command = [sys.executable, "-m", "pytest", "-q", "tests/server", "tests/client", "tests/rpc"]
        green &= subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0
    return green


def untrue_bounds(versions: Path) -> list[str]:
    """List the bounds in pyproject.toml that the resolver cannot choose, so that no test has used them."""
    resolved = dict(re.findall(r"^([\w.-]+)==([\w.]+)", versions.read_text(encoding="utf-8"), re.MULTILINE))
    wanted = sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])
    bounds = {
        match.groups() for requirement in wanted if (match := re.match(r"([\w.-]+)(?:\[\w+\])?>=([\d.]+)", requirement))
    }
    return [
        f"{name}>={low}: got {resolved[name]}"
        for name, low in sorted(bounds)
        if Version(resolved[name]) != Version(low)
    ]


def run_extras() -> bool:
    """Install each extra alone from a wheel, and run a program that uses it."""
    uv("build", "--wheel", "--out-dir", BUILD)
    (wheel,) = BUILD.glob("*.whl")
    green = True
    for extras, program in EXTRAS.items():
        for age in RESOLUTIONS:
            words = [f"--extra={extra}" for extra in extras.split()]
            versions = resolve(f"{age} {extras}".strip(), age, *words)
            install(sys.executable, "--no-deps", "--requirements", versions, wheel)
            command = [str(PYTHON), "-W", "error", "-c", program]
            done = subprocess.run(command, cwd=BUILD, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            print(f"  {extras or 'no extra':14}{age:10}{'FAILED' if done.returncode else 'passed'}", flush=True)
            if done.returncode:
                print(done.stdout)
                green = False
    return green


def run_engines() -> bool:
    """Resolve the extra hf beside the requirements of each engine; the engines are too large to install."""
    for engine in ENGINES:
        beside = BUILD / f"{engine}.in"
        beside.write_text(engine, encoding="utf-8")
        text = resolve(engine, "newest", "--extra=hf", str(beside)).read_text(encoding="utf-8")
        print(f"  {engine:16}", *re.findall(r"^(?:torch|transformers)==[\w.]+", text, re.MULTILINE), flush=True)
    return True


def interpreter(version: str) -> str | None:
    """Find an interpreter of this Python version on the path or in pyenv."""
    known = [shutil.which(f"python{version}"), *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    works = (path for path in known if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0)
    return next(works, None)


def main() -> int:
    """Run the selected parts, and print a line for each."""
    alone = {"grpc": run_grpc, "extras": run_extras, "engines": run_engines}
    chosen = parse_parts(__doc__, [*RESOLUTIONS, *alone, *PYTHONS])
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    results: dict[str, bool | None] = {}
    for part in chosen:
        print(f"{part} …", flush=True)
        if part in alone:
            results[part] = alone[part]()
        else:
            python = interpreter(part) if part in PYTHONS else sys.executable
            results[part] = run_tests(part, python) if python else None
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    for part, passed in results.items():
        print(f"{part:10}{'skipped: not installed' if passed is None else 'passed' if passed else 'FAILED'}")
    return 1 if False in results.values() else 0


if __name__ == "__main__":
    sys.exit(main())
