"""The code that a suite measures, as a hash that shows whether recorded figures are older than their code."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[2]
"""The repository, if this package was not installed from a wheel."""

MEASURED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "positions": (
            *("mmpos/segments", "mmpos/schemes", "mmpos/positions", "csrc/cut.c", "csrc/expand*"),
            *("csrc/placeholders*", "csrc/plan.*", "csrc/segments.c", "csrc/table.h", "csrc/tokens.*"),
        ),
        "images": ("mmpos/images",),
        "rotary": ("mmpos/rotary", "csrc/rotate.c", "csrc/phases.*", "csrc/heads.h"),
        "data": ("mmpos/data", "csrc/collate.c"),
        "service": ("server/mmpos_server", "mmpos/rpc", "csrc/wire.*", "csrc/served.c"),
    }
)
"""Folders and files that each suite measures; a name may be a pattern."""

_SUFFIXES = {".py", ".c", ".h", ".toml", ".json"}


def code_of(suite: str) -> str:
    """Return a hash of the code that a suite measures, or "" if the sources are not in their repository.

    Names of files and white space do not count.
    """
    named = [path for pattern in MEASURED[suite] for path in ROOT.glob(pattern)]
    files = {file for path in named for file in (path.rglob("*") if path.is_dir() else [path])}
    texts = ("".join(file.read_text(encoding="utf-8").split()) for file in files if file.suffix in _SUFFIXES)
    digests = sorted(hashlib.sha256(text.encode()).hexdigest() for text in texts)
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:12] if digests else ""
