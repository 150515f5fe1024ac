"""The service: processor time against a bare echo, documents and tokens per second, latency; all in one run.

python benchmarks/bench_service.py                     as the server ships: malloc tuned
python benchmarks/bench_service.py --malloc default    both servers with the C library's own settings
python benchmarks/bench_service.py --quick             every path once on toy sizes
"""

import argparse
import os
import shlex
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from service_load import OPTIONS, Clients, Order, ServerProcess, measure, started

import mmpos
from mmpos.bench.machine import stamp
from mmpos.bench.timing import Timing
from mmpos.bench.workloads import workload
from mmpos.queries import Dense, PositionsQuery
from mmpos.rpc.v1 import positions_pb2, sequences_pb2
from mmpos.wire.parts import put_parts
from mmpos.wire.positions import get_result, put_query
from mmpos.wire.sequences import get_sequence
from mmpos_server.config import load
from mmpos_server.profiles import Profiles

POSITIONS, SEQUENCES = "/mmpos.rpc.v1.PositionService/", "/mmpos.rpc.v1.SequenceService/"
PHOTOS = Path(mmpos.__file__).parent / "photos"
# The server, kept from tuning malloc.
UNTUNED = (
    "from mmpos_server import __main__, malloc; malloc.keep_large_blocks = bool; raise SystemExit(__main__.main())"
)


@dataclass(frozen=True)
class Sizes:
    """How large and how long everything is."""

    tokens: int = 4096
    images: int = 4
    side: int = 24
    batches: tuple[int, int] = (64, 256)
    photographs: int = 8
    seconds: float = 1.0
    rounds: int = 11
    in_flight: int = 4
    window: int = 16


QUICK = Sizes(64, 1, 4, (4, 8), 2, 0.02, 2, 2, 4)


@dataclass(frozen=True)
class Case:
    """A request and the answer that was proved to be right, with what one such call is worth."""

    name: str
    path: str
    request: bytes
    answer: bytes
    documents: int
    tokens: int

    def order(self, server: ServerProcess, in_flight: int) -> Order:
        """The order to call it."""
        return Order(
            "stream" if "/Stream" in self.path else "unary",
            server.address,
            self.path,
            self.request,
            self.answer,
            in_flight=in_flight,
        )


class Asking:
    """Calls of the server, each compared with what the same question gives in process.

    Args:
        channel: to the server.
        sizes: of documents.
    """

    def __init__(self, channel: grpc.Channel, sizes: Sizes) -> None:
        self._channel, self._sizes = channel, sizes
        self._builder = Profiles.from_config(load()).default.builder

    def segments(self, documents: int) -> mmpos.SegmentTable:
        """So many documents."""
        sizes = self._sizes
        return mmpos.SegmentTable.from_documents(workload(documents, sizes.tokens, sizes.images, sizes.side))

    def place(self, documents: int, *, dense: bool = False, stream: bool = False) -> Case:
        """Positions of so many documents."""
        name = f"{'StreamPlace, items of' if stream else 'Place,'} {counted(documents)}{', dense ids' if dense else ''}"
        segments = self.segments(documents)
        query = PositionsQuery(segments, dense=Dense() if dense else None)
        request: Any = (positions_pb2.StreamPlaceRequest if stream else positions_pb2.PlaceRequest)()
        put_query(request.query, query)
        path = POSITIONS + ("StreamPlace" if stream else "Place")
        raw, sent = self._ask(path, request)
        kind = positions_pb2.StreamPlaceResponse if stream else positions_pb2.PlaceResponse
        check(name, get_result("positions", kind.FromString(raw).positions), query.run())
        return Case(name, path, sent, raw, documents, segments.num_tokens)

    def text(self, documents: int) -> Case:
        """Sequences of so many documents of text, a token per letter."""
        return self._build("of text", [["a bird " * (self._sizes.tokens // 7)]] * documents)

    def photographs(self, documents: int) -> Case:
        """Sequences of so many documents with two photographs, pixels wanted."""
        cat, cup = ((PHOTOS / f"{name}.jpg").read_bytes() for name in ("chelsea", "coffee"))
        return self._build("with 2 photographs", [["A cat: ", cat, " and a cup: ", cup]] * documents, patches=True)

    def _build(self, what: str, documents: list[list[Any]], *, patches: bool = False) -> Case:
        name = f"Build, {counted(len(documents))} {what}"
        request = sequences_pb2.BuildRequest()
        request.query.patches = patches
        for document in documents:
            put_parts(request.query.documents.add(), document)
        raw, sent = self._ask(f"{SEQUENCES}Build", request)
        results = sequences_pb2.BuildResponse.FromString(raw).sequences.results
        tokens = 0
        for document, result in zip(documents, results, strict=True):
            wanted = self._builder.build(document)
            check(name, get_sequence("sequence", result.sequence), wanted)
            tokens += wanted.input_ids.size
        return Case(name, f"{SEQUENCES}Build", sent, raw, len(documents), tokens)

    def _ask(self, path: str, request: Any) -> tuple[bytes, bytes]:
        sent = request.SerializeToString()
        if "/Stream" not in path:
            unary: Any = self._channel.unary_unary(path)
            return unary(sent, timeout=60), sent
        stream: Any = self._channel.stream_stream(path)
        (raw,) = stream(iter([sent]), timeout=60)
        return raw, sent


def counted(documents: int) -> str:
    """As people say it."""
    return "1 document" if documents == 1 else f"{documents} documents"


def check(name: str, got: Any, want: Any) -> None:
    """Equality before timing, of every field and every number."""
    assert type(got) is type(want), f"{name}: got a {type(got).__name__}, want a {type(want).__name__}"
    if is_dataclass(want):
        for field in fields(want):
            check(f"{name}, {field.name}", getattr(got, field.name), getattr(want, field.name))
    elif isinstance(want, np.ndarray):
        assert got.dtype == want.dtype, f"{name}: got {got.dtype}, want {want.dtype}"
        assert np.array_equal(got, want), f"{name}: got other numbers"
    else:
        assert got == want, f"{name}: got {got!r}, want {want!r}"


def judged(values: list[float], target: float, *, at_most: bool) -> str:
    """Ratios of all rounds beside their target."""
    found = Timing.of(values)
    met = found.median <= target if at_most else found.median >= target
    text = f"{found.median:.2f}× ({found.p20:.2f}–{found.p80:.2f})"
    return f"{text}, target at {'most' if at_most else 'least'} {target:g}×: {'met' if met else 'missed'}"


def against_echo(contestants: dict[str, ServerProcess], cases: list[Case], clients: Clients, sizes: Sizes) -> None:
    """Processor time of each call, in turns with a servicer that only answers as many bytes."""
    print(f"\nserver CPU per call, µs; {clients.count} client processes, each with {sizes.in_flight} calls in flight")
    for case, target in zip(cases, (2.0, 1.3, None), strict=True):
        size = len(case.answer)
        orders = {who: (server, case.order(server, sizes.in_flight)) for who, server in contestants.items()}
        echo = contestants["echo"]
        bare = replace(orders["echo"][1], path=f"/echo/Bytes{size}", answer=bytes(size))
        found = measure(clients, orders | {"echo": (echo, bare)}, sizes.seconds, sizes.rounds)
        print(f"{case.name}: {len(case.request):,} bytes in, {size:,} out")
        for who, rounds in found.items():
            spent = [turn.cpu for turn in rounds]
            ratios = [one / base.cpu for one, base in zip(spent, found["echo"], strict=True)]
            told = f"{statistics.median(ratios):.2f}×" if target is None else judged(ratios, target, at_most=True)
            print(f"  {who:<24} {Timing.of(spent).micros:>28} {'' if who == 'echo' else told}")


def throughput(server: ServerProcess, groups: list[list[Case]], clients: Clients, sizes: Sizes) -> None:
    """Documents and tokens per second of unary, batched and stream calls; the first case of a group is its base."""
    print("\nper second, median (20th–80th percentile); server CPU per document, µs")
    print(f"{'':<44} {'documents/s':>28} {'tokens/s':>14} {'CPU':>8}  documents/s by unary")
    for group in groups:
        orders = {
            case.name: (server, case.order(server, sizes.window if "/Stream" in case.path else sizes.in_flight))
            for case in group
        }
        found = measure(clients, orders, sizes.seconds, sizes.rounds)
        rates = {case.name: [case.documents * turn.per_second for turn in found[case.name]] for case in group}
        for case in group:
            rate = Timing.of(rates[case.name])
            cpu = statistics.median(turn.cpu for turn in found[case.name]) / case.documents * 1e6
            ratios = [one / base for one, base in zip(rates[case.name], rates[group[0].name], strict=True)]
            batched = case.path == f"{POSITIONS}Place" and case.documents > 1
            told = judged(ratios, 20, at_most=False) if batched else f"{statistics.median(ratios):.2f}×"
            cell = f"{rate.median:,.0f} ({rate.p20:,.0f}–{rate.p80:,.0f})"
            tokens = rate.median * case.tokens / case.documents
            print(f"{case.name:<44} {cell:>28} {tokens:>14,.0f} {cpu:>8,.1f}  {told}")


def latency(server: ServerProcess, echo: ServerProcess, case: Case, segments: mmpos.SegmentTable, sizes: Sizes) -> None:
    """Milliseconds of calls that wait for each other, from one client process."""
    print("\nlatency at one in flight, ms: median of all calls, (20th–80th percentile of the rounds' medians), p99")
    stub, size = replace(case.order(server, 1), kind="stub"), len(case.answer)
    orders = {
        "echo, plain stub": replace(stub, address=echo.address, path=f"/echo/Bytes{size}", answer=bytes(size)),
        "Place, plain stub": stub,
        "Place, mmpos.client": replace(stub, kind="client", segments=segments),
    }
    with Clients(1) as client:
        found = measure(client, {who: (server, order) for who, order in orders.items()}, sizes.seconds, sizes.rounds)
    for who, turns in found.items():
        spread = Timing.of([statistics.median(turn.latencies) for turn in turns])
        p50, *_, p99 = statistics.quantiles(chain.from_iterable(turn.latencies for turn in turns), n=100)[49:99]
        print(f"  {who:<24} {p50 * 1e3:.3f} ({spread.p20 * 1e3:.3f}–{spread.p80 * 1e3:.3f}), p99 {p99 * 1e3:.3f}")


def run(sizes: Sizes, malloc: str) -> None:
    """Prove equality, measure and print."""
    serve = [sys.executable, *(["-m", "mmpos_server"] if malloc == "tuned" else ["-c", UNTUNED]), "--port", "0"]
    few, many = sizes.batches
    with ExitStack() as stack:
        quiet = stack.enter_context(started(*serve, "--log-level", "warning"))
        logging = stack.enter_context(started(*serve))
        with grpc.insecure_channel(quiet.address, options=OPTIONS) as channel:
            asking = Asking(channel, sizes)
            one, batch, dense = asking.place(1), asking.place(few), asking.place(few, dense=True)
            placing = [one, batch, asking.place(many), *(asking.place(n, stream=True) for n in (1, few))]
            texts = [asking.text(n) for n in (1, few)]
            photographs = [asking.photographs(n) for n in (1, sizes.photographs)]
        lengths = [str(len(case.answer)) for case in (one, batch, dense)]
        script = str(Path(__file__).parent / "echo_server.py")
        echo = stack.enter_context(started(sys.executable, script, "--malloc", malloc, *lengths))
        contestants = {"echo": echo, "Place": quiet, "Place, requests logged": logging}
        with Clients(2) as clients:
            against_echo(contestants, [one, batch, dense], clients, sizes)
            throughput(quiet, [placing, texts, photographs], clients, sizes)
        latency(quiet, echo, one, asking.segments(1), sizes)


def main() -> None:
    """Read the command line, say where and how this ran, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--malloc", choices=["default", "tuned"], default="tuned", help="of both servers")
    parser.add_argument("--quick", action="store_true", help="toy sizes, every path once")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    print(f"{stamp('default')}, {os.cpu_count()} cores, grpcio {grpc.__version__}, malloc {options.malloc}")
    print(f"python {shlex.join(sys.argv)}; {sizes.rounds} rounds of {sizes.seconds:g} s in which all take turns")
    print(f"documents of {sizes.tokens:,} tokens, {sizes.images} images of {sizes.side}×{sizes.side}")
    run(sizes, options.malloc)


if __name__ == "__main__":
    main()
