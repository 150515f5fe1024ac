"""Load on a server as something to time: a turn of it tells calls per second, processor time and latency."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mmpos_bench.serving.orders import Clients, Order
from mmpos_bench.serving.processes import ServerProcess
from mmpos_bench.timing import Budget, Call, Tick, Timer, Timing, in_turns

__all__ = ["Load", "Turn", "by_cpu", "by_latency", "by_rate"]


@dataclass(frozen=True)
class Turn:
    """One turn of a load.

    Args:
        per_second: calls, or items of a stream.
        cpu: seconds of the server's processor per call.
        latencies: seconds of each call.
    """

    per_second: float
    cpu: float
    latencies: tuple[float, ...] = ()


class Load:
    """The same call again and again, for some seconds each time it is called.

    Args:
        server: whose processor time counts.
        order: what to do, and for how long.
        clients: who do it.
        count: of them; None is all.
    """

    def __init__(self, server: ServerProcess, order: Order, clients: Clients, count: int | None = None) -> None:
        self._server, self._order, self._clients, self._count = server, order, clients, count
        self.turns: list[Turn] = []

    def __call__(self) -> Turn:
        """One turn, which is also remembered."""
        began = self._server.cpu
        done = self._clients.run(self._order, self._count)
        latencies = tuple(latency for one in done for latency in one.latencies)
        cpu = (self._server.cpu - began) / len(latencies)
        self.turns.append(Turn(sum(one.per_second for one in done), cpu, latencies))
        return self.turns[-1]

    def to(self, server: ServerProcess, path: str, answer: bytes) -> Load:
        """The same load on another method."""
        order = replace(self._order, address=server.address, path=path, answer=answer)
        return Load(server, order, self._clients, self._count)


def _by(seconds: Callable[[Turn], float]) -> Timer:
    """A timer of loads, whose turns tell their seconds themselves; the first turn of each warms up."""

    def turn(call: Call) -> float:
        made = call()
        assert isinstance(made, Turn)
        return seconds(made)

    def timer(calls: Mapping[str, Call], budget: Budget, tick: Tick) -> dict[str, Timing]:
        return in_turns(calls, budget.rounds, 1, turn, tick)

    return timer


by_cpu = _by(lambda turn: turn.cpu)
"""Seconds of the server's processor per call."""

by_rate = _by(lambda turn: 1 / turn.per_second)
"""Seconds of the clock per call, of many at once."""

by_latency = _by(lambda turn: statistics.median(turn.latencies))
"""Seconds that a call takes, in the median of a turn."""
