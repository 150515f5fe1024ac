"""Launch kernels: the first of a sort by Triton, which compiles it, and all that follow past Triton's binder."""

# mypy: ignore-errors

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver

from mmpos.rotary.kernel.tiling import Heads

KNOWN = ((3, 6), (3, 9))
"""First and last version of Triton whose launches and specialisations are those of ``launch``; others launch alone."""


class _Compiled(NamedTuple):
    """A compiled kernel on a device, with the constants that its launcher counts among the arguments."""

    run: Any
    function: Any
    metadata: Any
    constants: tuple[Any, ...]


_COMPILED: dict[tuple[Any, ...], _Compiled] = {}


def launch(kernel: Any, grid: tuple[int, int], warps: int, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel whose products and sums are rounded one by one.

    Triton binds, specialises and hashes the arguments anew for every launch, which takes longer than the rest of the
    host's work. Here a launch whose arguments are of a sort that was launched before goes straight to what Triton
    compiled then. Triton tells fewer sorts apart than these, so both launch the same code.

    Args:
        kernel: the kernel.
        grid: programs in each of two dimensions.
        warps: of a program.
        arguments: of the kernel, in its order: tensors, ``Heads``, numbers, or None for no parameter.
        constants: known when it is compiled, all that come after the arguments.
    """
    if not _goes_straight(kernel):
        kernel[grid](*arguments, **constants, num_warps=warps, enable_fp_fusion=False)
        return
    active = driver.active
    device = active.get_current_device()
    key = (id(kernel), id(active), device, warps, knobs.runtime.debug, *constants.values(), *map(_sort, arguments))
    compiled = _COMPILED.get(key)
    if compiled is None:
        done = kernel[grid](*arguments, **constants, num_warps=warps, enable_fp_fusion=False)
        if hasattr(done, "packed_metadata"):  # not where a hook wanted no kernel
            in_order = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
            _COMPILED[key] = _Compiled(done.run, done.function, done.packed_metadata, in_order)
        return
    stream = active.get_current_stream(device)
    run, function, metadata, in_order = compiled
    run(grid[0], grid[1], 1, stream, function, metadata, None, None, None, *arguments, *in_order)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launch on the tensors' device, which need not be the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _goes_straight(kernel: Any) -> bool:
    """Check that nobody watches launches or changes what is compiled, and that Triton and the device are known ones."""
    runtime = knobs.runtime
    return (
        isinstance(kernel, JITFunction)  # not interpreted
        and _known(driver.active)
        and not (_calls(runtime.launch_enter_hook) or _calls(runtime.launch_exit_hook) or kernel.pre_run_hooks)
        and runtime.add_stages_inspection_hook is None
        and not knobs.compilation.instrumentation_mode
    )


@lru_cache
def _known(active: Any) -> bool:
    """Check for a version and a backend whose specialisations are known: AMD's depend on sizes too."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return KNOWN[0] <= version <= KNOWN[1] and active.get_current_target().backend == "cuda"


def _calls(hook: Any) -> bool:
    """Check whether a hook calls anybody: Triton keeps chains of them, empty ones too."""
    return hook is not None and bool(getattr(hook, "calls", True))


def _sort(x: Any) -> Any:
    """Return all of an argument that Triton compiles into a kernel."""
    kind = type(x)
    if kind is int:
        return _sort_of_number(x)
    if kind is Heads:
        data = x.data
        return data.dtype, data.data_ptr() % 16, _sorts(x[1:])
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16
    if x is None or kind is float:
        return kind
    return kind, tuple(map(_sort, x)) if isinstance(x, tuple) else x


@lru_cache(maxsize=1 << 12)
def _sorts(numbers: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(_sort_of_number, numbers))


def _sort_of_number(x: int) -> int:
    """Number what Triton tells apart: whether it is 1, whether a multiple of 16, and whether it fits 32 bits."""
    return (x == 1) + 2 * (x % 16 == 0) + 4 * (-0x80000000 <= x < 0x80000000)
