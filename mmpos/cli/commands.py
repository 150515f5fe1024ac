"""The commands of the program and their help, each a few calls into the library."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mmpos import about
from mmpos.cli import report
from mmpos.errors import InvalidInputError
from mmpos.placing import place
from mmpos.positions import PositionTable
from mmpos.schemes import SCHEMES, Scheme
from mmpos.segments import SegmentTable
from mmpos.specs import Document, read_documents

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
)


class _Group(TyperGroup):
    """The commands, those first with which one begins."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))


app = typer.Typer(
    name="mmpos",
    cls=_Group,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

SPECS = (
    "A spec is one document: 3,2x3,2 is 3 text tokens, an image of 2 rows and 3 columns of patches, and 2 text "
    "tokens; 4x2x3 is a video of 4 frames. A file is .json or an image (.jpg .png .webp .gif), which becomes a "
    "marker, its patches and a marker."
)
JSON_FILE = (
    'A .json file holds {"documents": [[{"text": 3}, {"grid": [2, 3]}]]}; a video is '
    '{"grid": [4, 2, 3], "seconds_per_frame": 0.5}.'
)

Specs = Annotated[
    list[str], typer.Argument(metavar="SPEC|FILE...", help="Documents, as specs or files.", show_default=False)
]
SchemeName = Annotated[str, typer.Option("--scheme", "-s", metavar="NAME", help=f"One of {', '.join(SCHEMES)}.")]
Start = Annotated[int, typer.Option(help="Id of each document's first token.")]
Axes = Annotated[
    int | None,
    typer.Option(help="2 or 3 for the Tie schemes; 3 has a frame axis, for videos.", show_default="the scheme's own"),
]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Position ids for text with images and video, exact and by many schemes.

    Begin with [bold]mmpos demo[/bold], then try [bold]mmpos positions 3,2x3,2[/bold].

    Exit codes: 0 done, 1 something is missing on this machine,
    2 a wrong argument or input, 3 ids that [bold]mmpos check[/bold] found to differ.
    """
    if show_version:
        typer.echo(f"mmpos {about.version()}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The picture, .png or .svg.")] = Path(
        "mmpos-demo.png"
    ),
    scheme: SchemeName = "rope-tie",
) -> None:
    """Two photographs in a sentence: the sequence, its ids, and a picture of them."""
    from mmpos.cli.demo import run_demo

    run_demo(report.console(), make_scheme(scheme, None), output)


@app.command(help=f"Print the ids of documents.\n\n{SPECS}\n\n{JSON_FILE}")
def positions(
    documents: Specs,
    scheme: SchemeName = "rope-tie",
    start: Start = 0,
    axes: Axes = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with all ids.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.npy", help="Write (axes, tokens) ids there, too, by numpy.save."),
    ] = None,
) -> None:
    """Print the ids of documents."""
    read, segments, placed = place_specs(documents, scheme, start, axes)
    if output is not None:
        report.save_ids(output, placed)
    if json:
        typer.echo(report.to_json_text(read, placed))
    else:
        report.print_positions(report.console(), segments, placed)


@app.command(help=f"Say in one sentence why a token has its position.\n\n{SPECS}")
def explain(
    document: Annotated[str, typer.Argument(metavar="SPEC|FILE", help="Documents.", show_default=False)],
    token: Annotated[int, typer.Argument(metavar="TOKEN", help="The token, counted from 0.", show_default=False)],
    scheme: SchemeName = "rope-tie",
    start: Start = 0,
    axes: Axes = None,
) -> None:
    """Say in one sentence why a token has its position."""
    typer.echo(place_specs([document], scheme, start, axes)[2].explain(token))


@app.command()
def schemes() -> None:
    """List the schemes, and the ids that an image of 24×24 patches consumes in each."""
    report.show(report.console(), report.schemes_table())


@app.command()
def info() -> None:
    """Print versions, and whether the extension in C was built."""
    with warnings.catch_warnings(record=True) as caught:
        found = about.info()
    for name, value in found.items():
        typer.echo(f"{name:12} {value}")
    for warning in caught:
        typer.echo(f"mmpos: warning: {warning.message}", err=True)


def place_specs(
    arguments: list[str], scheme: str, start: int, axes: int | None
) -> tuple[list[Document], SegmentTable, PositionTable]:
    """The documents that arguments name, their segments, and the table of a scheme."""
    documents = read_documents(arguments)
    segments = SegmentTable.from_documents(documents)
    return documents, segments, place(segments, make_scheme(scheme, axes), start)


def make_scheme(name: str, axes: int | None) -> Scheme:
    """The scheme of this name, with other axes where it has a choice of them."""
    if name not in SCHEMES:
        raise InvalidInputError(f"--scheme: got {name!r}, want one of {', '.join(SCHEMES)}")
    scheme = SCHEMES[name]
    own = scheme().axes
    if axes in (None, own):
        return scheme()
    choice = {field.name: field.type for field in dataclasses.fields(scheme)}  # type: ignore[arg-type]
    if "axes" not in choice:
        raise InvalidInputError(f"--axes: got {axes}, want {own} for scheme {name!r}")
    return scheme(axes=axes)  # type: ignore[call-arg]
