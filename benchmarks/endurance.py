"""The service under more than it can do: overload, streams that stall, and everything at once for a long time.

python benchmarks/endurance.py                     overload, stalled streams and a minute of everything
python benchmarks/endurance.py --soak 600 --json   ten minutes of everything; the figures kept in results/
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import typer
from pages import RESULTS, Rows, markdown

from mmpos.errors import MmposError
from mmpos.support.files import write_text
from mmpos_bench.machine import stamp
from mmpos_bench.serving.overload import Overload, Scale, overload
from mmpos_bench.serving.soak import Soak, soak
from mmpos_bench.serving.stalled import Stalled, stalled

T = TypeVar("T")
Columns = Mapping[str, Callable[[T], str]]
"""The head of every column, and its cell of a result."""

OVERLOAD: Columns[Overload] = {
    "under overload": lambda one: one.name,
    "answers per second, at most": lambda one: f"{one.capacity:,.0f}",
    "offered per second": lambda one: f"{one.offered:,.0f}",
    "p99 unloaded, ms": lambda one: f"{one.unloaded_p99:.1f}",
    "p50 accepted, ms": lambda one: f"{one.accepted_p50:.1f}",
    "p99 accepted, ms": lambda one: f"{one.accepted_p99:.1f}",
    "of unloaded": lambda one: f"{one.ratio:.1f}×",
    "p99 of a refusal, ms": lambda one: f"{one.refused_p99:.1f}",
    "statuses": lambda one: ", ".join(f"{status} {100 * share:.0f} %" for status, share in one.statuses.items()),
}
STALLED: Columns[Stalled] = {
    "streams that are not read": lambda one: f"{one.streams}",
    "an answer, MiB": lambda one: f"{one.answer:.1f}",
    "server before, MiB": lambda one: f"{one.before:,.0f}",
    "at most, MiB": lambda one: f"{one.peak:,.0f}",
    "per stream, MiB": lambda one: f"{one.per_stream:.1f}",
}
SOAK: Columns[Soak] = {
    "everything at once, seconds": lambda one: f"{one.seconds:,.0f}",
    "deeds": lambda one: f"{one.calls:,}",
    "MiB at half-time": lambda one: f"{one.first:,.0f}",
    "MiB in the end": lambda one: f"{one.last:,.0f}",
    "MiB at most": lambda one: f"{one.peak:,.0f}",
    "slope, MiB per hour": lambda one: f"{one.slope:.0f} ± {one.error:.0f}",
    "flat": lambda one: "yes" if one.flat else "no",
}


def table(columns: Columns[T], results: Iterable[T]) -> Rows:
    """Make the head and a row for every result."""
    return [list(columns), *([cell(one) for cell in columns.values()] for one in results)]


def tables(kept: Mapping[str, Any]) -> tuple[Rows, ...]:
    """Make the tables of a file in results/."""
    loaded, held = [Overload(**one) for one in kept["overload"]], [Stalled(**one) for one in kept["stalled"]]
    return table(OVERLOAD, loaded), table(STALLED, held), table(SOAK, [Soak(**kept["soak"])])


def main(
    seconds: Annotated[float, typer.Option(help="Of each measurement of overload.")] = 20.0,
    times: Annotated[float, typer.Option(help="The capacity, to offer.")] = 10.0,
    stall: Annotated[float, typer.Option(help="Seconds that streams stall.")] = 15.0,
    streams: Annotated[str, typer.Option(help="How many streams, in turn.")] = "1,16,64",
    soak_seconds: Annotated[float, typer.Option("--soak", help="Seconds of everything at once.")] = 60.0,
    quick: Annotated[bool, typer.Option(help="Toy sizes: the figures mean nothing.")] = False,
    keep: Annotated[bool, typer.Option("--json", help="Keep the figures in results/.")] = False,
) -> None:
    """Measure, show, and keep if told so; ends with 1 if memory grows."""
    scale = Scale(seconds, times, 64, 2, settling=0.3) if quick else Scale(seconds, times)
    loaded = list(overload(scale, "tuned"))
    print(markdown(table(OVERLOAD, loaded)))
    held = list(stalled(tuple(map(int, streams.split(","))), stall, "tuned", 2 if quick else 64))
    print(markdown(table(STALLED, held)))
    soaked = soak(soak_seconds, "tuned", 1 if quick else 2)
    print(markdown(table(SOAK, [soaked])))
    if keep:
        machine = stamp("tuned")
        kept = {
            "command": " ".join(["benchmarks/endurance.py", *sys.argv[1:]]),
            "machine": asdict(machine),
            "overload": [asdict(one) for one in loaded],
            "stalled": [asdict(one) for one in held],
            "soak": asdict(soaked),
        }
        path = RESULTS / f"{machine.name}.endurance.json"
        write_text(path, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    if not soaked.flat:
        raise typer.Exit(1)


if __name__ == "__main__":
    try:
        typer.run(main)
    except MmposError as error:
        raise SystemExit(f"endurance: error: {error}") from None
