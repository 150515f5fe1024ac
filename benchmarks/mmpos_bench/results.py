"""The figures of a run as dataclasses, JSON and text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mmpos_bench.machine import Machine
from mmpos_bench.timing import Timing

FORMAT = 2
"""Version of the JSON format; incremented when older readers would misread it."""

Rows = Sequence[Sequence[str]]
"""A table; its first row is the header."""


@dataclass(frozen=True)
class Timed:
    """Contestant with its role ("limit", "ours", "part" or "peer") and its seconds per call."""

    name: str
    role: str
    timing: Timing


@dataclass(frozen=True)
class Measurement:
    """Result of one comparison; see `mmpos_bench.suites.Comparison` and `Lineup` for the fields."""

    group: str
    name: str
    entries: tuple[Timed, ...]
    work: dict[str, int]
    unit: str
    facts: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Timed:
        """Return the contestant with this name."""
        return {entry.name: entry for entry in self.entries}[name]

    @property
    def limit(self) -> Timed | None:
        """Contestant with the role "limit", or None."""
        return next((entry for entry in self.entries if entry.role == "limit"), None)

    def of_limit(self, entry: Timed) -> float | None:
        """Compute a contestant's time as a multiple of the limit, where 1 is the best that the machine can do."""
        return None if self.limit is None else entry.timing.median / self.limit.timing.median

    def over_peers(self, entry: Timed) -> dict[str, float]:
        """Compute a contestant's speed as a multiple of each peer's speed; empty unless its role is "ours"."""
        if entry.role != "ours":
            return {}
        return {peer.name: peer.timing.median / entry.timing.median for peer in self.entries if peer.role == "peer"}

    def per_unit(self, entry: Timed) -> float | None:
        """Compute the seconds per unit, such as a token; return None if there is no work."""
        count = self.work[self.unit]
        return entry.timing.median / count if count else None


@dataclass(frozen=True)
class SuiteReport:
    """Results of one run of a suite."""

    suite: str
    command: str  # command that repeats the run
    quick: bool  # whether toy sizes were used, which makes the figures meaningless
    machine: Machine
    measurements: tuple[Measurement, ...]  # in order of measurement
    missing: dict[str, str] = field(default_factory=dict)  # reason for each missing peer
    interrupted: bool = False  # whether Ctrl-C ended the run before the last comparison
    failed: dict[str, str] = field(default_factory=dict)  # errors after which the run continued, by name
    date: str = ""  # day of the run, as YYYY-MM-DD
    code: str = ""  # hash of the code that was measured, from `mmpos_bench.measured.code_of`

    def group(self, name: str) -> tuple[Measurement, ...]:
        """Return the measurements of a group."""
        return tuple(m for m in self.measurements if m.group == name)

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups, in order."""
        return tuple(dict.fromkeys(m.group for m in self.measurements))


# JSON.


def to_json(report: SuiteReport) -> str:
    """Write a report as JSON, with one line per measurement and times rounded to four significant digits."""
    head = {"format": FORMAT} | asdict(replace(report, measurements=()))
    del head["measurements"]
    lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()]
    rows = ",\n  ".join(json.dumps(_row(measurement), ensure_ascii=False) for measurement in report.measurements)
    return "{" + ",\n ".join([*lines, f'"measurements": [\n  {rows}\n ]']) + "}\n"


def from_json(text: str) -> SuiteReport:
    """Read a report from a JSON string."""
    values = json.loads(text)
    assert values.pop("format") == FORMAT
    rows = tuple(_measurement(**row) for row in values.pop("measurements"))
    return SuiteReport(machine=Machine(**values.pop("machine")), measurements=rows, **values)


def _row(measurement: Measurement) -> dict[str, object]:
    row: dict[str, object] = {name: getattr(measurement, name) for name in ("group", "name", "work", "unit")}
    row["facts"] = {name: _rounded(value) for name, value in measurement.facts.items()}
    row["entries"] = [
        [e.name, e.role, *map(_rounded, (e.timing.median, e.timing.p20, e.timing.p80)), e.timing.turns]
        for e in measurement.entries
    ]
    return row


def _rounded(value: float) -> float:
    """Round to four significant digits, since further digits are noise."""
    return float(f"{value:.4g}")


def _measurement(*, entries: list[list[Any]], **values: Any) -> Measurement:
    timed = tuple(Timed(name, role, Timing(*numbers)) for name, role, *numbers in entries)
    return Measurement(entries=timed, **values)


# Text.


def markdown(rows: Rows) -> str:
    """Write a Markdown table with right-aligned numbers."""
    head, *body = rows
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def to_markdown(measurements: Sequence[Measurement], *, parts: bool = True) -> str:
    """Write a table with one row per comparison and one column per contestant and per fact.

    Each time is also given as a multiple of the limit or of our time. Without ``parts``, this role is left out.
    """
    roles = {e.name: e.role for m in measurements for e in m.entries if parts or e.role != "part"}
    ours = next((name for name, role in roles.items() if role == "ours"), None)
    of_limit = " (× limit)" if "limit" in roles.values() else ""
    multiples = {"ours": of_limit, "part": of_limit, "peer": f" (× {ours})", "limit": " (limit)"}
    facts = list(dict.fromkeys(name for m in measurements for name in m.facts))
    rows = [["", *(name + multiples[role] for name, role in roles.items()), *facts]]
    for m in measurements:
        times = {e.name: seconds_text(e.timing.median) for e in m.entries}
        ratios = {e.name: ratio_text(m.of_limit(e)) for e in m.entries if e.role != "limit"}
        if ours in times:
            ratios |= {name: ratio_text(over) for name, over in m.over_peers(m[ours]).items()}
        times |= {name: f"{times[name]} ({ratio})" for name, ratio in ratios.items() if ratio}
        numbers = {name: number_text(value) for name, value in m.facts.items()}
        rows.append([m.name, *(times.get(name, "–") for name in roles), *(numbers.get(name, "–") for name in facts)])
    return markdown(rows)


def unit_of(seconds: float) -> tuple[float, str]:
    """Return the size in seconds and the name of the largest unit in which a time is >= 1, or of nanoseconds."""
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
    return next((unit for unit in units if seconds >= unit[0]), units[-1])


def seconds_text(seconds: float) -> str:
    """Format a time with three significant digits.

    >>> seconds_text(0.0012345), seconds_text(7.2e-7), seconds_text(0.0), seconds_text(0.009996), seconds_text(0.9999)
    ('1.23 ms', '720 ns', '0 ns', '10.0 ms', '1.00 s')
    """
    size, unit = unit_of(float(f"{seconds:.3g}"))
    return f"{_three(seconds / size)} {unit}"


def ratio_text(ratio: float | None) -> str:
    """Format a ratio with three significant digits and at most two decimals; None becomes an empty string.

    >>> ratio_text(0.4567), ratio_text(9.996), ratio_text(1234.5), ratio_text(None)
    ('0.46×', '10.0×', '1,234×', '')
    """
    return "" if ratio is None else f"{_three(ratio)}×"


def _three(value: float) -> str:
    rounded = float(f"{value:.3g}")
    return f"{value:,.{0 if rounded >= 100 or rounded == 0 else 1 if rounded >= 10 else 2}f}"


def number_text(value: float) -> str:
    """Format a number, never using an exponent for a large number.

    >>> number_text(122975.4), number_text(0.99634)
    ('122,975', '0.9963')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
