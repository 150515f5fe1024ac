"""A description of the installation and the machine, for bug reports and measurements."""

from __future__ import annotations

import os
import platform
import warnings

from mmpos.support import native
from mmpos.support.extras import DISTRIBUTION

__all__ = ["cores", "info", "print_info", "version", "version_of"]

_PACKAGES = ("numpy", "torch", "torchvision", "triton", "transformers", "pillow", "av",
             "pyarrow", "datasets", "grpcio", "protobuf")  # fmt: skip


def info() -> dict[str, str]:
    """Report the versions of mmpos and its dependencies, and whether its C extension was built.

    The packages are not imported. Without the extension, everything works through numpy and produces the same numbers.

    >>> sorted(info())[:5]
    ['av', 'datasets', 'extension', 'grpcio', 'machine']

    Returns:
        ``mmpos``, ``python``, ``machine``, ``extension`` and the packages that mmpos may use, each with its version or
        a note that it is missing.

    Warns:
        UserWarning: another distribution also provides ``mmpos``, and the files of both may be mixed.
    """
    from importlib.metadata import packages_distributions

    owners = sorted(set(packages_distributions().get("mmpos", [])))
    if owners not in ([], [DISTRIBUTION]):
        remedy = f"pip uninstall {' '.join(owners)}, then install {DISTRIBUTION} again"
        warnings.warn(
            f"import mmpos: got it from {', '.join(owners)}, want {DISTRIBUTION} alone: {remedy}", stacklevel=2
        )
    return {
        "mmpos": version(),
        "extension": "built" if native.core is not None else "not built, numpy is used",
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        **{name: version_of(name) or "not installed" for name in _PACKAGES},
    }


def print_info() -> None:
    """Print the entries of ``info``, one per line."""
    for name, value in info().items():
        print(f"{name:12} {value}")


def version() -> str:
    """Return the installed version of mmpos, or "unknown" if it runs from source without being installed."""
    return version_of(DISTRIBUTION) or "unknown"


def cores() -> int:
    """Return the number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # missing on some systems
        return os.cpu_count() or 1


def version_of(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
