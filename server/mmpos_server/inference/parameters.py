"""Values beside tensors: each of a name and a kind that is known, and anything else refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from google.protobuf import json_format

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.rpc.positions import get_scheme, get_view
from mmpos.rpc.queries import View
from mmpos.rpc.v1 import positions_pb2, scheme_pb2
from mmpos.schemes import Scheme
from mmpos_server.inference import open_inference_pb2 as pb
from mmpos_server.refusals import check

if TYPE_CHECKING:
    from mmpos_server.config import Limits

__all__ = ["Kind", "get_parameters", "loaded", "scheme_of", "views_of"]

MAX_TEXT = 2**20
"""Most characters of a JSON text: while it is parsed, nothing else happens in the process."""

MAX_DEPTH = 16
"""Most lists and objects inside each other: what reads and what quotes them works its way down by recursion."""
MAX_SCHEME = 2**12
"""Most characters of a scheme, which is read between two other calls."""

Kind = Literal["bool", "int64", "string"]

IGNORED = ("triton_enable_empty_final_response",)
"""A client's wish to be told of the last answer to a request, which it always is."""


def get_parameters(
    where: str, parameters: Mapping[str, pb.InferParameter], known: Mapping[str, Kind]
) -> dict[str, Any]:
    """The values of parameters, by name.

    Args:
        where: what errors call their map.
        parameters: as they came.
        known: kind of each that may come.

    Raises:
        UnsupportedError: one that is not known, since what it asks for would not be done.
        InvalidInputError: a value of another kind.
    """
    if len(parameters) > len(known) + len(IGNORED):  # counted first: looking at a million takes seconds
        raise UnsupportedError(f"{where}: got {len(parameters)} of them, want {' or '.join(known)}")
    unknown = set(parameters) - set(known) - set(IGNORED)
    if unknown:
        raise UnsupportedError(f"{where}: got {min(unknown)[:100]!r}, want {' or '.join(known)}")
    found = {}
    for name in known:
        if name in parameters:
            choice = parameters[name].WhichOneof("parameter_choice")
            if choice != f"{known[name]}_param":
                raise InvalidInputError(f"{where}[{name!r}]: got {choice or 'no value'}, want {known[name]}_param")
            found[name] = getattr(parameters[name], choice)
    return found


def loaded(name: str, text: str, most: int = MAX_TEXT) -> Any:
    """What a JSON text of so many characters says.

    Raises:
        InvalidInputError: it is none.
        LimitExceededError: it is too long.
    """
    if len(text) > most:
        raise LimitExceededError(f"parameters[{name!r}]: got {len(text)} characters, want at most {most}")
    try:
        value = json.loads(text)
        # What Python reads and JSON has not: infinities, of which no integer can be made, and half characters, which
        # no message and no status can hold.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"parameters[{name!r}]: got {text[:100]!r}, want JSON ({error})") from None
    if _deeper(value, MAX_DEPTH):
        raise InvalidInputError(f"parameters[{name!r}]: got {text[:100]!r}, want at most {MAX_DEPTH} lists in lists")
    return value


def scheme_of(text: str) -> Scheme:
    """The scheme of a parameter: its name, or message Scheme as JSON."""
    if not text.lstrip().startswith("{"):
        return get_scheme("scheme", scheme_pb2.Scheme(name=text))
    message = _message("scheme", loaded("scheme", text, MAX_SCHEME), scheme_pb2.Scheme())
    return get_scheme("scheme", message)


def views_of(text: str, limits: Limits) -> list[View]:
    """The views of a parameter: a JSON list of messages View."""
    values = loaded("views", text)
    if not isinstance(values, list):
        raise InvalidInputError(f"parameters['views']: got {text[:100]!r}, want a JSON list of views")
    check("views", len(values), limits)
    return [
        get_view(f"views[{i}]", _message(f"views[{i}]", value, positions_pb2.View())) for i, value in enumerate(values)
    ]


def _deeper(value: Any, levels: int) -> bool:
    """Whether there are more than so many lists and objects inside each other."""
    found = [value] if isinstance(value, list | dict) else []
    for _ in range(levels):
        inner = chain.from_iterable(outer.values() if isinstance(outer, dict) else outer for outer in found)
        found = [value for value in inner if isinstance(value, list | dict)]
    return bool(found)


def _message(name: str, value: Any, message: Any) -> Any:
    try:
        return json_format.ParseDict(value, message)
    except (json_format.ParseError, AttributeError, TypeError, RecursionError) as error:
        kind = type(message).__name__
        raise InvalidInputError(f"{name}: got {str(value)[:100]}, want message {kind} as JSON ({error})") from None
