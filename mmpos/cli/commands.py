"""The program, and its commands that place documents and describe the installation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, resources
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from mmpos.cli import report
from mmpos.cli.options import DEFAULT, Document, SchemeName, Specs, as_config, make_scheme, read_specs
from mmpos.errors import InvalidInputError
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.segments.table import GRID, SegmentTable
from mmpos.support import info as installation
from mmpos.support.extras import missing_contrib, needed_for
from mmpos.support.program import EXIT_CODES, STDIN, console, write_output

if TYPE_CHECKING:
    from mmpos.sequence.builder import InterleavedSequence, SequenceBuilder

_ORDER = (
    *("demo", "positions", "check", "plot", "explore", "probe", "explain", "schemes", "info", "serve", "remote"),
    *("preprocess", "data", "bench"),
)

_ELSEWHERE = {"serve": ("mmpos_server.options", "server"), "bench": ("mmpos_bench.command", "cli")}
"""Commands of other packages, which replace the placeholders below: their modules, and the extras they require."""

_CONTRIB = ("explore", "probe")
"""Commands of the distributions in contrib/."""


def _contrib_commands() -> dict[str, EntryPoint]:
    """Return the commands that other distributions add to the program."""
    return {point.name: point for point in entry_points(group="mmpos.commands")}


class _Naming(TyperGroup):
    """A group that adds the command's path to an error about an option without its argument, which lacks it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:
                error.ctx = typer.Context(self, parent=ctx, info_name=ctx.invoked_subcommand)  # type: ignore[attr-defined]
            raise


class _Group(_Naming):
    """A group that lists commands in the order of ``_ORDER``, and imports commands of other packages on first use."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = {**self.commands, **_contrib_commands()}
        return sorted(names, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is None and (point := _contrib_commands().get(cmd_name)):
            summary = point.dist.metadata["Summary"] if point.dist else None
            command = TyperCommand(cmd_name, help=summary)  # listed without importing the distribution
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        if args[0] not in self.commands:
            if point := _contrib_commands().get(args[0]):
                return args[0], typer.main.get_command(point.load()), args[1:]
            if args[0] in _CONTRIB and not ctx.resilient_parsing:
                raise missing_contrib(args[0])
        name, command, rest = super().resolve_command(ctx, args)
        if name in _ELSEWHERE:
            module, extra = _ELSEWHERE[name]
            try:
                with needed_for(f"mmpos {name}", extra=extra):
                    command = typer.main.get_command(import_module(module).app)
            except ImportError:
                if not ctx.resilient_parsing:  # shell completion must not print errors
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
    "A spec is one document: 3,2x3,2 is 3 text tokens, an image of 2 rows and 3 columns of patches, and 2 text tokens; "
    "4x2x3@1/24 is a video of 4 frames, 1/24 seconds apart. A file is .json or an image (.jpg .png .webp .gif), which "
    "becomes a marker, its patches and a marker; - reads specs (one per line), JSON or an image from standard input."
)
JSON_FILE = (
    'A .json file contains {"documents": [[{"text": 3}, {"grid": [2, 3]}]]}; a video is '
    '{"grid": [4, 2, 3], "seconds_per_frame": 0.5}. The file may name a "scheme", which --scheme overrides.'
)

Documents = Annotated[
    list[str], typer.Argument(metavar="SPEC|FILE...", help="Documents, as specs or files.", show_default=False)
]
Start = Annotated[int, typer.Option(help="Id of each document's first token.")]


def group(name: str, summary: str) -> typer.Typer:
    """Add a group of commands to the program; without a command, the group prints its help."""
    commands = typer.Typer(name=name, cls=_Naming, invoke_without_command=True, rich_markup_mode="rich")

    @commands.callback(help=summary)
    def root(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    app.add_typer(commands)
    return commands


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", "-V", help="Print the version and exit.")] = False,
) -> None:
    """Compute exact position ids for text with images and video, in many schemes.

    Begin with [bold]mmpos demo[/bold], then try [bold]mmpos positions 3,2x3,2[/bold].
    """
    if show_version:
        typer.echo(f"mmpos {installation.version()}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="File of the plot: .png, .svg or .pdf.")
    ] = Path("mmpos-demo.png"),
    scheme: SchemeName = None,
) -> None:
    """Show a sentence with two photographs: the sequence, its ids, and a plot of them."""
    from mmpos.analysis.plot import plot_positions
    from mmpos.images import ImageProcessor
    from mmpos.sequence.builder import SequenceBuilder
    from mmpos.sequence.tokenizers import ByteTokenizer

    out = console()
    processor = ImageProcessor(backend="pillow", max_tokens=128)
    builder = SequenceBuilder(
        ByteTokenizer(), images=processor, scheme=make_scheme(DEFAULT if scheme is None else scheme)
    )
    photos = resources.files("mmpos") / "photos"
    coffee, cat = ((photos / name).read_bytes() for name in ("coffee.jpg", "chelsea.jpg"))
    sequence = builder.build(["A photo of a coffee: ", coffee, " and one of a cat: ", cat, "."])

    placed = sequence.positions
    plot_positions(placed, output, pictures=[processor.pixels(photo) for photo in (coffee, cat)])

    texts, kinds = list(_texts(builder, sequence)), sequence.segments.kind
    names = [text.strip() if kind == GRID else repr(text) for text, kind in zip(texts, kinds, strict=True)]
    _line(out, "Sequence", "".join(texts))
    out.print()
    _line(out, "Ids", report.heading(placed, 0))
    out.print()
    report.show(out, report.segment_table(sequence.segments, placed, 0, names))
    out.print()
    if placed.resumable.all():
        (following,), (delta,) = placed.next_positions.tolist(), placed.deltas.tolist()
        _line(out, "Next", f"position {following} on every axis, where the answer begins")
        _line(out, "Delta", f"{delta}, which decoding adds to the index of a token")
    _line(out, "Picture", str(output))


@app.command(help=f"Print the ids of documents.\n\n{SPECS}\n\n{JSON_FILE}")
def positions(
    documents: Documents,
    scheme: SchemeName = None,
    start: Start = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object with all ids.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.npy|-",
            help="Also save (axes, tokens) ids with numpy.save; - writes only them, to standard output.",
        ),
    ] = None,
) -> None:
    """Print the ids of documents."""
    placed = place_specs(read_specs(documents), scheme, start)
    if output == Path(STDIN):
        if json:
            raise InvalidInputError("--output - (standard output) cannot be combined with --json")
        write_output(report.npy(placed.positions))
        return
    if output is not None:
        report.save("--output", output, ".npy", report.npy(placed.positions))
    if json:
        typer.echo(report.to_json_text(placed.documents, placed.positions, placed.scheme))
    else:
        report.print_positions(console(), placed.segments, placed.positions)


@app.command(help=f"Explain in one sentence why a token has its position.\n\n{SPECS}")
def explain(
    document: Annotated[str, typer.Argument(metavar="SPEC|FILE|-", help="Documents.", show_default=False)],
    token: Annotated[int, typer.Argument(metavar="TOKEN", help="Index of the token, from 0.", show_default=False)],
    scheme: SchemeName = None,
) -> None:
    """Explain in one sentence why a token has its position."""
    placed = place_specs(read_specs([document]), scheme)
    print(placed.positions.explain(token, placed.segments))  # typer.echo writes UTF-8 to an ASCII terminal


@app.command()
def schemes(
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="config.json|FOLDER|-", help="Print the settings of this model instead.", show_default=False
        ),
    ] = None,
    layer_type: Annotated[
        str | None,
        typer.Option(help="The type of layer, for a config with a rotation for each.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the schemes, and the number of ids that an image of 24×24 patches consumes in each."""
    if config is None:
        if layer_type is not None:
            raise InvalidInputError("--layer-type requires --config")
        if as_json:
            typer.echo(report.json_lines({name: row._asdict() for name, row in report.scheme_rows().items()}))
        else:
            report.print_schemes(console())
        return
    from mmpos.integrations.models import from_hf_config

    values = report.settings_values(from_hf_config(as_config(config), layer_type=layer_type))
    if as_json:
        typer.echo(report.json_lines(values))
    else:
        report.show_values({name: str(value) for name, value in values.items()}, "setting", "value")


@app.command()
def info() -> None:
    """Print versions, and whether the C extension is built."""
    installation.print_info()


@app.command()
def serve() -> None:
    """Serve positions, sequences and rotations over gRPC."""


@app.command()
def bench() -> None:
    """Run the benchmarks on this machine: equality first, then times relative to memory bandwidth."""


def _complete_command(incomplete: str) -> list[str]:
    return [name for name in _ORDER if name.startswith(incomplete)]


@app.command("help", hidden=True)
def show_help(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND...]", autocompletion=_complete_command)
    ] = None,
) -> object:
    """Show the help of a command, as with --help."""
    return app(args=[*(command or ()), "--help"], prog_name="mmpos", standalone_mode=False)


@dataclass(frozen=True)
class Placed:
    """Documents from a command line, placed with a scheme.

    Args:
        documents: the documents.
        segments: the segments of the documents.
        positions: the placed table.
        scheme: the scheme in the syntax of ``--scheme``.
    """

    documents: list[Document]
    segments: SegmentTable
    positions: PositionTable
    scheme: str


def place_specs(specs: Specs, scheme: str | None, start: int = 0) -> Placed:
    """Place documents with the scheme named by an option, else in their files, else rope-tie."""
    segments = SegmentTable.from_documents(specs.documents)
    scheme = specs.scheme if scheme is None else scheme
    name = DEFAULT if scheme is None else scheme
    return Placed(specs.documents, segments, place(segments, make_scheme(name), start), name)


def _line(out: Console, name: str, text: str) -> None:
    out.print(f"{name:<10}", style="bold", end="")
    out.print(text, soft_wrap=True)


def _texts(builder: SequenceBuilder, sequence: InterleavedSequence) -> Iterator[str]:
    """Yield the text or a description of each segment."""
    stops = np.cumsum(sequence.segments.lengths)
    for s, stop in enumerate(stops.tolist()):
        _, height, width = sequence.segments.extents[:, s].tolist()
        if sequence.segments.kind[s] == GRID:
            yield f" {height}×{width} patches "
        else:
            yield builder.tokenizer.decode(sequence.input_ids[stop - width : stop].tolist())
