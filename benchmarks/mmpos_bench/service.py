"""Service: processor time and calls per second, compared with echoing the same number of bytes."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from tempfile import NamedTemporaryFile

from mmpos.errors import UnsupportedError
from mmpos.positions.place import place
from mmpos.segments.table import SegmentTable
from mmpos.support.extras import needed_for
from mmpos_bench.suites import Comparison, Contestant, Lineup, Role, SuiteOptions, giving, limit
from mmpos_bench.timing import Budget, Call, Timer
from mmpos_bench.workloads import workload

with needed_for("the service suite", extra="server"):
    import grpc

    from mmpos.client import Client
    from mmpos_bench.questions import Asking, Question
    from mmpos_bench.serving import (
        OPTIONS,
        Load,
        Order,
        ServerProcess,
        ask,
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
        yield from _Suite(sizes, server, bare, pool, asking).cases(quick=options.quick)
        if find_spec("torch") is not None:
            yield from stack.enter_context(_rotations(bare.address, sizes))


@dataclass(frozen=True)
class _Suite:
    """Server and client processes, and the cases that put load on a server."""

    sizes: ServiceSizes
    server: ServerProcess
    bare: ServerProcess  # echo server
    pool: ProcessPoolExecutor  # two clients
    asking: Asking  # asks the server

    def cases(self, *, quick: bool) -> Iterator[Comparison]:
        """Yield every case."""
        ask, few = self.asking, self.sizes.batch
        for question in (ask.place(1), ask.place(few), ask.place(few, dense=True)):
            yield self.case("server CPU of a call", question, self.processor, by_cpu)
        questions = [partial(ask.place, documents, stream=stream) for stream in (False, True) for documents in (1, few)]
        questions += [partial(ask.text, documents) for documents in (1, few)]
        questions += [partial(ask.photographs, documents) for documents in (1, self.sizes.photographs)]
        for question_of in questions:
            yield self.case("calls at once", question_of(), self.at_once, by_rate)

    def case(self, group: str, question: Question, line_up: Callable[[Question], Lineup], timer: Timer) -> Comparison:
        """Return the comparison for a question."""
        budget = Budget(0.0, self.sizes.rounds)
        return Comparison(group, question.name, partial(line_up, question), "documents", budget=budget, timer=timer)

    def processor(self, question: Question) -> Lineup:
        """Line up the processor time of a call."""
        ours = self.load(question)
        contestants = (
            limit("echo", self.echoed(ours, question)),
            Contestant("mmpos", ours, proof=question.proof),
        )
        return Lineup(contestants, question.work)

    def at_once(self, question: Question) -> Lineup:
        """Line up the time per document while both clients keep several calls in flight."""
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
        """Return a load from both clients on the server, each with several calls or stream items in flight."""
        in_flight = self.sizes.window if question.stream else self.sizes.in_flight
        order = Order(question.path, question.request, question.answer, self.sizes.seconds, in_flight)
        return Load(self.server, order, self.pool, 2)

    def echoed(self, load: Load, question: Question) -> Load:
        """Return the same load on the echo server, with answers of the same size."""
        size = len(question.answer)
        return load.to(self.bare, echo_path(size, stream=question.stream), bytes(size))


_LARGE = 2**26
"""Maximum bytes of a request with large tensors."""


@contextmanager
def _rotations(bare: str, sizes: ServiceSizes) -> Iterator[list[Comparison]]:
    """Run a server for large tensors and yield the cases of its rotations; ``bare`` is the echo server's address."""
    with NamedTemporaryFile("w", suffix=".toml") as settings, ExitStack() as stack:
        settings.write(f"request_bytes = {_LARGE}\n")
        settings.flush()
        (server,) = stack.enter_context(started(service("--config", settings.name, "--rotations")))
        client = stack.enter_context(Client(server.address, timeout=120))
        channel = stack.enter_context(grpc.insecure_channel(bare, options=OPTIONS))
        name, line_up = f"{sizes.tokens:,} tokens of 32 + 8 heads", partial(_rotated, client, channel, sizes)
        budget = Budget(0.0, sizes.rounds)
        yield [Comparison("a rotation of 128 channels in bfloat16", name, line_up, "calls", budget=budget)]


def _rotated(client: Client, channel: grpc.Channel, sizes: ServiceSizes) -> Lineup:
    """Line up rotating q and k in process, rotating them in the service, and echoing the same number of bytes.

    Rotating into new tensors spends most of its time on new memory pages. The in-process rotation is therefore measured
    both with reused memory and with new tensors, and the facts include the size of new pages. The service returns new
    tensors.
    """
    import torch

    from mmpos.rotary import Rotary, apply_rotary

    generator = torch.Generator().manual_seed(0)
    table = place(SegmentTable.from_documents(workload(1, sizes.tokens, sizes.images, sizes.side)), "rope-tie")
    q, k = (torch.randn(table.num_tokens, heads, 128, generator=generator).bfloat16() for heads in (32, 8))
    rotary, used = Rotary(128, axes=2), (q.clone(), k.clone())
    raw = bytes(q.nbytes + k.nbytes)

    def bits(pair: tuple[torch.Tensor, torch.Tensor | None]) -> tuple[object, ...]:
        return tuple(x.view(torch.int16) for x in pair if x is not None)  # numpy has no bfloat16

    in_process = partial(apply_rotary, q, k, table, rotary)
    want = bits(in_process())
    contestants = (
        limit("in process, used memory", partial(apply_rotary, *used, table, rotary, inplace=True)),
        giving("in process, new tensors", in_process, want, Role.PART, bits),
        giving("mmpos", partial(client.apply_rotary, q, k, table, rotary), want, read=bits),
        giving("echo of messages", partial(ask, channel, echo_path(len(raw)), raw), raw, Role.PART),
    )
    work = {"calls": 1, "tokens": table.num_tokens, "bytes": 2 * len(raw)}
    return Lineup(contestants, work, lambda: {"MiB of new pages in process": _new_pages(in_process) / 2**20})


def _new_pages(call: Call) -> int:
    """Return the size, in bytes, of the memory pages that this process first touches during a call."""
    import resource  # not available on Windows

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize()
