"""The service: its processor time and calls per second, against a bare echo of as many bytes."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from tempfile import NamedTemporaryFile

from mmpos.errors import UnsupportedError
from mmpos.positions.place import place
from mmpos.segments.kinds import Grid, Text
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import counted
from mmpos.support.extras import needed_for
from mmpos_bench.suites import Comparison, Contestant, Lineup, Role, SuiteOptions, giving, limit
from mmpos_bench.timing import Budget, Timer

with needed_for("the service suite", extra="server"):
    import grpc

    from mmpos.client import Client
    from mmpos_bench.questions import Asking, Question
    from mmpos_bench.serving import (
        OPTIONS,
        PHOTOGRAPHS,
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
    from mmpos_server.config import Profiles, load

_LARGE = 2**29  # bytes of a request, and of shared memory, where tensors are large


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

    @property
    def budget(self) -> Budget:
        """Of a case."""
        return Budget(self.seconds * self.rounds, self.rounds)


QUICK = ServiceSizes(64, 1, 4, 4, 2, 0.02, 2, 2, 4)


def cases(options: SuiteOptions) -> Iterator[Comparison]:
    """Yield every case; the servers and two client processes share the machine."""
    if sys.platform != "linux":
        raise UnsupportedError(f"service: got {sys.platform}, want Linux, which tells the processor time of a server")
    sizes = QUICK if options.quick else ServiceSizes()
    with ExitStack() as stack:
        settings = stack.enter_context(NamedTemporaryFile("w", suffix=".toml"))
        settings.write(f"[limits]\nrequest_bytes = {_LARGE}\n")
        settings.flush()
        sharing = ("--config", settings.name, "--shared-memory", f"mmpos-bench-{os.getpid()}-")
        silent = ("--log-level", "warning")
        # Each takes seconds to start: a quick run makes do with one, which logs.
        ours = [sharing] if options.quick else [(*sharing, *silent), (), silent]
        commands = [echo(options.malloc), *(service(options.malloc, *words) for words in ours)]
        bare, large, *more = stack.enter_context(started(*commands))
        logging, quiet = more or (large, large)
        channel = stack.enter_context(grpc.insecure_channel(quiet.address, options=OPTIONS))
        pool = stack.enter_context(clients(2))
        asking = Asking(channel, sizes.tokens, sizes.images, sizes.side)
        yield from _Suite(sizes, quiet, logging, bare, pool, asking).cases(quick=options.quick)
        plain = stack.enter_context(Client(large.address, timeout=120))
        shares = stack.enter_context(Client(large.address, timeout=120, shared_memory=_LARGE))
        yield from _sharing(plain, shares, sizes)


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
        made, budget = partial(line_up, question), self.sizes.budget
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


def _sharing(plain: Client, shares: Client, sizes: ServiceSizes) -> Iterator[Comparison]:
    """Yield calls with large tensors: in messages, and in shared memory, against the same work in process."""
    group = "large tensors, one call at a time"
    if find_spec("torch") is not None:
        name = f"Rotate, {sizes.tokens:,} tokens of 32 + 8 heads of 128 in bfloat16"
        yield Comparison(group, name, partial(_rotated, plain, shares, sizes.tokens), "calls", budget=sizes.budget)
    name = f"Build, {counted(sizes.photographs, 'document')} with 2 photographs"
    yield Comparison(group, name, partial(_built, plain, shares, sizes.photographs), "calls", budget=sizes.budget)


def _rotated(plain: Client, shares: Client, tokens: int) -> Lineup:
    """Line up rotations of a model's q and k."""
    import torch

    from mmpos.rotary import Rotary, apply_rotary

    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(tokens, heads, 128, generator=generator).bfloat16() for heads in (32, 8))
    side = 4
    table = place(SegmentTable.from_documents([[Text(tokens - side**2 - 1), Grid(side, side), Text(1)]]))
    asked = (q, k, table, Rotary(128))

    def bits(pair: tuple[torch.Tensor, torch.Tensor | None]) -> tuple[object, ...]:
        return tuple(x.view(torch.int16) for x in pair if x is not None)  # numpy has no bfloat16

    here, want = partial(apply_rotary, *asked), bits(apply_rotary(*asked))
    contestants = (
        limit("in process", here),
        giving("mmpos, messages", partial(plain.apply_rotary, *asked), want, Role.PART, bits),
        giving("mmpos, shared memory", partial(shares.apply_rotary, *asked), want, read=bits),
    )
    return Lineup(contestants, {"calls": 1, "tokens": tokens, "bytes": 2 * (q.nbytes + k.nbytes)})


def _built(plain: Client, shares: Client, documents: int) -> Lineup:
    """Line up sequences with photographs."""
    asked = [["A cat: ", PHOTOGRAPHS[0], " and a cup: ", PHOTOGRAPHS[1]]] * documents
    here = partial(Profiles.from_config(load()).default.builder.build_batch, asked)
    want = tuple(here())
    contestants = (
        limit("in process", here),
        giving("mmpos, messages", partial(plain.build_batch, asked), want, Role.PART),
        giving("mmpos, shared memory", partial(shares.build_batch, asked), want),
    )
    patches = sum(sequence.patches.nbytes for sequence in want if sequence.patches is not None)
    size = sum(map(len, PHOTOGRAPHS)) * documents + patches
    return Lineup(contestants, {"calls": 1, "documents": documents, "bytes": size})
