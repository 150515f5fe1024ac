"""A server that is asked ten times what it can do: how fast are the calls that it answers, and what of the others."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import quantiles
from time import perf_counter, sleep

import grpc

from mmpos.errors import ServiceError
from mmpos_bench.serving.flood import Flood, Flooded, tell_flood
from mmpos_bench.serving.loads import OPTIONS
from mmpos_bench.serving.processes import ServerProcess, Tell, Worker, on_core, service, started, working
from mmpos_bench.serving.questions import Asking, Question

_NO_LIMIT = 2**31 - 1
_PROBES = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]

Sent = tuple[str, float]
"""The status of a call, and the seconds from the time at which it was due to its end."""


@dataclass(frozen=True)
class Scale:
    """The sizes and lengths of everything."""

    seconds: float = 20.0  # of each measurement, of which the first fifth does not count
    times: float = 10.0  # the capacity, to load the server with
    tokens: int = 4096  # of a document
    batch: int = 64  # documents of a batch
    settling: float = 1.5  # seconds, longer than pools take to fill and a server to forget that it refused calls

    @property
    def warm_up(self) -> float:
        """Seconds that do not count."""
        return self.seconds / 5


@dataclass(frozen=True)
class Overload:
    """The fate of one kind of call; milliseconds count from the time at which a call was due."""

    name: str
    capacity: float  # answers per second, with a few calls always in flight
    offered: float  # calls per second under overload
    unloaded_p50: float  # milliseconds at a tenth of the capacity
    unloaded_p99: float
    accepted_p50: float  # milliseconds of those that are answered under overload
    accepted_p99: float
    refused_p99: float  # milliseconds until a refusal; 0 where there is none
    statuses: dict[str, float]  # share of each status among the probes under overload
    probes: int

    @property
    def ratio(self) -> float:
        """The 99th percentile under overload, as a multiple of that without load."""
        return self.accepted_p99 / self.unloaded_p99


def overload(scale: Scale, malloc: str) -> Iterator[Overload]:
    """Overload a server with each kind of call; server and clients have a core each if there are two."""
    cores = sorted(os.sched_getaffinity(0))
    with on_core(cores[0]), started(service(malloc, "--log-level", "warning")) as (server,):
        options = [*OPTIONS, ("grpc.enable_retries", 0)]
        with (
            on_core(cores[-1]),
            working(2) as (load, probes),
            grpc.insecure_channel(server.address, options=options) as channel,
        ):
            side = max(1, int(scale.tokens**0.5) * 3 // 8)
            asking = Asking(channel, scale.tokens, 4 if side > 1 else 1, side)
            for question in (asking.place(1), asking.place(scale.batch, dense=True), asking.photographs(1)):
                question.proof()
                yield _measured(question, server, scale, load, probes)


def _measured(question: Question, server: ServerProcess, scale: Scale, load: Worker, probes: Worker) -> Overload:
    calls = partial(Flood, server.address, question.path, question.request)
    load.start(tell_flood, calls(scale.seconds / 2 + scale.warm_up, None, connections=2, in_flight=2))
    load.receive()  # it has begun
    few: Flooded = load.receive()
    rate = max(few.answers / 10, 20 / scale.seconds)  # so that there are some, however short the time
    probing = calls(scale.seconds, rate, connections=4, in_flight=_NO_LIMIT)
    probes.start(tell_probes, probing, scale.warm_up)
    calm: list[Sent] = probes.receive()
    sleep(scale.settling)
    lasts, most = scale.settling + scale.seconds + scale.settling, max(few.answers * scale.times - rate, 1.0)
    load.start(tell_flood, calls(lasts, most, connections=16, in_flight=100))
    load.receive()
    sleep(scale.settling)
    probes.start(tell_probes, probing, scale.warm_up)
    busy: list[Sent] = probes.receive()
    many: Flooded = load.receive()

    before = [seconds for status, seconds in calm if status == "OK"]
    answered = [seconds for status, seconds in busy if status == "OK"]
    refused = [seconds for status, seconds in busy if status != "OK"]
    if not answered or not before:
        raise ServiceError(f"{question.name}: got no answer at all, want some")
    counts = Counter(status for status, _ in busy)
    return Overload(
        question.name,
        round(few.answers, 1),
        round(many.offered + rate, 1),
        _percentile(before, 50),
        _percentile(before, 99),
        _percentile(answered, 50),
        _percentile(answered, 99),
        _percentile(refused, 99) if refused else 0.0,
        {status: round(count / len(busy), 4) for status, count in sorted(counts.items())},
        len(busy),
    )


def _percentile(seconds: list[float], percent: int) -> float:
    cuts = quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else seconds * 99
    return round(1000 * cuts[percent - 1], 2)


def tell_probes(tell: Tell, load: Flood, warm_up: float) -> None:
    """Send calls at random times of a Poisson process, fixed beforehand however long the answers to others take, and
    tell what became of those that are due after the seconds of warm-up.
    """
    tell(asyncio.run(_send(load, warm_up)))


async def _send(load: Flood, warm_up: float) -> list[Sent]:
    channels = [grpc.aio.insecure_channel(load.address, options=_PROBES) for _ in range(load.connections)]
    calls: list[grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = [
        channel.unary_unary(load.path) for channel in channels
    ]
    sent: list[Sent] = []

    async def one(number: int, due: float, counts: bool) -> None:
        status = "OK"
        try:
            await calls[number % len(calls)](load.request, timeout=30, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            status = error.code().name
        if counts:
            sent.append((status, perf_counter() - due))

    for number in range(len(calls)):
        await one(number, perf_counter(), counts=False)
    tasks: set[asyncio.Task[None]] = set()
    chance = random.Random(0)
    assert load.rate is not None
    begin = due = perf_counter()
    while (due := due + chance.expovariate(load.rate)) < begin + load.seconds:
        if (wait := due - perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.add(asyncio.create_task(one(len(tasks), due, due - begin >= warm_up)))
    await asyncio.gather(*tasks)
    for channel in channels:
        await channel.close()
    return sent
