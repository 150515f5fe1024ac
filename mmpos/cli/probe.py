"""The commands that find out by which positions an engine rotates keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import typer

from mmpos.cli.analysis import read_array
from mmpos.cli.commands import SPECS, group
from mmpos.cli.options import read_config, read_specs
from mmpos.errors import InvalidInputError, MmposError, UnsupportedError
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import counted, first_bad, int_array, naming
from mmpos.support.program import DIFFERENT, STDIN

if TYPE_CHECKING:
    from mmpos.analysis.probe import Meant, Reading, Verdict
    from mmpos.integrations.models.settings import ModelSettings

probe = group("probe", "Find the positions by which an engine actually rotates, from the keys in its cache.")


@probe.command()
def checkpoint(
    config: Annotated[
        Path,
        typer.Option(metavar="config.json|FOLDER", help="The model; files next to it are copied.", show_default=False),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder to write.", show_default=False)
    ],
) -> None:
    """Write a small checkpoint of an architecture, in which keys differ only by their rotation.

    Any engine that loads checkpoints can be probed with it through ordinary requests, because all tokens and image
    patches have the same hidden state in every layer.
    """
    from mmpos.analysis.probe import write_checkpoint

    typer.echo(write_checkpoint(config, output))


Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]

BESIDE = ("position_ids", "lengths", "reference")
"""Names of the arrays of a dump that are not keys."""


@probe.command(
    help="Read the positions by which keys were rotated, and compare them with the intended ones.\n\n"
    "A dump contains the keys of tokens with one hidden state: floats (tokens, kv_heads, head_dim) or (batch, tokens, "
    "kv_heads, head_dim), as one array of numpy.save, or one array per layer of numpy.savez. It may also contain "
    "position_ids, the intended ids, (axes, tokens) without padding or (axes, batch, length) with padding; lengths, "
    "(batch,) the number of tokens of each row before its padding; and reference, a (kv_heads, head_dim) unrotated "
    "key. Without it, the reference of each layer is read from reference.npz next to config.json, which a probe "
    f"checkpoint contains.\n\n{SPECS}\n\n"
    f"Exit codes: 0 as intended; {DIFFERENT} other positions, another rotation, or nothing compared."
)
def run(
    keys: Annotated[Path, typer.Argument(metavar="KEYS.npz|.npy", help="The dump.", show_default=False)],
    config: Annotated[
        Path, typer.Option(metavar="config.json|FOLDER", help="The model, for its rotation.", show_default=False)
    ],
    ids: Annotated[
        Path | None, typer.Option(metavar="IDS.npy", help="The ids passed to the engine.", show_default=False)
    ] = None,
    documents: Annotated[
        list[str] | None,
        typer.Option("--spec", metavar="SPEC|FILE", help="The documents, for the model's scheme.", show_default=False),
    ] = None,
    start: Annotated[
        int | None, typer.Option(help="Id of each document's first token.", show_default="the model's first id")
    ] = None,
    layer_type: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Type of all layers, if the rotation depends on it.",
            show_default="the config's, by the layer number in the name of each array",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Read the positions by which keys were rotated."""
    from mmpos.analysis.probe import judge

    dump = _dump(keys)
    layers = dict(_layers(keys, dump))
    kinds, models = _models(config, layer_type, layers)
    meant = _meant(dump, ids, documents, start, next(iter(models.values())))
    trusted = "reference" in dump
    references = dict.fromkeys(layers, dump["reference"]) if trusted else _beside(config, layers)
    verdicts: dict[str, Verdict] = {}
    for name, layer in layers.items():
        options: dict[str, Any] = {"lengths": dump.get("lengths"), "reference": references.get(name)}
        with naming(f"{keys}: {name} of shape {layer.shape}", joint=", "):
            verdicts[name] = judge(layer, models[name].rotary, meant, **options, trusted=trusted)
        if not as_json:
            typer.echo(_summary(name, verdicts[name]))
            typer.echo("".join(f"  {sentence}\n" for sentence in _sentences(verdicts, name, meant)), nl=False)
    equal = all(verdict.equal for verdict in verdicts.values())
    unjudged = [name for name in layers if name not in references]
    if as_json:
        fields = {name: {"layer_type": kinds[name], **_json(verdicts, name, meant)} for name in verdicts}
        typer.echo(json.dumps({"equal": equal, "layers": fields}, ensure_ascii=False, indent=1))
    elif unjudged:
        where = "" if len(unjudged) == len(verdicts) else f" in {', '.join(unjudged)}"
        typer.echo(f"The attention factor was not judged{where}: there is no unrotated reference key.")
    if not equal:
        raise typer.Exit(DIFFERENT)


def _summary(name: str, verdict: Verdict) -> str:
    known = verdict.known
    heads = f" of {len(known)} kv heads" if len(known) > 1 else ""
    residual = f"residual at most {verdict.residual:.2g} rad"
    return f"{name}: {int(known.sum()):,} of {known.size:,} ids{heads} read, {residual}"


def _sentences(verdicts: Mapping[str, Verdict], name: str, meant: Meant | None) -> list[str]:
    """Return the sentences about a layer; without intended positions, also compare it with the first layer."""
    first = next(iter(verdicts))
    unlike = _unlike(verdicts[name].readings[0], first, verdicts[first].readings[0]) if meant is None else []
    return [*verdicts[name].sentences, *unlike]


def _json(verdicts: Mapping[str, Verdict], name: str, meant: Meant | None) -> dict[str, Any]:
    verdict = verdicts[name]
    return {
        "equal": verdict.equal,
        "known": float(verdict.known.mean()),
        "unknown_tokens": verdict.unknown_tokens,
        "first_wrong": verdict.first_wrong,
        "factor_judged": verdict.factor_judged,
        "wrong_heads": verdict.wrong_heads,
        "message": _sentences(verdicts, name, meant),
    }


def _models(
    config: Path, layer_type: str | None, names: Iterable[str]
) -> tuple[dict[str, str | None], dict[str, ModelSettings]]:
    """Return the type of each layer, and the settings of the model for that type."""
    from mmpos.integrations.models import from_hf_config
    from mmpos.rotary.hf_config import hf_layer_types

    values, types = read_config(config), list[str]()
    with suppress(MmposError):  # from_hf_config below raises the same error
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
                if kind is not None or not types:
                    raise
                hint = "pass --layer-type, or put the number of each layer into the name of its array"
                raise InvalidInputError(f"{name}: {error}; {hint}") from error
        if models[kind].second_rotary is not None:
            raise UnsupportedError(f"{config}: got a model with two rotaries for the channels of a pair, want one")
    return kinds, {name: models[kind] for name, kind in kinds.items()}


def _number(name: str) -> int | None:
    """Return the layer number in the name of an array: the number after "layer", or else the last number.

    >>> _number("model.layers.3.self_attn.attn1"), _number("arr_4"), _number("keys")
    (3, 4, None)
    """
    match = re.search(r"layers?\W?_?(\d+)", name) or re.search(r"(\d+)\D*$", name)
    return None if match is None else int(match[1])


def _beside(config: Path, names: Iterable[str]) -> Arrays:
    """Read the unrotated keys stored next to the config.json of a probe checkpoint, keyed by layer name."""
    from mmpos.analysis.probe.checkpoint import REFERENCE

    path = (config if config.is_dir() else config.parent) / REFERENCE
    if config == Path(STDIN) or not path.is_file():
        return {}
    keys = _dump(path)
    return {name: keys[str(_number(name))] for name in names if str(_number(name)) in keys}


def _unlike(reading: Reading, name: str, first: Reading) -> list[str]:
    """Return a sentence about ids that differ from the first layer's, counting tokens with ids known in both layers."""
    if reading.position_ids.shape != first.position_ids.shape or reading.reference != first.reference:
        return []
    got, want = ((layer.position_ids / layer.denominators) for layer in (reading, first))
    tokens = np.flatnonzero(((got != want) & reading.known & first.known).any(axis=0))
    if not tokens.size:
        return []
    return [f"{counted(tokens.size, 'token')} (first: {tokens[0]}) have other ids than in {name}."]


def _dump(path: Path) -> Arrays:
    """Read the arrays of a dump, and return them by name."""
    if path.suffix == ".npy":
        return {"keys": read_array(path)}
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except OSError as error:
        got = error.strerror or str(error)
    except (ValueError, AttributeError, EOFError) as error:
        got = str(error)
    raise InvalidInputError(f"{path}: got {got}, want arrays saved with numpy.savez, or a .npy saved with numpy.save")


def _layers(path: Path, dump: Arrays) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    names = [name for name in dump if name not in BESIDE]
    if not names:
        raise InvalidInputError(f"{path}: got only {', '.join(sorted(dump))}, want at least one array of keys")
    for name in names:
        if dump[name].ndim < 3:
            got = f"{name} of shape {dump[name].shape}"
            raise InvalidInputError(
                f"{path}: got {got}, want keys (tokens, kv_heads, head_dim), or {', '.join(BESIDE)}"
            )
        yield name, dump[name]


def _meant(
    dump: Arrays, ids: Path | None, documents: list[str] | None, start: int | None, model: ModelSettings
) -> Meant | None:
    """Return the intended positions, or None if none were passed."""
    from mmpos.analysis.probe import Meant

    sources = {"--spec": bool(documents), "--ids": ids is not None, "position_ids in the dump": "position_ids" in dump}
    passed = [name for name, present in sources.items() if present]
    if len(passed) > 1:
        raise InvalidInputError(f"{passed[0]} cannot be combined with {passed[1]}")
    if documents:
        segments = SegmentTable.from_documents(read_specs(documents).documents)
        return Meant(segments, model.scheme, model.start if start is None else start)
    if start is not None:
        raise InvalidInputError("--start requires --spec")
    if not passed:
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
    return Meant(np.asarray(array.reshape(axes, -1)))
