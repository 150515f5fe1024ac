"""Measure device or host times of all launches at all sizes, or run launches between profiler marks.

This program runs in a separate process, which is restarted and continues if its CUDA context breaks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from mmpos.rotary import DevicePositions
from mmpos_bench.cuda import synchronize
from mmpos_bench.gpu import BROKEN, Kept
from mmpos_bench.results import Measurement, Timed
from mmpos_bench.rotary import Bench, Size, compared, launches
from mmpos_bench.suites import QUICK, Comparison, SuiteOptions
from mmpos_bench.timing import Call, Timing, in_turns

_HOST_TOKENS = 64


def speeds(kept: Kept, cases: Iterable[Comparison], late: Callable[[], bool], dry: bool) -> None:
    """Measure every comparison that has no figures yet, continuing after failures."""

    def attempt(name: str, work: Callable[[], object]) -> bool:
        done = kept.attempt(name, work)
        if not done:
            try:
                synchronize()
            except RuntimeError:  # the CUDA context is lost
                kept.interrupt()
                sys.exit(BROKEN)
        return done

    def measure(case: Comparison) -> None:
        kept.write(case.measure(QUICK if dry else case.budget, lambda done, rounds: None, attempt))

    for case in cases:
        if late():
            kept.report.missing[case.title] = "out of time"
        elif not kept.has(case.title):
            attempt(case.title, partial(measure, case))
    kept.write()


def host_times(
    bench: Bench, size: Size, only: Sequence[str] = (), rounds: int = 9, count: int = 100
) -> dict[str, Timing]:
    """Measure the host time of launches.

    Args:
        bench: creates the layers.
        size: size of the layer whose q and k are rotated.
        only: launches to measure, by group and name; empty means all.
        rounds: number of rounds after warm-up.
        count: calls per turn, fewer than a GPU's launch queue can hold.

    Returns:
        seconds per call by name.
    """
    layer = bench.layer(size, sets=1)
    calls: dict[str, Call] = {name: partial(call, 0) for name, call in launches(bench, size, only).items()}
    calls["a table to the device"] = partial(DevicePositions.from_table, layer.positions, layer.device)
    calls["a table refreshed"] = partial(layer.table.refresh, layer.positions)

    def seconds(call: Call) -> float:
        synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - begin) / count

    return in_turns(calls, rounds, 1, seconds, lambda done, of: None)  # the first round compiles


def hosts(kept: Kept, bench: Bench, dry: bool) -> None:
    """Measure the host time of calls with so few tokens that the host takes longer than the kernels."""
    size = Size("7B layer", 8 if dry else _HOST_TOKENS)
    times = host_times(bench, size, ("in place: mmpos, table",), 2, 1) if dry else host_times(bench, size)
    for name, timing in times.items():
        spread = {"20th percentile, µs": 1e6 * timing.p20, "80th percentile, µs": 1e6 * timing.p80}
        timed = (Timed("a call", "ours", timing),)
        kept.write(Measurement("the host", name, timed, {"calls": 1}, "calls", spread))


def launched(bench: Bench, size: Size, names: list[str], warm: int) -> None:
    """Run launches once between profiler marks."""
    calls = launches(bench, size, names).values()
    for _ in range(warm):
        for call in calls:
            call(0)
    synchronize()
    if torch.cuda.is_available():
        torch.cuda.profiler.start()
    for call in calls:
        call(0)
    synchronize()
    if torch.cuda.is_available():
        torch.cuda.profiler.stop()


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m mmpos_bench.gpu_launches", description=__doc__)
    parser.add_argument("what", choices=["speed", "host", "launch"])
    parser.add_argument("--kept", type=Path, help="the results file")
    parser.add_argument("--seconds", type=float, default=3600.0, help="do not start a measurement after this time")
    parser.add_argument("--dry", action="store_true", help="toy sizes, for the interpreter")
    parser.add_argument("--way", action="append", default=[], help="launches to run; default all of ours")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=1)
    parser.add_argument("--warm", type=int, default=0)
    arguments = parser.parse_args()
    begin = time.monotonic()
    bench = Bench("cuda" if torch.cuda.is_available() else "cpu", toy=not torch.cuda.is_available())
    if arguments.what == "launch":
        launched(bench, Size("7B layer", arguments.tokens, arguments.documents), arguments.way, arguments.warm)
    elif arguments.what == "host":
        hosts(Kept(arguments.kept), bench, arguments.dry)
    else:
        options, kept = SuiteOptions(quick=arguments.dry, peers=not arguments.dry), Kept(arguments.kept)
        options.missing = kept.report.missing
        cases = compared(bench, options)
        speeds(kept, cases, lambda: time.monotonic() - begin > arguments.seconds, arguments.dry)


if __name__ == "__main__":
    main()
