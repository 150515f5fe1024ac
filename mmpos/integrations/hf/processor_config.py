"""What a processor is made of, as JSON writes it, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.schemes import SCHEMES, Scheme, get_scheme

__all__ = ["object_of", "scheme_of", "scheme_to_json", "to_json"]

T = TypeVar("T")


def to_json(settings: Any) -> dict[str, Any]:
    """The fields of a frozen object, tuples as lists, fractions as "3/2", and numbers of numpy as Python's."""
    return {each.name: _plain(getattr(settings, each.name)) for each in fields(settings) if each.init}


def object_of(name: str, kind: type[T], given: Any) -> T:
    """An object of this kind: as it is, or made of its fields in JSON.

    Raises:
        InvalidInputError: something else, or a field that the kind does not have.
    """
    if isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise InvalidInputError(f"{name}: got {type(given).__name__}, want {kind.__name__} or its fields")
    known = [each.name for each in fields(kind) if each.init]  # type: ignore[arg-type]
    for field in given.keys() - set(known):
        raise InvalidInputError(f"{name}: got the field {field!r}, want {', '.join(known)}")
    return kind(**{field: tuple(value) if isinstance(value, list) else value for field, value in given.items()})


def scheme_to_json(scheme: Scheme) -> dict[str, Any]:
    """The name of a scheme and its parameters.

    Raises:
        UnsupportedError: a scheme of the caller's own, which no file can name.
    """
    if SCHEMES.get(scheme.name) is not type(scheme):
        raise UnsupportedError(f"scheme: got {type(scheme).__name__}, want one of mmpos.SCHEMES to write it to a file")
    return {"name": scheme.name, **to_json(scheme)}


def scheme_of(given: Any) -> Scheme:
    """A scheme: as it is, by its name, or made of its name and parameters in JSON."""
    if not isinstance(given, Mapping):
        return get_scheme(given)
    parameters = dict(given)
    name = parameters.pop("name", None)
    kind = type(get_scheme(name))
    rate = parameters.get("tokens_per_second")
    if isinstance(rate, str):
        try:
            parameters["tokens_per_second"] = Fraction(rate)
        except (ValueError, ZeroDivisionError):
            raise InvalidInputError(f"scheme.tokens_per_second: got {rate!r}, want a fraction such as 3/2") from None
    return object_of("scheme", kind, parameters)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, Fraction) else value
