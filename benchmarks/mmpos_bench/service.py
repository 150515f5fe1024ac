"""Service: processor time and calls per second, compared with echoing the same number of bytes."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from mmpos.errors import UnsupportedError
from mmpos.support.extras import needed_for
from mmpos_bench.suites import Comparison, Contestant, Lineup, SuiteOptions, limit
from mmpos_bench.timing import Budget

with needed_for("the service suite", extra="server"):
    import grpc

    from mmpos_bench.questions import Asking, Question
    from mmpos_bench.serving import (
        OPTIONS,
        Load,
        Order,
        ServerProcess,
        by_rate,
        clients,
        echo,
        echo_path,
        service,
        started,
    )


@dataclass(frozen=True)
class ServiceSizes:
    """Sizes and durations; ``seconds`` is the duration of a turn."""

    tokens: int = 4096
    images: int = 4
    side: int = 24
    batch: int = 64
    photographs: int = 8
    seconds: float = 0.5
    rounds: int = 11
    in_flight: int = 4
    window: int = 16


QUICK = ServiceSizes(64, 1, 4, 4, 2, 0.02, 2, 2, 4)


def cases(options: SuiteOptions) -> Iterator[Comparison]:
    """Yield every case, with the servers and two client processes sharing the machine."""
    if sys.platform != "linux":
        raise UnsupportedError(f"service: got {sys.platform}, want Linux, which reports the processor times of servers")
    sizes = QUICK if options.quick else ServiceSizes()
    with ExitStack() as stack:
        bare, server = stack.enter_context(started(echo(), service()))
        channel = stack.enter_context(grpc.insecure_channel(server.address, options=OPTIONS))
        pool = stack.enter_context(clients(2))
        asking = Asking(channel, sizes.tokens, sizes.images, sizes.side)
        places = [partial(asking.place, count, stream=stream) for stream in (False, True) for count in (1, sizes.batch)]
        texts = [partial(asking.text, count) for count in (1, sizes.batch)]
        photographs = [partial(asking.photographs, count) for count in (1, sizes.photographs)]
        budget = Budget(0.0, sizes.rounds)
        for ask in (*places, partial(asking.place, sizes.batch, dense=True), *texts, *photographs):
            question = ask()
            line_up = partial(at_once, question, sizes, pool, server, bare)
            yield Comparison("calls at once", question.name, line_up, "documents", budget=budget, timer=by_rate)


def at_once(
    question: Question, sizes: ServiceSizes, pool: ProcessPoolExecutor, server: ServerProcess, bare: ServerProcess
) -> Lineup:
    """Line up the time per document while two clients keep several calls in flight, with an echo as the limit.

    The echo server answers with as many bytes as the server.
    """
    size, in_flight = len(question.answer), sizes.window if question.stream else sizes.in_flight
    order = Order(question.path, question.request, question.answer, sizes.seconds, in_flight)
    ours = Load(server, order, pool, 2)
    echoed = Load(bare, replace(order, path=echo_path(size, stream=question.stream), answer=bytes(size)), pool, 2)

    def facts() -> Mapping[str, float]:
        rate = statistics.median(turn.per_second for turn in ours.turns[1:])
        cpu, of_echo = (statistics.median(turn.cpu for turn in load.turns[1:]) * 1e6 for load in (ours, echoed))
        per_second = rate * question.documents
        return {"documents per second": per_second, "server CPU of a call, µs": cpu, "of an echo, µs": of_echo}

    contestants = limit("echo", echoed), Contestant("mmpos", ours, proof=question.proof)
    return Lineup(contestants, question.work, facts)
