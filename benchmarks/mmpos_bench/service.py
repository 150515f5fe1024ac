"""The service: its processor time and calls per second, against a bare echo of as many bytes."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from mmpos.errors import UnsupportedError
from mmpos.support.extras import needed_for
from mmpos_bench.suites import Comparison, Contestant, Lineup, Role, SuiteOptions, limit
from mmpos_bench.timing import Budget, Timer

with needed_for("the service suite", extra="server"):
    import grpc

    from mmpos_bench.questions import Asking, Question
    from mmpos_bench.serving import (
        OPTIONS,
        Load,
        Order,
        ServerProcess,
        by_cpu,
        by_rate,
        clients,
        echo,
        echo_path,
        service,
        started,
    )


@dataclass(frozen=True)
class ServiceSizes:
    """Sizes and durations; seconds are those of a turn."""

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
    """Yield every case; the servers and two client processes share the machine."""
    if sys.platform != "linux":
        raise UnsupportedError(f"service: got {sys.platform}, want Linux, which tells the processor time of a server")
    sizes = QUICK if options.quick else ServiceSizes()
    with ExitStack() as stack:
        commands = [echo(options.malloc), service(options.malloc)]
        if not options.quick:  # each takes seconds to start: a quick run makes do with the one that logs
            commands.append(service(options.malloc, "--log-level", "warning"))
        bare, logging, *more = stack.enter_context(started(*commands))
        quiet = more[0] if more else logging
        channel = stack.enter_context(grpc.insecure_channel(quiet.address, options=OPTIONS))
        pool = stack.enter_context(clients(2))
        asking = Asking(channel, sizes.tokens, sizes.images, sizes.side)
        yield from _Suite(sizes, quiet, logging, bare, pool, asking).cases(quick=options.quick)


@dataclass(frozen=True)
class _Suite:
    """The processes, and the cases that load a server."""

    sizes: ServiceSizes
    quiet: ServerProcess
    logging: ServerProcess  # as it ships, which logs every request
    bare: ServerProcess  # the echo server
    pool: ProcessPoolExecutor  # of two clients
    asking: Asking  # the quiet one

    def cases(self, *, quick: bool) -> Iterator[Comparison]:
        """Yield every case."""
        ask, few = self.asking, self.sizes.batch
        for question in (ask.place(1), ask.place(few), ask.place(few, dense=True)):
            yield self.case("server CPU of a call", question, self.processor, by_cpu)
        asked = [partial(ask.place, documents, stream=stream) for stream in (False, True) for documents in (1, few)]
        asked += [partial(ask.text, documents) for documents in (1, few)]
        asked += [partial(ask.photographs, documents) for documents in (1, self.sizes.photographs)]
        for make in asked:
            yield self.case("calls at once", make(), self.at_once, by_rate)

    def case(self, group: str, question: Question, line_up: Callable[[Question], Lineup], timer: Timer) -> Comparison:
        """Make the case of a question."""
        made, budget = partial(line_up, question), Budget(0.0, self.sizes.rounds)
        return Comparison(group, question.name, made, "documents", budget=budget, timer=timer)

    def processor(self, question: Question) -> Lineup:
        """Line up processor time of a call."""
        ours = self.load(question)
        logging = ours.to(self.logging, question.path, question.answer)
        proof = partial(question.answered_by, self.logging.address)
        contestants = (
            limit("echo", self.echoed(ours, question)),
            Contestant("mmpos", ours, proof=question.proof),
            Contestant("mmpos, requests logged", logging, proof, Role.PART),
        )
        return Lineup(contestants, question.work)

    def at_once(self, question: Question) -> Lineup:
        """Line up time per document while both clients keep several calls in flight, and count documents."""
        ours = self.load(question)

        def facts() -> Mapping[str, float]:
            rate = statistics.median(turn.per_second for turn in ours.turns[1:])
            cpu = statistics.median(turn.cpu for turn in ours.turns[1:]) / question.documents
            return {
                "documents per second": rate * question.documents,
                "tokens per second": rate * question.tokens,
                "server CPU of a document, µs": cpu * 1e6,
            }

        echoed = limit("echo", self.echoed(ours, question))
        return Lineup((echoed, Contestant("mmpos", ours, proof=question.proof)), question.work, facts)

    def load(self, question: Question) -> Load:
        """Have both clients load the quiet server, each with several calls or items of a stream in flight."""
        in_flight = self.sizes.window if question.stream else self.sizes.in_flight
        order = Order(question.path, question.request, question.answer, self.sizes.seconds, in_flight)
        return Load(self.quiet, order, self.pool, 2)

    def echoed(self, load: Load, question: Question) -> Load:
        """Put the load on the echo server, which answers as many bytes."""
        size = len(question.answer)
        return load.to(self.bare, echo_path(size, stream=question.stream), bytes(size))
