"""The commands that analyse ids: check and plot."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from tokenize import TokenError  # numpy parses headers with it
from typing import TYPE_CHECKING, Annotated

import numpy as np
import numpy.typing as npt
import typer

from mmpos.cli import report
from mmpos.cli.commands import JSON_FILE, SPECS, Documents, Placed, app, group, place_specs
from mmpos.cli.options import DEFAULT, SchemeName, Specs, as_config, make_scheme, read_specs, scheme_option
from mmpos.errors import InvalidInputError
from mmpos.positions.table import Side
from mmpos.schemes import Scheme
from mmpos.segments.table import SegmentTable
from mmpos.support.html import page
from mmpos.support.program import DIFFERENT, STDIN, read_input, write_output

if TYPE_CHECKING:
    from mmpos.analysis.diagnosis import Diagnosis

HTML = typer.Option("--html", metavar="FILE.html", help="Write a report to send to a colleague.", show_default=False)


@app.command(
    help="Compare ids in a file with a scheme: the first difference, and the mistake that explains it.\n\n"
    f"{SPECS}\n\n{JSON_FILE}\n\n"
    "Ids are (axes, tokens) packed, (axes, batch, length) padded, or either without axes, saved with numpy.save. "
    "For three axes, (4, batch, length) begins with Transformers' text row. "
    f"Exit codes: 0 equal, {DIFFERENT} different."
)
def check(
    ids: Annotated[Path, typer.Argument(metavar="IDS.npy|-", help="The ids of one batch.", show_default=False)],
    documents: Annotated[
        list[str], typer.Option("--spec", metavar="SPEC|FILE|-", help="A document, or a file of documents; repeatable.")
    ],
    scheme: SchemeName = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="config.json|-", help="A model's config, to use its scheme.", show_default=False),
    ] = None,
    start: Annotated[
        int | None, typer.Option(help="Id of each document's first token.", show_default="0, or the model's first id")
    ] = None,
    padding: Annotated[Side, typer.Option(help="Side of the padding of a padded batch.")] = "right",
    tolerance: Annotated[float, typer.Option(help="How far an id may be from the exact one.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    report_to: Annotated[Path | None, HTML] = None,
) -> None:
    """Compare ids in a file with a scheme."""
    from mmpos.analysis.diagnosis import diagnose

    specs = read_specs(documents)
    segments = SegmentTable.from_documents(specs.documents)
    chosen, first = _scheme_and_start(specs, scheme, config)
    start = first if start is None else start
    diagnosis = diagnose(read_array(ids), segments, chosen, start, side=padding, tolerance=tolerance)
    if report_to is not None:
        title = f"{ids.name} compared with {diagnosis.scheme}"
        report.save("--html", report_to, ".html", page(title, diagnosis._repr_html_()).encode())
    typer.echo(_json(diagnosis) if as_json else "\n".join(diagnosis.sentences))
    if not diagnosis.equal:
        raise typer.Exit(DIFFERENT)


def _scheme_and_start(specs: Specs, name: str | None, config: Path | None) -> tuple[Scheme | None, int]:
    """Return the named or the model's scheme (None without either), and the id of each document's first token."""
    if config is None:
        name = specs.scheme if name is None else name
        return None if name is None else make_scheme(name), 0
    if name is not None:
        raise InvalidInputError("--config cannot be combined with --scheme")
    from mmpos.integrations.models import from_hf_config

    model = from_hf_config(as_config(config))
    return model.scheme, model.start


def read_array(path: Path) -> npt.NDArray[np.generic]:
    """Read an array from a file or from standard input."""
    if path == Path(STDIN):
        with NamedTemporaryFile() as file:
            file.write(read_input())
            file.flush()
            return _mapped(Path(file.name), "standard input")
    return _mapped(path, str(path))


def _mapped(path: Path, name: str) -> npt.NDArray[np.generic]:
    """Memory-map the array in a file, so that a header with a false size allocates nothing."""
    try:
        with path.open("rb") as file:
            beginning = file.read(6)
        if beginning == b"\x93NUMPY":
            array: npt.NDArray[np.generic] = np.load(path, mmap_mode="r", allow_pickle=False)
            return array
        got = "an archive (.npz or torch.save)" if beginning[:2] == b"PK" else "no .npy file"
    except OSError as error:
        got = error.strerror or str(error)
    except (ValueError, TypeError, EOFError, OverflowError, SyntaxError, TokenError) as error:
        got = str(error)
    raise InvalidInputError(f"{name}: got {got}, want an array saved with numpy.save")


def _json(diagnosis: Diagnosis) -> str:
    """Format the fields of a diagnosis as JSON, one per line, with fractions and infinities as text."""
    want = diagnosis.want and [int(value) if value.denominator == 1 else str(value) for value in diagnosis.want]
    got = diagnosis.got and [value if math.isfinite(value) else str(value) for value in diagnosis.got]
    values = {**vars(diagnosis), "got": got, "want": want, "message": str(diagnosis)}
    # The first field concerns keys; the others hold one value per token or per segment.
    for name in ("unknown_tokens", "wrong", "owner", "segment_starts"):
        del values[name]
    return report.json_lines(values)


plot = group("plot", "Draw ids or attention, as .png, .svg or .pdf.")

Output = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="FILE|-", help="A .png, .svg or .pdf; - writes a .png to standard output."),
]
SchemeNames = Annotated[list[str] | None, scheme_option(DEFAULT, "Repeat to compare several. ")]


def _complete_allocation(incomplete: str) -> list[str]:
    from mmpos.rotary.allocation import ALLOCATIONS

    return [name for name in ALLOCATIONS if name.startswith(incomplete)]


@plot.command(help=f"Draw the plane of ids: text on the diagonal, images as grids of points.\n\n{SPECS}")
def ids(
    documents: Documents,
    output: Output,
    scheme: SchemeNames = None,
    own_scale: Annotated[
        bool, typer.Option("--own-scale", help="Use a separate scale for each scheme, not one for all.")
    ] = False,
) -> None:
    """Draw the plane of ids."""
    from mmpos.analysis.plot import plot_positions

    placed = _placed(documents, scheme)
    tables = [placement.positions for placement in placed]
    positions = tables[0] if len(tables) == 1 else tables
    segments = placed[0].segments
    _write(output, lambda path: plot_positions(positions, path, segments=segments, same_scale=not own_scale))


@plot.command(
    help="Draw the attention of one patch from position alone: the mean cosine between its phases and those of every "
    f"other patch, and of the text before and after the image.\n\n{SPECS}"
)
def attention(
    document: Annotated[str, typer.Argument(metavar="SPEC|FILE", help="One document.", show_default=False)],
    output: Output,
    scheme: SchemeNames = None,
    token: Annotated[
        int | None, typer.Option(help="Index of the patch.", show_default="the middle of the first image")
    ] = None,
    allocation: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="How pairs are assigned to axes, such as interleaved, split or axial; repeat to compare.",
            show_default="interleaved",
            autocompletion=_complete_allocation,
        ),
    ] = None,
) -> None:
    """Draw the attention of one patch from position alone."""
    from mmpos.analysis.plot import attention_kernel, plot_attention
    from mmpos.rotary import Rotary

    names = allocation or ["interleaved"]
    kernels = [
        attention_kernel(
            table, Rotary(128, axes=table.axes, allocation=name), token, label=None if len(names) > 1 else table.scheme
        )
        for table in (placement.positions for placement in _placed([document], scheme))
        for name in names
    ]
    _write(output, lambda path: plot_attention(kernels, path))


def _write(output: Path, draw: Callable[[Path], object]) -> None:
    """Save a plot and print the file's name, or write a .png to standard output."""
    if output != Path(STDIN):
        draw(output)
        typer.echo(output)
        return
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plot.png"
        draw(path)
        write_output(path.read_bytes())


def _placed(documents: list[str], schemes: list[str] | None) -> list[Placed]:
    """Place the documents with every scheme."""
    specs = read_specs(documents)
    names: list[str | None] = [*schemes] if schemes else [None]
    return [place_specs(specs, name) for name in names]
