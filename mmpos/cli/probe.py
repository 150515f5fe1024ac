"""The commands that ask an engine which positions it rotates by."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console

from mmpos.cli.analysis import model_of, read_array
from mmpos.cli.commands import SPECS, app
from mmpos.cli.options import read_specs
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.positions.place import place
from mmpos.positions.rows import FIRST_TOKEN
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import counted, first_bad, int_array, naming
from mmpos.support.program import DIFFERENT

if TYPE_CHECKING:
    from mmpos.analysis.probe import Reading
    from mmpos.integrations.models.settings import ModelSettings
    from mmpos.rotary import Rotary

probe = typer.Typer(name="probe", invoke_without_command=True, rich_markup_mode="rich")
app.add_typer(probe)


@probe.callback()
def root(context: typer.Context) -> None:
    """Find the positions that an engine really rotates by, from the keys in its cache."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@probe.command()
def checkpoint(
    config: Annotated[
        Path,
        typer.Option(metavar="config.json|FOLDER", help="The model; files beside it are used.", show_default=False),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where to write.", show_default=False)
    ],
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Write a small checkpoint of an architecture, in which keys differ by their rotation alone.

    Any engine that loads checkpoints can be asked with it, by ordinary requests: every token, and every patch of an
    image, has one hidden state in every layer.
    """
    from mmpos.analysis.probe import write_checkpoint

    typer.echo(write_checkpoint(config, output, seed=seed))


Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]

BESIDE = ("position_ids", "lengths", "reference")
"""Names of the arrays of a dump that are not keys."""


@probe.command(
    help="Read the positions that keys were turned by, and compare them with those that were meant.\n\n"
    "A dump has (tokens, kv_heads, head_dim) floats, or with a batch axis before, of tokens with one hidden state: one "
    "array of numpy.save, or any number by numpy.savez, one for each layer. Beside them it may have position_ids that "
    "were meant, (axes, tokens) without padding or (axes, batch, length) with it; lengths, (batch,) tokens of each row "
    "that count, the first ones; and reference, "
    f"(kv_heads, head_dim) a key that was not turned.\n\n{SPECS}\n\n"
    f"Exit codes: 0 as meant, {DIFFERENT} other positions, another rotation, or nothing compared."
)
def run(
    keys: Annotated[Path, typer.Argument(metavar="KEYS.npz|.npy", help="The dump.", show_default=False)],
    config: Annotated[
        Path, typer.Option(metavar="config.json|FOLDER", help="The model, for its rotation.", show_default=False)
    ],
    ids: Annotated[
        Path | None, typer.Option(metavar="IDS.npy", help="The ids that the engine was given.", show_default=False)
    ] = None,
    documents: Annotated[
        list[str] | None,
        typer.Option("--spec", metavar="SPEC|FILE", help="The documents, for the model's scheme.", show_default=False),
    ] = None,
    start: Annotated[
        int | None, typer.Option(help="Id of each document's first token.", show_default="the model's")
    ] = None,
    layer_type: Annotated[
        str | None, typer.Option(metavar="NAME", help="The layers, where a model has rotations by them.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Read the positions that keys were turned by."""
    model = model_of(config, layer_type)
    if model.second_rotary is not None:
        raise UnsupportedError(f"{config}: got a model that turns the channels of a pair apart, want one rotary")
    dump = _dump(keys)
    meant = _meant(dump, ids, documents, start, model)
    found: dict[str, _Verdict] = {}
    for name, layer in _layers(keys, dump):
        with naming(f"{keys}: {name} of shape {layer.shape}", joint=", "):
            options: dict[str, Any] = {key: dump[key] for key in ("reference", "lengths") if key in dump}
            verdict = found[name] = _judge(name, layer, model.rotary, meant, options)
        if meant is None:
            first = next(iter(found))
            verdict.words.extend(_unlike(verdict.reading, first, found[first].reading))
        if not as_json:
            reading = verdict.reading
            told = f"{int(reading.known.sum()):,} of {reading.known.size:,} ids read"
            typer.echo(f"{name}: {told}, at most {_largest(reading.residual):.2g} rad left")
            typer.echo("".join(f"  {sentence}\n" for sentence in verdict.words), nl=False)
    equal = all(verdict.equal for verdict in found.values())
    if as_json:
        layers = {name: verdict.as_json() for name, verdict in found.items()}
        typer.echo(json.dumps({"equal": equal, "layers": layers}, ensure_ascii=False, indent=1))
    if not equal:
        raise typer.Exit(DIFFERENT)


@dataclass(frozen=True)
class _Verdict:
    """What is said of one layer: whether it is as meant, the first token over all rows that is not, and words."""

    reading: Reading
    equal: bool
    first_wrong: int | None
    words: list[str]

    def as_json(self) -> dict[str, Any]:
        known = self.reading.known
        unknown = int((self.reading.explained & ~known.all(axis=0)).sum())
        found = {"equal": self.equal, "known": float(known.mean()), "unknown_tokens": unknown}
        return {**found, "first_wrong": self.first_wrong, "message": self.words}


def _judge(name: str, keys: npt.NDArray[Any], rotary: Rotary, meant: Any, options: dict[str, Any]) -> _Verdict:
    """Read the keys of a layer, and compare ids and rotation with those that were meant."""
    from mmpos.analysis.probe import read

    with _reporting(name) as progress:
        reading = read(keys, rotary, progress=progress, **options)
    try:
        return _compared(reading, keys, rotary, meant, options)
    except InvalidInputError as error:  # of keys in another layout, which the notes see
        raise InvalidInputError(f"{error}; {' '.join(reading.notes)}".rstrip("; ")) from error


def _compared(
    reading: Reading, keys: npt.NDArray[Any], rotary: Rotary, meant: Any, options: dict[str, Any]
) -> _Verdict:
    from mmpos.analysis.probe import check, identify
    from mmpos.analysis.probe.reading import ONE_KEY

    notes, sentences = [note for note in reading.notes if note != ONE_KEY], list[str]()
    differs, wrong = False, None
    alone = reading.reference is not None and reading.num_tokens == 1  # it is what it is compared with
    equal = bool(meant is not None and reading.known.any() and not alone)
    if meant is None:
        notes.append("Nothing was compared: give --spec or --ids, the positions that were meant.")
    elif equal:
        diagnosis = check(reading, meant)
        equal, sentences = diagnosis.equal, [*diagnosis.sentences]
        differs, wrong = not equal, diagnosis.token
        if diagnosis.document and wrong is not None:
            wrong += int(meant.documents[FIRST_TOKEN, diagnosis.document])
            sentences.insert(1, f"Counted over all rows, this is token {wrong}.")
        if equal and reading.reference is not None:
            notes.append(f"Ids are relative to token {reading.reference}: what all have too much is not seen.")
    if alone:
        return _Verdict(reading, equal, wrong, [*sentences, *notes])
    ids = reading.position_ids
    if not equal and reading.num_tokens > 1 and reading.known.all() and (ids == ids[:, :1]).all():
        notes += [ONE_KEY, "To do: dump keys as they enter the cache, after their rotation."]
        return _Verdict(reading, equal, wrong, [*_uncaused(sentences), *notes])
    identified = identify(keys, rotary, meant, **options)  # ids may be read through a wrong rotation
    right = equal and identified.as_meant and identified.first_wrong is None
    earlier = identified.first_wrong is not None and (wrong is None or identified.first_wrong < wrong)
    wrong = identified.first_wrong if earlier else wrong
    other = identified.named and not identified.as_meant
    if other:
        sentences = _uncaused(sentences)  # what the ids look like through the rotation that was meant
    if other or earlier or (not differs and (not right or reading.notes)):
        notes.append(str(identified))
    return _Verdict(reading, right, wrong, [*sentences, *notes])


@contextmanager
def _reporting(name: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show on a terminal how many tokens of a layer are read."""
    out = Console(stderr=True)
    if not out.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    with Progress(*columns, TimeElapsedColumn(), console=out, transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _uncaused(sentences: list[str]) -> list[str]:
    """Leave out the cause of a diagnosis, and its remedy."""
    return [sentence for sentence in sentences if not sentence.startswith(("Cause", "To do"))]


def _unlike(reading: Reading, name: str, first: Reading) -> list[str]:
    """Say which ids are not those of the first layer; a token is counted where both know it."""
    if reading.position_ids.shape != first.position_ids.shape:
        return []
    got, want = ((each.position_ids / each.denominators) for each in (reading, first))
    tokens = np.flatnonzero(((got != want) & reading.known & first.known).any(axis=0))
    if not tokens.size:
        return []
    return [f"{counted(tokens.size, 'token')}, the first {tokens[0]}, have other ids than in {name}."]


def _largest(residual: npt.NDArray[np.float64]) -> float:
    known = residual[np.isfinite(residual)]
    return float(known.max(initial=0))


def _dump(path: Path) -> Arrays:
    """Read the arrays of a dump by their names."""
    if path.suffix == ".npy":
        return {"keys": read_array(path)}
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except OSError as error:
        got = error.strerror or str(error)
    except (ValueError, AttributeError, EOFError) as error:
        got = str(error)
    raise InvalidInputError(f"{path}: got {got}, want arrays of numpy.savez, or one of numpy.save in a .npy")


def _layers(path: Path, dump: Arrays) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    names = [name for name in dump if name not in BESIDE]
    if not names:
        raise InvalidInputError(f"{path}: got {sorted(dump)}, want an array of keys, such as keys")
    for name in names:
        if dump[name].ndim < 3:
            got = f"{name} of shape {dump[name].shape}"
            raise InvalidInputError(
                f"{path}: got {got}, want keys (tokens, kv_heads, head_dim), or {', '.join(BESIDE)}"
            )
        yield name, dump[name]


def _meant(dump: Arrays, ids: Path | None, documents: list[str] | None, start: int | None, model: ModelSettings) -> Any:
    """Return the positions that were meant: a table, (axes, tokens) ids, or None."""
    given = {"--spec": bool(documents), "--ids": ids is not None, "position_ids in the dump": "position_ids" in dump}
    several = [name for name, there in given.items() if there]
    if len(several) > 1:
        raise InvalidInputError(f"{several[0]}: got one beside {several[1]}, want one of them")
    if documents:
        segments = SegmentTable.from_documents(read_specs(documents).documents)
        return place(segments, model.scheme, model.start if start is None else start)
    if start is not None:
        raise InvalidInputError("--start: got one without --spec, want both")
    if not any(given.values()):
        return None
    array = dump["position_ids"] if ids is None else read_array(ids)
    axes = model.rotary.axes
    if array.ndim == 1:
        array = np.tile(array, (axes, 1))
    name = "position_ids" if ids is None else "--ids"
    if array.ndim not in (2, 3) or len(array) != axes:
        hint = "; leave out the text row" if array.ndim and len(array) == axes + 1 else ""
        raise InvalidInputError(
            f"{name}: got shape {array.shape}, want ({axes}, tokens) or ({axes}, batch, length){hint}"
        )
    if array.ndim == 3 and "lengths" in dump:
        batch, length = array.shape[1:]
        with naming(f"{name} of shape {array.shape}", joint=", "):
            lengths = int_array("lengths", dump["lengths"], (batch,))
            first_bad("lengths", lengths, minimum=0, maximum=length)
        array = array[:, np.arange(length) < lengths[:, None]]
    return array.reshape(axes, -1)
