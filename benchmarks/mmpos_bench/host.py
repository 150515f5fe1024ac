"""Host time of rotations: what a call costs a CPU before a kernel starts, measured with a GPU or without one.

``PYTHONPATH=.:benchmarks python -m mmpos_bench.host`` prints it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

from mmpos.support.extras import needed_for
from mmpos_bench.results import seconds_text
from mmpos_bench.timing import Call, Timing, in_turns

with needed_for("the host time of rotations", extra="all"):
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from mmpos.rotary import DevicePositions, paged
    from mmpos.rotary.kernel import launching
    from mmpos_bench.cuda import synchronize
    from mmpos_bench.layers import SHAPES, Layer, interleaved
    from mmpos_bench.rotary import launches

BY_TRITON = ("into new tensors: mmpos, table", "in place: mmpos, table", "norm, rotation and store: without a norm")
"""Launches that are also made through Triton's binder."""

_H100 = GPUTarget("cuda", 90, 32)


class StandIn:
    """A driver of Triton for a GPU that is not there: kernels are compiled for it, and a launch does nothing."""

    class Launcher:
        """Takes the arguments of a launch."""

        def __init__(self, source: object, metadata: object) -> None: ...

        def __call__(self, *arguments: object) -> None:
            """Launch nothing."""

    def __init__(self, target: GPUTarget = _H100) -> None:
        self._target = target
        self.launcher_cls = self.Launcher
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (0, 0, 0, 0, 1024),  # module, function, registers, spills, most threads
            unload_module=lambda _: None,
            get_device_properties=lambda _: {"max_shared_mem": 227 << 10},
        )

    def get_current_target(self) -> GPUTarget:
        """The GPU that kernels are compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """The first."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0


def host_times(layer: Layer, only: Sequence[str] = (), rounds: int = 9, count: int = 100) -> dict[str, Timing]:
    """Time the host's part of launches: each as it is, and some with Triton's binder, too.

    Args:
        layer: whose q and k are rotated.
        only: launches by group and name; none are all.
        rounds: of turns that count.
        count: calls of a turn, fewer than the queue of launches of a GPU takes.

    Returns:
        seconds per call, by name.
    """
    calls: dict[str, Call] = {name: partial(call, 0) for name, call in launches(layer, only).items()}
    calls |= {f"{name}, by Triton": _by_triton(calls[name]) for name in BY_TRITON if name in calls}
    calls["a table to the device"] = partial(DevicePositions.from_table, layer.positions, layer.device)
    calls["a table refreshed"] = partial(layer.table.refresh, layer.positions)

    def seconds(call: Call) -> float:
        synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - begin) / count

    return in_turns(calls, rounds, 1, seconds, lambda done, of: None)  # the first round compiles


def _by_triton(call: Call) -> Call:
    """Make the same call without the way past Triton's binder."""

    def slower() -> None:
        with patch.object(launching, "_goes_straight", _never):
            call()

    return slower


def _never(kernel: object) -> bool:
    return False


@contextmanager
def without_gpu() -> Iterator[None]:
    """Launch on tensors of a CPU as if they lay on a GPU, where slots are not read and nothing is differentiated: the
    driver's own time is missing.

    Kernels that are interpreted since ``TRITON_INTERPRET`` was set stay so: leave it unset.
    """
    usual = driver._active  # None until somebody asks for one
    driver.set_active(StandIn())
    environment = patch.dict(os.environ, TRITON_INTERPRET="1")
    with torch.inference_mode(), environment, patch.object(paged, "_check_slots", lambda *_: None):
        try:
            yield
        finally:
            driver.set_active(usual)


def main(tokens: int = 256, *turns: int) -> None:
    """Print the times of a 7B layer in bfloat16."""
    with nullcontext() if torch.cuda.is_available() else without_gpu():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        layer = Layer(SHAPES["7B layer"], interleaved(tokens), torch.bfloat16, device, how="triton")
        times = host_times(layer, BY_TRITON, *turns)
    for name, timing in times.items():
        low, median, high = map(seconds_text, (timing.p20, timing.median, timing.p80))
        print(f"{name:60} {median}  ({low} to {high})")


if __name__ == "__main__":
    main()
