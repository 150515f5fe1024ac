"""Measure GPU time with cold caches and with the host running ahead, and capture CUDA graphs.

Without CUDA, the host's clock times the calls; such times serve only to test this code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from mmpos_bench.timing import Budget, Call, Timing, in_turns

_WARM = 3  # warm-up rounds
_EVICTED = 4  # size of the buffer that is read between calls, as a multiple of the second-level cache
_LEAST_EVICTED = 256 << 20  # minimum size of that buffer in bytes
_AHEAD, _LONGEST = 1 << 20, 1 << 28  # initial and maximum number of cycles that the device sleeps


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Clock:
    """Measures calls with GPU events, excluding the effects of warm caches and of a slow host.

    Before every call, a buffer several times the size of the second-level cache is read. Unlike writing, reading leaves
    no dirty lines to write back. The device then sleeps while the host queues the call. If the device wakes before
    everything is queued, the measurement is repeated with a longer sleep. A call that waits for the device never gets
    ahead of it, so its waiting time is included.
    """

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()
        if self._cuda:
            cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
            size = max(_EVICTED * cache, _LEAST_EVICTED) // 4
            self._evicting = torch.ones(size, dtype=torch.float32, device="cuda")
        self._cycles = _AHEAD

    def seconds(self, call: Call) -> float:
        """Measure one call."""
        if not self._cuda:
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin
        while True:
            took, ahead = self._turn(call)
            if ahead or self._cycles >= _LONGEST:
                return took
            self._cycles *= 2

    def _turn(self, call: Call) -> tuple[float, bool]:
        """Return how many seconds a call took and whether the host was ahead of the device."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._evicting.sum()
        torch.cuda._sleep(self._cycles)
        begin.record()
        call()
        end.record()
        ahead = not begin.query()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3, ahead


class Replays:
    """CUDA graph that replays several calls, each doing the same work on separate memory.

    A replay runs each call once, so each call finds its own memory cold. Shared data, such as a table, is warm from the
    second call on, as in the layers of a model. The time of a call includes the gap before the call.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self._replay: Call | None = None

    def capture(self) -> Call:
        """Capture the calls unless they have been captured already, and return the replay."""
        kept: list[object] = []  # keeping results alive makes each call write to different memory

        def all_of_them() -> None:
            kept.clear()
            kept.extend(call() for call in self.calls)

        if self._replay is None:
            self._replay = capture(all_of_them, warm=lambda: [call() for call in self.calls[:2]])
        return self._replay

    def __call__(self) -> None:
        """Replay the calls."""
        self.capture()()


def by_events(calls: Mapping[str, Call], budget: Budget) -> dict[str, Timing]:
    """Measure the GPU time of contestants with a cold cache before every call; for replays, time a single call."""
    clock = Clock()

    def seconds(call: Call) -> float:
        return clock.seconds(call) / (len(call.calls) if isinstance(call, Replays) else 1)

    return in_turns(calls, budget.rounds, min(_WARM, budget.rounds), seconds)


def capture(call: Call, warm: Call | None = None) -> Callable[[], object]:
    """Capture a call in a CUDA graph and return a function that replays it; without CUDA, return the call.

    Args:
        call: the call to capture, which must not wait for the device.
        warm: warm-up function, called three times beforehand in a separate stream; None means the call itself.
    """
    if not torch.cuda.is_available():
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            (warm or call)()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
