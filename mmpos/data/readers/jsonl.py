"""JSON lines: files of one object per line, plain or compressed."""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from mmpos.data.examples import Location, RecordError
from mmpos.data.readers.base import FileReader, Raw, broken, is_chosen, stride
from mmpos.support.extras import needed_for

__all__ = ["JsonlReader"]


@dataclass(frozen=True)
class JsonlReader(FileReader):
    """Reader of JSON lines. The number of a record is that of its line, from 0; empty lines are skipped.

    Args:
        path: the file; names that end in .gz or .zst are decompressed.
    """

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Raw]]:
        """Read records; a broken line is an error and reading goes on, a broken compression ends the shard."""
        start, step = stride(start, step)
        index = 0
        try:
            with _open(self.path) as file:
                while line := file.readline():
                    if is_chosen(index, start, step) and not line.isspace():
                        here = Location(self.path, index)
                        yield here, _parsed(line, here)
                    index += 1
        except (OSError, EOFError, zlib.error) as error:
            yield from self.lost(error, index, start, step)


def _open(path: str) -> io.BufferedIOBase:
    if path.endswith((".gz", ".zst")) and not os.path.getsize(path):
        raise EOFError("an empty file")  # which decompressors take for nothing compressed
    if path.endswith(".gz"):
        return gzip.open(path, "rb")
    if path.endswith(".zst"):
        with needed_for("zst files", extra="data"):
            import pyarrow as pa
        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(path), "zstd"))
    return open(path, "rb")


def _parsed(line: bytes, location: Location) -> Raw:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return broken(location, error)
    if not isinstance(value, dict):
        return RecordError(f"{location}: got {type(value).__name__}, want a JSON object")
    return value
