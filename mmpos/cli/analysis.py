"""The commands that study ids, schemes and encodings: check, compare and plot."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from tokenize import TokenError  # numpy reads headers with it
from typing import TYPE_CHECKING, Annotated

import numpy as np
import numpy.typing as npt
import typer

from mmpos.cli import report
from mmpos.cli.commands import JSON_FILE, SPECS, Documents, Placed, Start, app, group, place_specs, scheme_words
from mmpos.cli.options import (
    DEFAULT,
    Axes,
    SchemeName,
    Specs,
    complete_scheme,
    did_you_mean,
    flat,
    make_scheme,
    read_config,
    read_specs,
    scheme_option,
)
from mmpos.errors import InvalidInputError
from mmpos.positions.table import Side
from mmpos.schemes import SCHEMES, Scheme
from mmpos.segments.table import SegmentTable
from mmpos.support.html import page
from mmpos.support.program import DIFFERENT, STDIN, console, read_input, write_output

if TYPE_CHECKING:
    from mmpos.analysis.compare import Matrix
    from mmpos.analysis.diagnosis import Diagnosis
    from mmpos.analysis.plot.picture import Picture
    from mmpos.integrations.models.settings import ModelSettings
    from mmpos.rotary import Rotary

HTML = typer.Option("--html", metavar="FILE.html", help="Write a report to send to a colleague.", show_default=False)


@app.command(
    help="Compare ids in a file with a scheme: the first difference, and the mistake that explains it.\n\n"
    f"{SPECS}\n\n{JSON_FILE}\n\n"
    "Ids are (axes, tokens) packed, (axes, batch, length) padded, or either without axes, saved with numpy.save; "
    "(4, batch, length) for three axes has Transformers' text row first. "
    f"Exit codes: 0 equal, {DIFFERENT} different."
)
def check(
    ids: Annotated[Path, typer.Argument(metavar="IDS.npy|-", help="The ids of one batch.", show_default=False)],
    documents: Annotated[
        list[str], typer.Option("--spec", metavar="SPEC|FILE|-", help="A document, or a file of them; once for each.")
    ],
    scheme: SchemeName = None,
    config: Annotated[
        Path | None, typer.Option(metavar="config.json|-", help="A model's config, for its scheme.", show_default=False)
    ] = None,
    start: Annotated[
        int | None, typer.Option(help="Id of each document's first token: 0, or the model's.", show_default=False)
    ] = None,
    axes: Axes = None,
    padding: Annotated[Side, typer.Option(help="Where a padded batch has its padding.")] = "right",
    tolerance: Annotated[float, typer.Option(help="How far an id may be from the exact one.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    report_to: Annotated[Path | None, HTML] = None,
) -> None:
    """Compare ids in a file with a scheme."""
    from mmpos.analysis.diagnosis import diagnose

    specs = read_specs(documents)
    segments = SegmentTable.from_documents(specs.documents)
    how, first = _scheme_and_start(specs, scheme, axes, config)
    start = first if start is None else start
    diagnosis = diagnose(read_array(ids), segments, how, start, side=padding, tolerance=tolerance)
    if report_to is not None:
        title = f"{ids.name} compared with {diagnosis.scheme}"
        report.save_html("--html", report_to, page(title, diagnosis._repr_html_()))
    typer.echo(_json(diagnosis) if as_json else "\n".join(diagnosis.sentences))
    if not diagnosis.equal:
        raise typer.Exit(DIFFERENT)


def _scheme_and_start(specs: Specs, name: str | None, axes: int | None, config: Path | None) -> tuple[Scheme, int]:
    """Make the scheme that is named, or that of a model, and the id of each document's first token."""
    if config is None:
        name, axes = scheme_words(specs, name, axes)
        return make_scheme(DEFAULT if name is None else name, axes), 0
    if name is not None or axes is not None:
        raise InvalidInputError("--config: got one with --scheme or --axes, want it alone")
    model = model_of(config)
    return model.scheme, model.start


def model_of(config: Path) -> ModelSettings:
    """Make the settings of a config.json, of a folder with one, or of standard input."""
    from mmpos.integrations.models import from_hf_config

    return from_hf_config(read_config(config))


def read_array(path: Path) -> npt.NDArray[np.generic]:
    """Read the array of a file, or of standard input."""
    if path == Path(STDIN):
        with NamedTemporaryFile() as file:
            file.write(read_input())
            file.flush()
            return _mapped(Path(file.name), "standard input")
    return _mapped(path, str(path))


def _mapped(path: Path, name: str) -> npt.NDArray[np.generic]:
    """Map the array of a file, so that a header that promises more than the file has costs nothing."""
    try:
        with path.open("rb") as file:
            beginning = file.read(6)
        if beginning == b"\x93NUMPY":
            array: npt.NDArray[np.generic] = np.load(path, mmap_mode="r", allow_pickle=False)
            return array
        got = "an archive (.npz, or of torch.save)" if beginning[:2] == b"PK" else "no .npy file"
    except OSError as error:
        got = error.strerror or str(error)
    except (ValueError, TypeError, EOFError, OverflowError, SyntaxError, TokenError) as error:
        got = str(error)
    raise InvalidInputError(f"{name}: got {got}, want an array saved with numpy.save")


def _json(diagnosis: Diagnosis) -> str:
    """Write the fields of a diagnosis, one per line; what is no number in JSON, fractions and infinity, as text."""
    want = diagnosis.want and [int(value) if value.denominator == 1 else str(value) for value in diagnosis.want]
    got = diagnosis.got and [value if math.isfinite(value) else str(value) for value in diagnosis.got]
    found = {**vars(diagnosis), "got": got, "want": want, "message": str(diagnosis)}
    for name in ("unknown_tokens", "wrong", "owner"):  # of keys alone, and one for each token
        del found[name]
    return report.json_lines(found)


def _complete(incomplete: str) -> list[tuple[str, str]]:
    from mmpos.encodings import ENCODINGS

    return complete_scheme(incomplete) + [(name, "") for name in ENCODINGS if name.startswith(incomplete)]


@app.command(
    help="Measure which scheme and which encoding has which property: ✓ yes, ✗ no, – does not apply.\n\n"
    f"NAME is a scheme, one of {', '.join(SCHEMES)}, also with parameters (v2pe,stride=16), or package.module:Class of "
    "your own; or an encoding, such as rope-2d or alibi: without NAME, all are measured."
)
def compare(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME...]", help="Only these.", show_default=False, autocompletion=_complete),
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="Also the smallest counterexample of every ✗.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, counterexamples included.")] = False,
) -> None:
    """Measure which scheme and which encoding has which property."""
    matrices = _measured(names or [])
    if as_json:
        typer.echo(json.dumps({f"{each.subject}s": each.to_dict() for each in matrices}, ensure_ascii=False, indent=1))
        return
    out = console()
    for i, matrix in enumerate(matrices):
        if i:
            out.print()
        out.out(matrix.to_text(out.width), highlight=False)
        if why:
            out.print()
            for name, each, reason in matrix.reasons:
                out.print(f"{name}, {each.title}: {reason}", soft_wrap=True)


def _measured(names: Sequence[str]) -> list[Matrix]:
    """Measure the matrices of what is named, or of everything."""
    from mmpos.analysis.compare import measure, measure_encodings
    from mmpos.analysis.compare.schemes import every_scheme
    from mmpos.encodings import ENCODINGS

    made = [make_scheme(name) for name in names if "," in name or ":" in name]
    for name in names:
        if name not in SCHEMES and name not in ENCODINGS and "," not in name and ":" not in name:
            known = (*SCHEMES, *ENCODINGS)
            raise InvalidInputError(f"NAME: got {name!r}{did_you_mean(name, known)}, want one of {', '.join(known)}")
    schemes = [scheme for scheme in every_scheme() if not names or scheme.name in names]
    measured = {scheme.name for scheme in schemes}
    # Of models that generate, only where they are named.
    schemes += [SCHEMES[name]() for name in names if name in SCHEMES and name not in measured] + made
    encodings = [name for name in ENCODINGS if not names or name in names]
    return [*([measure(schemes)] if schemes else []), *([measure_encodings(encodings)] if encodings else [])]


plot = group("plot", "Draw ids, attention, errors of phases, or growth, as .png, .svg or .pdf.")

Output = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="FILE|-", help="Where to, .png, .svg or .pdf; - writes a .png to standard output."
    ),
]
SchemeNames = Annotated[list[str] | None, scheme_option(DEFAULT, "Give several to compare them. ")]
HeadDim = Annotated[int, typer.Option(metavar="CHANNELS", help="Channels of a head, two to a pair.")]
Theta = Annotated[float, typer.Option(metavar="BASE", help="Base of the frequencies.")]


def _complete_allocation(incomplete: str) -> list[str]:
    from mmpos.rotary.allocation import ALLOCATIONS

    return [name for name in ALLOCATIONS if name.startswith(incomplete)]


@dataclass(frozen=True)
class RotationFlags:
    """The options that say how q and k are turned."""

    head_dim: HeadDim = 128
    theta: Theta = 10000.0
    allocation: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Which axis drives a pair, such as interleaved, split, axial or sections; several to compare.",
            show_default="interleaved",
            autocompletion=_complete_allocation,
        ),
    ] = None
    mrope_section: Annotated[
        str | None,
        typer.Option(metavar="N,N,N", help="Pairs per axis, for sections and mrope-interleaved.", show_default=False),
    ] = None

    def rotaries(self, axes: int) -> list[Rotary]:
        """Make the rotation of each allocation."""
        from mmpos.rotary import Rotary

        section = None if self.mrope_section is None else _section(self.mrope_section)
        names = self.allocation or ["interleaved"]
        return [Rotary(self.head_dim, self.theta, axes, name, mrope_section=section) for name in names]


@plot.command(help=f"Draw the plane of ids: text on the diagonal, images as grids of points.\n\n{SPECS}")
def ids(
    documents: Documents,
    output: Output,
    scheme: SchemeNames = None,
    start: Start = 0,
    axes: Axes = None,
    own_scale: Annotated[
        bool, typer.Option("--own-scale", help="Every scheme on a scale of its own, not all on one.")
    ] = False,
) -> None:
    """Draw the plane of ids."""
    from mmpos.analysis.plot import plot_positions

    placed = _placed(documents, scheme, start, axes)
    tables = [each.positions for each in placed]
    drawn = tables[0] if len(tables) == 1 else tables
    segments = placed[0].segments
    _write(output, lambda path: plot_positions(drawn, path, segments=segments, same_scale=not own_scale))


@plot.command(
    help="Draw what one patch sees by its position alone: the mean cosine between its phases and those of every "
    f"other patch, and of the text before and after the image.\n\n{SPECS}"
)
@flat
def attention(
    document: Annotated[str, typer.Argument(metavar="SPEC|FILE", help="One document.", show_default=False)],
    output: Output,
    *,
    scheme: SchemeNames = None,
    axes: Axes = None,
    token: Annotated[
        int | None, typer.Option(help="The patch, as a token from 0.", show_default="the middle of the first image")
    ] = None,
    rotation: RotationFlags,
) -> None:
    """Draw what one patch sees by its position alone."""
    from mmpos.analysis.plot import attention_kernel, plot_attention

    several = len(rotation.allocation or ()) > 1
    kernels = [
        attention_kernel(table, rotary, token, label=None if several else table.scheme)
        for table in (each.positions for each in _placed([document], scheme, 0, axes))
        for rotary in rotation.rotaries(table.axes)
    ]
    _write(output, lambda path: plot_attention(kernels, path))


@plot.command()
def phase(output: Output, head_dim: HeadDim = 128, theta: Theta = 10000.0) -> None:
    """Draw how far phases are from the truth, over ids: float32 angles, those of Transformers, and integer turns."""
    from mmpos.analysis.plot import plot_phase_error
    from mmpos.rotary import Rotary

    rotary = Rotary(head_dim, theta, axes=1)
    _write(output, lambda path: plot_phase_error(rotary, path))


@plot.command()
def growth(
    output: Output,
    scheme: Annotated[
        list[str] | None, scheme_option("all with a next position", "Give several to compare them. ")
    ] = None,
) -> None:
    """Draw how many ids an image consumes, over its patches: squares, and strips of one row."""
    from mmpos.analysis.plot import plot_growth

    schemes = [make_scheme(words) for words in scheme] if scheme else None
    _write(output, lambda path: plot_growth(schemes, path))


def _write(output: Path, draw: Callable[[Path | None], Picture]) -> None:
    """Draw into a file and print its name, or write the picture to standard output."""
    if output == Path(STDIN):
        write_output(draw(None).png())
    else:
        draw(output)
        typer.echo(output)


def _placed(documents: list[str], schemes: list[str] | None, start: int, axes: int | None) -> list[Placed]:
    """Place the documents under every scheme."""
    specs = read_specs(documents)
    asked: list[str | None] = [*schemes] if schemes else [None]
    return [place_specs(specs, words, start, axes) for words in asked]


def _section(words: str) -> list[int]:
    try:
        return [int(word) for word in words.split(",")]
    except ValueError:
        raise InvalidInputError(f"--mrope-section: got {words!r}, want numbers such as 16,24,24") from None
