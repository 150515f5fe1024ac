"""The figures of a run as data, as JSON, and as people read them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from mmpos.errors import InvalidInputError
from mmpos_bench.machine import Machine
from mmpos_bench.timing import Timing

FORMAT = 1
"""Of the JSON text; grows when a reader of the one before would misread it."""

_DIGITS = 4  # significant ones of a time: more is noise


@dataclass(frozen=True)
class Entry:
    """One contestant.

    Args:
        name: of the contestant.
        role: "limit", "ours", "part" or "peer".
        timing: seconds per call.
    """

    name: str
    role: str
    timing: Timing


@dataclass(frozen=True)
class Point:
    """A place on a curve.

    Args:
        axis: what grows along the curve: "tokens", "images", "pixels of an image".
        value: how many.
    """

    axis: str
    value: float


@dataclass(frozen=True)
class Measurement:
    """One case; see `mmpos_bench.Case` and `mmpos_bench.Lineup` for the fields."""

    group: str
    name: str
    entries: tuple[Entry, ...]
    work: dict[str, int]
    unit: str
    point: Point | None = None
    facts: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Entry:
        """The contestant of this name."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise KeyError(name)

    @property
    def limit(self) -> Entry | None:
        """The contestant that is the limit."""
        return next((entry for entry in self.entries if entry.role == "limit"), None)

    def of_limit(self, entry: Entry) -> float | None:
        """The time of a contestant as a multiple of the limit: 1 is all that the machine can do."""
        return None if self.limit is None else entry.timing.median / self.limit.timing.median

    def over_peers(self, entry: Entry) -> dict[str, float]:
        """The speed of a contestant as a multiple of each peer's; only ours are compared."""
        if entry.role != "ours":
            return {}
        return {peer.name: peer.timing.median / entry.timing.median for peer in self.entries if peer.role == "peer"}

    def per_unit(self, entry: Entry) -> float | None:
        """Seconds per token, or whatever the unit is; None of no work."""
        count = self.work[self.unit]
        return entry.timing.median / count if count else None


@dataclass(frozen=True)
class Report:
    """A run of one suite.

    Args:
        suite: its name.
        command: how to repeat it.
        quick: whether sizes were toys, so that the figures mean nothing.
        machine: where and with what.
        measurements: in the order in which they were made.
        missing: peers that were wanted and not there, and why.
    """

    suite: str
    command: str
    quick: bool
    machine: Machine
    measurements: tuple[Measurement, ...]
    missing: dict[str, str] = field(default_factory=dict)

    def group(self, name: str) -> tuple[Measurement, ...]:
        """The measurements under one heading."""
        return tuple(m for m in self.measurements if m.group == name)

    @property
    def groups(self) -> tuple[str, ...]:
        """The headings, in order."""
        return tuple(dict.fromkeys(m.group for m in self.measurements))


def to_json(reports: Iterable[Report]) -> str:
    """Reports as JSON, a line per measurement; times keep four significant digits."""
    texts = [_report_text(report) for report in reports]
    return f'{{"format": {FORMAT}, "reports": [\n' + ",\n".join(texts) + "\n]}\n"


def from_json(text: str) -> tuple[Report, ...]:
    """The reports of a JSON text.

    Raises:
        InvalidInputError: not JSON, another format, or fields that do not fit.
    """
    try:
        content = json.loads(text)
        got = content.get("format")
        if got != FORMAT:
            raise InvalidInputError(f"format: got {got!r}, want {FORMAT}")
        return tuple(_report(values) for values in content["reports"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(
            f"got no reports ({type(error).__name__}: {error}), want what mmpos bench writes"
        ) from None


def _report_text(report: Report) -> str:
    head = {f.name: getattr(report, f.name) for f in fields(report) if f.name not in ("machine", "measurements")}
    lines = [f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in head.items()]
    lines.append(f'"machine": {json.dumps(asdict(report.machine), ensure_ascii=False)}')
    rows = ",\n  ".join(json.dumps(_row(m), ensure_ascii=False) for m in report.measurements)
    lines.append(f'"measurements": [\n  {rows}\n ]' if rows else '"measurements": []')
    return "{" + ",\n ".join(lines) + "}"


def _row(measurement: Measurement) -> dict[str, Any]:
    row: dict[str, Any] = {"group": measurement.group, "name": measurement.name, "work": measurement.work}
    row["unit"] = measurement.unit
    if measurement.point is not None:
        row["point"] = [measurement.point.axis, measurement.point.value]
    if measurement.facts:
        row["facts"] = {name: float(f"{value:.{_DIGITS}g}") for name, value in measurement.facts.items()}
    row["entries"] = [
        [
            e.name,
            e.role,
            *(float(f"{t:.{_DIGITS}g}") for t in (e.timing.median, e.timing.p20, e.timing.p80)),
            e.timing.turns,
        ]
        for e in measurement.entries
    ]
    return row


def _report(values: dict[str, Any]) -> Report:
    known = {f.name for f in fields(Report)} - {"machine", "measurements"}
    measurements = tuple(_measurement(row) for row in values["measurements"])
    return Report(
        **{name: values[name] for name in known}, machine=Machine(**values["machine"]), measurements=measurements
    )


def _measurement(row: dict[str, Any]) -> Measurement:
    entries = tuple(Entry(name, role, Timing(*numbers)) for name, role, *numbers in row["entries"])
    point = Point(*row["point"]) if "point" in row else None
    return Measurement(row["group"], row["name"], entries, row["work"], row["unit"], point, row.get("facts", {}))


UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
"""Units of time and their seconds, the longest first."""


def seconds_text(seconds: float) -> str:
    """A time with three significant digits.

    >>> seconds_text(0.0012345), seconds_text(7.2e-7), seconds_text(0.0), seconds_text(0.009996), seconds_text(0.9999)
    ('1.23 ms', '720 ns', '0 ns', '10.0 ms', '1.00 s')
    """
    rounded = float(f"{seconds:.3g}")
    size, unit = next(((s, u) for s, u in UNITS if rounded >= s), UNITS[-1])
    return f"{_three(seconds / size)} {unit}"


def ratio_text(ratio: float | None) -> str:
    """A ratio with two or three significant digits, or nothing.

    >>> ratio_text(0.4567), ratio_text(9.996), ratio_text(1234.5), ratio_text(None)
    ('0.46×', '10.0×', '1,234×', '')
    """
    return "" if ratio is None else f"{_three(ratio)}×"


def _three(value: float) -> str:
    rounded = float(f"{value:.3g}")
    return f"{value:,.{0 if rounded >= 100 or rounded == 0 else 1 if rounded >= 10 else 2}f}"


def number_text(value: float) -> str:
    """A number beside times, without an exponent where it is large.

    >>> number_text(122975.4), number_text(0.99634)
    ('122,975', '0.9963')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
