"""The command that runs a benchmark suite: progress on stderr, tables or JSON on stdout, and a picture."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mmpos.errors import InvalidInputError
from mmpos.support.files import write_text
from mmpos.support.program import console
from mmpos_bench.machine import MALLOCS
from mmpos_bench.results import to_json
from mmpos_bench.suites import SUITES, Watch, run
from mmpos_bench.tables import print_report

app = typer.Typer(
    name="mmpos bench",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_LIST = " ".join(f"[bold]{name}[/bold]: {what}." for name, what in SUITES.items())


@app.command(help=f"Measure on this machine: equality first, then ratios to what memory can do.\n\n{_LIST}")
def bench(
    suite: Annotated[
        str,
        typer.Argument(
            metavar="|".join(SUITES),
            help="What to measure.",
            show_default=False,
            autocompletion=lambda incomplete: [each for each in SUITES.items() if each[0].startswith(incomplete)],
        ),
    ],
    peers: Annotated[bool, typer.Option("--peers", help="Also other projects, those that are installed.")] = False,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write the figures; - prints them alone.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the curves and ratios, .png or .svg.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Toy sizes, every path once; figures mean nothing.")] = False,
    malloc: Annotated[
        str,
        typer.Option(
            metavar="|".join(MALLOCS),
            help="The C library's own settings, or those of the server, which keep large blocks.",
            autocompletion=lambda incomplete: [name for name in MALLOCS if name.startswith(incomplete)],
        ),
    ] = "default",
    only: Annotated[str, typer.Option(metavar="TEXT", help="Only cases whose name contains this.")] = "",
) -> None:
    """Measure on this machine."""
    # What is wrong with the paths is said before minutes are spent.
    for option, path in (("--json", None if json in (None, "-") else Path(json)), ("--plot", plot)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise InvalidInputError(f"{option}: got {str(path)!r}, want a file in a folder that is there")
    if plot is not None:
        from mmpos.analysis.plot.canvas import picture_path

        picture_path(plot)
    with _watch() as watch:
        found = run(suite, peers=peers, quick=quick, malloc=malloc, only=only, watch=watch)
    if json == "-":
        typer.echo(to_json([found]), nl=False)
    else:
        print_report(console(), found)
    if json not in (None, "-"):
        write_text(Path(json), to_json([found]))
    if plot is not None:
        from mmpos_bench.plot import plot_report

        plot_report(found, plot)


@contextmanager
def _watch() -> Iterator[Watch]:
    """A bar on a terminal, and a line per case elsewhere; both on stderr."""
    err = Console(stderr=True)
    if not err.is_terminal:
        yield _say
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), BarColumn(bar_width=20), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def watch(title: str, done: int, rounds: int) -> None:
            progress.update(task, description=title, completed=done, total=rounds)

        yield watch


def _say(title: str, done: int, rounds: int) -> None:
    if done == 0:
        print(title, file=sys.stderr, flush=True)
