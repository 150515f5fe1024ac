"""Which suites there are, and how one is run: a case at a time, proved and then timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import cast

from mmpos.errors import InvalidInputError
from mmpos.support.checks import one_of
from mmpos_bench.cases import Case, Later, Options
from mmpos_bench.machine import MALLOCS, set_malloc, stamp
from mmpos_bench.peers import Peers
from mmpos_bench.results import Report
from mmpos_bench.timing import Budget

__all__ = ["SUITES", "Watch", "run"]

SUITES: Mapping[str, str] = MappingProxyType(
    {
        "positions": "from lists, spans and token ids to dense ids",
        "images": "from the bytes of photographs to patches",
        "rotary": "rotations of q and k, forward and backward",
        "data": "from examples to batches and packs, from tar shards to batches",
        "service": "calls of the service, beside a bare echo",
    }
)
"""Every suite, which is the module mmpos_bench.<name>, and what it measures."""

FULL, QUICK = Budget(0.5, 21), Budget(0.0, 2)

Watch = Callable[[str, int, int], None]
"""Told what is being measured, the rounds done, and the rounds there are."""


def _unseen(title: str, done: int, rounds: int) -> None:
    pass


def run(
    suite: str,
    *,
    peers: bool = False,
    quick: bool = False,
    malloc: str = "default",
    only: str = "",
    watch: Watch = _unseen,
) -> Report:
    """Run one suite in this process.

    Args:
        suite: a name from SUITES.
        peers: whether installed peers take part; those that are missing are named in the report.
        quick: toy sizes, every path once.
        malloc: "default" or "tuned"; tuned stays for the rest of the process.
        only: measure only cases whose group and name contain this.
        watch: told before each case, and after every round.

    Returns:
        What was measured, and where.

    Raises:
        InvalidInputError: an unknown suite or malloc, or no such case.
        NotEqualError: a contestant gives other results than it should.
        UnsupportedError: malloc cannot be tuned here.
        ImportError: the suite needs a library that is not installed.
    """
    one_of("suite", suite, tuple(SUITES))
    one_of("malloc", malloc, MALLOCS)
    set_malloc(malloc)
    options = Options(quick, Peers(peers), malloc)
    cases = cast(Callable[[Options], Iterator[Case | Later]], import_module(f"mmpos_bench.{suite}").cases)
    measurements = []
    for found in cases(options):
        if only in found.title:
            watch(found.title, 0, 1)
            case = found.make() if isinstance(found, Later) else found
            measurements.append(case.measure(QUICK if quick else FULL, partial(watch, case.title)))
            del case  # its arrays make room for the next one's
    if not measurements:
        raise InvalidInputError(f"only: got {only!r}, want part of the name of a case")
    command = _command(suite, peers=peers, quick=quick, malloc=malloc, only=only)
    return Report(suite, command, quick, stamp(malloc), tuple(measurements), options.peers.missing)


def _command(suite: str, *, peers: bool, quick: bool, malloc: str, only: str) -> str:
    words = ["mmpos bench", suite, "--peers" * peers, "--quick" * quick, f"--malloc {malloc}"]
    words.append(f"--only {only!r}" if only else "")
    return " ".join(filter(None, words))
