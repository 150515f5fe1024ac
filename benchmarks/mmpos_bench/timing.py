"""Timing of calls in one process: all contestants take turns, so that a machine's moods meet all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat

__all__ = ["Budget", "Call", "Tick", "Timer", "Timing", "compare", "in_turns", "one_thread"]

Call = Callable[[], object]

Tick = Callable[[int, int], None]
"""Receives after every round how many are done, and how many there are."""

_SHORTEST = 2e-4  # seconds that a turn is made to last while it is found out how long a call takes
_FEWEST = 3  # turns of a contestant that takes more time than it has


@dataclass(frozen=True)
class Budget:
    """The time for a measurement.

    Args:
        seconds: time for each contestant; one call of a slow contestant may take more.
        rounds: rounds in which every contestant has its turn.
    """

    seconds: float = 1.0
    rounds: int = 25


@dataclass(frozen=True)
class Timing:
    """Seconds per call.

    Args:
        median: the middle of all turns.
        p20: a fifth of the turns were at least as fast.
        p80: four fifths of them were.
        turns: how many there were.
    """

    median: float
    p20: float
    p80: float
    turns: int

    @classmethod
    def of(cls, values: list[float]) -> Timing:
        """Take the middle and the range of measurements, at least two.

        >>> Timing.of([3.0, 1.0, 2.0]).median
        2.0
        """
        cuts = statistics.quantiles(values, n=10, method="inclusive")
        return cls(statistics.median(values), cuts[1], cuts[7], len(values))


Timer = Callable[[Mapping[str, Call], Budget, Tick], dict[str, Timing]]
"""Times contestants: `compare`, or a suite's own, for devices and other processes."""


def _quiet(done: int, rounds: int) -> None:
    pass


def compare(calls: Mapping[str, Call], budget: Budget = Budget(), tick: Tick = _quiet) -> dict[str, Timing]:
    """Time contestants side by side.

    A turn is as many calls as fit the contestant's share of a round. A contestant that is too slow for that sits out
    some rounds, evenly, but has at least three turns where there are as many rounds.

    Args:
        calls: what to time, by name.
        budget: how long.
        tick: called after every round.

    Returns:
        The timing of each, in the same order.
    """
    once = {name: _once(call) for name, call in calls.items()}
    share = budget.seconds / budget.rounds
    repeats = {name: max(1, int(share / took)) for name, took in once.items()}
    turns = {name: _turns(budget, took) for name, took in once.items()}
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(budget.rounds):
        for name, call in calls.items():
            if turn * turns[name] % budget.rounds < turns[name]:
                spent[name].append(_turn(call, repeats[name]))
        tick(turn + 1, budget.rounds)
    return {name: Timing.of(values) for name, values in spent.items()}


def _turns(budget: Budget, once: float) -> int:
    """Rounds that a contestant takes part in."""
    return min(budget.rounds, max(_FEWEST, int(budget.seconds / once)))


def _once(call: Call) -> float:
    """Seconds of a warm call; the first warms up and does not count."""
    call()
    count, took = 1, _turn(call, 1)
    while took * count < _SHORTEST:
        count *= 4
        took = _turn(call, count)
    return max(took, 1e-9)


def _turn(call: Call, count: int) -> float:
    """Seconds per call."""
    begin = time.perf_counter()
    for _ in repeat(None, count):
        call()
    return (time.perf_counter() - begin) / count


def in_turns(
    calls: Mapping[str, Call], rounds: int, warm: int, seconds: Callable[[Call], float], tick: Tick
) -> dict[str, Timing]:
    """Time contestants that have a turn of one call in every round.

    Args:
        calls: what to time, by name.
        rounds: that count.
        warm: rounds before them.
        seconds: makes a call and says how long it took.
        tick: called after every round that counts.
    """
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for done in range(1 - warm, rounds + 1):
        for name, call in calls.items():
            took = seconds(call)
            if done > 0:
                spent[name].append(took)
        if done > 0:
            tick(done, rounds)
    return {name: Timing.of(values) for name, values in spent.items()}


@contextmanager
def one_thread() -> Iterator[int]:
    """Give torch one thread while inside; gives how many it would take."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)
