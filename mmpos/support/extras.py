"""The pip commands that bring optional packages, and the errors that name them where a package is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["DISTRIBUTION", "missing", "needed_for", "pip_install"]

DISTRIBUTION = "multimodal-positions"
"""The name of this package on an index; ``mmpos`` there is a program of other people."""

_OWN = ("mmpos", "mmpos_server")


def pip_install(extra: str) -> str:
    """Word the command that installs an extra, which leaves what is installed from a clone as it is.

    >>> pip_install("client")
    'pip install "multimodal-positions[client]"'
    """
    return f'pip install "{DISTRIBUTION}[{extra}]"'


def missing(what: str, package: str, *, extra: str) -> ImportError:
    """Make the error for a package that is not installed.

    >>> missing("rotations", "torch", extra="all")
    ImportError('rotations: torch is not installed, want pip install "multimodal-positions[all]"')

    Args:
        what: the part of mmpos that needs the package; begins the message.
        package: as it is imported; the ``name`` of the error.
        extra: the one that installs the package.
    """
    return ImportError(f"{what}: {package} is not installed, want {pip_install(extra)}", name=package)


@contextmanager
def needed_for(what: str, *, extra: str) -> Iterator[None]:
    """Turn the failure of an import in this block into the error that names the pip command.

    Only a package that is not there fails so: one that is broken has words of its own, and a module of ours that is not
    there is a mistake of ours.

    Args:
        what: the part of mmpos that needs what the block imports; begins the message.
        extra: the one that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in _OWN:
            raise
        raise missing(what, error.name, extra=extra) from error
