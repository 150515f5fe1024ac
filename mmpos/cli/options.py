"""Documents and schemes on the command line: ``3,2x3,2`` or a file; ``v2pe,stride=16`` or a class."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer

from mmpos.errors import InvalidInputError
from mmpos.schemes import NOT_AFFINE, SCHEMES, Scheme, get_scheme
from mmpos.schemes.imported import build_scheme, import_scheme
from mmpos.segments.kinds import Audio, Clip, Grid, Segment, Text, Thumbnail, Tile
from mmpos.support.checks import did_you_mean, integer, naming
from mmpos.support.program import STDIN, read_input

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT = "rope-tie"


def flat(command: Callable[..., T]) -> Callable[..., T]:
    """Turn the fields of each dataclass parameter of a command into options."""
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {p.name: p.annotation for p in parameters if is_dataclass(p.annotation)}

    @wraps(command)
    def run(**options: Any) -> T:
        grouped = {
            name: group(**{field.name: options.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return command(**options, **grouped)

    flattened: list[inspect.Parameter] = []
    for parameter in parameters:
        own = [parameter]
        if parameter.name in groups:
            own = list(inspect.signature(groups[parameter.name], eval_str=True).parameters.values())
        flattened += [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in own]
    run.__signature__ = inspect.Signature(flattened)  # type: ignore[attr-defined]  # typer reads the signature
    run.__annotations__ = {option.name: option.annotation for option in flattened}
    return run


def complete_scheme(incomplete: str) -> list[tuple[str, str]]:
    """List the schemes that complete a name, each with the first line of its documentation."""
    return [
        (name, (scheme.__doc__ or "").partition("\n")[0])
        for name, scheme in SCHEMES.items()
        if name.startswith(incomplete)
    ]


def scheme_option(default: str, prefix: str = "") -> Any:
    """Return the option that names a scheme, with its default in words and a prefix for its help."""
    return typer.Option(
        "--scheme",
        "-s",
        metavar="NAME[,PARAMETER=VALUE...]",
        help=f"{prefix}One of {', '.join(SCHEMES)}, or your own package.module:Class.",
        show_default=default,
        autocompletion=complete_scheme,
    )


SchemeName = Annotated[str | None, scheme_option(DEFAULT)]


def make_scheme(name: str) -> Scheme:
    """Build a scheme from a name such as ``rope-tie``, ``v2pe,stride=16`` or ``my.module:MyScheme,width=3``.

    Args:
        name: a name, or a module and its class or object, then parameters; or the label of a scheme, such as
            ``v2pe(stride=16)``, which must be quoted in a shell.

    Raises:
        InvalidInputError: the name or its parameters are invalid.
    """
    if name.endswith(")"):
        name = name[:-1].replace("(", ",", 1)
    head, *assignments = (word.strip() for word in name.split(","))
    parameters = dict(map(_parameter, assignments))
    try:
        return import_scheme(head, parameters) if ":" in head else build_scheme(_known(head), head, parameters)
    except InvalidInputError as error:
        if not str(error).startswith("got "):  # a check of the scheme, whose message names its class
            raise
        raise InvalidInputError(f"--scheme: {error}") from error


def _known(name: str) -> type[Scheme]:
    if name in NOT_AFFINE:
        get_scheme(name)  # raises an error with the reason
    if name not in SCHEMES:
        raise InvalidInputError(
            f"--scheme: got {name!r}{did_you_mean(name, SCHEMES)}, want one of {', '.join(SCHEMES)}, "
            "or your own package.module:Class"
        )
    return SCHEMES[name]


def _parameter(assignment: str) -> tuple[str, object]:
    name, equals, value = (word.strip() for word in assignment.partition("="))
    if not (name and equals and value):
        raise InvalidInputError(f"--scheme: got {assignment!r}, want PARAMETER=VALUE after the comma")
    for read in (int, float, Fraction):
        try:
            return name, read(value)
        except (ValueError, ZeroDivisionError):
            continue
    return name, {"None": None, "True": True, "False": False}.get(value, value.strip("'\""))


Document = list[Segment]

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif")
_NUMBER = "[0-9]{1,640}"  # any number of digits that int() reads, so that a larger one is refused as too large
_WANT_PART = "a text run such as 3, an image such as 2x3 or a video such as 4x2x3@1/24"
_WANT_GRID = "[height, width] or [frames, height, width]"
_WANT_FILE = '{"documents": [[{"text": 3}, {"grid": [2, 3]}]]}'


@dataclass(frozen=True)
class Specs:
    """Documents, with the scheme of their files.

    Args:
        documents: the documents, in the order of the arguments.
        scheme: the value of "scheme" in a JSON file; None if no file contains it.
    """

    documents: list[Document]
    scheme: str | None = None


def read_specs(arguments: Sequence[str]) -> Specs:
    """Read the documents that command-line arguments name, in order, and the scheme in JSON files.

    >>> read_specs(["3,2x3"]).documents
    [[Text(length=3), Grid(height=2, width=3, frames=1, row_separator=False, seconds_per_frame=None, first_frame=None)]]

    Args:
        arguments: each is a spec (one document), a .json file (several documents), an image file (one document: a
            marker, the patches of a default ImageProcessor, a marker), or "-", which reads one of these from standard
            input, with one spec per line.

    Raises:
        InvalidInputError: an argument is invalid, or files name different schemes.
    """
    parsed = [_read(argument) for argument in arguments]
    schemes = {specs.scheme: argument for specs, argument in zip(parsed, arguments, strict=True) if specs.scheme}
    if len(schemes) > 1:
        got = ", ".join(f"{scheme!r} in {argument}" for scheme, argument in schemes.items())
        raise InvalidInputError(f"scheme: got {got}, want one for all documents")
    return Specs([document for specs in parsed for document in specs.documents], next(iter(schemes), None))


def as_config(config: Path) -> object:
    """Read a config.json from standard input; return the path of a file or a folder unchanged."""
    if config != Path(STDIN):
        return config
    try:
        return json.loads(read_input())
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"--config: got invalid JSON ({error}), want the config.json of a model") from None


def to_json(documents: Sequence[Document]) -> list[list[dict[str, object]]]:
    """Convert documents to the value of "documents" in a JSON file."""
    return [[_part_to_json(part) for part in document] for document in documents]


def _read(argument: str) -> Specs:
    if argument == STDIN:
        return _input()
    suffix = Path(argument).suffix.lower()
    # Recognize a spec before asking the file system, which refuses long names.
    if not suffix and (re.fullmatch(r"[0-9x×@/,\s]+", argument) or not Path(argument).exists()):
        return Specs([read_spec(argument)])
    if suffix != ".json" and suffix not in IMAGE_SUFFIXES:
        raise InvalidInputError(
            f"SPEC|FILE: got {argument!r}, want a spec such as 3,2x3,2 or a file ending in "
            f".json {' '.join(IMAGE_SUFFIXES)}"
        )
    if not Path(argument).is_file():
        raise InvalidInputError(f"{argument}: no such file")
    if suffix != ".json":
        return Specs([_image(argument, Path(argument))])
    try:
        return _json(argument, Path(argument).read_bytes())
    except OSError as error:
        raise InvalidInputError(f"{argument}: got {error.strerror}, want a readable file") from None


def _input() -> Specs:
    """Read specs, JSON or an image from standard input; data that is not valid UTF-8 is an image."""
    name, data = "standard input", read_input()
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return Specs([_image(name, data)])
    if text.lstrip().startswith(("{", "[")):
        return _json(name, data)
    specs = [read_spec(line.strip()) for line in text.splitlines() if line.strip()]
    if not specs:
        raise InvalidInputError(f"{name}: got nothing, want specs (one per line), a JSON file or an image")
    return Specs(specs)


def read_spec(argument: str) -> Document:
    """Read a spec such as ``3,2x3,2`` or ``4x2x3@1/24``, a video of 1/24 seconds per frame.

    Raises:
        InvalidInputError: a part is neither text nor a grid.
    """
    document: Document = []
    for i, piece in enumerate(argument.split(",")):
        name = f"SPEC {argument!r}, part {i + 1}"
        sides, _, seconds = piece.strip().partition("@")
        if not re.fullmatch(rf"{_NUMBER}(([x×]{_NUMBER}){{1,2}}(@{_NUMBER}(/[1-9][0-9]{{0,639}})?)?)?", piece.strip()):
            raise InvalidInputError(f"{name}: got {piece!r}, want {_WANT_PART}")
        numbers, time = [int(number) for number in re.split("[x×]", sides)], Fraction(seconds) if seconds else None
        grid = len(numbers) > 1
        document.append(_named(name, _grid, numbers, seconds_per_frame=time) if grid else _named(name, Text, *numbers))
    return document


def _grid(numbers: list[int], **options: Any) -> Grid:
    return Grid(*numbers[-2:], frames=numbers[0] if len(numbers) == 3 else 1, **options)


def _json(path: str, data: bytes) -> Specs:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path}: got invalid JSON ({error}), want {_WANT_FILE}") from None
    documents = content.get("documents") if isinstance(content, dict) else None
    if not isinstance(documents, list):
        got = "no list of documents" if isinstance(content, dict) else f"a JSON {type(content).__name__}"
        raise InvalidInputError(f"{path}: got {got}, want {_WANT_FILE}")
    segments = []
    for d, parts in enumerate(documents):
        if not isinstance(parts, list):
            raise InvalidInputError(f"{path}: documents[{d}]: got {type(parts).__name__}, want a list of parts")
        segments.append([read_part(f"{path}: documents[{d}][{i}]", part) for i, part in enumerate(parts)])
    scheme = content.get("scheme")
    if scheme is not None and not isinstance(scheme, str):
        raise InvalidInputError(f"{path}: scheme: got {json.dumps(scheme)}, want a name")
    return Specs(segments, scheme)


_OF_GRID = {"row_separator", "seconds_per_frame", "first_frame"}


def read_part(name: str, part: Any) -> Segment:
    """Read a part of a JSON file, such as ``{"grid": [2, 3]}``; errors begin with the name."""
    names: dict[str, Any] = part if isinstance(part, dict) else {}
    match names:
        case {"text": length, **rest} if not rest:
            return _named(name, Text, length)
        case {"audio": length, **rest} if not rest:
            return _named(name, Audio, length)
        case {"clip": [frames, height, width], "audio": audio, **time} if time.keys() <= {"seconds_per_frame"}:
            seconds = time.get("seconds_per_frame")
            return _named(name, Clip, height, width, frames=frames, audio=audio, seconds_per_frame=seconds)
        case {"thumbnail": [height, width], **after} if after.keys() <= {"tokens_after"}:
            return _named(name, Thumbnail, height, width, **after)
        case {"tile": [height, width], **after} if after.keys() <= {"tokens_after"}:
            return _named(name, Tile, height, width, **after)
        case {"grid": sides, **options} if options.keys() <= _OF_GRID:
            if not isinstance(options.get("row_separator", False), bool):
                raise InvalidInputError(f"{name}.row_separator: got {options['row_separator']!r}, want true or false")
            if not isinstance(sides, list) or len(sides) not in (2, 3):
                raise InvalidInputError(f"{name}.grid: got {json.dumps(sides)}, want {_WANT_GRID}")
            numbers = [integer(f"{name}.grid[{i}]", value) for i, value in enumerate(sides)]
            return _named(name, _grid, numbers, **options)
    raise InvalidInputError(f'{name}: got {json.dumps(part)}, want {{"text": n}} or {{"grid": {_WANT_GRID}}}')


def _image(name: str, source: Path | bytes) -> Document:
    from mmpos.images import ImageProcessor

    processor = ImageProcessor(backend="pillow")
    size = _named(name, processor.inspect, source)
    return [Text(1), _named(name, processor.grid, size.height, size.width), Text(1)]


def _part_to_json(part: Segment) -> dict[str, object]:
    if isinstance(part, Text | Audio):
        return {"text" if isinstance(part, Text) else "audio": part.length}
    if isinstance(part, Thumbnail | Tile):
        crop: dict[str, object] = {type(part).__name__.lower(): [part.height, part.width]}
        return crop | {"tokens_after": part.tokens_after} if part.tokens_after else crop
    sides = [part.frames, part.height, part.width]
    written: dict[str, object] = {"grid": sides if part.frames > 1 else sides[1:]}
    if isinstance(part, Clip):
        written = {"clip": sides, "audio": part.audio}
    elif part.row_separator:
        written["row_separator"] = True
    if part.seconds_per_frame is not None:
        written["seconds_per_frame"] = float(part.seconds_per_frame)
    if isinstance(part, Grid) and part.first_frame is not None:
        written["first_frame"] = part.first_frame
    return written


def _named(name: str, make: Callable[P, T], *values: P.args, **options: P.kwargs) -> T:
    """Call a function, and prefix its errors with the name of the argument."""
    with naming(name):
        return make(*values, **options)
