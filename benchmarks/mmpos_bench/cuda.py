"""Time by the clock of a GPU, with cold caches and a host that is ahead; and graphs.

Where there is no CUDA, calls are made as they are and timed by the clock of the host: toys, which prove the code alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from mmpos_bench.timing import Budget, Call, Tick, Timing, in_turns

_WARM = 3  # rounds that do not count
_EVICTED = 4  # times the second-level cache: what is read between calls
_LEAST_EVICTED = 256 << 20  # bytes
_AHEAD, _LONGEST = 1 << 20, 1 << 28  # cycles that the device sleeps, at first and at most


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Clock:
    """Measures calls by events of a GPU, so that neither a warm cache nor a slow host is in the result.

    Before every call a buffer of several times the second-level cache is read: reading leaves lines that nobody has to
    write back, which writing would leave. Then the device sleeps while the host queues the call. Where the device woke
    before all of it was queued, the measurement is made again behind a longer sleep; a call that itself waits for the
    device never gets ahead, and its waits count.
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
    """Several calls that do the same work on memory of their own, as one graph that replays them all.

    Each is made once in a replay, and so finds its memory cold; what they share, such as a table, is warm from the
    second on, as it is in the layers of a model. A call counts with the gap before it.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self._replay: Call | None = None

    def capture(self) -> Call:
        """Capture them, if they are not yet."""
        kept: list[object] = []  # a result that stays makes the next call write elsewhere

        def all_of_them() -> None:
            kept.clear()
            kept.extend(call() for call in self.calls)

        if self._replay is None:
            self._replay = capture(all_of_them, warm=lambda: [call() for call in self.calls[:2]])
        return self._replay

    def __call__(self) -> None:
        """Replay them."""
        self.capture()()


def by_events(calls: Mapping[str, Call], budget: Budget, tick: Tick) -> dict[str, Timing]:
    """Time contestants by the clock of a GPU, with a cold cache before every call; of replays, one of their calls."""
    clock = Clock()

    def seconds(call: Call) -> float:
        return clock.seconds(call) / (len(call.calls) if isinstance(call, Replays) else 1)

    return in_turns(calls, budget.rounds, min(_WARM, budget.rounds), seconds, tick)


def capture(call: Call, warm: Call | None = None) -> Callable[[], object]:
    """Capture a call in a CUDA graph, and return what replays it; without CUDA, the call itself.

    Args:
        call: waits for nothing.
        warm: is called three times before, in a stream of its own; None is the call itself.
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
