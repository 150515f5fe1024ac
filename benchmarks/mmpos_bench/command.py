"""The command that runs a benchmark suite, with progress on stderr and tables or JSON on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from mmpos.errors import InvalidInputError
from mmpos.support.checks import as_typed
from mmpos.support.files import write_text
from mmpos.support.program import INTERRUPTED, console
from mmpos_bench.machine import MALLOCS
from mmpos_bench.results import Measurement, SuiteReport, Timed, number_text, ratio_text, seconds_text, to_json, unit_of
from mmpos_bench.suites import SUITES, run

app = typer.Typer(
    name="mmpos bench",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_LIST = " ".join(f"[bold]{name}[/bold]: {subject}." for name, subject in SUITES.items())


@app.command(help=f"Check equality on this machine, then measure ratios to memory limits.\n\n{_LIST}")
def bench(
    suite: Annotated[
        str,
        typer.Argument(
            metavar="|".join(SUITES),
            help="The suite to measure.",
            show_default=False,
            autocompletion=lambda incomplete: [suite for suite in SUITES.items() if suite[0].startswith(incomplete)],
        ),
    ],
    peers: Annotated[bool, typer.Option("--peers", help="Also measure other installed projects.")] = False,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write the figures; - prints only the JSON.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Toy sizes, run once; the figures are meaningless.")] = False,
    malloc: Annotated[
        str,
        typer.Option(
            metavar="|".join(MALLOCS),
            help="The settings of the C library, or those of the server, which make malloc keep large blocks.",
            autocompletion=lambda incomplete: [name for name in MALLOCS if name.startswith(incomplete)],
        ),
    ] = "default",
    only: Annotated[str, typer.Option(metavar="TEXT", help="Only measure cases whose name contains this text.")] = "",
) -> None:
    """Measure on this machine."""
    path = None if json in (None, "-") else Path(json)
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):  # before a long run
        raise InvalidInputError(f"--json: got {str(path)!r}, want a file in an existing folder")
    watch = partial(print, file=sys.stderr, flush=True)
    with as_typed(only="--only"):
        report = run(suite, peers=peers, quick=quick, malloc=malloc, only=only, watch=watch)
    if json == "-":
        typer.echo(to_json(report), nl=False)
    else:
        print_report(console(), report)
    if path is not None:
        write_text(path, to_json(report))
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)


def print_report(out: Console, report: SuiteReport) -> None:
    """Print the machine, the command, one table per group, and missing peers."""
    out.print(f"{report.machine}\n{report.machine.versions}\n", soft_wrap=True)
    out.print(f"{report.command}; medians and 20th to 80th percentiles, contestants alternating", soft_wrap=True)
    if report.quick:
        out.print("quick: every path ran once; the figures are meaningless")
    if report.interrupted:
        out.print("interrupted: only completed cases are shown")
    for group in report.groups:
        out.print(f"\n{group}")
        _print_group(out, report.group(group))
    for name, reason in report.missing.items():
        out.print(f"\nmissing: {name} ({reason})", soft_wrap=True)


def _print_group(out: Console, measurements: tuple[Measurement, ...]) -> None:
    """Print a table for each case, under its name."""
    limits = list(dict.fromkeys(m.limit.name for m in measurements if m.limit))
    for measurement in measurements:
        per = f"per {measurement.unit.removesuffix('s')}"
        numbers = [Column(name, justify="right") for name in ("median", "p20–p80", per, "of limit" * bool(limits))]
        peers = "faster than" * any(entry.role == "peer" for entry in measurement.entries)
        table = Table("", *numbers, peers, box=None, pad_edge=False)
        for entry in measurement.entries:
            table.add_row(*_cells(measurement, entry))
        out.print(Text(measurement.name, style="bold"), table)
        for name, value in measurement.facts.items():
            out.print(f"{name}: {number_text(value)}")
    if limits:
        below = any((m.of_limit(e) or 1) < 1 for m in measurements for e in m.entries)
        words = ", a single call over the same number of bytes; below 1×: faster than that call"
        out.print(f"limit: {', '.join(limits)}{words * below}", soft_wrap=True)


def _cells(measurement: Measurement, entry: Timed) -> Iterator[str]:
    """Yield the cells of a contestant; the last has a line for each peer."""
    timing, seconds = entry.timing, measurement.per_unit(entry)
    size, _ = unit_of(timing.median)
    digits = 0 if timing.p20 >= 100 * size else 1 if timing.p20 >= 10 * size else 2
    yield from (entry.name, seconds_text(timing.median))
    yield f"{timing.p20 / size:,.{digits}f}–{timing.p80 / size:,.{digits}f}"
    yield "" if seconds is None else seconds_text(seconds)
    yield "" if entry.role == "limit" else ratio_text(measurement.of_limit(entry))
    yield "\n".join(f"{ratio_text(over)} {name}" for name, over in measurement.over_peers(entry).items())
