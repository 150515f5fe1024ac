"""Schemes as a command line names them: by name or as a class of one's own, with parameters."""

from __future__ import annotations

import os
import sys
from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from importlib import import_module
from typing import Annotated, Any

import typer

from mmpos.errors import InvalidInputError, MmposError
from mmpos.schemes import SCHEMES, Scheme

DEFAULT = "rope-tie"


def complete_scheme(incomplete: str) -> list[tuple[str, str]]:
    """Names that begin so, each with the first line of its documentation."""
    return [
        (name, (scheme.__doc__ or "").partition("\n")[0])
        for name, scheme in SCHEMES.items()
        if name.startswith(incomplete)
    ]


def scheme_option(default: str, also: str = "") -> Any:
    """The option that names a scheme, with words for its default, and what else is to be said."""
    return typer.Option(
        "--scheme",
        "-s",
        metavar="NAME[,PARAMETER=VALUE...]",
        help=f"{also}One of {', '.join(SCHEMES)}, or package.module:Class of your own.",
        show_default=default,
        autocompletion=complete_scheme,
    )


SchemeName = Annotated[str | None, scheme_option(DEFAULT)]
Axes = Annotated[
    int | None,
    typer.Option(help="2 or 3 for the Tie schemes; 3 has a frame axis, for videos.", show_default="the scheme's own"),
]


def make_scheme(words: str, axes: int | None = None) -> Scheme:
    """The scheme that words such as ``rope-tie``, ``v2pe,stride=16`` or ``my.module:MyScheme,width=3`` name.

    Args:
        words: a name, or a module and its class or object, then parameters; or the label of a scheme, as
            ``v2pe(stride=16)``, which a shell wants in quotes.
        axes: replaces the scheme's own where it has a choice.

    Raises:
        InvalidInputError: naming what came and what was wanted.
    """
    if words.endswith(")"):
        words = words[:-1].replace("(", ",", 1)
    head, *assignments = (word.strip() for word in words.split(","))
    parameters = dict(map(_parameter, assignments))
    scheme = _made(_own(head) if ":" in head else _known(head), head, parameters)
    if axes in (None, scheme.axes):
        return scheme
    if "axes" not in _names(scheme):
        raise InvalidInputError(f"--axes: got {axes}, want {scheme.axes} for scheme {scheme.name!r}")
    return _made(scheme, head, {"axes": axes})


def did_you_mean(word: str, names: Any) -> str:
    """The name that is most like a mistyped one, as a remark in brackets; nothing if none is."""
    from difflib import get_close_matches

    likely = get_close_matches(word, names, n=1)
    return f" (did you mean {likely[0]!r}?)" if likely else ""


def _known(name: str) -> type[Scheme]:
    if name not in SCHEMES:
        raise InvalidInputError(
            f"--scheme: got {name!r}{did_you_mean(name, SCHEMES)}, want one of {', '.join(SCHEMES)}, "
            "or package.module:Class of your own"
        )
    return SCHEMES[name]


def _own(words: str) -> Any:
    """The class or object of a module, which may lie in the current folder, as for ``python -m``."""
    module, _, name = words.partition(":")
    try:
        if (here := os.getcwd()) not in sys.path:
            sys.path.insert(0, here)
        return getattr(import_module(module), name)
    except (Exception, SystemExit) as error:  # whatever the module does as it is imported
        raise _refused(words, error) from error


def _made(scheme: Any, words: str, parameters: dict[str, Any]) -> Scheme:
    """An object of a scheme's class, or an object with other parameters."""
    known = _names(scheme)
    for name in parameters.keys() - set(known):
        raise InvalidInputError(f"--scheme: got {name!r} of {words!r}, want {' or '.join(known) or 'no parameter'}")
    try:
        if isinstance(scheme, Scheme):
            made: Any = replace(scheme, **parameters)  # type: ignore[type-var]  # with parameters it is a dataclass
        else:
            made = scheme(**parameters) if callable(scheme) else scheme
    except MmposError:
        raise
    except Exception as error:  # whatever a class of the caller's own does
        raise _refused(words, error) from error
    if not isinstance(made, Scheme):
        raise InvalidInputError(f"--scheme: got {words!r}, which is {type(made).__name__}, want a Scheme")
    return made


def _names(scheme: Any) -> list[str]:
    return [field.name for field in fields(scheme) if field.init] if is_dataclass(scheme) else []


def _refused(words: str, error: BaseException) -> InvalidInputError:
    got = f"{type(error).__name__}: {error}"
    return InvalidInputError(f"--scheme: got {words!r} ({got}), want package.module:Class of a Scheme that is made so")


def _parameter(assignment: str) -> tuple[str, Any]:
    name, equals, value = (word.strip() for word in assignment.partition("="))
    if not (name and equals and value):
        raise InvalidInputError(f"--scheme: got {assignment!r}, want PARAMETER=VALUE after the comma")
    for read in (int, float, Fraction):
        try:
            return name, read(value)
        except (ValueError, ZeroDivisionError):
            continue
    return name, {"None": None, "True": True, "False": False}.get(value, value.strip("'\""))
