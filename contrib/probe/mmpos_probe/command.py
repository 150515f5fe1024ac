"""The commands of ``mmpos probe``, which find out by which positions an engine rotates keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import typer

from mmpos.errors import InvalidInputError, MmposError, UnsupportedError
from mmpos.integrations.models import ModelSettings, from_hf_config
from mmpos.segments import Grid, SegmentTable, Text
from mmpos_probe.checkpoint import REFERENCE, write_checkpoint
from mmpos_probe.verdict import Meant, Verdict, judge

DIFFERENT = 3
"""Exit code if keys are not as intended."""

app = typer.Typer(
    name="probe",
    help="Find the positions by which an engine actually rotates, from the keys in its cache.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@app.command()
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
    typer.echo(write_checkpoint(config, output))


Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]

BESIDE = ("position_ids", "reference")
"""Names of the arrays of a dump that are not keys."""


@app.command(
    help="Read the positions by which keys were rotated, and compare them with the intended ones.\n\n"
    "A dump contains the keys of tokens with one hidden state: floats (tokens, kv_heads, head_dim), without padding, "
    "as one array of numpy.save, or one array per layer of numpy.savez. It may also contain position_ids, the "
    "intended ids, (axes, tokens); and reference, a (kv_heads, head_dim) unrotated key. Without it, the reference of "
    "each layer is read from reference.npz next to config.json, which a probe checkpoint contains.\n\n"
    "A spec is one document: 3,2x3,2 is 3 text tokens, an image of 2 rows and 3 columns of patches, and 2 text "
    "tokens; 4x2x3 is a video of 4 frames.\n\n"
    f"Exit codes: 0 as intended; {DIFFERENT} other positions or another rotation."
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
        typer.Option("--spec", metavar="SPEC", help="The documents, for the model's scheme.", show_default=False),
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
    dump = _dump(keys)
    layers = dict(_layers(keys, dump))
    kinds, models = _models(config, layer_type, layers)
    meant = _meant(dump, ids, documents, start, next(iter(models.values())))
    trusted = "reference" in dump
    references = dict.fromkeys(layers, dump["reference"]) if trusted else _beside(config, layers)
    verdicts: dict[str, Verdict] = {}
    for name, layer in layers.items():
        try:
            verdicts[name] = judge(layer, models[name].rotary, meant, reference=references.get(name), trusted=trusted)
        except MmposError as error:
            raise type(error)(f"{keys}: {name} of shape {layer.shape}, {error}") from error
        if not as_json:
            typer.echo(_summary(name, verdicts[name]))
            typer.echo("".join(f"  {sentence}\n" for sentence in verdicts[name].sentences), nl=False)
    equal = all(verdict.equal for verdict in verdicts.values())
    unjudged = [name for name in layers if name not in references]
    if as_json:
        fields = {name: {"layer_type": kinds[name], **_json(verdict)} for name, verdict in verdicts.items()}
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


def _json(verdict: Verdict) -> dict[str, Any]:
    return {
        "equal": verdict.equal,
        "known": float(verdict.known.mean()),
        "unknown_tokens": verdict.unknown_tokens,
        "first_wrong": verdict.first_wrong,
        "factor_judged": verdict.factor_judged,
        "wrong_heads": verdict.wrong_heads,
        "message": verdict.sentences,
    }


def _models(
    config: Path, layer_type: str | None, names: Iterable[str]
) -> tuple[dict[str, str | None], dict[str, ModelSettings]]:
    """Return the type of each layer, and the settings of the model for that type."""
    path = config / "config.json" if config.is_dir() else config
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{config}: got {error}, want the config.json of a model") from None
    types = values.get("text_config", values).get("layer_types") or [] if isinstance(values, dict) else []
    numbers = {name: _number(name) for name in names}
    kinds = {
        name: types[number] if layer_type is None and number is not None and number < len(types) else layer_type
        for name, number in numbers.items()
    }
    models: dict[str | None, ModelSettings] = {}
    for kind in kinds.values():
        if kind not in models:
            models[kind] = from_hf_config(values, layer_type=kind)
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
    path = (config if config.is_dir() else config.parent) / REFERENCE
    if not path.is_file():
        return {}
    keys = _dump(path)
    return {name: keys[str(_number(name))] for name in names if str(_number(name)) in keys}


def _dump(path: Path) -> Arrays:
    """Read the arrays of a dump, and return them by name."""
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            return {"keys": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except OSError as error:
        got = error.strerror or str(error)
    except (ValueError, EOFError, BadZipFile) as error:
        got = str(error)
    raise InvalidInputError(f"{path}: got {got}, want arrays saved with numpy.savez, or a .npy saved with numpy.save")


def _layers(path: Path, dump: Arrays) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    names = [name for name in dump if name not in BESIDE]
    if not names:
        raise InvalidInputError(f"{path}: got only {', '.join(sorted(dump))}, want at least one array of keys")
    for name in names:
        if dump[name].ndim != 3:
            got = f"{name} of shape {dump[name].shape}"
            raise InvalidInputError(
                f"{path}: got {got}, want keys (tokens, kv_heads, head_dim), or {', '.join(BESIDE)}"
            )
        yield name, dump[name]


def _meant(
    dump: Arrays, ids: Path | None, documents: list[str] | None, start: int | None, model: ModelSettings
) -> Meant:
    """Return the intended positions."""
    sources = {"--spec": bool(documents), "--ids": ids is not None, "position_ids in the dump": "position_ids" in dump}
    passed = [name for name, present in sources.items() if present]
    if not passed:
        raise InvalidInputError(f"got no intended positions, want one of {', '.join(sources)}")
    if len(passed) > 1:
        raise InvalidInputError(f"{passed[0]} cannot be combined with {passed[1]}")
    if documents:
        segments = SegmentTable.from_documents([_document(spec) for spec in documents])
        return Meant(segments, model.scheme, model.start if start is None else start)
    if start is not None:
        raise InvalidInputError("--start requires --spec")
    arrays = [dump["position_ids"]] if ids is None else list(_dump(ids).values())
    if len(arrays) != 1:
        raise InvalidInputError(f"--ids: got {len(arrays)} arrays, want one")
    array, axes = arrays[0], model.rotary.axes
    if array.ndim == 1:
        array = np.tile(array, (axes, 1))
    name = "position_ids" if ids is None else "--ids"
    if array.ndim != 2 or len(array) != axes:
        hint = "; leave out the text row" if array.ndim and len(array) == axes + 1 else ""
        raise InvalidInputError(f"{name}: got shape {array.shape}, want ({axes}, tokens){hint}")
    return Meant(np.asarray(array))


def _document(spec: str) -> list[Text | Grid]:
    """Parse the text and grids of a document.

    >>> SegmentTable.from_documents([_document("3,2x4,4x2x3")]).extents.T.tolist()
    [[1, 1, 3], [1, 2, 4], [4, 2, 3]]
    """
    part = r"\d+(x\d+){0,2}"
    if not re.fullmatch(rf"{part}(,{part})*", spec, re.ASCII):
        raise InvalidInputError(f"--spec: got {spec!r}, want text and grids, such as 3,2x3,2 or 3,4x2x3,2")
    parts = [[int(side) for side in sides.split("x")] for sides in spec.split(",")]
    return [Text(*sides) if len(sides) == 1 else Grid.from_thw([1, *sides][-3:]) for sides in parts]
