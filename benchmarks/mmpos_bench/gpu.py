"""Timing of what a GPU does, by its own clock, with a cold cache before every call."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mmpos_bench.timing import Budget, Call, Tick, Timing

__all__ = ["by_events"]

_FLUSH = 256 << 20  # bytes: more than the caches of GPUs hold
_WARM = 10  # rounds that do not count


def by_events(calls: Mapping[str, Call], budget: Budget, tick: Tick) -> dict[str, Timing]:
    """Seconds between two events around a single call, in as many rounds as the budget has, contestants in turn.

    While the cache is flushed the host gets ahead, so that launches do not count where they are shorter than that.
    """
    flush = torch.empty(_FLUSH, dtype=torch.int8, device="cuda")
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-min(_WARM, budget.rounds), budget.rounds):
        for name, call in calls.items():
            flush.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            if turn >= 0:
                spent[name].append(begin.elapsed_time(end) / 1e3)
        tick(max(turn + 1, 0), budget.rounds)
    return {name: Timing.of(values) for name, values in spent.items()}
