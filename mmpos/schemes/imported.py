"""Schemes of the user's own, which the command line and the settings of a server name as "package.module:Class"."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from importlib import import_module

from mmpos.errors import InvalidInputError, MmposError
from mmpos.schemes.base import Scheme


def import_scheme(path: str, parameters: Mapping[str, object] | None = None) -> Scheme:
    """Import a class or an object, and return its scheme; as with ``python -m``, the module may be in this folder.

    Raises:
        InvalidInputError: it cannot be imported, or ``build_scheme`` refuses it.
    """
    module, _, name = path.partition(":")
    try:
        if (here := os.getcwd()) not in sys.path:
            sys.path.insert(0, here)
        scheme = getattr(import_module(module), name)
    except (Exception, SystemExit) as error:  # importing a module may raise anything
        raise _refused(path, error) from error
    return build_scheme(scheme, path, parameters)


def build_scheme(scheme: object, name: str, parameters: Mapping[str, object] | None = None) -> Scheme:
    """Build a scheme from a class, or from a scheme with these parameters replaced; ``name`` is for messages.

    Raises:
        InvalidInputError: it has no such parameter, or is not a Scheme with a name and axes.
    """
    parameters = parameters or {}
    known = [field.name for field in fields(scheme) if field.init] if is_dataclass(scheme) else []
    for parameter in parameters.keys() - set(known):
        raise InvalidInputError(f"got {parameter!r} of {name!r}, want {' or '.join(known) or 'no parameter'}")
    try:
        if isinstance(scheme, Scheme):
            built: object = replace(scheme, **parameters)  # type: ignore[type-var]  # with parameters it is a dataclass
        else:
            built = scheme(**parameters) if callable(scheme) else scheme
    except MmposError:
        raise
    except Exception as error:  # a user's class may raise anything
        raise _refused(name, error) from error
    if not isinstance(built, Scheme):
        raise InvalidInputError(f"got {name!r}, which is {type(built).__name__}, want a Scheme")
    for attribute, kind in (("name", str), ("axes", int)):
        if not isinstance(getattr(built, attribute, None), kind):
            raise InvalidInputError(f"got {name!r} without {attribute}, want a Scheme with name and axes")
    return built


def _refused(name: str, error: BaseException) -> InvalidInputError:
    return InvalidInputError(
        f"got {name!r} ({type(error).__name__}: {error}), want the package.module:Class of a valid Scheme"
    )
