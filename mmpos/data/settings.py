"""Describe the settings of a job, so that two runs can be compared and their differences named."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from fractions import Fraction
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType

from mmpos.data.formats import FORMATS
from mmpos.schemes import SCHEMES

__all__ = ["describe", "differences"]

_NAMES = {f"{kind.__module__}.{kind.__qualname__}": name for name, kind in {**SCHEMES, **FORMATS}.items()}
"""The names of schemes and formats, as users type them, by their classes."""

_MAX_ITEMS = 64  # longest list or mapping whose items are described one by one
_DIGEST = "sha256:"


def describe(settings: Mapping[str, object]) -> dict[str, object]:
    """Describe settings as a flat mapping from path to value; equal settings give equal mappings on every machine.

    >>> from mmpos.schemes import RopeTie
    >>> describe({"scheme": RopeTie(axes=3), "part_bytes": 64})
    {'scheme': 'mmpos.schemes.tie.RopeTie', 'scheme.axes': 3, 'part_bytes': 64}

    Args:
        settings: settings by name: frozen dataclasses, their fields, and functions. Functions are compared only by
            name, tokenizers by their saved form, and other objects by their pickle, which may differ between versions
            of their package.

    Returns:
        numbers and class names, keyed by path; texts and paths, which may be secret, are replaced by a digest.
    """
    return dict(leaf for name, value in settings.items() for leaf in _leaves(name, value))


def differences(got: Mapping[str, object], want: Mapping[str, object]) -> list[str]:
    """Name the settings that differ between two descriptions; settings nested in a named one are left out.

    >>> differences({"a": 1, "b": "sha256:01", "c": 2}, {"a": 1, "b": "sha256:02", "c": 3})
    ['another b', 'c 2, want 3']
    """
    named: dict[str, str] = {}
    for path in dict.fromkeys([*want, *got]):
        old, new = (repr(_NAMES.get(str(value), value)) for value in (got.get(path), want.get(path)))
        if old == new or any(path.startswith((f"{outer}.", f"{outer}[")) for outer in named):
            continue
        hidden = any(value.startswith(f"'{_DIGEST}") for value in (old, new))
        named[path] = f"another {path}" if hidden else f"{path} {old}, want {new}"
    return list(named.values())


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the path and description of a value, then those of the values nested in it."""
    if value is None or isinstance(value, bool | int | float):
        yield path, value
    elif isinstance(value, str | bytes | bytearray | PurePath | Fraction):
        yield path, _digest(repr(value).encode())
    elif isinstance(value, list | tuple | Mapping):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        leaves = [leaf for key, item in items for leaf in _leaves(f"{path}[{key!r}]", item)]
        if len(value) > _MAX_ITEMS:
            yield path, _digest(json.dumps(leaves).encode())
        else:
            yield path, f"{len(value)} items"
            yield from leaves
    elif is_dataclass(value) and not isinstance(value, type):
        yield path, _class(value)
        for field in fields(value):
            yield from _leaves(f"{path}.{field.name}", getattr(value, field.name))
    elif isinstance(value, partial):
        yield path, _class(value)
        for name, part in (("func", value.func), ("args", value.args), ("keywords", value.keywords)):
            yield from _leaves(f"{path}.{name}", part)
    elif isinstance(value, MethodType):
        yield path, f"{value.__module__}.{value.__qualname__}"
        yield from _leaves(f"{path}.__self__", value.__self__)
    elif isinstance(value, type | FunctionType | BuiltinFunctionType):
        yield path, f"{value.__module__}.{value.__qualname__}"
    else:
        yield path, _class(value)
        yield f"{path}.content", _digest(_saved(value))


def _class(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _saved(value: object) -> bytes:
    """Return the saved form of a tokenizer, or the pickle of any other object."""
    for tokenizer in (value, getattr(value, "backend_tokenizer", None)):  # tokenizers and transformers libraries
        save = getattr(tokenizer, "to_str", None)
        if callable(save):
            return str(save()).encode()
    return pickle.dumps(value, protocol=4)


def _digest(data: bytes) -> str:
    return _DIGEST + hashlib.sha256(data).hexdigest()[:16]
