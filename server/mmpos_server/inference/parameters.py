"""Read the parameters of ModelInfer requests: check their kinds, and parse JSON texts of limited length and depth."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain
from typing import Any, Literal, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.rpc.positions import get_scheme, get_view
from mmpos.rpc.queries import View
from mmpos.rpc.v1 import positions_pb2, scheme_pb2
from mmpos.schemes import Scheme
from mmpos_server.inference import open_inference_pb2 as pb
from mmpos_server.limits import check_views

__all__ = ["Kind", "get_values", "loaded", "scheme_of", "views_of"]

M = TypeVar("M", bound=Message)

MAX_TEXT = 2**20
"""Maximum number of characters in a JSON text, which is limited because parsing it blocks the process."""

MAX_DEPTH = 16
"""Maximum nesting depth of lists and objects, which is limited because parsing and quoting them is recursive."""

MAX_SCHEME = 2**12
"""Maximum number of characters in a scheme."""

Kind = Literal["bool", "int64", "string"]

IGNORED = ("triton_enable_empty_final_response",)
"""Parameters without effect: they request that the last answer to a request be marked, which it always is."""


def get_values(where: str, parameters: Mapping[str, pb.InferParameter], known: Mapping[str, Kind]) -> dict[str, Any]:
    """Return the values of parameters, by name.

    Args:
        where: name of the map in errors.
        parameters: the message's parameters.
        known: the kind of each known parameter.

    Raises:
        UnsupportedError: a parameter is unknown.
        InvalidInputError: a value has the wrong kind.
    """
    if len(parameters) > len(known) + len(IGNORED):  # count first: checking a million names would take seconds
        raise UnsupportedError(f"{where}: got {len(parameters)} parameters, want {' or '.join(known)}")
    unknown = set(parameters) - set(known) - set(IGNORED)
    if unknown:
        raise UnsupportedError(f"{where}: got {min(unknown)[:100]!r}, want {' or '.join(known)}")
    values = {}
    for name in known:
        if name in parameters:
            choice = parameters[name].WhichOneof("parameter_choice")
            if choice != f"{known[name]}_param":
                raise InvalidInputError(f"{where}[{name!r}]: got {choice or 'no value'}, want {known[name]}_param")
            values[name] = getattr(parameters[name], choice)
    return values


def loaded(name: str, text: str, most: int = MAX_TEXT) -> object:
    """Parse a JSON text of limited length.

    Raises:
        InvalidInputError: the text is not JSON.
        LimitExceededError: the text is too long.
    """
    if len(text) > most:
        raise LimitExceededError(f"parameters[{name!r}]: got {len(text)} characters, want at most {most}")
    try:
        value: object = json.loads(text)
        # Python also parses input that is not JSON: infinities, which are not integers, and lone surrogates, which
        # messages and statuses cannot contain.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"parameters[{name!r}]: got {text[:100]!r}, want JSON ({error})") from None
    if _deeper(value, MAX_DEPTH):
        raise InvalidInputError(f"parameters[{name!r}]: got {text[:100]!r}, want at most {MAX_DEPTH} nested lists")
    return value


def _deeper(value: object, levels: int) -> bool:
    """Return whether lists and objects are nested deeper than ``levels``."""
    nested = [value] if isinstance(value, list | dict) else []
    for _ in range(levels):
        inner = chain.from_iterable(outer.values() if isinstance(outer, dict) else outer for outer in nested)
        nested = [value for value in inner if isinstance(value, list | dict)]
    return bool(nested)


def scheme_of(text: str) -> Scheme:
    """Parse a scheme, given as a name or as a message Scheme in JSON."""
    if not text.lstrip().startswith("{"):
        return get_scheme("scheme", scheme_pb2.Scheme(name=text))
    message = _message("scheme", loaded("scheme", text, MAX_SCHEME), scheme_pb2.Scheme())
    return get_scheme("scheme", message)


def views_of(text: str) -> list[View]:
    """Parse views, given as a JSON list of View messages."""
    values = loaded("views", text)
    if not isinstance(values, list):
        raise InvalidInputError(f"parameters['views']: got {text[:100]!r}, want a JSON list of views")
    check_views(len(values))
    return [
        get_view(f"views[{i}]", _message(f"views[{i}]", value, positions_pb2.View())) for i, value in enumerate(values)
    ]


def _message(name: str, value: object, message: M) -> M:
    try:
        return json_format.ParseDict(value, message)  # type: ignore[arg-type]  # refuses values that are not objects
    except (json_format.ParseError, AttributeError, TypeError, RecursionError) as error:
        kind = type(message).__name__
        raise InvalidInputError(f"{name}: got {str(value)[:100]}, want message {kind} as JSON ({error})") from None
