"""Optional packages: pip commands that install them, errors that name these commands, and lazy attributes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module

__all__ = ["DISTRIBUTION", "lazy_names", "missing", "needed_for", "pip_install"]

DISTRIBUTION = "multimodal-positions"
"""Name of this package on an index; the name ``mmpos`` belongs to another project there."""

_OWN = ("mmpos", "mmpos_bench", "mmpos_server")


def pip_install(extra: str) -> str:
    """Return the command that installs an extra, and the one for a clone.

    >>> pip_install("client")
    'pip install "multimodal-positions[client]" (in a clone: pip install ".[client]")'
    """
    return f'pip install "{DISTRIBUTION}[{extra}]" (in a clone: pip install ".[{extra}]")'


def missing(what: str, package: str, *, extra: str | None) -> ImportError:
    """Return the error for a package that is not installed.

    >>> missing("the command line", "typer", extra="cli").name
    'typer'

    Args:
        what: feature that needs the package; begins the message.
        package: import name of the package; the ``name`` of the error.
        extra: extra that installs the package; None if the package is installed by its own name.
    """
    command = f"pip install {package}" if extra is None else pip_install(extra)
    return ImportError(f"{what}: {package} is not installed, want {command}", name=package)


@contextmanager
def needed_for(what: str, *, extra: str) -> Iterator[None]:
    """Turn the failure of an import in this block into the error that names the pip command.

    Only a missing package becomes this error: a broken package keeps its own, and a missing module of this project is
    our mistake.

    Args:
        what: feature that needs the imports of the block; begins the message.
        extra: extra that installs them.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in _OWN:
            raise
        raise missing(what, error.name, extra=extra) from error


def lazy_names(
    package: str, modules: Mapping[str, str], *, extra: str | None = None, what: str | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package that imports some of its names at their first use.

    Args:
        package: full name of the package.
        modules: submodule of each name; a name that equals its submodule is that module.
        extra: extra that installs the requirements of the submodules, or None.
        what: beginning of the error if these requirements are missing; None uses the package and the name.
    """

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        needs = nullcontext() if extra is None else needed_for(what or f"{package}.{name}", extra=extra)
        with needs:
            module = import_module(f"{package}.{modules[name]}")
            value = module if modules[name] == name else getattr(module, name)
        vars(sys.modules[package])[name] = value  # later accesses do not call this function
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get, names
