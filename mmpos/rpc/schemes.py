"""Schemes as a name and the parameters that are not the default ones."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.rpc.fields import get_rational, path, put_rational
from mmpos.rpc.v1 import scheme_pb2 as pb
from mmpos.schemes import SCHEMES, Scheme
from mmpos.schemes.base import changed_parameters


def parameters(scheme: type[Scheme]) -> list[str]:
    """Names of a scheme's parameters, which are fields of the message too."""
    return [field.name for field in fields(scheme) if field.init]  # type: ignore[arg-type]


def put_scheme(message: pb.Scheme, scheme: str | Scheme) -> None:
    """Fill a message with a scheme.

    Raises:
        UnsupportedError: a scheme of the caller's own, which no server knows.
    """
    if isinstance(scheme, str):
        message.name = scheme
        return
    if SCHEMES.get(getattr(scheme, "name", "")) is not type(scheme):
        raise UnsupportedError(f"scheme: got {type(scheme).__name__}, want one of mmpos.SCHEMES in a call of a service")
    message.name = scheme.name
    for name, value in changed_parameters(scheme).items():
        if name == "tokens_per_second":
            put_rational(message.tokens_per_second, value)
        else:
            setattr(message, name, value)


def get_scheme(name: str, message: pb.Scheme) -> Scheme:
    """The scheme of a message.

    Raises:
        InvalidInputError: an unknown name, or a parameter that is wrong or not of this scheme.
    """
    if message.name not in SCHEMES:
        raise InvalidInputError(f"scheme: got {message.name!r}, want a Scheme or one of {', '.join(SCHEMES)}")
    scheme = SCHEMES[message.name]
    given: dict[str, Any] = {field.name: value for field, value in message.ListFields() if field.name != "name"}
    for parameter in sorted(given.keys() - set(parameters(scheme))):
        raise InvalidInputError(f"{path(name, parameter)}: got a value, want none: {message.name!r} has no {parameter}")
    if "tokens_per_second" in given:
        rate = get_rational(path(name, "tokens_per_second"), given["tokens_per_second"])
        given["tokens_per_second"] = rate if rate.denominator > 1 else int(rate)
    return scheme(**given)
