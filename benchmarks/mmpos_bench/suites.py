"""Suites of cases: contestants that do the same work, each proved before any is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

from mmpos.errors import InvalidInputError
from mmpos.support.checks import one_of
from mmpos_bench.machine import MALLOCS, set_malloc, stamp
from mmpos_bench.peers import Peers
from mmpos_bench.proofs import NotEqualError, equal
from mmpos_bench.results import Entry, Measurement, Point, Report
from mmpos_bench.timing import Budget, Call, Tick, Timer, compare

__all__ = ["SUITES", "Case", "Contestant", "Lineup", "Options", "Role", "Watch", "giving", "run"]

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
"""Receives the title of what is measured, the rounds done, and the rounds there are."""


class Role(StrEnum):
    """The part of a contestant in a comparison."""

    LIMIT = "limit"  # what the machine can do at best: a fill, a copy, an echo
    OURS = "ours"  # compared with the limit and with every peer
    PART = "part"  # one stage of ours: compared with the limit alone
    PEER = "peer"


@dataclass(frozen=True)
class Contestant:
    """One way to do the work of a case.

    Args:
        name: in tables, at most about 30 characters.
        call: does the work once.
        role: its part in the comparison.
        proof: raises NotEqualError if the call gives something else than it should; only a limit may lack it.
    """

    name: str
    call: Call
    role: Role = Role.OURS
    proof: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        if self.proof is None and self.role is not Role.LIMIT:
            raise InvalidInputError(f"contestant {self.name!r}: got no proof, want one: equality comes before timing")


def giving(
    name: str, call: Callable[[], Any], want: Any, role: Role = Role.OURS, read: Callable[[Any], Any] | None = None
) -> Contestant:
    """Make a contestant whose call must give the values of an array; read takes them out of what it gives."""
    return Contestant(name, call, role, lambda: equal(call() if read is None else read(call()), want))


def _nothing() -> dict[str, float]:
    return {}


@dataclass(frozen=True)
class Lineup:
    """The contestants of a case, with the arrays that they work on.

    Args:
        contestants: at most one of them the limit.
        work: what one call does, such as {"tokens": 4096, "bytes": 32768}.
        facts: gives numbers beside the times, such as {"fill": 0.996}; called once after the timing.
    """

    contestants: Sequence[Contestant]
    work: Mapping[str, int]
    facts: Callable[[], Mapping[str, float]] = field(default=_nothing)

    def __post_init__(self) -> None:
        names = [contestant.name for contestant in self.contestants]
        if len(set(names)) < len(names):
            raise InvalidInputError(f"contestants: got {names}, want names that differ")
        if sum(contestant.role is Role.LIMIT for contestant in self.contestants) > 1:
            raise InvalidInputError("contestants: got several limits, want at most one")

    def prove(self, title: str) -> None:
        """Run every proof.

        Raises:
            NotEqualError: naming the case by its title, and the contestant that differs.
        """
        for contestant in self.contestants:
            if contestant.proof is not None:
                try:
                    contestant.proof()
                except NotEqualError as error:
                    raise NotEqualError(f"{title}, {contestant.name}: {error}") from None


@dataclass(frozen=True)
class Case:
    """A measurement to make.

    Args:
        group: the heading under which cases are shown together, and the panel of a curve.
        name: of this case within its group.
        line_up: makes the contestants when it is their turn.
        unit: the key of work by which times are divided in tables.
        point: where on a curve, if on one: cases of one group that have points are drawn as one curve.
        budget: how long to measure; None is the default of `run`.
        timer: times the calls.
    """

    group: str
    name: str
    line_up: Callable[[], Lineup]
    unit: str = "tokens"
    point: Point | None = None
    budget: Budget | None = None
    timer: Timer = compare

    @property
    def title(self) -> str:
        """Group and name."""
        return f"{self.group}: {self.name}"

    def measure(self, budget: Budget, tick: Tick) -> Measurement:
        """Prove all contestants, then time them.

        Args:
            budget: how long.
            tick: called after every round.

        Raises:
            NotEqualError: before anything is timed.
            InvalidInputError: the contestants do not say how much of the unit they do.
        """
        lineup = self.line_up()
        if self.unit not in lineup.work:
            raise InvalidInputError(f"{self.title}: got work {sorted(lineup.work)}, want {self.unit!r} among it")
        lineup.prove(self.title)
        times = self.timer({each.name: each.call for each in lineup.contestants}, budget, tick)
        entries = tuple(Entry(each.name, each.role.value, times[each.name]) for each in lineup.contestants)
        facts = dict(lineup.facts())
        return Measurement(self.group, self.name, entries, dict(lineup.work), self.unit, self.point, facts)


@dataclass(frozen=True)
class Options:
    """The options of a run that suites heed.

    Args:
        quick: toy sizes, every path once; the figures mean nothing.
        peers: where to ask for peers.
        malloc: the setting of this process, which suites that start others give to them.
    """

    quick: bool
    peers: Peers
    malloc: str = "default"


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
        watch: called before each case, and after every round.

    Returns:
        The figures, with the machine that they are from.

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
    cases: Callable[[Options], Iterator[Case]] = import_module(f"mmpos_bench.{suite}").cases
    measurements = []
    for case in cases(options):
        if only in case.title:
            watch(case.title, 0, 1)
            budget = QUICK if quick else case.budget or FULL
            measurements.append(case.measure(budget, partial(watch, case.title)))
    if not measurements:
        raise InvalidInputError(f"only: got {only!r}, want part of the name of a case")
    words = ["mmpos bench", suite, "--peers" * peers, "--quick" * quick, f"--malloc {malloc}"]
    words.append(f"--only {only!r}" if only else "")
    command = " ".join(filter(None, words))
    return Report(suite, command, quick, stamp(malloc), tuple(measurements), options.peers.missing)
