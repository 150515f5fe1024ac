"""Suites of cases: contestants that do the same work, each proved before any is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import TypeVar

from mmpos.errors import InvalidInputError
from mmpos.support.checks import one_of
from mmpos_bench.machine import MALLOCS, set_malloc, stamp
from mmpos_bench.proofs import NotEqualError, equal
from mmpos_bench.results import Entry, Measurement, Point, Report
from mmpos_bench.timing import Budget, Call, Tick, Timer, compare

SUITES: Mapping[str, str] = MappingProxyType(
    {
        "positions": "from lists, spans and token ids to dense ids",
        "images": "from the bytes of photographs to patches",
        "rotary": "rotations of q and k, forward and backward",
        "data": "from examples to batches and packs, from tar shards to batches",
        "service": "calls of the service, beside a bare echo",
    }
)
"""Every suite, which is the module mmpos_bench.<name>, and its subject."""

FULL, QUICK = Budget(0.5, 21), Budget(0.0, 2)

T = TypeVar("T")

Watch = Callable[[str, int, int], None]
"""Receives the title of the case under way, the rounds done, and the rounds there are."""


class Role(StrEnum):
    """The part of a contestant in a comparison."""

    LIMIT = "limit"  # what the machine can do at best: a fill, a copy, an echo
    OURS = "ours"  # compared with the limit and with every peer
    PART = "part"  # one stage of ours: compared with the limit alone
    PEER = "peer"


@dataclass(frozen=True)
class Contestant:
    """One way to do the work of a case."""

    name: str  # in tables, at most about 30 characters
    call: Call  # does the work once
    role: Role = Role.OURS
    proof: Callable[[], object] | None = None  # raises NotEqualError if the call is wrong; only a limit may lack it

    def __post_init__(self) -> None:
        if self.proof is None and self.role is not Role.LIMIT:
            raise InvalidInputError(f"contestant {self.name!r}: got no proof, want one: equality comes before timing")


def limit(name: str, call: Call) -> Contestant:
    """Make the contestant that the others are measured by."""
    return Contestant(name, call, Role.LIMIT)


def giving(
    name: str,
    call: Callable[[], T],
    want: object,
    role: Role = Role.OURS,
    read: Callable[[T], object] = lambda result: result,
    at_most: float = 0.0,
) -> Contestant:
    """Make a contestant whose call must give some result; read makes what is compared with it."""
    return Contestant(name, call, role, lambda: equal(read(call()), want, at_most))


@dataclass(frozen=True)
class Lineup:
    """The contestants of a case, at most one of them the limit, with the arrays that they work on."""

    contestants: Sequence[Contestant]
    work: Mapping[str, int]  # of one call, such as {"tokens": 4096, "bytes": 32768}
    facts: Callable[[], Mapping[str, float]] = dict  # numbers beside the times, asked for once after the timing

    def __post_init__(self) -> None:
        names = [contestant.name for contestant in self.contestants]
        if len(set(names)) < len(names):
            raise InvalidInputError(f"contestants: got {names}, want names that differ")
        if sum(contestant.role is Role.LIMIT for contestant in self.contestants) > 1:
            raise InvalidInputError("contestants: got several limits, want at most one")


@dataclass(frozen=True)
class Case:
    """A measurement to make."""

    group: str  # the heading under which cases are shown together, and the panel of a curve
    name: str  # of this case within its group
    line_up: Callable[[], Lineup]  # makes the contestants when it is their turn
    unit: str = "tokens"  # the key of work by which times are divided in tables
    point: Point | None = None  # on the curve of the group
    budget: Budget = FULL
    timer: Timer = compare

    @property
    def title(self) -> str:
        """Group and name."""
        return f"{self.group}: {self.name}"

    def measure(self, budget: Budget, tick: Tick) -> Measurement:
        """Prove all contestants, then time them.

        Raises:
            NotEqualError: naming the case by its title, and the contestant that differs, before anything is timed.
            InvalidInputError: the contestants do not say how much of the unit they do.
        """
        lineup = self.line_up()
        if self.unit not in lineup.work:
            raise InvalidInputError(f"{self.title}: got work {sorted(lineup.work)}, want {self.unit!r} among it")
        for each in lineup.contestants:
            try:
                if each.proof is not None:
                    each.proof()
            except NotEqualError as error:
                raise NotEqualError(f"{self.title}, {each.name}: {error}") from None
        times = self.timer({each.name: each.call for each in lineup.contestants}, budget, tick)
        entries = tuple(Entry(each.name, each.role.value, times[each.name]) for each in lineup.contestants)
        facts = dict(lineup.facts())
        return Measurement(self.group, self.name, entries, dict(lineup.work), self.unit, self.point, facts)


class Options:
    """The options of a run that suites heed, and the peers that were missing.

    Args:
        quick: toy sizes, every path once; the figures mean nothing.
        peers: whether other projects take part, those that are installed.
        malloc: the setting of this process, which suites that start others give to them.
    """

    def __init__(self, *, quick: bool = False, peers: bool = False, malloc: str = "default") -> None:
        self.quick, self.peers, self.malloc = quick, peers, malloc
        self.missing: dict[str, str] = {}

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


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in the middle of a run.

    Args:
        report: the figures of the cases that were done.
    """

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report


def run(
    suite: str,
    *,
    peers: bool = False,
    quick: bool = False,
    malloc: str = "default",
    only: str = "",
    watch: Watch = lambda title, done, rounds: None,
) -> Report:
    """Run a suite on this machine.

    Args:
        suite: a name from SUITES.
        peers: whether installed peers take part; those that are missing are named in the report.
        quick: toy sizes, every path once.
        malloc: "default" or "tuned"; tuned stays for the rest of the process.
        only: measure only cases whose group and name contain this.
        watch: called before each case, and after every round.

    Raises:
        InvalidInputError: an unknown suite or malloc, or no such case.
        Interrupted: Ctrl-C after the first case was done.
        NotEqualError: a contestant gives other results than it should.
        UnsupportedError: malloc cannot be tuned here.
        ImportError: the suite needs a library that is not installed.
    """
    one_of("suite", suite, tuple(SUITES))
    one_of("malloc", malloc, MALLOCS)
    set_malloc(malloc)
    options = Options(quick=quick, peers=peers, malloc=malloc)
    cases: Callable[[Options], Iterator[Case]] = import_module(f"mmpos_bench.{suite}").cases
    words = ["mmpos bench", suite, "--peers" * peers, "--quick" * quick, f"--malloc {malloc}"]
    command = " ".join(filter(None, [*words, f"--only {only!r}" * bool(only)]))
    measurements: list[Measurement] = []

    def report(interrupted: bool) -> Report:
        return Report(suite, command, quick, stamp(malloc), tuple(measurements), options.missing, interrupted)

    try:
        for case in cases(options):
            if only in case.title:
                watch(case.title, 0, 1)
                measurements.append(case.measure(QUICK if quick else case.budget, partial(watch, case.title)))
    except KeyboardInterrupt:
        if not measurements:
            raise
        raise Interrupted(report(interrupted=True)) from None
    if not measurements:
        raise InvalidInputError(f"only: got {only!r}, want part of the name of a case")
    return report(interrupted=False)
