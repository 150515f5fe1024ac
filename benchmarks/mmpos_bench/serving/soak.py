"""A server under everything at once for a long time: does the memory that it holds grow?"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic, sleep

from mmpos.errors import ServiceError
from mmpos_bench.serving.overload import memory
from mmpos_bench.serving.processes import service, started

__all__ = ["MOST_GROWTH", "Soak", "slope", "soak"]

MOST_GROWTH = 0.02
"""Of the memory held, in the time that counts: what is less is flat."""


@dataclass(frozen=True)
class Soak:
    """What came of it.

    Args:
        seconds: under load.
        counted: of them, at the end, from which the slope comes; what is before warms up.
        calls: deeds of the clients, a stream being one.
        outcomes: how often each deed ended how.
        first: MiB in the median of the first tenth of what counts.
        last: likewise of the last tenth.
        peak: MiB at most.
        slope: MiB per hour, by least squares.
        error: its standard error, from the means of tenths: memory of one second resembles that of the next.
    """

    seconds: float
    counted: float
    calls: int
    outcomes: dict[str, int]
    first: float
    last: float
    peak: float
    slope: float
    error: float

    @property
    def flat(self) -> bool:
        """Whether it grew by less than MOST_GROWTH in the time that counts, or less than twice the error allows."""
        growth = self.slope * self.counted / 3600
        return growth <= MOST_GROWTH * self.first or self.slope <= 2 * self.error


def soak(seconds: float, malloc: str, clients: int = 2) -> Soak:
    """Load a new server for so long, and look at its memory every second; the first half warms up.

    Raises:
        ServiceError: the server or a client ended.
    """
    with started(service(malloc, "--shared-memory", "mmpos-soak-")) as (server,):
        words = [sys.executable, "-m", "mmpos_bench.serving.mixture", server.address, str(seconds)]
        running = [subprocess.Popen([*words, str(i)], stdout=subprocess.PIPE, text=True) for i in range(clients)]
        began, samples = monotonic(), []
        step = min(1.0, seconds / 40)
        while any(client.poll() is None for client in running):
            samples.append((monotonic() - began, memory(server.pid)))
            sleep(step)
        outcomes: Counter[str] = Counter()
        for client in running:
            said, _ = client.communicate()
            if client.returncode:
                raise ServiceError(f"client: got exit code {client.returncode}, want 0")
            outcomes.update(json.loads(said))
        peak = memory(server.pid, "VmHWM")
    counts = [sample for sample in samples if sample[0] >= samples[-1][0] / 2]
    grown, error = slope(counts)
    tenth = max(1, len(counts) // 10)
    return Soak(
        round(samples[-1][0], 1),
        round(counts[-1][0] - counts[0][0], 1),
        sum(outcomes.values()),
        dict(sorted(outcomes.items())),
        round(statistics.median(held for _, held in counts[:tenth]), 1),
        round(statistics.median(held for _, held in counts[-tenth:]), 1),
        round(peak, 1),
        round(3600 * grown, 1),
        round(3600 * error, 1),
    )


def slope(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """What is held more after each second, and the standard error of that, from ten means of neighbours.

    >>> slope([(float(t), 100.0 + 2 * t) for t in range(40)])
    (2.0, 0.0)
    """
    size = max(1, len(samples) // 10)
    blocks = [samples[i : i + size] for i in range(0, len(samples) - size + 1, size)]
    times = [statistics.fmean(time for time, _ in block) for block in blocks]
    held = [statistics.fmean(value for _, value in block) for block in blocks]
    line = statistics.linear_regression(times, held)
    left = [value - line.intercept - line.slope * time for time, value in zip(times, held, strict=True)]
    middle = statistics.fmean(times)
    spread = sum((time - middle) ** 2 for time in times)
    freedom = max(1, len(times) - 2)
    return round(line.slope, 9), round(math.sqrt(sum(value**2 for value in left) / freedom / spread), 9)
