"""The commands of the program and their help, each a few calls into the library."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mmpos.cli import report
from mmpos.cli.scheme_options import DEFAULT, Axes, SchemeName, make_scheme
from mmpos.cli.specs import Document, Specs, read_specs
from mmpos.errors import InvalidInputError
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.segments.table import SegmentTable
from mmpos.support import info as installation
from mmpos.support.extras import needed_for
from mmpos.support.program import EXIT_CODES, STDIN, console, write_output

_ORDER = (
    "demo",
    "positions",
    "check",
    "plot",
    "compare",
    "explain",
    "schemes",
    "info",
    "serve",
    "remote",
    "preprocess",
    "bench",
)


_ELSEWHERE = {"serve": ("mmpos_server.options", "server"), "bench": ("mmpos_bench.command", "cli")}
"""Commands of packages that know this one: the module of each, and the extra that it needs."""


class _Group(TyperGroup):
    """The commands in the order in which one meets them; those of other packages are imported when asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name in _ELSEWHERE:
            module, extra = _ELSEWHERE[name]
            try:
                with needed_for(f"mmpos {name}", extra=extra):
                    command = typer.main.get_command(import_module(module).app)
            except ImportError:
                if not ctx.resilient_parsing:  # a shell that completes a line wants no error in it
                    raise
        return name, command, rest


app = typer.Typer(
    name="mmpos",
    cls=_Group,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"Exit codes: {'; '.join(f'[bold]{code}[/bold] {meaning}' for code, meaning in EXIT_CODES.items())}.",
)

SPECS = (
    "A spec is one document: 3,2x3,2 is 3 text tokens, an image of 2 rows and 3 columns of patches, and 2 text "
    "tokens; 4x2x3 is a video of 4 frames. A file is .json or an image (.jpg .png .webp .gif), which becomes a "
    "marker, its patches and a marker; - reads one of all these from standard input, specs one a line."
)
JSON_FILE = (
    'A .json file holds {"documents": [[{"text": 3}, {"grid": [2, 3]}]]}; a video is '
    '{"grid": [4, 2, 3], "seconds_per_frame": 0.5}. Its "scheme", if there is one, is that of its documents, unless '
    "--scheme is given."
)

Documents = Annotated[
    list[str], typer.Argument(metavar="SPEC|FILE...", help="Documents, as specs or files.", show_default=False)
]
Start = Annotated[int, typer.Option(help="Id of each document's first token.")]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", "-V", help="Print the version and exit.")] = False,
) -> None:
    """Position ids for text with images and video, exact and by many schemes.

    Begin with [bold]mmpos demo[/bold], then try [bold]mmpos positions 3,2x3,2[/bold].
    """
    if show_version:
        typer.echo(f"mmpos {installation.version()}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The picture, .png or .svg.")] = Path(
        "mmpos-demo.png"
    ),
    scheme: SchemeName = None,
) -> None:
    """Two photographs in a sentence: the sequence, its ids, and a picture of them."""
    from mmpos.cli.demo import run_demo

    run_demo(console(), make_scheme(DEFAULT if scheme is None else scheme), output)


@app.command(help=f"Print the ids of documents.\n\n{SPECS}\n\n{JSON_FILE}")
def positions(
    documents: Documents,
    scheme: SchemeName = None,
    start: Start = 0,
    axes: Axes = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with all ids.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.npy|-",
            help="Write (axes, tokens) ids there, too, by numpy.save; - writes them alone, to standard output.",
        ),
    ] = None,
) -> None:
    """Print the ids of documents."""
    placed = place_specs(read_specs(documents), scheme, start, axes)
    if output == Path(STDIN):
        if json:
            raise InvalidInputError("--output: got - beside --json, want one of them on standard output")
        write_output(report.npy(placed.positions))
        return
    if output is not None:
        report.save_ids(output, placed.positions)
    if json:
        typer.echo(report.to_json_text(placed.documents, placed.positions, placed.scheme))
    else:
        report.print_positions(console(), placed.segments, placed.positions)


@app.command(help=f"Say in one sentence why a token has its position.\n\n{SPECS}")
def explain(
    document: Annotated[str, typer.Argument(metavar="SPEC|FILE|-", help="Documents.", show_default=False)],
    token: Annotated[int, typer.Argument(metavar="TOKEN", help="The token, counted from 0.", show_default=False)],
    scheme: SchemeName = None,
    start: Start = 0,
    axes: Axes = None,
) -> None:
    """Say in one sentence why a token has its position."""
    typer.echo(place_specs(read_specs([document]), scheme, start, axes).positions.explain(token))


@app.command()
def schemes() -> None:
    """List the schemes, and the ids that an image of 24×24 patches consumes in each."""
    report.show(console(), report.schemes_table())


@app.command()
def info() -> None:
    """Print versions, and whether the extension in C was built."""
    with warnings.catch_warnings(record=True) as caught:
        found = installation.info()
    for name, value in found.items():
        typer.echo(f"{name:12} {value}")
    for warning in caught:
        typer.echo(f"mmpos: warning: {warning.message}", err=True)


def _complete_command(incomplete: str) -> list[str]:
    return [name for name in _ORDER if name.startswith(incomplete)]


@app.command("help", hidden=True)
def show_help(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND...]", autocompletion=_complete_command)
    ] = None,
) -> Any:
    """Show what a command does, as its --help does."""
    return app(args=[*(command or ()), "--help"], prog_name="mmpos", standalone_mode=False)


@dataclass(frozen=True)
class Placed:
    """Documents of a command line in a scheme.

    Args:
        documents: as they were named.
        segments: their segments.
        positions: where the scheme places them.
        scheme: the words that name the scheme.
    """

    documents: list[Document]
    segments: SegmentTable
    positions: PositionTable
    scheme: str


def place_specs(specs: Specs, scheme: str | None, start: int, axes: int | None) -> Placed:
    """Place documents in the scheme of an option, else of their files, else rope-tie."""
    segments = SegmentTable.from_documents(specs.documents)
    words, axes = scheme_words(specs, scheme, axes)
    words = DEFAULT if words is None else words
    return Placed(specs.documents, segments, place(segments, make_scheme(words, axes), start), words)


def scheme_words(specs: Specs, scheme: str | None, axes: int | None) -> tuple[str | None, int | None]:
    """The scheme and axes that options name; where they name no scheme, those of the files."""
    if scheme is not None or specs.scheme is None:
        return scheme, axes
    return specs.scheme, specs.axes if axes is None else axes
