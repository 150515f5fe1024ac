"""The service under more than it can do: overload, and everything at once for a long time.

python benchmarks/endurance.py                     overload, and a minute of everything
python benchmarks/endurance.py --soak 600 --json   ten minutes of everything; the figures kept in results/
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
from mmpos_bench.machine import stamp
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
    """The sizes and lengths of everything."""

    seconds: float = 20.0  # of each measurement of overload, of which the first fifth does not count
    times: float = 10.0  # the capacity, to load the server with
    tokens: int = 4096  # of a document
    batch: int = 64  # documents of a batch
    settling: float = 1.5  # seconds, longer than pools take to fill and a server to forget that it refused calls
    clients: int = 2  # who do everything at once


TOY = Scale(0.5, 1.0, 64, 2, 0.3, 1)


def overload(question: Question, server: ServerProcess, pool: ProcessPoolExecutor, scale: Scale) -> Result:
    """Ask for more than the server can do, and see what becomes of probes, a tenth of its capacity.

    Milliseconds count from the time at which a call was due.

    Raises:
        ServiceError: no probe is answered.
    """
    question.proof()
    asked = server.address, question.path, question.request
    few = Load(server, Order(question.path, question.request, question.answer, scale.seconds / 2, 4), pool)
    capacity = max((few() for _ in range(2)), key=lambda turn: turn.per_second).per_second
    rate = max(capacity / 10, 20 / scale.seconds)  # so that there are some, however short the time
    calm = pool.submit(flood, *asked, rate, scale.seconds).result()
    sleep(scale.settling)
    lasts = scale.settling + scale.seconds + scale.settling
    load = pool.submit(flood, *asked, max(capacity * scale.times - rate, 1.0), lasts)
    sleep(scale.settling)
    busy = pool.submit(flood, *asked, rate, scale.seconds).result()
    offered = len(load.result()) / lasts + rate
    calm, busy = ([call for call in calls if call.due >= scale.seconds / 5] for calls in (calm, busy))
    unloaded = [call.seconds for call in calm if call.status == "OK"]
    accepted = [call.seconds for call in busy if call.status == "OK"]
    refused = [call.seconds for call in busy if call.status != "OK"]
    if not accepted or not unloaded:
        raise ServiceError(f"{question.name}: got no answer at all, want some")
    statuses = Counter(call.status for call in busy)
    return {
        "name": question.name,
        "capacity": round(capacity, 1),  # answers per second, with a few calls always in flight
        "offered": round(offered, 1),  # calls per second
        "unloaded_p99": percentile(unloaded, 99),  # milliseconds at a tenth of the capacity
        "accepted_p50": percentile(accepted, 50),  # of those that are answered under overload
        "accepted_p99": percentile(accepted, 99),
        "refused_p99": percentile(refused, 99) if refused else 0.0,
        "statuses": {status: round(count / len(busy), 4) for status, count in sorted(statuses.items())},
        "probes": len(busy),
    }


def percentile(seconds: Sequence[float], percent: int) -> float:
    """Compute milliseconds."""
    return round(1000 * float(np.percentile(seconds, percent)), 2)


def overloaded(scale: Scale) -> list[Result]:
    """Overload a server with each kind of call; server and clients have a core each if there are two."""
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        with on_core(cores[0]):
            (server,) = stack.enter_context(started(service("tuned", "--log-level", "warning")))
        stack.enter_context(on_core(cores[-1]))
        channel = stack.enter_context(grpc.insecure_channel(server.address, options=OPTIONS))
        side = max(1, int(scale.tokens**0.5) * 3 // 8)
        asking = Asking(channel, scale.tokens, 4 if side > 1 else 1, side)
        questions = asking.place(1), asking.place(scale.batch, dense=True), asking.photographs(1)
        pool = stack.enter_context(clients(2))
        return [overload(question, server, pool, scale) for question in questions]


def soak(seconds: float, scale: Scale) -> Result:
    """Load a new server with everything at once, and read its memory every second; the first half warms up."""
    with started(service("tuned", "--shared-memory", "mmpos-soak-")) as (server,), clients(scale.clients) as pool:
        asked = [pool.submit(everything, server.address, seconds, seed) for seed in range(scale.clients)]
        began, samples = monotonic(), []
        while not all(each.done() for each in asked):
            samples.append((monotonic() - began, server.memory()))
            sleep(min(1.0, seconds / 40))
        outcomes = sum((each.result() for each in asked), Counter[str]())
        peak = server.memory("VmHWM")
    counts = [sample for sample in samples if sample[0] >= samples[-1][0] / 2]
    grown, error = slope(counts)
    tenth = max(1, len(counts) // 10)
    return {
        "seconds": round(samples[-1][0], 1),  # under load
        "counted": round(counts[-1][0] - counts[0][0], 1),  # of them, at the end, from which the slope comes
        "calls": outcomes.total(),  # a stream being one
        "outcomes": dict(sorted(outcomes.items())),  # how often each deed had which
        "first": round(median(held for _, held in counts[:tenth]), 1),  # MiB, as all that follows
        "last": round(median(held for _, held in counts[-tenth:]), 1),
        "peak": round(peak, 1),
        "slope": round(3600 * grown, 1),  # per hour, by least squares
        "error": round(3600 * error, 1),  # its standard error
    }


def slope(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit the memory that is held more after each second, and its standard error, to ten means of neighbours: memory of
    one second resembles that of the next.
    """
    size = max(1, len(samples) // 10)
    blocks = [np.mean(samples[i : i + size], axis=0) for i in range(0, len(samples) - size + 1, size)]
    times, held = np.array(blocks).T
    (line, _), covariance = np.polyfit(times, held, 1, cov=True)
    return round(float(line), 9), round(float(np.sqrt(covariance[0, 0])), 9)


def flat(soaked: Result) -> bool:
    """Tell whether memory grew by less than 2 % in the time that counts, or by less than twice the error."""
    growth = soaked["slope"] * soaked["counted"] / 3600
    return bool(growth <= 0.02 * soaked["first"] or soaked["slope"] <= 2 * soaked["error"])


# The head of every column, and its cell of a result.
Columns = Mapping[str, Callable[[Result], str]]

OVERLOAD: Columns = {
    "under overload": lambda one: one["name"],
    "answers per second, at most": lambda one: f"{one['capacity']:,.0f}",
    "offered per second": lambda one: f"{one['offered']:,.0f}",
    "p99 unloaded, ms": lambda one: f"{one['unloaded_p99']:.1f}",
    "p50 accepted, ms": lambda one: f"{one['accepted_p50']:.1f}",
    "p99 accepted, ms": lambda one: f"{one['accepted_p99']:.1f}",
    "of unloaded": lambda one: f"{one['accepted_p99'] / one['unloaded_p99']:.1f}×",
    "p99 of a refusal, ms": lambda one: f"{one['refused_p99']:.1f}",
    "statuses": lambda one: ", ".join(f"{name} {100 * share:.0f} %" for name, share in one["statuses"].items()),
}
SOAK: Columns = {
    "everything at once, seconds": lambda one: f"{one['seconds']:,.0f}",
    "deeds": lambda one: f"{one['calls']:,}",
    "MiB at half-time": lambda one: f"{one['first']:,.0f}",
    "MiB in the end": lambda one: f"{one['last']:,.0f}",
    "MiB at most": lambda one: f"{one['peak']:,.0f}",
    "slope, MiB per hour": lambda one: f"{one['slope']:.0f} ± {one['error']:.0f}",
    "flat": lambda one: "yes" if flat(one) else "no",
}


def table(columns: Columns, results: Iterable[Result]) -> Rows:
    """Make the head and a row for every result."""
    return [list(columns), *([cell(one) for cell in columns.values()] for one in results)]


def tables(kept: Result) -> tuple[Rows, ...]:
    """Make the tables of a file in results/."""
    return table(OVERLOAD, kept["overload"]), table(SOAK, [kept["soak"]])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, show, and keep if told so; ends with 1 if memory grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--soak", type=float, default=60.0, help="seconds of everything at once")
    parser.add_argument("--quick", action="store_true", help="toy sizes: the figures mean nothing")
    parser.add_argument("--json", action="store_true", help="keep the figures in results/")
    asked = parser.parse_args(arguments)
    scale = TOY if asked.quick else Scale()
    machine = stamp("tuned")
    kept: dict[str, Any] = {
        "command": " ".join(["benchmarks/endurance.py", *sys.argv[1:]]),
        "machine": asdict(machine),
        "overload": overloaded(scale),
        "soak": soak(asked.soak, scale),
    }
    print("\n".join(map(markdown, tables(kept))))
    if asked.json:
        write_text(RESULTS / f"{machine.name}.endurance.json", json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    if not flat(kept["soak"]):
        raise SystemExit(1)


if __name__ == "__main__":
    try:
        main()
    except MmposError as error:
        raise SystemExit(f"endurance: error: {error}") from None
