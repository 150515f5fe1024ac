"""The extension under sanitizers, under a strict compiler, for Python without the GIL, and missing: the rooms alone."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(map(str, (ROOT / "csrc").glob("*.c")))
COMPILER = shlex.split(os.environ.get("CC", "cc"))
FLAGS = ["-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", f"-I{sysconfig.get_path('include')}"]

CPYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"

pytestmark = pytest.mark.slow


def run_tests(native: str, *files: str, **environment: str) -> str:
    """Run tests in a process of their own, with this extension or none."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "native_choice", "-p", "no:xdist", "-p", "no:cacheprovider"]
    path = os.pathsep.join([str(ROOT / "tests" / "helpers"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "NATIVE": native, **environment}
    done = subprocess.run([*command, *files], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def library(name: str) -> str:
    """The path of a library of the compiler."""
    done = subprocess.run([*COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = done.stdout.strip()
    assert os.path.isabs(path), f"{name} is not there; it comes with gcc"
    return path


def test_addresses_and_undefined_behaviour_are_sound(tmp_path: Path) -> None:
    built = tmp_path / "_native.so"
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    subprocess.run([*COMPILER, "-shared", "-fPIC", "-O1", "-g", *sanitize, *FLAGS, "-o", built, *SOURCES], check=True)
    said = run_tests(
        str(built),
        *sorted(str(path) for path in (ROOT / "tests").rglob("test_native*.py") if path != Path(__file__)),
        LD_PRELOAD=library("libasan.so"),
        ASAN_OPTIONS="detect_leaks=0",  # the interpreter itself keeps what it has
        PYTHONMALLOC="malloc",  # so that the sanitizer sees where every object ends
    )
    assert " passed" in said


def test_the_sanitizer_would_have_seen_it(tmp_path: Path) -> None:
    """A write past the end of an array, in the way that the extension writes, ends the process."""
    source, built = tmp_path / "past.c", tmp_path / "past"
    source.write_text(
        '#include "native.h"\n#include <stdlib.h>\n'
        "int main(int n, char **v) { Vector x = {malloc(16), 2, 8}; (void)v; put(&x, n + 1, 1); return 0; }\n"
    )
    flags = [f"-I{ROOT / 'csrc'}", f"-I{sysconfig.get_path('include')}", "-fsanitize=address"]
    subprocess.run([*COMPILER, "-O1", *flags, "-o", built, source], check=True)
    done = subprocess.run([str(built)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


def test_no_compiler_has_anything_to_say(tmp_path: Path) -> None:
    for flags in (["-O0", "-U__SSE2__"], ["-O3"]):  # the first as for other processors
        strict = ["-c", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-std=c11", *flags]
        for source in SOURCES:
            subprocess.run([*COMPILER, *strict, *FLAGS, "-o", tmp_path / "x.o", source], check=True)


@pytest.mark.skipif(sys.version_info < (3, 13), reason="the headers know of no Python without the GIL")
def test_the_sources_compile_for_python_without_the_gil() -> None:
    subprocess.run([*COMPILER, "-fsyntax-only", "-Werror", "-DPy_GIL_DISABLED=1", *FLAGS, *SOURCES], check=True)


@pytest.mark.parametrize(("disabled", "tag"), [(0, "cp311-abi3"), (1, f"{CPYTHON}-{CPYTHON}")])
def test_the_wheel_has_the_stable_abi_where_python_has_the_gil(disabled: int, tag: str) -> None:
    """Builds without it have no stable ABI, and setuptools refuses the option there."""
    program = (
        "import sysconfig\n"
        f"sysconfig.get_config_vars()['Py_GIL_DISABLED'] = {disabled}\n"
        "from setuptools import distutils\n"
        "command = distutils.core.run_setup('setup.py', stop_after='config').get_command_obj('bdist_wheel')\n"
        "command.ensure_finalized()\n"
        "print(*command.get_tag(), sep='-')\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.startswith(tag)


def test_the_rooms_are_the_same_without_the_extension() -> None:
    rooms = ("positions", "segments", "placeholders", "golden", "tie", "schemes", "custom_schemes", "errors")
    more = ("table_checks", "sequence", "engine_identities", "rotary_apply")
    said = run_tests("", *(str(next((ROOT / "tests").rglob(f"test_{name}.py"))) for name in (*rooms, *more)))
    assert " passed" in said
