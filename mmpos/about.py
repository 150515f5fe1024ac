"""What this installation and its machine are, as one says it in a report of a mistake or of a measurement."""

from __future__ import annotations

import os
import platform

from mmpos import native

__all__ = ["cores", "info", "version_of"]

_PACKAGES = ("numpy", "torch", "torchvision", "triton", "pillow", "grpcio", "protobuf")
_MISSING = "not installed"


def info() -> dict[str, str]:
    """Versions of what mmpos stands on, and whether its extension in C was built.

    Nothing is imported for it. Without the extension everything works, and gives the same numbers, through numpy.

    >>> sorted(info())[:4]
    ['extension', 'grpcio', 'machine', 'mmpos']

    Returns:
        ``mmpos``, ``python``, ``machine``, ``extension`` and the packages that mmpos may use, each with a version or
        what is missing.
    """
    return {
        "mmpos": version_of("mmpos") or _MISSING,
        "extension": "built" if native.core is not None else "not built, numpy is used",
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        **{name: version_of(name) or _MISSING for name in _PACKAGES},
    }


def cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def version_of(package: str) -> str | None:
    """The version of an installed package; None where it is not."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
