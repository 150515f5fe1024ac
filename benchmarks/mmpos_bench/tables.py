"""The figures of a run as tables for people: time, time per token, ratio to the limit and to each peer."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from mmpos_bench.results import Entry, Measurement, Report
from mmpos_bench.words import UNITS, number_text, ratio_text, seconds_text

_BELOW = ", one plain call over as many bytes; below 1×: faster than that call"


def print_report(out: Console, found: Report) -> None:
    """Machine, command, one table per group, and the peers that were missing."""
    out.print(f"{found.machine}\n{found.machine.versions}\n", soft_wrap=True)
    out.print(f"{found.command}; medians and 20th to 80th percentiles, contestants in turn", soft_wrap=True)
    if found.quick:
        out.print("quick: every path once, the figures mean nothing")
    for group in found.groups:
        measurements = found.group(group)
        out.print(f"\n{group}")
        _print_group(out, measurements)
    for name, why in found.missing.items():
        out.print(f"\nmissing: {name} ({why})", soft_wrap=True)


def spread_text(entry: Entry) -> str:
    """The range of a timing, in the unit of its median."""
    size, _ = next(((s, u) for s, u in UNITS if entry.timing.median >= s), UNITS[-1])
    low, high = entry.timing.p20 / size, entry.timing.p80 / size
    digits = 0 if low >= 100 else 1 if low >= 10 else 2
    return f"{low:,.{digits}f}–{high:,.{digits}f}"


def _print_group(out: Console, measurements: tuple[Measurement, ...]) -> None:
    """A line per contestant under the name of each case: names are too long for a column of a table."""
    units = list(dict.fromkeys(m.unit for m in measurements))
    limits = list(dict.fromkeys(m.limit.name for m in measurements if m.limit))
    peers = any(e.role == "peer" for m in measurements for e in m.entries)
    per = f"per {units[0].removesuffix('s')}" if len(units) == 1 else "per unit"
    head = ["", "median", "p20–p80", per, "of limit" if limits else "", "faster than" if peers else ""]
    rows = [[cells for e in m.entries for cells in _cells(m, e)] for m in measurements]
    every = [head, *(row for case in rows for row in case)]
    widths = [max(len(cells[i]) for cells in every) for i in range(len(head))]
    out.out(_line(head, widths))
    for measurement, case in zip(measurements, rows, strict=True):
        out.print(Text(measurement.name, style="bold"))
        for cells in case:
            out.out(_line(cells, widths), highlight=False)
        for name, value in measurement.facts.items():
            out.out(f"  {name}: {number_text(value)}", highlight=False)
    if limits:
        below = any((m.of_limit(e) or 1) < 1 for m in measurements for e in m.entries)
        out.print(f"limit: {', '.join(limits)}{_BELOW if below else ''}", soft_wrap=True)


def _cells(measurement: Measurement, entry: Entry) -> Iterator[list[str]]:
    """The line of a contestant, and one more for each further peer."""
    each = measurement.per_unit(entry)
    over = [f"{ratio_text(ratio)} {name}" for name, ratio in measurement.over_peers(entry).items()]
    yield [
        f"  {entry.name}",
        seconds_text(entry.timing.median),
        spread_text(entry),
        "" if each is None else seconds_text(each),
        "" if entry.role == "limit" else ratio_text(measurement.of_limit(entry)),
        over[0] if over else "",
    ]
    yield from (["", "", "", "", "", peer] for peer in over[1:])


def _line(cells: list[str], widths: list[int]) -> str:
    """Names flush left, numbers flush right, peers flush left."""
    name, *numbers, over = cells
    middle = [f"{cell:>{width}}" for cell, width in zip(numbers, widths[1:-1], strict=True)]
    return "  ".join([f"{name:<{widths[0]}}", *middle, over]).rstrip()
