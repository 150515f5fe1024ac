"""Measure calls in one process, alternating contestants so that fluctuations of the machine affect all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat

Call = Callable[[], object]

_SHORTEST = 2e-4  # minimum seconds of a turn that estimates the time of a call
_FEWEST = 3  # minimum turns of a contestant, even if it exceeds its time budget


@dataclass(frozen=True)
class Budget:
    """Time budget of a measurement."""

    seconds: float = 1.0  # per contestant; a single call to a slow contestant may take longer
    rounds: int = 25  # number of rounds, in each of which every contestant has a turn


@dataclass(frozen=True)
class Timing:
    """Seconds per call: median, 20th and 80th percentile over turns, and the number of turns."""

    median: float
    p20: float
    p80: float
    turns: int

    @classmethod
    def of(cls, values: list[float]) -> Timing:
        """Compute the median and percentiles of at least two measurements.

        >>> Timing.of([3.0, 1.0, 2.0]).median
        2.0
        """
        cuts = statistics.quantiles(values, n=10, method="inclusive")
        return cls(statistics.median(values), cuts[1], cuts[7], len(values))


Timer = Callable[[Mapping[str, Call], Budget], dict[str, Timing]]
"""Function that times contestants by name: `compare`, or a suite's own for devices and other processes."""


def compare(calls: Mapping[str, Call], budget: Budget = Budget()) -> dict[str, Timing]:
    """Measure contestants with this machine's clock.

    A turn consists of as many calls as fit into the contestant's share of a round. Slower contestants skip rounds at
    even intervals, but get at least three turns if there are at least three rounds.
    """
    once = {call: _once(call) for call in calls.values()}
    share = budget.seconds / budget.rounds
    turns = {call: max(_FEWEST, int(budget.seconds / took)) for call, took in once.items()}

    def plays(call: Call, turn: int) -> bool:
        return turn * turns[call] % budget.rounds < turns[call]

    return in_turns(calls, budget.rounds, 0, lambda call: _turn(call, max(1, int(share / once[call]))), plays)


def _once(call: Call) -> float:
    """Measure how many seconds one call takes, after a warm-up call."""
    call()
    count, took = 1, _turn(call, 1)
    while took * count < _SHORTEST:
        count *= 4
        took = _turn(call, count)
    return max(took, 1e-9)


def _turn(call: Call, count: int) -> float:
    """Make calls for one turn and return the seconds per call."""
    begin = time.perf_counter()
    for _ in repeat(None, count):
        call()
    return (time.perf_counter() - begin) / count


def in_turns(
    calls: Mapping[str, Call],
    rounds: int,
    warm: int,
    seconds: Callable[[Call], float],
    plays: Callable[[Call, int], bool] = lambda call, turn: True,
) -> dict[str, Timing]:
    """Measure alternating contestants.

    Args:
        calls: the contestants by name.
        rounds: number of rounds after warm-up.
        warm: number of warm-up rounds.
        seconds: function that runs one turn of a call and returns the seconds per call.
        plays: function that returns whether a call has a turn in a round.
    """
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-warm, rounds):
        for name, call in calls.items():
            if plays(call, turn):
                took = seconds(call)
                if turn >= 0:
                    spent[name].append(took)
    return {name: Timing.of(values) for name, values in spent.items()}


@contextmanager
def one_thread() -> Iterator[int]:
    """Limit torch to one thread within the context; yield its previous number of threads."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)
