"""Suites of comparisons: contestants do the same work, and all results are checked before timing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from enum import StrEnum
from importlib import import_module
from types import MappingProxyType
from typing import TypeVar

from mmpos.errors import InvalidInputError
from mmpos.support.checks import one_of
from mmpos_bench.machine import MALLOCS, set_malloc, stamp
from mmpos_bench.measured import code_of
from mmpos_bench.proofs import NotEqualError, equal
from mmpos_bench.results import Measurement, SuiteReport, Timed
from mmpos_bench.timing import Budget, Call, Timer, compare

SUITES: Mapping[str, str] = MappingProxyType(
    {
        "positions": "from lists, spans and token ids to dense ids",
        "images": "from the bytes of photographs to patches",
        "rotary": "rotations of q and k, forward and backward",
        "data": "from examples to batches and packs",
        "service": "calls to the service, compared with an echo",
    }
)
"""Subjects by suite; a suite is the module mmpos_bench.<name> with a function ``cases(options)``."""

FULL, QUICK = Budget(0.5, 21), Budget(0.0, 2)

T = TypeVar("T")

Attempt = Callable[[str, Callable[[], object]], bool]
"""Function that does a named piece of work and returns whether it succeeded."""


class Role(StrEnum):
    """Role of a contestant in a comparison."""

    LIMIT = "limit"  # the best that the machine can do: a fill, a copy, an echo
    OURS = "ours"  # compared with the limit and with every peer
    PART = "part"  # one stage of ours, compared only with the limit
    PEER = "peer"


@dataclass(frozen=True)
class Contestant:
    """One implementation of a comparison's work."""

    name: str  # name in tables, at most about 30 characters
    call: Call  # does the work once
    proof: Callable[[], object]  # raises NotEqualError if the result of the call is wrong
    role: Role = Role.OURS


def giving(
    name: str,
    call: Callable[[], T],
    want: object,
    role: Role = Role.OURS,
    read: Callable[[T], object] = lambda result: result,
    at_most: float = 0.0,
) -> Contestant:
    """Return a contestant whose call must return ``want``, after conversion by ``read``."""
    return Contestant(name, call, lambda: equal(read(call()), want, at_most), role)


def limit(name: str, call: Call) -> Contestant:
    """Return a comparison's limit, whose results are not checked."""
    return Contestant(name, call, lambda: None, Role.LIMIT)


@dataclass(frozen=True)
class Lineup:
    """The contestants of a comparison, including at most one limit."""

    contestants: Sequence[Contestant]
    work: Mapping[str, int]  # work of one call, such as {"tokens": 4096, "bytes": 32768}
    facts: Callable[[], Mapping[str, float]] = dict  # returns additional numbers; called once, after timing


def strictly(name: str, work: Callable[[], object]) -> bool:
    """Run the work; if a contestant's result is wrong, add the name of the work to the error.

    Raises:
        NotEqualError: the work raised NotEqualError, so its comparison is not timed.
    """
    try:
        work()
    except NotEqualError as error:
        raise NotEqualError(f"{name}: {error}") from None
    return True


@dataclass(frozen=True)
class Comparison:
    """Comparison that can be measured."""

    group: str  # heading under which comparisons are shown together
    name: str  # name within the group
    line_up: Callable[[], Lineup]  # creates the contestants when the comparison starts
    unit: str = "tokens"  # key of ``work`` whose value divides the times in tables
    budget: Budget = FULL
    timer: Timer = compare

    @property
    def title(self) -> str:
        """Group and name."""
        return f"{self.group}: {self.name}"

    def measure(self, budget: Budget, attempt: Attempt = strictly) -> Measurement:
        """Check the results of all contestants, then time those whose check succeeds under ``attempt``.

        Raises:
            NotEqualError: a contestant's result is wrong; the message names the comparison and the contestant.
        """
        lineup = self.line_up()
        proved = [one for one in lineup.contestants if attempt(f"{self.title}, {one.name}", one.proof)]
        times = self.timer({one.name: one.call for one in proved}, budget)
        timed = tuple(Timed(one.name, one.role.value, times[one.name]) for one in proved)
        work = dict(lineup.work)
        return Measurement(self.group, self.name, timed, work, self.unit, dict(lineup.facts()))


@dataclass
class SuiteOptions:
    """Options that a run passes to its suites, and the peers found missing."""

    quick: bool = False  # whether to run every path once with toy sizes, which makes the figures meaningless
    peers: bool = False  # whether installed peers take part
    missing: dict[str, str] = field(default_factory=dict)  # reason for each missing peer

    def peer(self, name: str, load: Callable[[], T]) -> T | None:
        """Return the peer that ``load`` imports, or None if peers are disabled or this one is missing."""
        if not self.peers:
            return None
        try:
            return load()
        # Other versions of a peer may lack some names, and imports may fail with any exception.
        except Exception as error:
            self.missing[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            return None


def run(
    suite: str,
    *,
    peers: bool = False,
    quick: bool = False,
    malloc: str = "default",
    only: str = "",
    watch: Callable[[str], None] = lambda title: None,
) -> SuiteReport:
    """Run a suite on this machine; Ctrl-C ends the run but keeps completed comparisons.

    Args:
        suite: a name from SUITES.
        peers: whether installed peers take part; the report names missing peers.
        quick: run every path once with toy sizes.
        malloc: "default" or "tuned"; the setting persists for the rest of the process.
        only: text that the title of a comparison must contain.
        watch: called with the title of each comparison before it is measured.

    Raises:
        InvalidInputError: the suite or malloc setting is unknown, or no title contains ``only``.
        KeyboardInterrupt: Ctrl-C was pressed before the first comparison was completed.
        NotEqualError: a contestant returned a wrong result.
        UnsupportedError: malloc cannot be tuned on this machine.
        ImportError: the suite requires a library that is not installed.
    """
    one_of("suite", suite, tuple(SUITES))
    one_of("malloc", malloc, MALLOCS)
    set_malloc(malloc)
    options = SuiteOptions(quick=quick, peers=peers)
    cases: Callable[[SuiteOptions], Iterator[Comparison]] = import_module(f"mmpos_bench.{suite}").cases
    words = ["mmpos bench", suite, "--peers" * peers, "--quick" * quick, f"--malloc {malloc}"]
    command = " ".join(filter(None, [*words, f"--only {only!r}" * bool(only)]))
    measurements: list[Measurement] = []
    interrupted = False
    try:
        for case in cases(options):
            if only in case.title:
                watch(case.title)
                measurements.append(case.measure(QUICK if quick else case.budget))
    except KeyboardInterrupt:
        if not measurements:
            raise
        interrupted = True
    if not measurements:
        raise InvalidInputError(f"only: got {only!r}, want part of a case's name")
    report = SuiteReport(suite, command, quick, stamp(malloc), tuple(measurements), options.missing, interrupted)
    return replace(report, date=date.today().isoformat(), code=code_of(suite))
