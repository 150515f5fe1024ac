"""A GPU that is not there: Triton compiles and launches kernels as on one, and the launches run on the machine.

Import it where TRITON_INTERPRET is not set; ``use`` then sets it, since calls with tensors on the CPU check it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import machine
import ptx
import triton
from torch import Tensor
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

import mmpos.rotary.kernel  # noqa: F401  (compiled, not interpreted)


class Configuration(ctypes.Structure):
    """The first fields of CUlaunchConfig."""

    _fields_ = (("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint))


class Launch(NamedTuple):
    """A kernel and what Triton's launcher passed to the library: see ``machine.run``."""

    program: ptx.Program
    grid: tuple[int, int, int]
    shared: int
    parameters: dict[str, int]


launches: list[Launch] = []
programs: dict[int, ptx.Program] = {}
"""The launches of this process, and the kernels that it has loaded by the handles of their functions."""


def _loaded(module: Any, function: Any, name: str, files: dict[str, str], key: str) -> None:
    programs[function] = ptx.parse(Path(files[f"{name}.ptx"]).read_text())


def _launched(function: int, config: Any, parameters: Any) -> None:
    program, config = programs[function], config.contents
    assert tuple(config.block) == (program.threads, 1, 1), tuple(config.block)
    sizes = enumerate(program.parameters.items())
    values = {name: int.from_bytes(ctypes.string_at(parameters[i], size), "little") for i, (name, size) in sizes}
    launches.append(Launch(program, tuple(config.grid), config.shared, values))


_LAUNCHED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(Configuration), ctypes.POINTER(ctypes.c_void_p))(
    _launched
)


def tensors_in(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """Yield all tensors in nested tuples."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, tuple):
            yield from tensors_in(argument)


class Launcher(nvidia.CudaLauncher):  # type: ignore[misc]
    """Triton's launcher; what it has passed to the library then runs over the tensors among its arguments."""

    def __call__(self, *arguments: Any) -> None:
        """Launch a kernel."""
        before = len(launches)
        super().__call__(*arguments)
        for launch in launches[before:]:
            machine.run(*launch, tensors_in(arguments))


class Driver(nvidia.CudaDriver):  # type: ignore[misc]
    """Triton's driver for one device."""

    def __init__(self, device: int) -> None:
        super().__init__()
        self.launcher_cls = Launcher
        self.get_device_capability = self.utils.get_device_capability
        self.get_current_device = lambda: device
        self.get_current_stream = lambda device: 0


def use(architecture: str, folder: Path) -> Any:
    """Make Triton compile and launch kernels for an architecture such as "sm_90", with a stand-in built in a folder."""
    path, include = folder / "libcuda.so.1", Path(triton.__file__).parent / "backends/nvidia/include"
    options = ["-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{include}"]
    subprocess.run(["cc", *options, Path(__file__).with_name("libcuda.c"), "-o", path], check=True)
    library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    library.on_launch(_LAUNCHED)
    triton.knobs.runtime.kernel_load_end_hook.add(_loaded)
    os.environ |= {"TRITON_LIBCUDA_PATH": str(folder), "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "1"}
    for name in ("ptxas", "ptxas_blackwell"):  # the machine runs PTX, so do not spend a third of the time on ptxas
        script = folder / name
        real = getattr(triton.knobs.nvidia, name).path
        script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {real} "$1"\nfor last; do :; done\n: > "$last"\n')
        script.chmod(0o755)
        os.environ[f"TRITON_{name.upper()}_PATH"] = str(script)
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY)  # the stand-in has only the functions that launches call
    driver.set_active(Driver(int(architecture.removeprefix("sm_"))))
    sys.setdlopenflags(flags)
    return library
