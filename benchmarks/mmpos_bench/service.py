"""The service: its processor time, calls per second and latency, against a bare echo of as many bytes."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from tempfile import NamedTemporaryFile

from mmpos.errors import UnsupportedError
from mmpos.support.extras import needed_for
from mmpos_bench.cases import Case, Contestant, Options, Point, Role
from mmpos_bench.timing import Budget

with needed_for("the service suite", extra="server"):
    import grpc

    from mmpos_bench.serving.clients import Clients
    from mmpos_bench.serving.echo import echo_path
    from mmpos_bench.serving.h2load import H2Load
    from mmpos_bench.serving.loads import Load, Turn, by_cpu, by_latency, by_rate
    from mmpos_bench.serving.orders import OPTIONS, Kind, Order
    from mmpos_bench.serving.processes import ServerProcess, echo, service, started
    from mmpos_bench.serving.questions import Asking, Question
    from mmpos_bench.serving.sharing import Sharing

__all__ = ["cases"]


@dataclass(frozen=True)
class Sizes:
    """How large and how long everything is; seconds are those of a turn."""

    tokens: int = 4096
    images: int = 4
    side: int = 24
    batch: int = 64
    curve: tuple[int, ...] = (1, 4, 16, 64, 256)
    photographs: int = 8
    seconds: float = 0.5
    rounds: int = 11
    in_flight: int = 4
    window: int = 16
    h2load: int = 2000

    @property
    def budget(self) -> Budget:
        """Of every contestant."""
        return Budget(self.seconds * self.rounds, self.rounds)


QUICK = Sizes(64, 1, 4, 4, (1, 4), 2, 0.02, 2, 2, 4, 20)


def cases(options: Options) -> Iterator[Case]:
    """Every case of the suite; the servers and two client processes share the machine."""
    if sys.platform != "linux":
        raise UnsupportedError(f"service: got {sys.platform}, want Linux, which tells the processor time of a server")
    sizes = QUICK if options.quick else Sizes()
    with ExitStack() as stack:
        sharing = Sharing(stack.enter_context(NamedTemporaryFile("w", suffix=".toml")))
        silent = ("--log-level", "warning")
        if options.quick:  # each takes seconds to start: a quick run makes do with one, which logs
            commands = [echo(options.malloc), service(options.malloc, *sharing.options)]
        else:
            ours = ((*sharing.options, *silent), (), silent)
            commands = [echo(options.malloc), *(service(options.malloc, *words) for words in ours)]
        bare, large, *more = stack.enter_context(started(*commands))
        logging, quiet = more or (large, large)
        channel = stack.enter_context(grpc.insecure_channel(quiet.address, options=OPTIONS))
        clients = stack.enter_context(Clients(2))
        asking = Asking(channel, sizes.tokens, sizes.images, sizes.side)
        suite = Suite(sizes, quiet, logging, bare, clients, asking)
        yield from suite.processor()
        yield from suite.throughput()
        yield from suite.over_documents()
        yield suite.latency(asking.place(1))
        if H2Load.found() and not options.quick:
            few = (1, sizes.batch)
            yield from (suite.by_h2load(ask(documents)) for ask in (asking.place, asking.infer) for documents in few)
        yield from sharing.cases(large, sizes.tokens, sizes.photographs, sizes.budget)


@dataclass(frozen=True)
class Suite:
    """The processes, and the cases that they are for.

    Args:
        sizes: of everything.
        quiet: our server.
        logging: our server as it ships, which logs every request.
        bare: the echo server.
        clients: who load them.
        asking: asks the quiet one.
    """

    sizes: Sizes
    quiet: ServerProcess
    logging: ServerProcess
    bare: ServerProcess
    clients: Clients
    asking: Asking

    def processor(self) -> Iterator[Case]:
        """Processor time of a call."""
        few = self.sizes.batch
        for question in (self.asking.place(1), self.asking.place(few), self.asking.place(few, dense=True)):
            load = self._load(question)
            contestants = (
                Contestant("echo", self._echoed(load, question), Role.LIMIT),
                Contestant("mmpos", load, proof=question.proof),
                Contestant(
                    "mmpos, requests logged",
                    load.to(self.logging, question.path, question.answer),
                    Role.PART,
                    partial(question.answered_by, self.logging.address),
                ),
            )
            yield Case(
                "server CPU of a call",
                question.name,
                contestants,
                question.work,
                "documents",
                budget=self.sizes.budget,
                timer=by_cpu,
            )

    def throughput(self) -> Iterator[Case]:
        """Calls at once, of every sort."""
        ask, few = self.asking, self.sizes.batch
        asked = [partial(ask.place, documents, stream=stream) for stream in (False, True) for documents in (1, few)]
        asked += [partial(ask.text, documents) for documents in (1, few)]
        asked += [partial(ask.photographs, documents) for documents in (1, self.sizes.photographs)]
        for make in asked:
            yield self._at_once("calls at once", make())

    def over_documents(self) -> Iterator[Case]:
        """Calls at once, of more and more documents each."""
        for documents in self.sizes.curve:
            question = self.asking.place(documents)
            yield self._at_once("Place over documents", question, Point("documents of a call", documents))

    def latency(self, question: Question) -> Case:
        """Calls of one client that wait for each other."""
        size = len(question.answer)

        segments = self.asking.segments(question.documents)
        order = replace(self._order(question), kind="stub")
        stub = Load(self.quiet, order, self.clients, 1)
        client = Load(self.quiet, replace(order, kind="client", segments=segments), self.clients, 1)
        loads = {
            "echo, plain stub": stub.to(self.bare, echo_path(size), bytes(size)),
            "plain stub": stub,
            "mmpos.client": client,
        }

        def facts() -> Mapping[str, float]:
            return {f"{name}: 99th percentile, ms": _p99(load.turns) * 1e3 for name, load in loads.items()}

        roles = (Role.LIMIT, Role.PART, Role.OURS)
        contestants = tuple(
            Contestant(name, load, role, question.proof)
            for (name, load), role in zip(loads.items(), roles, strict=True)
        )
        return Case(
            "latency at one in flight",
            question.name,
            contestants,
            question.work,
            "documents",
            budget=self.sizes.budget,
            facts=facts,
            timer=by_latency,
        )

    def by_h2load(self, question: Question) -> Case:
        """The same load by a client that takes less of the machine."""
        size, sizes = len(question.answer), self.sizes

        def load(server: ServerProcess, path: str) -> H2Load:
            return H2Load(server, path, question.request, size, sizes.h2load, self.clients.count, sizes.in_flight)

        contestants = (
            Contestant("echo", load(self.bare, echo_path(size)), Role.LIMIT),
            Contestant("mmpos", load(self.quiet, question.path), proof=question.proof),
        )
        return Case(
            "calls at once, by h2load",
            question.name,
            contestants,
            question.work,
            "documents",
            budget=sizes.budget,
            timer=by_rate,
        )

    def _at_once(self, group: str, question: Question, point: Point | None = None) -> Case:
        """Time per document while both clients keep several calls in flight, and what that comes to."""
        load = self._load(question)

        def facts() -> Mapping[str, float]:
            rate = statistics.median(turn.per_second for turn in load.turns[1:])
            cpu = statistics.median(turn.cpu for turn in load.turns[1:]) / question.documents
            return {
                "documents per second": rate * question.documents,
                "tokens per second": rate * question.tokens,
                "server CPU of a document, µs": cpu * 1e6,
            }

        contestants = (
            Contestant("echo", self._echoed(load, question), Role.LIMIT),
            Contestant("mmpos", load, proof=question.proof),
        )
        return Case(
            group,
            question.name,
            contestants,
            question.work,
            "documents",
            point,
            self.sizes.budget,
            facts,
            by_rate,
        )

    def _order(self, question: Question) -> Order:
        kind: Kind = "stream" if question.stream else "unary"
        in_flight = self.sizes.window if question.stream else self.sizes.in_flight
        asked = question.path, question.request, question.answer
        return Order(kind, self.quiet.address, *asked, self.sizes.seconds, in_flight)

    def _load(self, question: Question) -> Load:
        return Load(self.quiet, self._order(question), self.clients)

    def _echoed(self, load: Load, question: Question) -> Load:
        size = len(question.answer)
        return load.to(self.bare, echo_path(size, stream=question.stream), bytes(size))


def _p99(turns: list[Turn]) -> float:
    """Of all calls but those of the first turn."""
    latencies = list(chain.from_iterable(turn.latencies for turn in turns[1:]))
    return statistics.quantiles(latencies, n=100)[98] if len(latencies) > 1 else latencies[0]
