"""The commands that draw: ids, attention by position, errors of phases, and growth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmpos.cli.commands import SPECS, Axes, Specs, Start, app, make_scheme, place_specs
from mmpos.errors import InvalidInputError
from mmpos.positions import PositionTable
from mmpos.rotary import Rotary
from mmpos.rotary.allocation import ALLOCATIONS
from mmpos.schemes import SCHEMES

plot = typer.Typer(name="plot", invoke_without_command=True)
app.add_typer(plot)

Output = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to, .png or .svg.")]
SchemeNames = Annotated[
    list[str] | None,
    typer.Option(
        "--scheme",
        "-s",
        metavar="NAME",
        help=f"Give several to compare them. Of {', '.join(SCHEMES)}.",
        show_default="rope-tie",
    ),
]
Title = Annotated[str | None, typer.Option(help="Above the picture.", show_default="what is drawn")]
HeadDim = Annotated[int, typer.Option(metavar="CHANNELS", help="Channels of a head, two to a pair.")]
Theta = Annotated[float, typer.Option(metavar="BASE", help="Base of the frequencies.")]


@plot.callback()
def root(context: typer.Context) -> None:
    """Draw ids, attention, errors of phases, or growth, as .png or .svg."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@plot.command(help=f"Draw the plane of ids: text on the diagonal, images as grids of points.\n\n{SPECS}")
def ids(
    documents: Specs,
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
    from mmpos.plot import plot_positions

    tables = _tables(documents, scheme, start, axes)
    plot_positions(tables[0] if len(tables) == 1 else tables, output, title, same_scale=not own_scale)
    typer.echo(output)


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
            help=f"Which axis drives a pair; several to compare. Of {', '.join(ALLOCATIONS)}.",
            show_default="interleaved",
        ),
    ] = None,
    mrope_section: Annotated[
        str | None,
        typer.Option(metavar="N,N,N", help="Pairs per axis, for sections and mrope-interleaved.", show_default=False),
    ] = None,
    title: Title = None,
) -> None:
    """Draw what one patch sees by its position alone."""
    from mmpos.plot import attention_kernel, plot_attention

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
    plot_attention(kernels, output, title)
    typer.echo(output)


@plot.command()
def phase(output: Output, head_dim: HeadDim = 128, theta: Theta = 10000.0, title: Title = None) -> None:
    """Draw how far phases are from the truth, over ids: float32 angles, those of Transformers, and integer turns."""
    from mmpos.plot import phase_errors, plot_phase_error

    plot_phase_error(phase_errors(Rotary(head_dim, theta, axes=1)), output, title)
    typer.echo(output)


@plot.command()
def growth(
    output: Output,
    scheme: Annotated[
        list[str] | None,
        typer.Option("--scheme", "-s", metavar="NAME", help="Give several.", show_default="all with a next position"),
    ] = None,
    title: Title = None,
) -> None:
    """Draw how many ids an image consumes, over its patches: squares, and strips of one row."""
    from mmpos.plot import id_growth, plot_growth

    plot_growth(id_growth([make_scheme(name, None) for name in scheme] if scheme else None), output, title)
    typer.echo(output)


def _tables(documents: list[str], names: list[str] | None, start: int, axes: int | None) -> list[PositionTable]:
    """The documents under every scheme."""
    return [place_specs(documents, name, start, axes)[2] for name in names or ["rope-tie"]]


def _section(words: str) -> list[int]:
    try:
        return [int(word) for word in words.split(",")]
    except ValueError:
        raise InvalidInputError(f"--mrope-section: got {words!r}, want numbers such as 16,24,24") from None
