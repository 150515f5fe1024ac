"""Measure device times of all launches at all sizes, or run launches between profiler marks.

This program runs in a separate process, which is restarted and continues if its CUDA context breaks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from mmpos_bench.cuda import synchronize
from mmpos_bench.gpu import BROKEN, Kept
from mmpos_bench.rotary import Bench, Size, compared, launches
from mmpos_bench.suites import QUICK, Comparison, SuiteOptions


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
    parser.add_argument("what", choices=["speed", "launch"])
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
    else:
        options, kept = SuiteOptions(quick=arguments.dry, peers=not arguments.dry), Kept(arguments.kept)
        options.missing = kept.report.missing
        cases = compared(bench, options)
        speeds(kept, cases, lambda: time.monotonic() - begin > arguments.seconds, arguments.dry)


if __name__ == "__main__":
    main()
