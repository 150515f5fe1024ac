"""Measure every way at every size, on the device or the host, or launch each between the marks of a profiler.

A process of its own: what breaks a CUDA context breaks no more than this one, which is then started anew and goes on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mmpos_bench.cuda import Clock, synchronize
from mmpos_bench.gpu.journal import Journal, numbers
from mmpos_bench.gpu.ways import WAYS, Size, Way, Work, peers, refreshed
from mmpos_bench.timing import Timing

BROKEN = 75
"""Exit status of a process whose CUDA context is lost."""

_ROUNDS = 15
_HOST_TOKENS, _HOST_CALLS, _HOST_ROUNDS = 64, 100, 9

# Those that decide first: a call that is cut off by the clock has them.
SIZES = (
    *(Size("7B layer", tokens) for tokens in (8192, 2048, 256, 64, 16, 1)),
    Size("7B layer", 256, 256),
    Size("72B layer", 8192),
    Size("vision encoder", 8192),
    Size("7B layer", 32768),
    Size("72B layer", 256),
    Size("vision encoder", 2048),
    Size("7B layer", 21504),
    Size("72B layer", 2048),
    Size("7B layer", 8192, 512),
    Size("7B layer", 131072),
    Size("72B layer", 32768),
    Size("vision encoder", 32768),
)
DRY_SIZES = (Size("7B layer", 8),)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def speeds(journal: Journal, sizes: tuple[Size, ...], every: list[Way], late: Callable[[], bool]) -> None:
    """Time every way at every size by the clock of the device."""
    clock = Clock()
    for size in sizes:
        if late():
            journal.write("note", text=f"out of time before {size}")
            return
        if all(journal.has("speed", f"{size}: {way.name}") for way in every if size.tokens <= way.most):
            continue
        work = Work(size, DEVICE)
        for way in every:
            if size.tokens <= way.most and not late():
                _attempt(journal, "speed", f"{size}: {way.name}", partial(_speed, way, work, clock))
        del work
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


def _speed(way: Way, work: Work, clock: Clock) -> dict[str, Any]:
    call = way.make(work)
    facts: dict[str, Any] = {"way": way.name, "role": way.role.value, "shape": work.size.shape}
    facts |= {"tokens": work.size.tokens, "documents": work.size.documents}
    if call is None:
        return facts | {"left_out": True}
    way.check(work, call)
    timing = clock.timing([partial(call, i) for i in range(len(work.sets))], _ROUNDS if DEVICE == "cuda" else 2)
    return facts | {"bytes": way.moved(work), "sets": len(work.sets), **_microseconds(timing)}


def _microseconds(timing: Timing) -> dict[str, float]:
    values = {"us": timing.median, "p20": timing.p20, "p80": timing.p80}
    return dict(numbers({name: 1e6 * value for name, value in values.items()}))


def hosts(journal: Journal, late: Callable[[], bool], dry: bool) -> None:
    """Time what the host spends on a call whose kernel is shorter than that."""
    work = Work(Size("7B layer", 8 if dry else _HOST_TOKENS), DEVICE, sets=1)
    calls: dict[str, Callable[[int], Any]] = dict(refreshed(work))
    for way in WAYS:
        call = way.make(work)
        if call is not None:
            calls[way.name] = call
    rounds, count = (2, 1) if dry else (_HOST_ROUNDS, _HOST_CALLS)
    for name, call in calls.items():
        if not late():
            _attempt(journal, "host", name, partial(_host, call, rounds, count))


def _host(call: Callable[[int], Any], rounds: int, count: int) -> dict[str, float]:
    spent = []
    for turn in range(rounds + 1):  # the first compiles
        synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call(0)
        if turn:
            spent.append((time.perf_counter() - begin) / count)
    return _microseconds(Timing.of(spent))


def launched(size: Size, names: list[str], warm: int) -> None:
    """Launch ways once between the marks of a profiler."""
    work = Work(size, DEVICE, sets=1)
    calls = [call for way in WAYS if way.name in names or not names if (call := way.make(work)) is not None]
    for _ in range(warm):
        for call in calls:
            call(0)
    synchronize()
    if DEVICE == "cuda":
        torch.cuda.profiler.start()
    for call in calls:
        call(0)
    synchronize()
    if DEVICE == "cuda":
        torch.cuda.profiler.stop()


def _attempt(journal: Journal, kind: str, name: str, work: Callable[[], Any]) -> None:
    """Attempt some work; where the CUDA context is lost with it, end this process."""
    if journal.attempt(kind, name, work):
        return
    try:
        synchronize()
    except RuntimeError:
        sys.exit(BROKEN)


def everyone(journal: Journal, folder: Path | None) -> Iterator[Way]:
    """Yield ours and those peers that are here."""
    yield from WAYS

    def missing(name: str, why: str) -> None:
        if not journal.has("missing", name):
            journal.write("missing", name=name, why=why)

    yield from peers(folder, missing)


def main() -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m mmpos_bench.gpu.measure", description=__doc__)
    parser.add_argument("what", choices=["speed", "host", "launch"])
    parser.add_argument("--journal", type=Path, help="the file of results")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start nothing new after so many")
    parser.add_argument("--peers", type=Path, help="the folder of what was brought along")
    parser.add_argument("--dry", action="store_true", help="toy sizes, for the interpreter")
    parser.add_argument("--way", action="append", default=[], help="launch these; none are all of ours")
    parser.add_argument("--shape", default="7B layer")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=1)
    parser.add_argument("--warm", type=int, default=2)
    options = parser.parse_args()
    begin = time.monotonic()

    def late() -> bool:
        return time.monotonic() - begin > options.seconds

    if options.what == "launch":
        launched(Size(options.shape, options.tokens, options.documents), options.way, options.warm)
        return
    journal = Journal(options.journal)
    if options.what == "host":
        hosts(journal, late, options.dry)
    else:
        speeds(journal, DRY_SIZES if options.dry else SIZES, list(everyone(journal, options.peers)), late)


if __name__ == "__main__":
    main()
