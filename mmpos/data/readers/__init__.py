"""Readers of shards: tar files of webdataset, Parquet, JSON lines, Lance, and datasets of Hugging Face."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from pathlib import Path

from mmpos.data.readers.base import Raw, Reader
from mmpos.data.readers.jsonl import JsonlReader
from mmpos.data.readers.slices import split_shards
from mmpos.data.readers.tables import DatasetReader, LanceReader, ParquetReader, dataset_shards, lance_readers
from mmpos.data.readers.tar import TarReader
from mmpos.errors import InvalidInputError
from mmpos.support.files import local_path

__all__ = [
    "SUFFIXES",
    "DatasetReader",
    "JsonlReader",
    "LanceReader",
    "ParquetReader",
    "Raw",
    "Reader",
    "TarReader",
    "dataset_shards",
    "shards",
    "split_shards",
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
"""The reader of each kind of file."""

_LANCE = ".lance"


def shards(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Reader]:
    """Open a reader for each file, in the order given; the files of a pattern are sorted by name.

    Args:
        paths: one or several paths or patterns with ``*``, ``?``, ``[…]`` or ``**``; a file that has such a name
            is that file. A folder whose name ends in .lance is a dataset, with a reader for each of its fragments.

    Raises:
        InvalidInputError: a file is not there or comes twice, a pattern finds none, no reader has the suffix, or a
            path is a URL.
    """
    entries = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    readers: dict[str, list[Reader]] = {}
    for i, path in enumerate(entries):
        for name in _files(f"paths[{i}]", os.fspath(path)):
            if name in readers:
                raise InvalidInputError(f"paths[{i}]: got {name!r} again, want each file once")
            readers[name] = _readers(f"paths[{i}]", name)
    return [reader for several in readers.values() for reader in several]


def _files(name: str, path: str) -> list[str]:
    if _is_shard(local_path(name, path)):
        return [path]
    if glob.has_magic(path):
        files = sorted(file for file in glob.glob(path, recursive=True) if _is_shard(Path(file)))
        if files:
            return files
    raise InvalidInputError(f"{name}: got {path!r}, want a file, or a pattern that finds files")


def _is_shard(path: Path) -> bool:
    return path.is_file() or (path.suffix == _LANCE and path.is_dir())


def _readers(name: str, path: str) -> list[Reader]:
    if path.rstrip("/").endswith(_LANCE):
        return [*lance_readers(path.rstrip("/"))]
    for suffix, reader in SUFFIXES.items():
        if path.endswith(suffix):
            return [reader(path)]
    raise InvalidInputError(f"{name}: got {path!r}, want a name that ends in one of {', '.join((*SUFFIXES, _LANCE))}")
