"""The commands that draw: ids, attention by position, errors of phases, and growth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmpos.cli.commands import SPECS, Documents, Start, app, place_specs
from mmpos.cli.scheme_options import DEFAULT, Axes, make_scheme, scheme_option
from mmpos.cli.specs import read_specs
from mmpos.errors import InvalidInputError
from mmpos.positions.table import PositionTable
from mmpos.support.program import STDIN, write_output

if TYPE_CHECKING:
    from mmpos.analysis.plot.picture import Picture

plot = typer.Typer(name="plot", invoke_without_command=True)
app.add_typer(plot)

Output = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="FILE|-", help="Where to, .png or .svg; - writes a .png to standard output."
    ),
]
SchemeNames = Annotated[list[str] | None, scheme_option(DEFAULT, "Give several to compare them. ")]
Title = Annotated[str | None, typer.Option(help="Above the picture.", show_default="what is drawn")]
HeadDim = Annotated[int, typer.Option(metavar="CHANNELS", help="Channels of a head, two to a pair.")]
Theta = Annotated[float, typer.Option(metavar="BASE", help="Base of the frequencies.")]


def _complete_allocation(incomplete: str) -> list[str]:
    from mmpos.rotary.allocation import ALLOCATIONS

    return [name for name in ALLOCATIONS if name.startswith(incomplete)]


@plot.callback()
def root(context: typer.Context) -> None:
    """Draw ids, attention, errors of phases, or growth, as .png or .svg."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@plot.command(help=f"Draw the plane of ids: text on the diagonal, images as grids of points.\n\n{SPECS}")
def ids(
    documents: Documents,
    output: Output,
    scheme: SchemeNames = None,
    start: Start = 0,
    axes: Axes = None,
    title: Title = None,
    own_scale: Annotated[
        bool, typer.Option("--own-scale", help="Every scheme on a scale of its own, not all on one.")
    ] = False,
) -> None:
    """Draw the plane of ids."""
    from mmpos.analysis.plot import plot_positions

    tables = _tables(documents, scheme, start, axes)
    drawn = tables[0] if len(tables) == 1 else tables
    _write(output, lambda path: plot_positions(drawn, path, title, same_scale=not own_scale))


@plot.command(
    help="Draw what one patch sees by its position alone: the mean cosine between its phases and those of every "
    f"other patch, and of the text before and after the image.\n\n{SPECS}"
)
def attention(
    document: Annotated[str, typer.Argument(metavar="SPEC|FILE", help="One document.", show_default=False)],
    output: Output,
    scheme: SchemeNames = None,
    axes: Axes = None,
    token: Annotated[
        int | None,
        typer.Option(help="The patch, as a token from 0.", show_default="the middle of the first image"),
    ] = None,
    head_dim: HeadDim = 128,
    theta: Theta = 10000.0,
    allocation: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Which axis drives a pair, such as interleaved, split, axial or sections; several to compare.",
            show_default="interleaved",
            autocompletion=_complete_allocation,
        ),
    ] = None,
    mrope_section: Annotated[
        str | None,
        typer.Option(metavar="N,N,N", help="Pairs per axis, for sections and mrope-interleaved.", show_default=False),
    ] = None,
    title: Title = None,
) -> None:
    """Draw what one patch sees by its position alone."""
    from mmpos.analysis.plot import attention_kernel, plot_attention
    from mmpos.rotary import Rotary

    section = None if mrope_section is None else _section(mrope_section)
    names = allocation or ["interleaved"]
    kernels = [
        attention_kernel(
            table,
            Rotary(head_dim, theta, table.axes, name, mrope_section=section),
            token,
            label=table.scheme if len(names) == 1 else None,
        )
        for table in _tables([document], scheme, 0, axes)
        for name in names
    ]
    _write(output, lambda path: plot_attention(kernels, path, title))


@plot.command()
def phase(output: Output, head_dim: HeadDim = 128, theta: Theta = 10000.0, title: Title = None) -> None:
    """Draw how far phases are from the truth, over ids: float32 angles, those of Transformers, and integer turns."""
    from mmpos.analysis.plot import phase_errors, plot_phase_error
    from mmpos.rotary import Rotary

    errors = phase_errors(Rotary(head_dim, theta, axes=1))
    _write(output, lambda path: plot_phase_error(errors, path, title))


@plot.command()
def growth(
    output: Output,
    scheme: Annotated[
        list[str] | None, scheme_option("all with a next position", "Give several to compare them. ")
    ] = None,
    title: Title = None,
) -> None:
    """Draw how many ids an image consumes, over its patches: squares, and strips of one row."""
    from mmpos.analysis.plot import id_growth, plot_growth

    found = id_growth([make_scheme(words) for words in scheme] if scheme else None)
    _write(output, lambda path: plot_growth(found, path, title))


def _write(output: Path, draw: Callable[[Path | None], Picture]) -> None:
    """Draw into a file and print its name, or write the picture to standard output."""
    if output == Path(STDIN):
        write_output(draw(None).png())
    else:
        draw(output)
        typer.echo(output)


def _tables(documents: list[str], schemes: list[str] | None, start: int, axes: int | None) -> list[PositionTable]:
    """The documents under every scheme."""
    specs = read_specs(documents)
    asked: list[str | None] = [*schemes] if schemes else [None]
    return [place_specs(specs, words, start, axes).positions for words in asked]


def _section(words: str) -> list[int]:
    try:
        return [int(word) for word in words.split(",")]
    except ValueError:
        raise InvalidInputError(f"--mrope-section: got {words!r}, want numbers such as 16,24,24") from None
