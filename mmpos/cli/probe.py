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
            verdict.words.extend(_unlike(verdict.readings[0], first, found[first].readings[0]))
        if not as_json:
            known, left = verdict.known, max(_largest(reading.residual) for reading in verdict.readings)
            heads = f" of {len(known)} kv heads" if len(known) > 1 else ""
            typer.echo(f"{name}: {int(known.sum()):,} of {known.size:,} ids{heads} read, at most {left:.2g} rad left")
            typer.echo("".join(f"  {sentence}\n" for sentence in verdict.words), nl=False)
    equal = all(verdict.equal for verdict in found.values())
    unjudged = [name for name in layers if "reference" not in dump and str(_number(name)) not in beside]
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


OTHER = "The keys are not those of reference.npz: other weights, heads, or order of channels."

ONE = 1e-5
"""Most that tokens with one key differ, relative: less than the slowest pairs of M-RoPE turn by one id."""


@dataclass(frozen=True)
class _Verdict:
    """What is said of one layer: whether it is as meant, the first token over all rows that is not, and words.

    Args:
        readings: of all kv heads as one, or of each.
        equal: whether ids and rotation are as meant.
        first_wrong: the first token that is not, counted over all rows.
        words: sentences.
        wrong_heads: kv heads that are wrong where others are right, or wrong in another way.
        foreign: whether the reference beside the config is not that of these keys.
    """

    readings: tuple[Reading, ...]
    equal: bool
    first_wrong: int | None
    words: list[str]
    wrong_heads: tuple[int, ...] = ()
    foreign: bool = False

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """(readings, axes, tokens) which ids were told."""
        return np.stack([reading.known for reading in self.readings])

    def as_json(self) -> dict[str, Any]:
        known = self.known
        hidden = np.stack([reading.explained for reading in self.readings]) & ~known.all(axis=1)
        found = {"equal": self.equal, "known": float(known.mean()), "unknown_tokens": int(hidden.any(axis=0).sum())}
        judged = all(reading.reference is None for reading in self.readings)
        heads = {"factor_judged": judged, "wrong_heads": self.wrong_heads}
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
    reference = beside.get(str(_number(name)))
    if reference is not None and reference.shape != keys.shape[-2:]:
        reference = reference[:0]
    with _reporting(name) as progress:
        found = _alone(keys, rotary, meant, options, reference, progress)
    lone = reference is None and found.readings[0].num_tokens == 1
    if keys.shape[-2] > 1 and rotary.head_axes is None and not lone:
        found = _by_head(found, keys, rotary, meant, options, reference)
    return replace(found, equal=False, words=[*found.words, OTHER]) if found.foreign else found


def _alone(
    keys: npt.NDArray[Any],
    rotary: Rotary,
    meant: _Meant | None,
    options: dict[str, Any],
    reference: npt.NDArray[Any] | None,
    progress: Callable[[int, int], None] | None = None,
) -> _Verdict:
    """Judge heads as one, by the reference beside the config where most tokens that were written are like it."""
    from mmpos.analysis.probe import read
    from mmpos.analysis.probe.traces import MOST

    usable = reference is not None and reference.size > 0
    own = {**options, "reference": reference} if usable else options
    foreign = reference is not None and not usable
    try:
        reading = read(keys, rotary, progress=progress, **own)
        if "reference" in own and reading.alike.mean() <= MOST:
            written = _written(keys, options)
            if not written.any():
                words = ["All keys are zeros, NaN or infinity: they were never written."]
                return _Verdict((reading,), False, 0, words)
            like = reading.alike[written.all(axis=1)]
            if usable and not (like.size and like.mean() > MOST):
                foreign, own = True, options
                reading = read(keys, rotary, progress=progress, **own)
    except InvalidInputError as error:
        if not re.match(r"reference: token \d+: got (NaN|nothing)", str(error)):
            raise
        return _Verdict((_unread(keys, rotary, options),), False, 0, [f"{error}."], foreign=foreign)
    try:
        return replace(_compared(reading, keys, rotary, meant, own), foreign=foreign)
    except InvalidInputError as error:  # of keys in another layout, which the notes see
        raise InvalidInputError(f"{error}; {' '.join(reading.notes)}".rstrip("; ")) from error


def _tokens(keys: npt.NDArray[Any], options: dict[str, Any]) -> npt.NDArray[Any]:
    """(tokens, kv_heads, head_dim) keys of all rows that count."""
    rows = keys.reshape(-1, *keys.shape[-3:])
    if "lengths" not in options:
        return rows.reshape(-1, *keys.shape[-2:])
    return np.asarray(rows[np.arange(rows.shape[1]) < np.asarray(options["lengths"])[:, None]])


def _written(keys: npt.NDArray[Any], options: dict[str, Any]) -> npt.NDArray[np.bool_]:
    """(tokens, kv_heads) which keys are finite numbers, not all zero."""
    tokens = _tokens(keys, options)
    return np.asarray(np.isfinite(tokens).all(axis=-1) & tokens.any(axis=-1))


def _unread(keys: npt.NDArray[Any], rotary: Rotary, options: dict[str, Any]) -> Reading:
    """Return a reading in which nothing is told, since the token that ids are relative to was never written."""
    from mmpos.analysis.probe import UNKNOWN, Reading

    rows = keys.reshape(-1, *keys.shape[-3:])
    offsets = np.cumsum([0, *options.get("lengths", [rows.shape[1]] * len(rows))])
    tokens, no = int(offsets[-1]), np.zeros(int(offsets[-1]), np.bool_)
    ids, ones = np.full((rotary.axes, tokens), UNKNOWN), np.ones(tokens, np.int64)
    return Reading(ids, ones, np.full(tokens, np.nan), np.zeros(ids.shape), no, no, 0, offsets, ())


def _by_head(
    whole: _Verdict,
    keys: npt.NDArray[Any],
    rotary: Rotary,
    meant: _Meant | None,
    options: dict[str, Any],
    reference: npt.NDArray[Any] | None,
) -> _Verdict:
    """Judge each kv head alone, and name those that are wrong where not all are, or not for one cause."""
    from mmpos.analysis.probe import identify
    from mmpos.analysis.probe.confidence import ONE_KEY
    from mmpos.analysis.probe.identify import UNEXPLAINED

    heads = keys.shape[-2]

    def given(head: int) -> tuple[npt.NDArray[Any], dict[str, Any], npt.NDArray[Any] | None]:
        """The key of a head, and its rows of the reference of the dump and of the one beside the config."""
        here, own = slice(head, head + 1), dict(options)
        if "reference" in own:
            own["reference"] = own["reference"][here]
        return keys[..., here, :], own, None if reference is None else reference[here]

    def alone(head: int) -> _Verdict:
        key, own, row = given(head)
        return _alone(key, rotary, meant, own, row)

    def as_meant(head: int) -> bool:
        key, own, row = given(head)
        if not whole.equal and not _written(key, own).any():
            return False
        with suppress(InvalidInputError):  # of a head whose first key was never written
            own |= {} if row is None or not row.size else {"reference": row}
            quick = identify(key, rotary, positions, **own)
            return quick.as_meant and quick.first_wrong is None
        return False

    if meant is None:
        if not whole.foreign or all(alone(head).foreign for head in range(heads)):
            return whole
        return replace(whole, foreign=False, words=["Kv heads were not turned alike.", *whole.words])
    positions = meant.positions
    found = {head: alone(head) for head in range(heads) if not as_meant(head)}
    others = reference is None or not reference.size or [one.foreign for one in found.values()] == [True] * heads
    foreign = whole.foreign and others
    causes: dict[str, list[int]] = {}
    for head, one in found.items():
        if one.foreign and not foreign:
            one = found[head] = replace(one, equal=False, words=[*one.words, OTHER])
        if not one.equal:
            said = (sentence for sentence in one.words if "Cause" in sentence or sentence in (ONE_KEY, OTHER))
            why = next(said, " ".join(one.words))
            causes.setdefault(why if whole.foreign else re.sub(r"\d[\d.,e+-]*", "", why), []).append(head)
    wrong = sorted(head for some in causes.values() for head in some)
    named = any(("Cause: " in said and UNEXPLAINED not in said) or said == ONE_KEY for said in whole.words)
    if not wrong or (whole.foreign == foreign and len(wrong) == heads and (named or len(causes) == 1)):
        return replace(whole, foreign=foreign)
    words = []
    for some in causes.values():
        names = f"{'head' if len(some) == 1 else 'heads'} {', '.join(map(str, some))}"
        words += [f"Of {heads} kv heads, {names} alone:", *found[some[0]].words]
    firsts = [first for head in wrong if (first := found[head].first_wrong) is not None]
    readings = tuple(reading for head in range(heads) for reading in (found.get(head) or alone(head)).readings)
    return _Verdict(readings, False, min(firsts, default=None), words, tuple(wrong), foreign)


def _compared(
    reading: Reading, keys: npt.NDArray[Any], rotary: Rotary, meant: _Meant | None, options: dict[str, Any]
) -> _Verdict:
    from mmpos.analysis.probe import check, identify
    from mmpos.analysis.probe.confidence import ONE_KEY

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
        return _Verdict((reading,), equal, wrong, [*sentences, *notes])
    ids = reading.position_ids
    same = reading.num_tokens > 1 and reading.known.all() and bool((ids == ids[:, :1]).all())
    if not equal and not same and meant is not None and not reading.known.all():
        changes = (meant.ids != meant.ids[:, :1]).any(axis=0)
        same = changes.size == reading.num_tokens and bool(changes.any()) and _one_key(_tokens(keys, options))
        wrong = int(changes.argmax()) if same and wrong is None else wrong
    if not equal and same:
        notes += [ONE_KEY, "To do: dump keys as they enter the cache, after their rotation."]
        return _Verdict((reading,), equal, wrong, [*_uncaused(sentences), *notes])
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
    return _Verdict((reading,), right, wrong, [*sentences, *notes])


def _one_key(tokens: npt.NDArray[Any]) -> bool:
    """Tell whether (tokens, kv_heads, head_dim) are one key, also where its pairs are too few to tell ids."""
    first = tokens[0].astype(np.float64)
    off = ((tokens - first) ** 2).mean(axis=(1, 2))
    return bool((off <= ONE**2 * (first**2).mean()).all())


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

    @property
    def ids(self) -> npt.NDArray[Any]:
        """(axes, tokens)."""
        return self.positions if isinstance(self.positions, np.ndarray) else self.positions.dense(dtype=np.float64)


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
