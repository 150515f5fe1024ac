"""Suites of comparisons: contestants that do the same work, each proved before any is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import TypeVar

from mmpos.errors import InvalidInputError
from mmpos.support.checks import one_of
from mmpos_bench.machine import MALLOCS, set_malloc, stamp
from mmpos_bench.proofs import NotEqualError, equal
from mmpos_bench.results import Measurement, SuiteReport, Timed
from mmpos_bench.timing import Budget, Call, Tick, Timer, compare

SUITES: Mapping[str, str] = MappingProxyType(
    {
        "positions": "from lists, spans and token ids to dense ids",
        "images": "from the bytes of photographs to patches",
        "rotary": "rotations of q and k, forward and backward",
        "data": "from examples to batches and packs",
        "service": "calls of the service, beside a bare echo",
    }
)
"""Every suite, which is the module mmpos_bench.<name> with a function ``cases(options)``, and its subject."""

FULL, QUICK = Budget(0.5, 21), Budget(0.0, 2)

T = TypeVar("T")

Watch = Callable[[str, int, int], None]
"""Receives the title of the comparison under way, the rounds done, and the rounds there are."""

Attempt = Callable[[str, Callable[[], object]], bool]
"""Does some work of a name, and tells whether it went well."""


class Role(StrEnum):
    """The part of a contestant in a comparison."""

    LIMIT = "limit"  # what the machine can do at best: a fill, a copy, an echo
    OURS = "ours"  # compared with the limit and with every peer
    PART = "part"  # one stage of ours: compared with the limit alone
    PEER = "peer"


@dataclass(frozen=True)
class Contestant:
    """One way to do the work of a comparison."""

    name: str  # in tables, at most about 30 characters
    call: Call  # does the work once
    proof: Callable[[], object]  # raises NotEqualError if the call is wrong
    role: Role = Role.OURS


def giving(
    name: str,
    call: Callable[[], T],
    want: object,
    role: Role = Role.OURS,
    read: Callable[[T], object] = lambda result: result,
    at_most: float = 0.0,
) -> Contestant:
    """Make a contestant whose call must give some result; read makes what is compared with it."""
    return Contestant(name, call, lambda: equal(read(call()), want, at_most), role)


def limit(name: str, call: Call) -> Contestant:
    """Make the contestant that the others are measured by, of whose results nothing is claimed."""
    return Contestant(name, call, lambda: None, Role.LIMIT)


@dataclass(frozen=True)
class Lineup:
    """The contestants of a comparison, at most one of them the limit, with the arrays that they work on."""

    contestants: Sequence[Contestant]
    work: Mapping[str, int]  # of one call, such as {"tokens": 4096, "bytes": 32768}
    facts: Callable[[], Mapping[str, float]] = dict  # numbers beside the times, asked for once after the timing


def strictly(name: str, work: Callable[[], object]) -> bool:
    """Do some work, and name it in the error if a contestant is wrong: nothing of the comparison is timed then.

    Raises:
        NotEqualError: the work raised it.
    """
    try:
        work()
    except NotEqualError as error:
        raise NotEqualError(f"{name}: {error}") from None
    return True


@dataclass(frozen=True)
class Comparison:
    """A measurement to make."""

    group: str  # the heading under which comparisons are shown together
    name: str  # of this one within its group
    line_up: Callable[[], Lineup]  # makes the contestants when it is their turn
    unit: str = "tokens"  # the key of work by which times are divided in tables
    budget: Budget = FULL
    timer: Timer = compare

    @property
    def title(self) -> str:
        """Group and name."""
        return f"{self.group}: {self.name}"

    def measure(self, budget: Budget, tick: Tick, attempt: Attempt = strictly) -> Measurement:
        """Prove all contestants, then time them in turn; those whose proof the attempt excuses are left out.

        Raises:
            NotEqualError: naming the comparison by its title, and the contestant that differs.
        """
        lineup = self.line_up()
        proved = [each for each in lineup.contestants if attempt(f"{self.title}, {each.name}", each.proof)]
        times = self.timer({each.name: each.call for each in proved}, budget, tick)
        timed = tuple(Timed(each.name, each.role.value, times[each.name]) for each in proved)
        work = dict(lineup.work)
        return Measurement(self.group, self.name, timed, work, self.unit, dict(lineup.facts()))


@dataclass
class SuiteOptions:
    """The options of a run that suites heed, and the peers that were missing."""

    quick: bool = False  # toy sizes, every path once; the figures mean nothing
    peers: bool = False  # whether other projects take part, those that are installed
    malloc: str = "default"  # the setting of this process, which suites that start others give to them
    missing: dict[str, str] = field(default_factory=dict)  # why, by peer

    def peer(self, name: str, load: Callable[[], T]) -> T | None:
        """Load a peer, which load imports; None where peers are not wanted, or where this one is missing."""
        if not self.peers:
            return None
        try:
            return load()
        # Peers of other versions may lack names, and fail in their own ways while they are imported.
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
    watch: Watch = lambda title, done, rounds: None,
) -> SuiteReport:
    """Run a suite on this machine; Ctrl-C ends it after the comparisons that were done.

    Args:
        suite: a name from SUITES.
        peers: whether installed peers take part; those that are missing are named in the report.
        quick: toy sizes, every path once.
        malloc: "default" or "tuned"; tuned stays for the rest of the process.
        only: measure only comparisons whose group and name contain this.
        watch: called before each comparison, and after every round.

    Raises:
        InvalidInputError: an unknown suite or malloc, or no such comparison.
        KeyboardInterrupt: Ctrl-C before the first comparison was done.
        NotEqualError: a contestant gives other results than it should.
        UnsupportedError: malloc cannot be tuned here.
        ImportError: the suite needs a library that is not installed.
    """
    one_of("suite", suite, tuple(SUITES))
    one_of("malloc", malloc, MALLOCS)
    set_malloc(malloc)
    options = SuiteOptions(quick=quick, peers=peers, malloc=malloc)
    cases: Callable[[SuiteOptions], Iterator[Comparison]] = import_module(f"mmpos_bench.{suite}").cases
    words = ["mmpos bench", suite, "--peers" * peers, "--quick" * quick, f"--malloc {malloc}"]
    command = " ".join(filter(None, [*words, f"--only {only!r}" * bool(only)]))
    measurements: list[Measurement] = []
    interrupted = False
    try:
        for case in cases(options):
            if only in case.title:
                watch(case.title, 0, 1)
                measurements.append(case.measure(QUICK if quick else case.budget, partial(watch, case.title)))
    except KeyboardInterrupt:
        if not measurements:
            raise
        interrupted = True
    if not measurements:
        raise InvalidInputError(f"only: got {only!r}, want part of the name of a case")
    return SuiteReport(suite, command, quick, stamp(malloc), tuple(measurements), options.missing, interrupted)
