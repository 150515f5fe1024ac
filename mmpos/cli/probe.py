"""The commands that ask an engine which positions it rotates by."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console

from mmpos.cli.analysis import read_array, read_config
from mmpos.cli.commands import SPECS, app
from mmpos.cli.options import read_specs
from mmpos.errors import InvalidInputError, MmposError, UnsupportedError
from mmpos.positions.place import place
from mmpos.positions.rows import FIRST_TOKEN
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import counted, first_bad, int_array, naming
from mmpos.support.program import DIFFERENT, STDIN

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
    "(kv_heads, head_dim) a key that was not turned; else that of the layer is read from reference.npz beside "
    f"config.json, where a probe checkpoint has it.\n\n{SPECS}\n\n"
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
        str | None,
        typer.Option(
            metavar="NAME",
            help="The type of all layers, where they turn by types.",
            show_default="the config's, by the number in the name of each array",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Read the positions that keys were turned by."""
    dump = _dump(keys)
    layers = dict(_layers(keys, dump))
    kinds, models = _models(config, layer_type, layers)
    meant = _meant(dump, ids, documents, start, next(iter(models.values())))
    beside = {} if "reference" in dump else _beside(config)
    found: dict[str, _Verdict] = {}
    for name, layer in layers.items():
        with naming(f"{keys}: {name} of shape {layer.shape}", joint=", "):
            options: dict[str, Any] = {key: dump[key] for key in ("reference", "lengths") if key in dump}
            verdict = found[name] = _judge(name, layer, models[name].rotary, meant, options, beside)
        if meant is None:
            first = next(iter(found))
            verdict.words.extend(_unlike(verdict.reading, first, found[first].reading))
        if not as_json:
            reading = verdict.reading
            told = f"{int(reading.known.sum()):,} of {reading.known.size:,} ids read"
            typer.echo(f"{name}: {told}, at most {_largest(reading.residual):.2g} rad left")
            typer.echo("".join(f"  {sentence}\n" for sentence in verdict.words), nl=False)
    equal = all(verdict.equal for verdict in found.values())
    unjudged = [name for name, verdict in found.items() if not verdict.factor_judged]
    if as_json:
        fields = {name: {"layer_type": kinds[name], **verdict.as_json()} for name, verdict in found.items()}
        typer.echo(json.dumps({"equal": equal, "layers": fields}, ensure_ascii=False, indent=1))
    elif unjudged:
        where = "" if len(unjudged) == len(found) else f" in {', '.join(unjudged)}"
        typer.echo(f"The attention factor was not judged{where}: there is no reference, a key that was not turned.")
    if not equal:
        raise typer.Exit(DIFFERENT)


def _models(
    config: Path, layer_type: str | None, names: Iterable[str]
) -> tuple[dict[str, str | None], dict[str, ModelSettings]]:
    """Find the type of each layer, and read the model with the rotation of that type."""
    from mmpos.integrations.models import from_hf_config
    from mmpos.rotary.hf_config import hf_layer_types

    values, types = read_config(config), list[str]()
    with suppress(MmposError):  # from_hf_config words it for the whole model
        types = hf_layer_types(values)
    numbers = {name: _number(name) for name in names}
    kinds = {
        name: types[number] if layer_type is None and number is not None and number < len(types) else layer_type
        for name, number in numbers.items()
    }
    models: dict[str | None, ModelSettings] = {}
    for name, kind in kinds.items():
        if kind not in models:
            try:
                models[kind] = from_hf_config(values, layer_type=kind)
            except InvalidInputError as error:
                if kind is not None or not str(error).startswith("layer_type: "):
                    raise
                want = "by --layer-type, or by the number of a layer in the array's name and layer_types in the config"
                raise InvalidInputError(f"{name}: {error}, {want}") from error
        if models[kind].second_rotary is not None:
            raise UnsupportedError(f"{config}: got a model that turns the channels of a pair apart, want one rotary")
    return kinds, {name: models[kind] for name, kind in kinds.items()}


def _number(name: str) -> int | None:
    """Find the number of a layer in the name of its array: behind "layer", or the last one.

    >>> _number("model.layers.3.self_attn.attn1"), _number("arr_4"), _number("keys")
    (3, 4, None)
    """
    found = re.search(r"layers?\W?_?(\d+)", name) or re.search(r"(\d+)\D*$", name)
    return None if found is None else int(found[1])


def _beside(config: Path) -> Arrays:
    """Read the keys before their rotation that a probe checkpoint has beside its config.json."""
    from mmpos.analysis.probe.checkpoint import REFERENCE

    path = (config if config.is_dir() else config.parent) / REFERENCE
    return _dump(path) if config != Path(STDIN) and path.is_file() else {}


@dataclass(frozen=True)
class _Verdict:
    """What is said of one layer: whether it is as meant, the first token over all rows that is not, and words."""

    reading: Reading
    equal: bool
    first_wrong: int | None
    words: list[str]
    wrong_heads: tuple[int, ...] = ()

    @property
    def factor_judged(self) -> bool:
        return self.reading.reference is None

    def as_json(self) -> dict[str, Any]:
        known = self.reading.known
        unknown = int((self.reading.explained & ~known.all(axis=0)).sum())
        found = {"equal": self.equal, "known": float(known.mean()), "unknown_tokens": unknown}
        heads = {"factor_judged": self.factor_judged, "wrong_heads": self.wrong_heads}
        return {**found, "first_wrong": self.first_wrong, **heads, "message": self.words}


def _judge(
    name: str,
    keys: npt.NDArray[Any],
    rotary: Rotary,
    meant: _Meant | None,
    options: dict[str, Any],
    beside: Arrays,
) -> _Verdict:
    """Read the keys of a layer and of each kv head, and compare ids and rotation with those that were meant."""
    from mmpos.analysis.probe import read
    from mmpos.analysis.probe.reading import MOST

    reference = beside.get(str(_number(name)))
    if reference is not None and reference.shape == keys.shape[-2:]:
        options = {**options, "reference": reference}
    with _reporting(name) as progress:
        reading = read(keys, rotary, progress=progress, **options)
        if "reference" in options and reference is options["reference"] and reading.alike.mean() <= MOST:
            del options["reference"]
            reading = read(keys, rotary, progress=progress, **options)
    try:
        whole = _compared(reading, keys, rotary, meant, options)
    except InvalidInputError as error:  # of keys in another layout, which the notes see
        raise InvalidInputError(f"{error}; {' '.join(reading.notes)}".rstrip("; ")) from error
    verdict = whole
    if keys.shape[-2] > 1 and rotary.head_axes is None and meant is not None and reading.num_tokens > 1:
        verdict = _by_head(whole, keys, rotary, meant, options)
    if reference is not None and not verdict.factor_judged:
        verdict.words.append("The keys are not those of reference.npz: other weights, heads, or order of channels.")
    return verdict


def _by_head(
    whole: _Verdict, keys: npt.NDArray[Any], rotary: Rotary, meant: _Meant, options: dict[str, Any]
) -> _Verdict:
    """Judge each kv head alone, and name those that are wrong where not all are, or not for one cause."""
    from mmpos.analysis.probe import identify, read
    from mmpos.analysis.probe.identify import UNEXPLAINED

    causes: dict[str, list[int]] = {}
    wrong: dict[int, _Verdict] = {}
    for head in range(keys.shape[-2]):
        own, key = dict(options), keys[..., head : head + 1, :]
        if "reference" in own:
            own["reference"] = own["reference"][head : head + 1]
        try:
            quick = identify(key, rotary, meant.positions, **own)
            if quick.as_meant and quick.first_wrong is None:
                continue
            found = _compared(read(key, rotary, **own), key, rotary, meant, own)
        except InvalidInputError as error:  # where it has no key
            found = replace(whole, equal=False, first_wrong=None, words=[f"{error}."])
        if not found.equal:
            wrong[head] = found
            why = next((sentence for sentence in found.words if "Cause" in sentence), " ".join(found.words))
            causes.setdefault(re.sub(r"\d[\d.,e+-]*", "", why), []).append(head)
    named = any("Cause: " in sentence and UNEXPLAINED not in sentence for sentence in whole.words)
    if not wrong or (len(wrong) == keys.shape[-2] and (named or len(causes) == 1)):
        return whole
    words = []
    for heads in causes.values():
        names = f"{'head' if len(heads) == 1 else 'heads'} {', '.join(map(str, heads))}"
        words += [f"Of {keys.shape[-2]} kv heads, {names} alone:", *wrong[heads[0]].words]
    first = min((one.first_wrong for one in wrong.values() if one.first_wrong is not None), default=None)
    return replace(whole, equal=False, first_wrong=first, words=words, wrong_heads=tuple(wrong))


def _compared(
    reading: Reading, keys: npt.NDArray[Any], rotary: Rotary, meant: _Meant | None, options: dict[str, Any]
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
        diagnosis = check(reading, *meant.told)
        equal, sentences = diagnosis.equal, [*diagnosis.sentences]
        differs, wrong = not equal, diagnosis.token
        if diagnosis.document and wrong is not None:
            wrong += int(meant.positions.documents[FIRST_TOKEN, diagnosis.document])
            sentences.insert(1, f"Counted over all rows, this is token {wrong}.")
        if equal and reading.reference is not None:
            notes.append(f"Ids are relative to token {reading.reference}: what all have too much is not seen.")
    if alone:
        return _Verdict(reading, equal, wrong, [*sentences, *notes])
    ids = reading.position_ids
    if not equal and reading.num_tokens > 1 and reading.known.all() and (ids == ids[:, :1]).all():
        notes += [ONE_KEY, "To do: dump keys as they enter the cache, after their rotation."]
        return _Verdict(reading, equal, wrong, [*_uncaused(sentences), *notes])
    positions = None if meant is None else meant.positions
    identified = identify(keys, rotary, positions, **options)  # ids may be read through a wrong rotation
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
    """Say which ids are not those of the first layer; a token is counted where both know it, from one reference."""
    if reading.position_ids.shape != first.position_ids.shape or reading.reference != first.reference:
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


@dataclass(frozen=True)
class _Meant:
    """The positions that were meant, and what ``check`` is told: documents, if there are any, since it knows more then.

    Args:
        positions: a table, or (axes, tokens) ids.
        told: arguments of check behind the reading.
    """

    positions: Any
    told: tuple[Any, ...]


def _meant(
    dump: Arrays, ids: Path | None, documents: list[str] | None, start: int | None, model: ModelSettings
) -> _Meant | None:
    """Return the positions that were meant, if any are given."""
    given = {"--spec": bool(documents), "--ids": ids is not None, "position_ids in the dump": "position_ids" in dump}
    several = [name for name, there in given.items() if there]
    if len(several) > 1:
        raise InvalidInputError(f"{several[0]}: got one beside {several[1]}, want one of them")
    if documents:
        segments = SegmentTable.from_documents(read_specs(documents).documents)
        told = segments, model.scheme, model.start if start is None else start
        return _Meant(place(*told), told)
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
    array = array.reshape(axes, -1)
    return _Meant(array, (array,))
