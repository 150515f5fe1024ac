"""Optional packages: pip commands that install them, errors that contain these commands, and lazy attributes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module

__all__ = ["DISTRIBUTION", "REINSTALL", "lazy_names", "missing", "needed_for", "pip_install"]

DISTRIBUTION = "multimodal-positions"
"""Name of this package on package indexes, where the name ``mmpos`` belongs to another project."""

REINSTALL = f"pip install --force-reinstall --no-deps --no-cache-dir {DISTRIBUTION} (in a clone: pip install -e .)"
"""Command that builds the package again."""

_OWN = ("mmpos", "mmpos_bench", "mmpos_server")


def pip_install(extra: str) -> str:
    """Return the command that installs an extra, and the corresponding command for a clone.

    >>> pip_install("client")
    'pip install "multimodal-positions[client]" (in a clone: pip install ".[client]")'
    """
    return f'pip install "{DISTRIBUTION}[{extra}]" (in a clone: pip install ".[{extra}]")'


def missing(what: str, package: str, *, extra: str | None) -> ImportError:
    """Return the error for a package that is not installed.

    >>> missing("the command line", "typer", extra="cli").name
    'typer'

    Args:
        what: feature that needs the package; the message begins with it.
        package: import name of the package, which becomes the ``name`` of the error.
        extra: extra that installs the package; None if the package is installed under its own name.
    """
    command = f"pip install {package}" if extra is None else pip_install(extra)
    return ImportError(f"{what}: {package} is not installed; install it with: {command}", name=package)


def missing_contrib(command: str) -> ImportError:
    """Return the error for a command of a distribution in contrib/ that is not installed."""
    name = f"mmpos-{command}"
    words = f"mmpos {command}: {name} is not installed; in a clone, install it with: pip install ./contrib/{command}"
    return ImportError(words, name=name.replace("-", "_"))


@contextmanager
def needed_for(what: str, *, extra: str) -> Iterator[None]:
    """Convert a failed import in the block to an error that contains the pip command.

    Only a missing package causes this error: a broken package raises its own error, and a missing module of this
    project is our mistake.

    Args:
        what: feature that needs the imports in the block; the message begins with it.
        extra: extra that installs the imported packages.
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
    """Return ``__getattr__`` and ``__dir__`` for a package that imports some of its names on first use.

    Args:
        package: full name of the package.
        modules: submodule that defines each name; a name equal to its submodule stands for the module itself.
        extra: extra that installs the requirements of the submodules, or None.
        what: beginning of the error message if these requirements are missing; None uses the package and the name.
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
