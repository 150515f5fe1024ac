"""The figures of a run as tables for people: time, time per token, ratio to the limit and to each peer."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from mmpos.bench.results import Entry, Measurement, Report
from mmpos.cli import report

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def print_report(out: Console, found: Report) -> None:
    """Machine, command, one table per group, and the peers that were missing."""
    out.print(f"{found.machine}\n{found.machine.versions}\n")
    out.print(f"{found.command}; medians (20th–80th percentile), all contestants in turn")
    if found.quick:
        out.print("quick: every path once, the figures mean nothing")
    for group in found.groups:
        measurements = found.group(group)
        out.print(f"\n{group}")
        _print_group(out, measurements)
    for name, why in found.missing.items():
        out.print(f"\nmissing: {name} ({why})")


def seconds_text(seconds: float) -> str:
    """A time with three significant digits.

    >>> seconds_text(0.0012345), seconds_text(7.2e-7), seconds_text(0.0)
    ('1.23 ms', '720 ns', '0 ns')
    """
    size, unit = next(((s, u) for s, u in _UNITS if seconds >= s), _UNITS[-1])
    value = seconds / size
    return f"{value:,.{0 if value >= 100 or value == 0 else 1 if value >= 10 else 2}f} {unit}"


def spread_text(entry: Entry) -> str:
    """The range of a timing, in the unit of its median."""
    size, _ = next(((s, u) for s, u in _UNITS if entry.timing.median >= s), _UNITS[-1])
    low, high = entry.timing.p20 / size, entry.timing.p80 / size
    digits = 0 if low >= 100 else 1 if low >= 10 else 2
    return f"{low:,.{digits}f}–{high:,.{digits}f}"


def ratio_text(ratio: float | None) -> str:
    """A ratio with two or three significant digits, or nothing."""
    return "" if ratio is None else f"{ratio:,.{0 if ratio >= 100 else 1 if ratio >= 10 else 2}f}×"


def _print_group(out: Console, measurements: tuple[Measurement, ...]) -> None:
    units = list(dict.fromkeys(m.unit for m in measurements))
    per = f"per {units[0].removesuffix('s')}" if len(units) == 1 else "per unit"
    peers = list(dict.fromkeys(e.name for m in measurements for e in m.entries if e.role == "peer"))
    limits = list(dict.fromkeys(m.limit.name for m in measurements if m.limit))
    # Rounds of many columns do not fit a terminal: peers are named in one.
    heads = ["", "median", "range", per, *(["of limit"] if limits else []), *(["faster than peers"] if peers else [])]
    table = report.new_table(*heads, right=heads[1:5])
    for measurement in measurements:
        table.add_row(Text(measurement.name, style="italic"))
        for entry in measurement.entries:
            cells = [f"  {entry.name}", seconds_text(entry.timing.median), spread_text(entry)]
            each = measurement.per_unit(entry)
            cells.append("" if each is None else seconds_text(each))
            if limits:
                cells.append("" if entry.role == "limit" else ratio_text(measurement.of_limit(entry)))
            if peers:
                over = measurement.over_peers(entry)
                cells.append(", ".join(f"{ratio_text(ratio)} {name}" for name, ratio in over.items()))
            table.add_row(*cells)
        for name, value in measurement.facts.items():
            table.add_row(f"  {name}", f"{value:,.4g}")
    report.show(out, table)
    if limits:
        out.print(f"limit: {', '.join(limits)}")
