"""Test the service under overload, and under a long random mix of calls.

python benchmarks/endurance.py                     overload, and one minute of random calls
python benchmarks/endurance.py --soak 600 --json   ten minutes of random calls; writes the figures to results/
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from time import monotonic, sleep
from typing import Any

import grpc
import numpy as np
from pages import RESULTS

from mmpos.errors import MmposError, ServiceError
from mmpos.support.files import write_text
from mmpos_bench.machine import set_malloc, stamp
from mmpos_bench.questions import Asking, Question
from mmpos_bench.results import Rows, markdown
from mmpos_bench.serving import (
    OPTIONS,
    Load,
    Order,
    ServerProcess,
    clients,
    everything,
    flood,
    on_core,
    service,
    started,
)

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Scale:
    """Sizes and durations."""

    seconds: float = 20.0  # duration of each overload measurement; the first fifth is ignored
    times: float = 10.0  # offered load as a multiple of the capacity
    tokens: int = 4096  # tokens per document
    batch: int = 64  # documents per batch
    settling: float = 1.5  # seconds for pools to fill and for the server to recover after refusing calls
    clients: int = 2  # number of clients that make random calls


TOY = Scale(0.5, 1.0, 64, 2, 0.3, 1)


def overload(question: Question, server: ServerProcess, pool: ProcessPoolExecutor, scale: Scale) -> Result:
    """Overload the server and measure the latency of probes at a tenth of its capacity.

    Latencies, in milliseconds, are measured from the scheduled time of each call.

    Raises:
        ServiceError: no probe was answered.
    """
    question.proof()
    target = server.address, question.path, question.request
    few = Load(server, Order(question.path, question.request, question.answer, scale.seconds / 2, 4), pool)
    capacity = max((few() for _ in range(2)), key=lambda turn: turn.per_second).per_second
    rate = max(capacity / 10, 20 / scale.seconds)  # enough probes even in a short run
    calm = pool.submit(flood, *target, rate, scale.seconds).result()
    sleep(scale.settling)
    lasts = scale.settling + scale.seconds + scale.settling
    load = pool.submit(flood, *target, max(capacity * scale.times - rate, 1.0), lasts)
    sleep(scale.settling)
    busy = pool.submit(flood, *target, rate, scale.seconds).result()
    offered = len(load.result()) / lasts + rate
    calm, busy = ([call for call in calls if call.due >= scale.seconds / 5] for calls in (calm, busy))
    unloaded = [call.seconds for call in calm if call.status == "OK"]
    accepted = [call.seconds for call in busy if call.status == "OK"]
    refused = [call.seconds for call in busy if call.status != "OK"]
    if not accepted or not unloaded:
        raise ServiceError(f"{question.name}: got no answers")
    statuses = Counter(call.status for call in busy)
    return {
        "name": question.name,
        "capacity": round(capacity, 1),  # answers per second with four calls in flight
        "offered": round(offered, 1),  # calls per second
        "unloaded_p99": percentile(unloaded, 99),  # milliseconds, at a tenth of the capacity
        "accepted_p50": percentile(accepted, 50),  # probes answered under overload
        "accepted_p99": percentile(accepted, 99),
        "refused_p99": percentile(refused, 99) if refused else 0.0,
        "statuses": {status: round(count / len(busy), 4) for status, count in sorted(statuses.items())},
        "probes": len(busy),
    }


def percentile(seconds: Sequence[float], percent: int) -> float:
    """Compute a percentile in milliseconds."""
    return round(1000 * float(np.percentile(seconds, percent)), 2)


def overloaded(scale: Scale) -> list[Result]:
    """Overload a server with each kind of call; server and clients use separate cores if the machine has two."""
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        with on_core(cores[0]):
            (server,) = stack.enter_context(started(service("--log-level", "warning")))
        stack.enter_context(on_core(cores[-1]))
        channel = stack.enter_context(grpc.insecure_channel(server.address, options=OPTIONS))
        side = max(1, int(scale.tokens**0.5) * 3 // 8)
        asking = Asking(channel, scale.tokens, 4 if side > 1 else 1, side)
        questions = asking.place(1), asking.place(scale.batch, dense=True), asking.photographs(1)
        pool = stack.enter_context(clients(2))
        return [overload(question, server, pool, scale) for question in questions]


def soak(seconds: float, scale: Scale) -> Result:
    """Run random calls on a new server and sample its memory every second; the first half is a warm-up."""
    with started(service("--shared-memory", "mmpos-soak-")) as (server,), clients(scale.clients) as pool:
        futures = [pool.submit(everything, server.address, seconds, seed) for seed in range(scale.clients)]
        began, samples = monotonic(), []
        while not all(future.done() for future in futures):
            samples.append((monotonic() - began, server.memory()))
            sleep(min(1.0, seconds / 40))
        outcomes = sum((future.result() for future in futures), Counter[str]())
        peak = server.memory("VmHWM")
    counts = [sample for sample in samples if sample[0] >= samples[-1][0] / 2]
    grown, error = slope(counts)
    tenth = max(1, len(counts) // 10)
    return {
        "seconds": round(samples[-1][0], 1),  # duration of the load
        "counted": round(counts[-1][0] - counts[0][0], 1),  # seconds after the warm-up, used for the slope
        "calls": outcomes.total(),  # a stream counts as one call
        "outcomes": dict(sorted(outcomes.items())),  # number of calls by action and outcome
        "first": round(median(held for _, held in counts[:tenth]), 1),  # MiB, like all following values
        "last": round(median(held for _, held in counts[-tenth:]), 1),
        "peak": round(peak, 1),
        "slope": round(3600 * grown, 1),  # least-squares slope per hour
        "error": round(3600 * error, 1),  # standard error of the slope
    }


def slope(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit the memory growth per second, and its standard error, to the means of ten consecutive parts.

    Means are used because memory samples from consecutive seconds are correlated.
    """
    size = max(1, len(samples) // 10)
    blocks = [np.mean(samples[i : i + size], axis=0) for i in range(0, len(samples) - size + 1, size)]
    times, held = np.array(blocks).T
    (line, _), covariance = np.polyfit(times, held, 1, cov=True)
    return round(float(line), 9), round(float(np.sqrt(covariance[0, 0])), 9)


def flat(soaked: Result) -> bool:
    """Return whether memory grew by at most 2 % after the warm-up, or by at most twice the standard error."""
    growth = soaked["slope"] * soaked["counted"] / 3600
    return bool(growth <= 0.02 * soaked["first"] or soaked["slope"] <= 2 * soaked["error"])


# Column headers, and functions that format a result's cell in each column.
Columns = Mapping[str, Callable[[Result], str]]

OVERLOAD: Columns = {
    "under overload": lambda one: one["name"],
    "capacity, answers per second": lambda one: f"{one['capacity']:,.0f}",
    "offered per second": lambda one: f"{one['offered']:,.0f}",
    "p99 unloaded, ms": lambda one: f"{one['unloaded_p99']:.1f}",
    "p50 accepted, ms": lambda one: f"{one['accepted_p50']:.1f}",
    "p99 accepted, ms": lambda one: f"{one['accepted_p99']:.1f}",
    "accepted / unloaded": lambda one: f"{one['accepted_p99'] / one['unloaded_p99']:.1f}×",
    "p99 refused, ms": lambda one: f"{one['refused_p99']:.1f}",
    "statuses": lambda one: ", ".join(f"{name} {100 * share:.0f} %" for name, share in one["statuses"].items()),
}
SOAK: Columns = {
    "random calls, seconds": lambda one: f"{one['seconds']:,.0f}",
    "calls": lambda one: f"{one['calls']:,}",
    "MiB after half the time": lambda one: f"{one['first']:,.0f}",
    "MiB at the end": lambda one: f"{one['last']:,.0f}",
    "peak MiB": lambda one: f"{one['peak']:,.0f}",
    "slope, MiB per hour": lambda one: f"{one['slope']:.0f} ± {one['error']:.0f}",
    "flat": lambda one: "yes" if flat(one) else "no",
}


def table(columns: Columns, results: Iterable[Result]) -> Rows:
    """Return the header and a row for each result."""
    return [list(columns), *([cell(one) for cell in columns.values()] for one in results)]


def tables(kept: Result) -> tuple[Rows, ...]:
    """Return the tables of a file in results/."""
    return table(OVERLOAD, kept["overload"]), table(SOAK, [kept["soak"]])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the figures, writing them to a file with --json; exit with status 1 if memory grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--soak", type=float, default=60.0, help="seconds of random calls")
    parser.add_argument("--quick", action="store_true", help="toy sizes; the figures are meaningless")
    parser.add_argument("--json", action="store_true", help="write the figures to results/")
    options = parser.parse_args(arguments)
    set_malloc("tuned")
    scale = TOY if options.quick else Scale()
    machine = stamp("tuned")
    kept: dict[str, Any] = {
        "command": " ".join(["benchmarks/endurance.py", *sys.argv[1:]]),
        "machine": asdict(machine),
        "overload": overloaded(scale),
        "soak": soak(options.soak, scale),
    }
    print("\n".join(map(markdown, tables(kept))))
    if options.json:
        write_text(RESULTS / f"{machine.name}.endurance.json", json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    if not flat(kept["soak"]):
        raise SystemExit(1)


if __name__ == "__main__":
    try:
        main()
    except MmposError as error:
        raise SystemExit(f"endurance: error: {error}") from None
