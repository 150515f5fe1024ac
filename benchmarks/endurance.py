"""The service under more than it can do: overload, streams that stall, and everything at once for a long time.

python benchmarks/endurance.py                     overload, stalled streams and a minute of everything
python benchmarks/endurance.py --soak 600 --json   ten minutes of everything; the figures kept in results/, and quoted
python benchmarks/endurance.py --tables            only the tables, from the figures that are there
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mmpos.errors import MmposError
from mmpos.support.files import write_text
from mmpos_bench.machine import stamp
from mmpos_bench.serving.overload import Overload, Scale, overload
from mmpos_bench.serving.soak import Soak, soak
from mmpos_bench.serving.stalled import Stalled, stalled

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE / "README.md"
BEGIN, END = "<!-- endurance -->\n", "<!-- /endurance -->"

Rows = tuple[str, list[str], list[list[str]]]
"""Title, head and rows of a table."""


def rows_of_overload(found: Iterable[Overload]) -> Rows:
    """Latencies in milliseconds, and what became of the calls."""
    head = ["under overload", "answers per second, at most", "offered per second", "p99 unloaded, ms"]
    head += ["p50 accepted, ms", "p99 accepted, ms", "of unloaded", "p99 of a refusal, ms", "statuses"]
    rows = []
    for one in found:
        shares = ", ".join(f"{status} {100 * share:.0f} %" for status, share in one.statuses.items())
        numbers = [f"{one.capacity:,.0f}", f"{one.offered:,.0f}", *(f"{ms:.1f}" for ms in _milliseconds(one))]
        rows.append([one.name, *numbers[:5], f"{one.ratio:.1f}×", numbers[5], shares])
    return "Overload", head, rows


def rows_of_stalled(found: Iterable[Stalled]) -> Rows:
    """What the server holds."""
    head = ["streams that are not read", "an answer, MiB", "server before, MiB", "at most, MiB", "per stream, MiB"]
    rows = [
        [str(s.streams), f"{s.answer:.1f}", f"{s.before:,.0f}", f"{s.peak:,.0f}", f"{s.per_stream:.1f}"] for s in found
    ]
    return "Stalled streams", head, rows


def rows_of_soak(one: Soak) -> Rows:
    """Whether memory grew."""
    head = ["everything at once, seconds", "deeds", "MiB at half-time", "MiB in the end", "MiB at most"]
    head += ["slope, MiB per hour", "flat"]
    numbers = [f"{one.seconds:,.0f}", f"{one.calls:,}", *(f"{mib:,.0f}" for mib in (one.first, one.last, one.peak))]
    return "Soak", head, [[*numbers, f"{one.slope:.0f} ± {one.error:.0f}", "yes" if one.flat else "no"]]


def _milliseconds(one: Overload) -> tuple[float, ...]:
    return one.unloaded_p99, one.accepted_p50, one.accepted_p99, one.refused_p99


def tables(found: dict[str, Any]) -> list[Rows]:
    """The tables of kept figures."""
    return [
        rows_of_overload(Overload(**one) for one in found["overload"]),
        rows_of_stalled(Stalled(**one) for one in found["stalled"]),
        rows_of_soak(Soak(**found["soak"])),
    ]


def fill_in(page: str) -> str:
    """The page with the tables of all kept figures between its marks."""
    begin, _, rest = page.partition(BEGIN)
    _, _, end = rest.partition(END)
    texts = []
    for path in sorted(RESULTS.glob("*.endurance.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        texts.append(f"{found['machine']['cpu']}, {found['machine']['cores']} cores, `{found['command']}`:\n")
        for _, head, rows in tables(found):
            lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
            texts.append("".join(f"| {' | '.join(cells)} |\n" for cells in lines))
    return f"{begin}{BEGIN}\n" + "\n".join(texts) + f"\n{END}{end}"


def shown(rows: Rows) -> None:
    """Print a table."""
    title, head, body = rows
    table = Table(title=title)
    for name in head:
        table.add_column(name, justify="left" if name == head[0] else "right")
    for cells in body:
        table.add_row(*cells)
    Console().print(table)


def main(
    seconds: Annotated[float, typer.Option(help="Of each measurement of overload.")] = 20.0,
    times: Annotated[float, typer.Option(help="The capacity, to offer.")] = 10.0,
    stall: Annotated[float, typer.Option(help="Seconds that streams stall.")] = 15.0,
    streams: Annotated[str, typer.Option(help="How many streams, in turn.")] = "1,16,64",
    soak_seconds: Annotated[float, typer.Option("--soak", help="Seconds of everything at once.")] = 60.0,
    quick: Annotated[bool, typer.Option(help="Toy sizes: the figures mean nothing.")] = False,
    keep: Annotated[bool, typer.Option("--json", help="Keep the figures in results/, and fill in the page.")] = False,
    only_tables: Annotated[bool, typer.Option("--tables", help="Only fill in the page.")] = False,
) -> None:
    """Measure, show, and keep if told so; ends with 1 if memory grows."""
    flat = True
    if not only_tables:
        scale = Scale(seconds, times, 64, 2) if quick else Scale(seconds, times)
        loaded = list(overload(scale, "tuned"))
        shown(rows_of_overload(loaded))
        held = list(stalled(tuple(map(int, streams.split(","))), stall, "tuned", 2 if quick else 64))
        shown(rows_of_stalled(held))
        soaked = soak(soak_seconds, "tuned")
        shown(rows_of_soak(soaked))
        flat = soaked.flat
        if keep:
            machine = stamp("tuned")
            found = {
                "command": " ".join(["benchmarks/endurance.py", *sys.argv[1:]]),
                "machine": asdict(machine),
                "overload": [asdict(one) for one in loaded],
                "stalled": [asdict(one) for one in held],
                "soak": asdict(soaked),
            }
            path = RESULTS / f"{machine.name}.endurance.json"
            write_text(path, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    if keep or only_tables:
        write_text(PAGE, fill_in(PAGE.read_text(encoding="utf-8")))
    if not flat:
        raise typer.Exit(1)


if __name__ == "__main__":
    try:
        typer.run(main)
    except MmposError as error:
        raise SystemExit(f"endurance: error: {error}") from None
