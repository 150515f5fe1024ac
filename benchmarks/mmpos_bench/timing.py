"""Timing of calls in one process: all contestants take turns, so that a machine's moods meet all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat

Call = Callable[[], object]

Tick = Callable[[int, int], None]
"""Receives after every round how many are done, and how many there are."""

_SHORTEST = 2e-4  # seconds that a turn is made to last while it is found out how long a call takes
_FEWEST = 3  # turns of a contestant that takes more time than it has


@dataclass(frozen=True)
class Budget:
    """The time for a measurement."""

    seconds: float = 1.0  # for each contestant; one call of a slow contestant may take more
    rounds: int = 25  # in which every contestant has its turn


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the middle of all turns, the 20th and 80th percentile, and how many turns there were."""

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
"""Times contestants, by name: `compare`, or a suite's own, for devices and other processes."""


def compare(
    calls: Mapping[str, Call], budget: Budget = Budget(), tick: Tick = lambda done, rounds: None
) -> dict[str, Timing]:
    """Time contestants by the clock of this machine.

    A turn is as many calls as fit the contestant's share of a round. A contestant that is too slow for that sits out
    some rounds, evenly, but has at least three turns where there are as many rounds.
    """
    once = {call: _once(call) for call in calls.values()}
    share = budget.seconds / budget.rounds
    turns = {call: max(_FEWEST, int(budget.seconds / took)) for call, took in once.items()}

    def plays(call: Call, turn: int) -> bool:
        return turn * turns[call] % budget.rounds < turns[call]

    return in_turns(calls, budget.rounds, 0, lambda call: _turn(call, max(1, int(share / once[call]))), tick, plays)


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
    calls: Mapping[str, Call],
    rounds: int,
    warm: int,
    seconds: Callable[[Call], float],
    tick: Tick,
    plays: Callable[[Call, int], bool] = lambda call, turn: True,
) -> dict[str, Timing]:
    """Time contestants that have a turn in every round.

    Args:
        calls: the contestants, by name.
        rounds: that count.
        warm: rounds before them.
        seconds: takes the turn of a call, and measures it.
        tick: called after every round that counts.
        plays: tells which call has a turn in which round.
    """
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-warm, rounds):
        for name, call in calls.items():
            if plays(call, turn):
                took = seconds(call)
                if turn >= 0:
                    spent[name].append(took)
        if turn >= 0:
            tick(turn + 1, rounds)
    return {name: Timing.of(values) for name, values in spent.items()}


@contextmanager
def one_thread() -> Iterator[int]:
    """Give torch one thread while inside; yields how many it would take."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)
