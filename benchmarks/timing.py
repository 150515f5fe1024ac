"""Timing of calls in one process: medians over rounds that take all contestants in turn."""

import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Seconds per call."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, values: list[float]) -> "Timing":
        """The middle and the range of many measurements."""
        cuts = statistics.quantiles(values, n=10)
        return cls(statistics.median(values), cuts[1], cuts[7])

    @property
    def micros(self) -> str:
        """Median microseconds, and the range from the 20th to the 80th percentile."""
        return f"{self.median * 1e6:,.1f} ({self.p20 * 1e6:,.1f}–{self.p80 * 1e6:,.1f})"


def compare(calls: dict[str, Call], seconds: float = 1.0, rounds: int = 25) -> dict[str, Timing]:
    """Time contestants side by side, so that a machine that changes its speed does so for all of them.

    Args:
        calls: what to time, by name.
        seconds: time to spend on each.
        rounds: rounds in which every contestant has its turn.
    """
    repeats = {}
    for name, call in calls.items():
        call()
        begin = time.perf_counter()
        call()
        once = time.perf_counter() - begin
        repeats[name] = max(1, int(seconds / rounds / max(once, 1e-7)))
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            spent[name].append((time.perf_counter() - begin) / repeats[name])
    return {name: Timing.of(values) for name, values in spent.items()}


def machine() -> str:
    """The machine, its Python, and the commit that was measured."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    with open("/proc/cpuinfo") as lines:
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{model}, Python {platform.python_version()}, commit {commit or 'unknown'}"
