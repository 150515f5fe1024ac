"""Measure every way at every size, on the device or the host, or launch each between the marks of a profiler.

A process of its own: what breaks a CUDA context breaks no more than this one, which is then started anew and goes on.
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
    """Time every comparison that has no figures yet, and go on behind those that fail."""

    def attempt(name: str, work: Callable[[], object]) -> bool:
        done = kept.attempt(name, work)
        if not done:
            try:
                synchronize()
            except RuntimeError:  # the context is lost, and all that would follow with it
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
    """Time the host's part of launches.

    Args:
        bench: where the layers are made.
        size: of the layer whose q and k are rotated.
        only: launches by group and name; none are all.
        rounds: of turns that count.
        count: calls of a turn, fewer than the queue of launches of a GPU takes.

    Returns:
        seconds per call, by name.
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
    """Time what the host spends on a call whose kernel is shorter than that."""
    size = Size("7B layer", 8 if dry else _HOST_TOKENS)
    times = host_times(bench, size, ("in place: mmpos, table",), 2, 1) if dry else host_times(bench, size)
    for name, timing in times.items():
        spread = {"20th percentile, µs": 1e6 * timing.p20, "80th percentile, µs": 1e6 * timing.p80}
        timed = (Timed("a call", "ours", timing),)
        kept.write(Measurement("the host", name, timed, {"calls": 1}, "calls", spread))


def launched(bench: Bench, size: Size, names: list[str], warm: int) -> None:
    """Launch ways once between the marks of a profiler."""
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
    """Do what the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m mmpos_bench.gpu_launches", description=__doc__)
    parser.add_argument("what", choices=["speed", "host", "launch"])
    parser.add_argument("--kept", type=Path, help="the file of results")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start nothing new after so many")
    parser.add_argument("--dry", action="store_true", help="toy sizes, for the interpreter")
    parser.add_argument("--way", action="append", default=[], help="launch these; none are all of ours")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=1)
    parser.add_argument("--warm", type=int, default=0)
    asked = parser.parse_args()
    begin = time.monotonic()
    bench = Bench("cuda" if torch.cuda.is_available() else "cpu", toy=not torch.cuda.is_available())
    if asked.what == "launch":
        launched(bench, Size("7B layer", asked.tokens, asked.documents), asked.way, asked.warm)
    elif asked.what == "host":
        hosts(Kept(asked.kept), bench, asked.dry)
    else:
        options, kept = SuiteOptions(quick=asked.dry, peers=not asked.dry), Kept(asked.kept)
        options.missing = kept.report.missing
        cases = compared(bench, options)
        speeds(kept, cases, lambda: time.monotonic() - begin > asked.seconds, asked.dry)


if __name__ == "__main__":
    main()
