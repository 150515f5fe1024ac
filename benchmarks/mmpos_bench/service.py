"""The service: its processor time, calls per second and latency, against a bare echo of as many bytes."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from tempfile import NamedTemporaryFile
from typing import Any

from mmpos.errors import UnsupportedError
from mmpos.positions.place import place
from mmpos.segments.kinds import Grid, Text
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import counted
from mmpos.support.extras import needed_for
from mmpos_bench.proofs import equal, holds
from mmpos_bench.results import Point
from mmpos_bench.suites import Case, Contestant, Lineup, Options, Role
from mmpos_bench.timing import Budget, Timer

with needed_for("the service suite", extra="server"):
    import grpc

    from mmpos.client import Client
    from mmpos_bench.serving.echo import echo_path
    from mmpos_bench.serving.h2load import H2Load
    from mmpos_bench.serving.loads import Load, by_cpu, by_latency, by_rate
    from mmpos_bench.serving.orders import OPTIONS, Clients, Order
    from mmpos_bench.serving.processes import ServerProcess, echo, service, started
    from mmpos_bench.serving.questions import PHOTOGRAPHS, Asking, Question
    from mmpos_server.config import Profiles, load

__all__ = ["cases"]

_LARGE = 2**29  # bytes of a request, and of shared memory, where tensors are large


@dataclass(frozen=True)
class Sizes:
    """Sizes and durations; seconds are those of a turn."""

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


QUICK = Sizes(64, 1, 4, 4, (1, 4), 2, 0.02, 2, 2, 4, 20)


def cases(options: Options) -> Iterator[Case]:
    """Every case of the suite; the servers and two client processes share the machine."""
    if sys.platform != "linux":
        raise UnsupportedError(f"service: got {sys.platform}, want Linux, which tells the processor time of a server")
    sizes = QUICK if options.quick else Sizes()
    with ExitStack() as stack:
        settings = stack.enter_context(NamedTemporaryFile("w", suffix=".toml"))
        settings.write(f"[limits]\nrequest_bytes = {_LARGE}\n")
        settings.flush()
        sharing = ("--config", settings.name, "--shared-memory", f"mmpos-bench-{os.getpid()}-")
        silent = ("--log-level", "warning")
        if options.quick:  # each takes seconds to start: a quick run makes do with one, which logs
            commands = [echo(options.malloc), service(options.malloc, *sharing)]
        else:
            ours = ((*sharing, *silent), (), silent)
            commands = [echo(options.malloc), *(service(options.malloc, *words) for words in ours)]
        bare, large, *more = stack.enter_context(started(*commands))
        logging, quiet = more or (large, large)
        channel = stack.enter_context(grpc.insecure_channel(quiet.address, options=OPTIONS))
        clients = stack.enter_context(Clients(2))
        asking = Asking(channel, sizes.tokens, sizes.images, sizes.side)
        yield from Suite(sizes, quiet, logging, bare, clients, asking).cases(quick=options.quick)
        plain = stack.enter_context(Client(large.address, timeout=120))
        shares = stack.enter_context(Client(large.address, timeout=120, shared_memory=_LARGE))
        yield from _sharing(plain, shares, sizes)


@dataclass(frozen=True)
class Suite:
    """The processes, and the cases that they are for.

    Args:
        sizes: of everything.
        quiet: our server.
        logging: our server as it ships, which logs every request.
        bare: the echo server.
        clients: load them.
        asking: asks the quiet one.
    """

    sizes: Sizes
    quiet: ServerProcess
    logging: ServerProcess
    bare: ServerProcess
    clients: Clients
    asking: Asking

    def cases(self, *, quick: bool) -> Iterator[Case]:
        """Every case that loads a server."""
        ask, few = self.asking, self.sizes.batch
        for question in (ask.place(1), ask.place(few), ask.place(few, dense=True)):
            yield self._case("server CPU of a call", question, self._processor, by_cpu)
        asked = [partial(ask.place, documents, stream=stream) for stream in (False, True) for documents in (1, few)]
        asked += [partial(ask.text, documents) for documents in (1, few)]
        asked += [partial(ask.photographs, documents) for documents in (1, self.sizes.photographs)]
        for make in asked:
            yield self._case("calls at once", make(), self._at_once, by_rate)
        for documents in self.sizes.curve:
            point = Point("documents of a call", documents)
            yield self._case("Place over documents", ask.place(documents), self._at_once, by_rate, point)
        yield self._case("latency at one in flight", ask.place(1), self._latency, by_latency)
        if H2Load.found() and not quick:
            for question in (each(documents) for each in (ask.place, ask.infer) for documents in (1, few)):
                yield self._case("calls at once, by h2load", question, self._by_h2load, by_rate)

    def _case(
        self,
        group: str,
        question: Question,
        line_up: Callable[[Question], Lineup],
        timer: Timer,
        point: Point | None = None,
    ) -> Case:
        budget = Budget(self.sizes.seconds * self.sizes.rounds, self.sizes.rounds)
        return Case(group, question.name, partial(line_up, question), "documents", point, budget, timer)

    def _processor(self, question: Question) -> Lineup:
        """Processor time of a call."""
        ours = self._load(question)
        logging = ours.to(self.logging, question.path, question.answer)
        proof = partial(question.answered_by, self.logging.address)
        contestants = (
            Contestant("echo", self._echoed(ours, question), Role.LIMIT),
            Contestant("mmpos", ours, proof=question.proof),
            Contestant("mmpos, requests logged", logging, Role.PART, proof),
        )
        return Lineup(contestants, question.work)

    def _at_once(self, question: Question) -> Lineup:
        """Time per document while both clients keep several calls in flight, and what that comes to."""
        ours = self._load(question)

        def facts() -> Mapping[str, float]:
            rate = statistics.median(turn.per_second for turn in ours.turns[1:])
            cpu = statistics.median(turn.cpu for turn in ours.turns[1:]) / question.documents
            return {
                "documents per second": rate * question.documents,
                "tokens per second": rate * question.tokens,
                "server CPU of a document, µs": cpu * 1e6,
            }

        echoed = Contestant("echo", self._echoed(ours, question), Role.LIMIT)
        return Lineup((echoed, Contestant("mmpos", ours, proof=question.proof)), question.work, facts)

    def _latency(self, question: Question) -> Lineup:
        """Calls of one client that wait for each other."""
        size = len(question.answer)
        order, segments = replace(self._order(question), kind="stub"), self.asking.segments(question.documents)
        stub = Load(self.quiet, order, self.clients, 1)
        client = Load(self.quiet, replace(order, kind="client", segments=segments), self.clients, 1)
        loads = {
            "echo, plain stub": (stub.to(self.bare, echo_path(size), bytes(size)), Role.LIMIT),
            "plain stub": (stub, Role.PART),
            "mmpos.client": (client, Role.OURS),
        }

        def facts() -> Mapping[str, float]:
            return {f"{name}: 99th percentile, ms": _p99(load) * 1e3 for name, (load, _) in loads.items()}

        contestants = [Contestant(name, load, role, question.proof) for name, (load, role) in loads.items()]
        return Lineup(contestants, question.work, facts)

    def _by_h2load(self, question: Question) -> Lineup:
        """The load of `_at_once` by a client that takes less of the machine."""
        size, sizes = len(question.answer), self.sizes

        def load(server: ServerProcess, path: str) -> H2Load:
            return H2Load(server, path, question.request, size, sizes.h2load, self.clients.count, sizes.in_flight)

        contestants = (
            Contestant("echo", load(self.bare, echo_path(size)), Role.LIMIT),
            Contestant("mmpos", load(self.quiet, question.path), proof=question.proof),
        )
        return Lineup(contestants, question.work)

    def _order(self, question: Question) -> Order:
        asked = question.path, question.request, question.answer, self.sizes.seconds
        if question.stream:
            return Order("stream", self.quiet.address, *asked, self.sizes.window)
        return Order("unary", self.quiet.address, *asked, self.sizes.in_flight)

    def _load(self, question: Question) -> Load:
        return Load(self.quiet, self._order(question), self.clients)

    def _echoed(self, load: Load, question: Question) -> Load:
        size = len(question.answer)
        return load.to(self.bare, echo_path(size, stream=question.stream), bytes(size))


def _p99(load: Load) -> float:
    """Of all calls but those of the first turn."""
    latencies = list(chain.from_iterable(turn.latencies for turn in load.turns[1:]))
    return statistics.quantiles(latencies, n=100)[98] if len(latencies) > 1 else latencies[0]


def _sharing(plain: Client, shares: Client, sizes: Sizes) -> Iterator[Case]:
    """Calls with large tensors: in messages, and in shared memory, against the same work in process."""
    budget = Budget(sizes.seconds * sizes.rounds, sizes.rounds)
    named: dict[str, Callable[[], Lineup]] = {}
    if find_spec("torch") is not None:
        name = f"Rotate, {sizes.tokens:,} tokens of 32 + 8 heads of 128 in bfloat16"
        named[name] = partial(_rotate, plain, shares, sizes.tokens)
    name = f"Build, {counted(sizes.photographs, 'document')} with 2 photographs"
    named[name] = partial(_build, plain, shares, sizes.photographs)
    for name, line_up in named.items():
        yield Case("large tensors, one call at a time", name, line_up, "calls", budget=budget)


def _rotate(plain: Client, shares: Client, tokens: int) -> Lineup:
    """Rotations of a model's q and k."""
    import torch

    from mmpos.rotary import Rotary, apply_rotary

    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(tokens, heads, 128, generator=generator).bfloat16() for heads in (32, 8))
    side = 4
    table = place(SegmentTable.from_documents([[Text(tokens - side**2 - 1), Grid(side, side), Text(1)]]))
    asked = (q, k, table, Rotary(128))
    want: Any = apply_rotary(*asked)

    def prove(call: Callable[[], Any]) -> None:
        for got, wanted in zip(call(), want, strict=True):
            equal(got.view(torch.int16), wanted.view(torch.int16))  # numpy has no bfloat16

    work = {"calls": 1, "tokens": tokens, "bytes": 2 * (q.nbytes + k.nbytes)}
    return _three_ways(partial(apply_rotary, *asked), plain.apply_rotary, shares.apply_rotary, asked, prove, work)


def _build(plain: Client, shares: Client, documents: int) -> Lineup:
    """Sequences with photographs."""
    asked = [["A cat: ", PHOTOGRAPHS[0], " and a cup: ", PHOTOGRAPHS[1]]] * documents
    builder = Profiles.from_config(load()).default.builder
    want = builder.build_batch(asked)

    def prove(call: Callable[[], Any]) -> None:
        sequences = call()
        holds(len(sequences) == len(want), f"{len(sequences)} sequences", len(want))
        for got, wanted in zip(sequences, want, strict=True):
            equal(got.input_ids, wanted.input_ids)
            equal(got.patches, wanted.patches)

    patches = sum(sequence.patches.nbytes for sequence in want if sequence.patches is not None)
    work = {"calls": 1, "documents": documents, "bytes": sum(map(len, PHOTOGRAPHS)) * documents + patches}
    here = partial(builder.build_batch, asked)
    return _three_ways(here, plain.build_batch, shares.build_batch, (asked,), prove, work)


def _three_ways(
    here: Callable[[], object],
    plain: Callable[..., object],
    shares: Callable[..., object],
    asked: tuple[object, ...],
    prove: Callable[[Callable[[], Any]], None],
    work: dict[str, int],
) -> Lineup:
    in_messages, in_memory = partial(plain, *asked), partial(shares, *asked)
    contestants = (
        Contestant("in process", here, Role.LIMIT),
        Contestant("mmpos, messages", in_messages, Role.PART, partial(prove, in_messages)),
        Contestant("mmpos, shared memory", in_memory, Role.OURS, partial(prove, in_memory)),
    )
    return Lineup(contestants, work)
