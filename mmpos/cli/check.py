"""The command that compares ids in a file with a scheme, and says what is wrong with them."""

from __future__ import annotations

import json
import math
from enum import StrEnum
from pathlib import Path
from tempfile import NamedTemporaryFile
from tokenize import TokenError  # numpy reads headers with it
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from mmpos.cli import report
from mmpos.cli.commands import JSON_FILE, SPECS, Start, app, scheme_words
from mmpos.cli.scheme_options import DEFAULT, Axes, SchemeName, make_scheme
from mmpos.cli.specs import Specs, read_specs
from mmpos.errors import InvalidInputError
from mmpos.schemes import Scheme
from mmpos.segments.table import SegmentTable
from mmpos.support.program import DIFFERENT, STDIN, read_input

if TYPE_CHECKING:
    from mmpos.analysis.diagnosis import Diagnosis


class Padding(StrEnum):
    """The side of a padded batch on which padding is."""

    LEFT = "left"
    RIGHT = "right"


@app.command(
    help="Compare ids in a file with a scheme: the first difference, and the mistake that explains it.\n\n"
    f"{SPECS}\n\n{JSON_FILE}\n\n"
    "Ids are (axes, tokens) packed, (axes, batch, length) padded, or either without axes, saved with numpy.save. "
    f"Exit codes: 0 equal, {DIFFERENT} different."
)
def check(
    ids: Annotated[Path, typer.Argument(metavar="IDS.npy|-", help="The ids of one batch.", show_default=False)],
    documents: Annotated[
        list[str],
        typer.Option("--spec", metavar="SPEC|FILE|-", help="A document, or a file of them; once for each."),
    ],
    scheme: SchemeName = None,
    config: Annotated[
        Path | None, typer.Option(metavar="config.json|-", help="A model's config, for its scheme.", show_default=False)
    ] = None,
    start: Start = 0,
    axes: Axes = None,
    padding: Annotated[Padding, typer.Option(help="Where a padded batch has its padding.")] = Padding.RIGHT,
    tolerance: Annotated[float, typer.Option(help="How far an id may be from the exact one.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare ids in a file with a scheme."""
    from mmpos.analysis.diagnosis import diagnose

    specs = read_specs(documents)
    segments = SegmentTable.from_documents(specs.documents)
    how = _scheme(specs, scheme, axes, config)
    found = diagnose(_read(ids), segments, how, start, side=padding.value, tolerance=tolerance)
    typer.echo(_json(found) if as_json else "\n".join(found.sentences))
    if not found.equal:
        raise typer.Exit(DIFFERENT)


def _scheme(specs: Specs, name: str | None, axes: int | None, config: Path | None) -> Scheme:
    """The scheme that is named, or that of a model."""
    from mmpos.integrations.models import from_hf_config

    if config is None:
        name, axes = scheme_words(specs, name, axes)
        return make_scheme(DEFAULT if name is None else name, axes)
    if name is not None or axes is not None:
        raise InvalidInputError("--config: got one with --scheme or --axes, want it alone")
    try:
        told = json.loads(read_input() if config == Path(STDIN) else config.read_bytes())
    except OSError as error:
        got = error.strerror or str(error)
    except (ValueError, RecursionError) as error:
        got = f"no valid JSON ({error})"
    else:
        return from_hf_config(told).scheme
    raise InvalidInputError(f"{config}: got {got}, want the config.json of a model")


def _read(path: Path) -> npt.NDArray[Any]:
    if path == Path(STDIN):
        with NamedTemporaryFile() as file:
            file.write(read_input())
            file.flush()
            return _mapped(Path(file.name), "standard input")
    return _mapped(path, str(path))


def _mapped(path: Path, name: str) -> npt.NDArray[Any]:
    """The array of a file, mapped, so that a header that promises more than the file has costs nothing."""
    try:
        with path.open("rb") as file:
            beginning = file.read(6)
        if beginning == b"\x93NUMPY":
            found: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
            return found
        got = "an archive (.npz, or of torch.save)" if beginning[:2] == b"PK" else "no .npy file"
    except OSError as error:
        got = error.strerror or str(error)
    except (ValueError, TypeError, EOFError, OverflowError, SyntaxError, TokenError) as error:
        got = str(error)
    raise InvalidInputError(f"{name}: got {got}, want an array saved with numpy.save")


def _json(found: Diagnosis) -> str:
    """The fields of a diagnosis, one per line; what is no number in JSON, fractions and infinity, as text."""
    want = found.want and [int(value) if value.denominator == 1 else str(value) for value in found.want]
    got = found.got and [value if math.isfinite(value) else str(value) for value in found.got]
    return report.json_lines({**vars(found), "got": got, "want": want, "message": str(found)})
