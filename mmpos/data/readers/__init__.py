"""Readers of shards: WebDataset tar files, Parquet, JSON lines, and Hugging Face datasets."""

from __future__ import annotations

import os
from collections.abc import Iterable
from glob import has_magic
from multiprocessing.pool import ThreadPool

from mmpos.data.readers.base import Raw, Reader
from mmpos.data.readers.jsonl import JsonlReader
from mmpos.data.readers.tables import DatasetReader, ParquetReader, dataset_shards
from mmpos.data.readers.tar import TarReader
from mmpos.data.stores import StorePath, store_path
from mmpos.errors import InvalidInputError

__all__ = [
    "SUFFIXES",
    "DatasetReader",
    "JsonlReader",
    "ParquetReader",
    "Raw",
    "Reader",
    "TarReader",
    "dataset_shards",
    "shards",
]

SUFFIXES: dict[str, type[JsonlReader] | type[ParquetReader] | type[TarReader]] = {
    ".jsonl": JsonlReader,
    ".jsonl.gz": JsonlReader,
    ".jsonl.zst": JsonlReader,
    ".ndjson": JsonlReader,
    ".parquet": ParquetReader,
    ".tar": TarReader,
    ".tar.gz": TarReader,
    ".tgz": TarReader,
}
"""Reader class by file name suffix."""

_REQUESTS = 16  # concurrent requests to a store


def shards(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Reader]:
    """Open a reader for each file in the given order; files that match a pattern are sorted by name.

    Args:
        paths: one or more paths, URLs, or patterns of either with ``*``, ``?``, ``[…]`` or ``**``; the name of an
            existing file is not treated as a pattern.

    Raises:
        InvalidInputError: a file does not exist or is listed twice, a pattern matches nothing, no reader supports the
            suffix, or a URL holds credentials.
        OSError: a store does not respond; the error names the URL.
    """
    entries = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    patterns = [store_path(f"paths[{i}]", path) for i, path in enumerate(entries)]
    readers: dict[str, Reader] = {}
    with ThreadPool(min(_REQUESTS, max(len(patterns), 1))) as threads:
        for i, files in enumerate(threads.imap(_files, patterns)):
            if not files:
                got = repr(str(patterns[i]))
                raise InvalidInputError(f"paths[{i}]: got {got}, want a file, or a pattern that matches files")
            for name in map(str, files):
                if name in readers:
                    raise InvalidInputError(f"paths[{i}]: got {name!r} again, want each file once")
                readers[name] = _reader(f"paths[{i}]", name)
    return list(readers.values())


def _files(pattern: StorePath) -> list[StorePath]:
    if pattern.is_file():
        return [pattern]
    return pattern.matches() if has_magic(str(pattern)) else []


def _reader(name: str, path: str) -> Reader:
    for suffix, reader in SUFFIXES.items():
        if StorePath(path).name.endswith(suffix):
            return reader(path)
    raise InvalidInputError(f"{name}: got {path!r}, want a name ending in one of {', '.join(SUFFIXES)}")
