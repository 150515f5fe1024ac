"""Service: processor time and calls per second, compared with echoing the same number of bytes."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
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
        yield from _Suite(sizes, server, bare, pool, asking).cases()


@dataclass(frozen=True)
class _Suite:
    """Server and client processes, and the cases that put load on a server."""

    sizes: ServiceSizes
    server: ServerProcess
    bare: ServerProcess  # echo server
    pool: ProcessPoolExecutor  # two clients
    asking: Asking  # asks the server

    def cases(self) -> Iterator[Comparison]:
        """Yield every case."""
        ask, few = self.asking, self.sizes.batch
        questions = [partial(ask.place, documents, stream=stream) for stream in (False, True) for documents in (1, few)]
        questions += [partial(ask.place, few, dense=True)]
        questions += [partial(ask.text, documents) for documents in (1, few)]
        questions += [partial(ask.photographs, documents) for documents in (1, self.sizes.photographs)]
        budget = Budget(0.0, self.sizes.rounds)
        for question_of in questions:
            question = question_of()
            line_up = partial(self.at_once, question)
            yield Comparison("calls at once", question.name, line_up, "documents", budget=budget, timer=by_rate)

    def at_once(self, question: Question) -> Lineup:
        """Line up the time per document while both clients keep several calls in flight."""
        ours = self.load(question)
        bare = self.echoed(ours, question)

        def facts() -> Mapping[str, float]:
            rate = statistics.median(turn.per_second for turn in ours.turns[1:])
            cpu, of_echo = (statistics.median(turn.cpu for turn in load.turns[1:]) * 1e6 for load in (ours, bare))
            return {
                "documents per second": rate * question.documents,
                "server CPU of a call, µs": cpu,
                "of an echo, µs": of_echo,
            }

        contestants = limit("echo", bare), Contestant("mmpos", ours, proof=question.proof)
        return Lineup(contestants, question.work, facts)

    def load(self, question: Question) -> Load:
        """Return a load from both clients on the server, each with several calls or stream items in flight."""
        in_flight = self.sizes.window if question.stream else self.sizes.in_flight
        order = Order(question.path, question.request, question.answer, self.sizes.seconds, in_flight)
        return Load(self.server, order, self.pool, 2)

    def echoed(self, load: Load, question: Question) -> Load:
        """Return the same load on the echo server, with answers of the same size."""
        size = len(question.answer)
        return load.to(self.bare, echo_path(size, stream=question.stream), bytes(size))
