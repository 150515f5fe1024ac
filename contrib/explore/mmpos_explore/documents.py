"""Documents and schemes as text: ``3,2x3,2``, ``{"grid": [2, 3]}``, ``v2pe,stride=16`` or a class of your own."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from importlib import import_module
from typing import Any

from mmpos.errors import InvalidInputError
from mmpos.images import ImageProcessor
from mmpos.schemes import SCHEMES, Scheme
from mmpos.segments import Grid, Text

Document = list[Text | Grid]


def read_spec(spec: str) -> Document:
    """Read a spec: 3 is text, 2x3 an image of 2 rows and 3 columns, and 4x2x3@1/2 a video with half a second per frame.

    Raises:
        InvalidInputError: a part is neither text nor a grid.
    """
    document: Document = []
    for i, piece in enumerate(spec.split(",")):
        if not re.fullmatch(r"\s*[0-9]{1,12}(([x×][0-9]{1,12}){1,2}(@[0-9]{1,6}(/[1-9][0-9]{0,5})?)?)?\s*", piece):
            raise InvalidInputError(f"SPEC {spec!r}, part {i + 1}: got {piece!r}, want 3, 2x3 or 4x2x3@1/2")
        words, _, time = piece.partition("@")
        sides, seconds = [1, *map(int, re.split("[x×]", words))], Fraction(time) if time else None
        document.append(Text(sides[1]) if len(sides) == 2 else Grid.from_thw(sides[-3:], seconds_per_frame=seconds))
    return document


def read_part(name: str, part: Any) -> Document:
    """Read a part of a request; a picture becomes a marker, its patches and another marker.

    Args:
        name: name of the part in errors.
        part: {"text": 3}, {"grid": [2, 3]}, {"grid": [4, 2, 3], "seconds_per_frame": 0.5} or {"picture": [64, 96]}.
    """
    match part:
        case {"text": length, **rest} if not rest:
            return [Text(length)]
        case {"grid": [*sides], **time} if time.keys() <= {"seconds_per_frame"} and len(sides) in (2, 3):
            return [Grid.from_thw([1, *sides][-3:], **time)]
        case {"picture": [height, width], **rest} if not rest:
            return [Text(1), ImageProcessor(backend="pillow").grid(height, width), Text(1)]
    raise InvalidInputError(f'{name}: got {part!r}, want {{"text": 3}}, {{"grid": [2, 3]}} or {{"picture": [64, 96]}}')


def parts_of(document: Document) -> list[dict[str, object]]:
    """Return the parts of a document, as in a request."""
    times = [getattr(part, "seconds_per_frame", None) for part in document]
    parts = [{"text": part.length} if isinstance(part, Text) else {"grid": _sides(part)} for part in document]
    return [p | ({"seconds_per_frame": float(time)} if time else {}) for p, time in zip(parts, times, strict=True)]


def spec_of(document: Document) -> str:
    """Format a document as a spec."""
    sides = (str(p.length) if isinstance(p, Text) else "x".join(map(str, _sides(p))) for p in document)
    times = (getattr(part, "seconds_per_frame", None) for part in document)
    return ",".join(map("{}@{}".format, sides, times)).replace("@None", "")


def _sides(grid: Grid) -> list[int]:
    return [grid.frames, grid.height, grid.width][grid.frames == 1 :]


def make_scheme(name: str, own: bool = True) -> Scheme:
    """Build a scheme from its name, as in ``v2pe,stride=16`` or ``my_schemes:Wide,width=3``.

    Args:
        name: a name from mmpos.SCHEMES, or a module and its class; then parameters.
        own: whether the name may import a class.

    Raises:
        InvalidInputError: the name or its parameters are invalid.
    """
    head, *assignments = (word.strip() for word in name.split(","))
    kind = _own(head) if own and ":" in head else SCHEMES.get(head)
    if kind is None:
        raise InvalidInputError(f"scheme: got {head!r}, want one of {', '.join(SCHEMES)}{', or module:Class' * own}")
    try:
        scheme = kind(**dict(map(_parameter, assignments)))
    except TypeError as error:  # a parameter that the class does not have
        raise InvalidInputError(f"scheme: got {name!r} ({error}), want parameters of {head}") from error
    if not isinstance(scheme, Scheme):
        raise InvalidInputError(f"scheme: got {head!r}, which is {type(scheme).__name__}, want a Scheme")
    return scheme


def _own(path: str) -> Any:
    """Import a class; its module may be in the current folder."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _parameter(assignment: str) -> tuple[str, object]:
    name, equals, value = (word.strip() for word in assignment.partition("="))
    if not (name and equals and value):
        raise InvalidInputError(f"scheme: got {assignment!r}, want PARAMETER=VALUE after the comma")
    if re.fullmatch(r"-?\d+", value):
        return name, int(value)
    return name, {"None": None, "True": True, "False": False}.get(value, value)


def choose(request: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the only one of these names that a request has; raise InvalidInputError if it has none or several."""
    passed = [name for name in names if request.get(name) is not None]
    if len(passed) != 1:
        raise InvalidInputError(f"request: got {' and '.join(passed) or 'no document'}, want one of {', '.join(names)}")
    return passed[0]
