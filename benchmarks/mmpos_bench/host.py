"""Host time of rotations: what a call costs a CPU before a kernel starts, measured with a GPU or without one.

``PYTHONPATH=.:benchmarks python -m mmpos_bench.host`` prints it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

from mmpos.support.extras import needed_for
from mmpos_bench.timing import Budget, Timing, compare

with needed_for("the host time of rotations", extra="all"):
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from mmpos.rotary import Cache, apply_rotary, paged, rotate_and_store
    from mmpos.rotary.device import Implementation
    from mmpos.rotary.kernel import launching
    from mmpos_bench.layers import SHAPES, Layer, interleaved

__all__ = ["StandIn", "host_times"]

_SLOTS = 16  # of a block of the cache
_BUDGET = Budget(1.0, 25)
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


def host_times(tokens: int = 256, budget: Budget = _BUDGET) -> dict[str, Timing]:
    """Time the host's part of rotations of a 7B layer in bfloat16: each as it is, and with every launch by Triton.

    With a GPU a launch is in it, and the queue of launches must not fill up: keep rounds of a budget short. Without
    one, tensors are on the CPU and a launch does nothing, so that the driver's own time is missing.

    Args:
        tokens: of a call.
        budget: time and rounds for each contestant.

    Returns:
        seconds per call, by name.
    """
    with torch.inference_mode(), ExitStack() as stack:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            stack.enter_context(_without_gpu())
        calls = _calls(tokens, device)
        return compare({**calls, **{f"{name}, by Triton": _by_triton(call) for name, call in calls.items()}}, budget)


def _calls(tokens: int, device: str) -> Mapping[str, Callable[[], object]]:
    layer = Layer(SHAPES["7B layer"], interleaved(tokens), torch.bfloat16, device)
    q, k, table, rotary = layer.q, layer.k, layer.table, layer.rotary
    v = torch.empty_like(k)
    blocks = -(-tokens // _SLOTS)
    keys, values = torch.zeros(2, blocks, _SLOTS, *k.shape[2:], dtype=k.dtype, device=device).unbind(0)
    slots = torch.arange(tokens, device=device)
    way: Implementation = "triton"
    return {
        "apply_rotary": lambda: apply_rotary(q, k, table, rotary, implementation=way),
        "apply_rotary in place": lambda: apply_rotary(q, k, table, rotary, implementation=way, inplace=True),
        "rotate_and_store": lambda: rotate_and_store(
            q, k, v, table, rotary, Cache(keys, values, slots), implementation=way
        ),
    }  # fmt: skip


def _never(kernel: object) -> bool:
    return False


def _by_triton(call: Callable[[], object]) -> Callable[[], object]:
    """Make the same call without the way past Triton's binder."""
    usual = launching._goes_straight

    def slower() -> None:
        launching._goes_straight = _never
        try:
            call()
        finally:
            launching._goes_straight = usual

    return slower


@contextmanager
def _without_gpu() -> Iterator[None]:
    """Launch on tensors of a CPU as if they lay on a GPU, where slots are not read.

    Kernels that are interpreted since ``TRITON_INTERPRET`` was set stay so: leave it unset.
    """
    usual = driver._active  # None until somebody asks for one
    driver.set_active(StandIn())
    with patch.dict(os.environ, TRITON_INTERPRET="1"), patch.object(paged, "_check_slots", lambda *_: None):
        try:
            yield
        finally:
            driver.set_active(usual)


if __name__ == "__main__":
    for name, timing in host_times().items():
        print(f"{name:36} {1e6 * timing.median:6.1f} µs  ({1e6 * timing.p20:.1f} to {1e6 * timing.p80:.1f})")
