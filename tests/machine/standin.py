"""A GPU that is not there: Triton compiles and launches kernels as on one, and the launches run on the machine."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

import machine
import mmpos.rotary.kernel  # noqa: F401  (compiled if TRITON_INTERPRET is not set now)
import ptx

ARCHITECTURES = {"sm_80": 80, "sm_90": 90, "sm_100": 100, "sm_120": 120}


class Configuration(ctypes.Structure):
    """The first fields of CUlaunchConfig."""

    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint)]


LAUNCHED = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.POINTER(Configuration), ctypes.POINTER(ctypes.c_void_p)
)  # fmt: skip


class Launch(NamedTuple):
    """What Triton's launcher passed to the library.

    Args:
        program: the kernel.
        grid: number of blocks in x, y and z.
        shared: bytes of shared memory per block.
        parameters: the bits of each parameter.
    """

    program: ptx.Program
    grid: tuple[int, int, int]
    shared: int
    parameters: dict[str, int]


launches: list[Launch] = []
"""Launches of this process."""

_programs: dict[int, ptx.Program] = {}
"""The kernels that have been loaded, by the handle of their function."""


def _loaded(module: Any, function: Any, name: str, files: dict[str, str], key: str) -> None:
    _programs[function] = ptx.parse(Path(files[f"{name}.ptx"]).read_text())


@LAUNCHED
def _launched(function: int, configuration: Any, parameters: Any) -> None:
    program, config = _programs[function], configuration.contents
    assert tuple(config.block) == (program.threads, 1, 1), tuple(config.block)
    sizes = enumerate(program.parameters.items())
    values = {name: int.from_bytes(ctypes.string_at(parameters[i], size), "little") for i, (name, size) in sizes}
    launches.append(Launch(program, tuple(config.grid), config.shared, values))


def tensors_in(arguments: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested tuples."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, tuple):
            yield from tensors_in(argument)


class Launcher(nvidia.CudaLauncher):  # type: ignore[misc]
    """Triton's launcher, which then runs what it passed to the library."""

    def __call__(self, *arguments: Any) -> None:
        """Launch, and run the blocks over the tensors among the arguments."""
        before = len(launches)
        super().__call__(*arguments)
        for launch in launches[before:]:
            machine.run(*launch, tensors_in(arguments))


class Driver(nvidia.CudaDriver):  # type: ignore[misc]
    """Triton's driver of a device whose number is 10 times its compute capability."""

    def __init__(self, device: int) -> None:
        super().__init__()
        self.launcher_cls = Launcher
        self.get_device_capability = self.utils.get_device_capability
        self.get_current_device = lambda: device
        self.get_current_stream = lambda device: 0


def build(folder: Path) -> Any:
    """Build the stand-in for libcuda in a folder, and load it so that Triton's driver finds it by its name."""
    path = folder / "libcuda.so.1"
    include = Path(triton.__file__).parent / "backends/nvidia/include"
    options = ["-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    source = Path(__file__).with_name("libcuda.c")
    subprocess.run([os.environ.get("CC", "cc"), *options, f"-I{include}", source, "-o", path], check=True)
    return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


def use(architecture: str, folder: Path) -> None:
    """Make Triton compile and launch kernels for a GPU of an architecture, with the stand-in built in a folder."""
    if not (folder / "libcuda.so.1").exists():
        library = build(folder)
        library.on_launch(_launched)
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
        triton.knobs.runtime.kernel_load_end_hook.add(_loaded)
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY)  # the stand-in has only the functions that launches call
    driver.set_active(Driver(ARCHITECTURES[architecture]))
    sys.setdlopenflags(flags)
    os.environ["TRITON_INTERPRET"] = "1"  # calls with tensors on the CPU check it
