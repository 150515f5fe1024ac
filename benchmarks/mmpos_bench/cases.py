"""What is measured: contestants that do the same work, one of them the limit, each proved before any is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from mmpos.errors import InvalidInputError
from mmpos_bench.peers import Peers
from mmpos_bench.proofs import NotEqualError
from mmpos_bench.results import Entry, Measurement
from mmpos_bench.timing import Budget, Call, Tick, Timer, compare

__all__ = ["Case", "Contestant", "Later", "Options", "Point", "Role"]


class Role(StrEnum):
    """What a contestant is there for."""

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
        role: what it is there for.
        proof: raises NotEqualError if the call gives something else than it should; only a limit may lack it.
    """

    name: str
    call: Call
    role: Role = Role.OURS
    proof: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        if self.proof is None and self.role is not Role.LIMIT:
            raise InvalidInputError(f"contestant {self.name!r}: got no proof, want one: equality comes before timing")


@dataclass(frozen=True)
class Point:
    """Where on a curve a case lies: cases of one group that have points are drawn as one curve.

    Args:
        axis: what grows along the curve: "tokens", "images", "pixels of an image".
        value: how many.
    """

    axis: str
    value: float


def _nothing() -> dict[str, float]:
    return {}


@dataclass(frozen=True)
class Case:
    """Contestants that do the same work.

    Args:
        group: the heading under which cases are shown together, and the panel of a curve.
        name: of this case within its group.
        contestants: at most one of them the limit.
        work: what one call does, such as {"tokens": 4096, "bytes": 32768}.
        unit: the key of work by which times are divided in tables.
        point: where on a curve, if on one.
        budget: how long to measure; None is the suite's.
        facts: numbers beside the times, such as {"fill": 0.996}; called once after the timing.
        timer: what times the calls.
    """

    group: str
    name: str
    contestants: tuple[Contestant, ...]
    work: Mapping[str, int]
    unit: str = "tokens"
    point: Point | None = None
    budget: Budget | None = None
    facts: Callable[[], Mapping[str, float]] = field(default=_nothing)
    timer: Timer = compare

    def __post_init__(self) -> None:
        names = [contestant.name for contestant in self.contestants]
        if len(set(names)) < len(names):
            raise InvalidInputError(f"{self.title}: got contestants {names}, want names that differ")
        if sum(contestant.role is Role.LIMIT for contestant in self.contestants) > 1:
            raise InvalidInputError(f"{self.title}: got several limits, want at most one")
        if self.unit not in self.work:
            raise InvalidInputError(f"{self.title}: got work {sorted(self.work)}, want {self.unit!r} among it")

    @property
    def title(self) -> str:
        """Group and name."""
        return f"{self.group}: {self.name}"

    def prove(self) -> None:
        """Run every proof.

        Raises:
            NotEqualError: naming the case and the contestant that differs.
        """
        for contestant in self.contestants:
            if contestant.proof is not None:
                try:
                    contestant.proof()
                except NotEqualError as error:
                    raise NotEqualError(f"{self.title}, {contestant.name}: {error}") from None

    def measure(self, budget: Budget, tick: Tick) -> Measurement:
        """Prove all contestants, then time them.

        Args:
            budget: how long, unless the case has a budget of its own.
            tick: told after every round.

        Raises:
            NotEqualError: before anything is timed.
        """
        self.prove()
        calls = {contestant.name: contestant.call for contestant in self.contestants}
        times = self.timer(calls, self.budget or budget, tick) if calls else {}
        entries = tuple(Entry(c.name, c.role.value, times[c.name]) for c in self.contestants)
        point = None if self.point is None else (self.point.axis, self.point.value)
        return Measurement(self.group, self.name, entries, dict(self.work), self.unit, point, dict(self.facts()))


@dataclass(frozen=True)
class Later:
    """A case that is made when it is measured, and its arrays with it.

    Args:
        group: of the case.
        name: of the case.
        make: the case.
    """

    group: str
    name: str
    make: Callable[[], Case]

    @property
    def title(self) -> str:
        """Group and name."""
        return f"{self.group}: {self.name}"


@dataclass(frozen=True)
class Options:
    """What a suite is asked for.

    Args:
        quick: toy sizes, every path once; the figures mean nothing.
        peers: where to ask for peers.
        malloc: the setting of this process, which suites that start others give to them.
    """

    quick: bool
    peers: Peers
    malloc: str = "default"
