"""One short name for settings: equal where they are equal, in every process and on every machine."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from fractions import Fraction
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

__all__ = ["fingerprint"]


def fingerprint(settings: Any) -> str:
    """A name for settings, which are frozen dataclasses, what they hold, and functions.

    >>> from mmpos import SequenceBuilder
    >>> fingerprint(SequenceBuilder()) == fingerprint(SequenceBuilder(scheme="rope-tie"))
    True
    >>> fingerprint(SequenceBuilder()) == fingerprint(SequenceBuilder(scheme="flatten"))
    False

    Args:
        settings: functions count by their names, not by what they do; tokenizers by what they would save; other
            objects by their pickle, which may differ between versions of their package.

    Returns:
        16 hex digits of a SHA-256.
    """
    return _digest(json.dumps(_plain(settings), sort_keys=True).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """The value as JSON, with the types of what JSON would take for another."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes | bytearray):
        return {"bytes": _digest(bytes(value))}
    if isinstance(value, PurePath | Fraction):
        return {type(value).__name__: str(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return [[_plain(key), _plain(item)] for key, item in value.items()]
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if is_dataclass(value) and not isinstance(value, type):
        return {name: {field.name: _plain(getattr(value, field.name)) for field in fields(value)}}
    if isinstance(value, partial):
        return {name: _plain([value.func, value.args, value.keywords])}
    if isinstance(value, MethodType):
        return {name: _plain([value.__func__, value.__self__])}
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return {"name": f"{value.__module__}.{value.__qualname__}"}
    if callable(getattr(value, "to_str", None)):  # a tokenizers.Tokenizer
        return {name: _digest(str(value.to_str()).encode())}
    if callable(getattr(getattr(value, "backend_tokenizer", None), "to_str", None)):  # one of transformers
        return {name: _digest(str(value.backend_tokenizer.to_str()).encode())}
    return {name: _digest(pickle.dumps(value, protocol=4))}
