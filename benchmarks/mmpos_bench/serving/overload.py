"""A server that is asked ten times what it can do: how fast are the calls that it answers, and what of the others."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from time import sleep

import grpc

from mmpos.errors import ServiceError
from mmpos_bench.serving.flood import Flood, flooding
from mmpos_bench.serving.openloop import Arrivals, Sent, send
from mmpos_bench.serving.orders import OPTIONS
from mmpos_bench.serving.processes import ServerProcess, service, started
from mmpos_bench.serving.questions import Asking, Question

__all__ = ["Overload", "Scale", "overload"]

_FILLING = 1.0  # seconds, longer than it takes until the pools are full and what came before is answered
_STARTING = 3.0  # seconds for the process of the probes to start beside the load, so that it meets the load to its end


@dataclass(frozen=True)
class Scale:
    """How large and how long everything is.

    Args:
        seconds: of each measurement, of which the first fifth does not count.
        times: the capacity, to load the server with.
        tokens: of a document.
        batch: documents of a batch.
    """

    seconds: float = 20.0
    times: float = 10.0
    tokens: int = 4096
    batch: int = 64


@dataclass(frozen=True)
class Overload:
    """What became of one kind of call; milliseconds count from the time at which a call was due.

    Args:
        name: of the kind.
        capacity: answers per second, with a few calls always in flight.
        offered: calls per second under overload.
        unloaded_p50, unloaded_p99: milliseconds at a tenth of the capacity.
        accepted_p50, accepted_p99: milliseconds of those that are answered under overload.
        refused_p99: milliseconds until a refusal; 0 where there is none.
        statuses: share of each status among the probes under overload.
        probes: how many these were.
    """

    name: str
    capacity: float
    offered: float
    unloaded_p50: float
    unloaded_p99: float
    accepted_p50: float
    accepted_p99: float
    refused_p99: float
    statuses: dict[str, float]
    probes: int

    @property
    def ratio(self) -> float:
        """How many times the 99th percentile without load the one under overload is."""
        return self.accepted_p99 / self.unloaded_p99


def overload(scale: Scale, malloc: str) -> Iterator[Overload]:
    """Each kind of call; server and clients have a core each if there are two."""
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = cores[0], cores[-1]
    with _on(ours), started(service(malloc, "--log-level", "warning")) as (server,):
        options = [*OPTIONS, ("grpc.enable_retries", 0)]
        with _on(theirs), grpc.insecure_channel(server.address, options=options) as channel:
            side = max(1, int(scale.tokens**0.5) * 3 // 8)
            asking = Asking(channel, scale.tokens, 4 if side > 1 else 1, side)
            for question in (asking.place(1), asking.place(scale.batch, dense=True), asking.photographs(1)):
                question.proof()
                yield _measured(question, server, scale, theirs)


def _measured(question: Question, server: ServerProcess, scale: Scale, core: int) -> Overload:
    warm_up = scale.seconds / 5
    asked = server.address, question.path, question.request
    with flooding(Flood(*asked, scale.seconds / 2 + warm_up, None, connections=2, in_flight=2, core=core)) as few:
        capacity = few().answers
    probing = max(capacity / 10, 20 / scale.seconds)  # so that there are some, however short the time
    calm = send(Arrivals(*asked, probing, scale.seconds, warm_up, core))
    sleep(1.5)  # until the server has forgotten what was refused
    rate = max(capacity * scale.times - probing, 1.0)
    lasts = _FILLING + scale.seconds + _STARTING
    with flooding(Flood(*asked, lasts, rate, connections=16, in_flight=100, core=core)) as many:
        sleep(_FILLING)
        busy = send(Arrivals(*asked, probing, scale.seconds, warm_up, core))
        offered = many().offered + probing
    return _told(question.name, capacity, offered, calm, busy)


def _told(name: str, capacity: float, offered: float, calm: list[Sent], busy: list[Sent]) -> Overload:
    answered = [sent.seconds for sent in busy if sent.status == "OK"]
    refused = [sent.seconds for sent in busy if sent.status != "OK"]
    before = [sent.seconds for sent in calm if sent.status == "OK"]
    if not answered or not before:
        raise ServiceError(f"{name}: got no answer at all, want some")
    counts = Counter(sent.status for sent in busy)
    return Overload(
        name,
        round(capacity, 1),
        round(offered, 1),
        _percentile(before, 50),
        _percentile(before, 99),
        _percentile(answered, 50),
        _percentile(answered, 99),
        _percentile(refused, 99) if refused else 0.0,
        {status: round(count / len(busy), 4) for status, count in sorted(counts.items())},
        len(busy),
    )


def _percentile(seconds: list[float], percent: int) -> float:
    found = quantiles(seconds, n=100, method="inclusive")[percent - 1] if len(seconds) > 1 else seconds[0]
    return round(1000 * found, 2)


@contextmanager
def _on(core: int) -> Iterator[None]:
    """Whatever is started inside keeps to this core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def memory(pid: int, which: str = "VmRSS") -> float:
    """MiB that a process holds, or (VmHWM) held at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{which}:"))
