"""The machine of a run, its installed packages and its malloc settings."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mmpos.errors import UnsupportedError
from mmpos.support import native
from mmpos.support.checks import counted
from mmpos.support.info import cores, version, version_of

MALLOCS = ("default", "tuned")
"""Malloc settings: the C library's own, or those of deploy/, which make malloc keep large blocks instead of returning
them.
"""

TUNED = {"MALLOC_MMAP_THRESHOLD_": (-3, 2**25), "MALLOC_TRIM_THRESHOLD_": (-1, 2**28), "MALLOC_ARENA_MAX": (-8, 4)}
"""Environment variable of each tuned setting, its number in glibc's malloc.h, and its value."""

_PACKAGES = (
    *("numpy", "torch", "torchvision", "triton", "pillow", "transformers", "diffusers", "timm"),
    *("liger-kernel", "flash-attn", "grpcio", "protobuf"),
)
_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_CONF", "LD_PRELOAD", "OMP_NUM_THREADS", "TRITON_INTERPRET")


@dataclass(frozen=True)
class Machine:
    """The machine of a run and its installed packages."""

    cpu: str  # model name that the machine reports
    cores: int  # number of cores that this process may use
    gpu: str | None
    system: str  # operating system and architecture
    python: str
    mmpos: str
    commit: str | None  # commit of the repository from which mmpos was imported, with "-dirty" if there are changes
    native: bool  # whether the C extension was available
    malloc: str  # one of MALLOCS
    settings: dict[str, str]  # environment variables that affect allocation or threads
    load: float | None  # load average over the last minute of the run, including the run itself
    packages: dict[str, str]  # versions of installed packages

    def __str__(self) -> str:
        where = f"{self.cpu}, {counted(self.cores, 'core')}" + (f", {self.gpu}" if self.gpu else "")
        package = f"mmpos {self.mmpos}" + (f" ({self.commit})" if self.commit else "")
        extension = "with" if self.native else "without"
        parts = [where, f"Python {self.python}", package, f"{extension} the C extension", f"malloc {self.malloc}"]
        parts += [f"{name}={value}" for name, value in self.settings.items()]
        if self.load is not None:
            busy = ": do not quote" if self.load > self.cores else ""
            parts.append(f"load {self.load:.3g} on {counted(self.cores, 'core')}{busy}")
        return ", ".join(parts)

    @property
    def versions(self) -> str:
        """Names and versions of installed packages."""
        return ", ".join(f"{name} {version}" for name, version in self.packages.items())


def set_malloc(setting: str) -> None:
    """Set the malloc settings of this process, and of the processes that it starts, for the rest of its life.

    Args:
        setting: one of MALLOCS.

    Raises:
        UnsupportedError: the C library cannot be tuned.
    """
    if setting != "tuned":
        return
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        raise UnsupportedError(f"malloc: got {setting!r}, want 'default': only glibc can be tuned")
    for variable, (number, value) in TUNED.items():
        library.mallopt(number, value)
        os.environ[variable] = str(value)


def stamp(malloc: str) -> Machine:
    """Return a description of this machine.

    Args:
        malloc: the setting with which `set_malloc` was called.
    """
    gpus = _gpus()
    counts = Counter(name for name, _ in gpus)
    packages = {name: known for name in _PACKAGES if (known := version_of(name))}
    return Machine(
        cpu=_cpu(),
        cores=cores(),
        gpu=", ".join(f"{count} × {name}" if count > 1 else name for name, count in counts.items()) or None,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        mmpos=version(),
        commit=_commit(),
        native=native.core is not None,
        malloc=malloc,
        settings={name: os.environ[name] for name in _SETTINGS if os.environ.get(name)},
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        packages=packages | ({"GPU driver": gpus[0][1]} if gpus else {}),
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    if not models and platform.system() == "Darwin":
        models = [_output_of("sysctl", "-n", "machdep.cpu.brand_string") or ""]
    return next(filter(None, models), platform.processor() or platform.machine() or "unknown")


def _gpus() -> list[list[str]]:
    """Return the name and driver version of every GPU."""
    output = _output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or ""
    return [line.split(", ") for line in output.splitlines()]


def _commit() -> str | None:
    root = Path(__file__).parents[2]
    # Consider only the clone that contains this file, not a repository that happens to contain the environment.
    if not (root / ".git").exists():
        return None
    commit = _output_of("git", "-C", str(root), "rev-parse", "--short=8", "HEAD")
    # Results are written one after another, and pages after the results.
    changed = _output_of("git", "-C", str(root), "status", "--short", "--", ":/", ":!benchmarks/results", ":!*.md")
    return commit and commit + "-dirty" * (changed is not None)


def _output_of(program: str, *arguments: str) -> str | None:
    """Return the output of a program, or None if it is missing, fails or prints nothing."""
    if shutil.which(program) is None:
        return None
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
