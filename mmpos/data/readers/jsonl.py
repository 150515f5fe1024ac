"""Reader of JSON lines: files with one object per line, plain or compressed."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from mmpos.data.examples import Location, RecordError
from mmpos.data.readers.base import FileReader, Raw, broken, is_chosen
from mmpos.support.extras import needed_for

__all__ = ["JsonlReader"]

_COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True)
class JsonlReader(FileReader):
    """Reader of JSON lines. The index of a record is its line number, counted from 0; empty lines are skipped.

    Args:
        path: path or URL of the file; files ending in .gz or .zst are decompressed.
    """

    def _records(self, start: int, step: int) -> Iterator[tuple[Location, Raw]]:
        """Read records; reading continues after an invalid line, and ends at corrupt compressed data."""
        index = 0
        try:
            with self.file.open() as packed, _unpacked(self.file.name, packed) as file:
                while line := file.readline():
                    if is_chosen(index, start, step) and not line.isspace():
                        here = Location(self.path, index)
                        yield here, _parsed(line, here)
                    index += 1
        except (OSError, EOFError, zlib.error) as error:
            yield from self.lost(error, index, start, step)


def _unpacked(name: str, packed: io.BufferedReader) -> io.BufferedReader | gzip.GzipFile:
    if name.endswith(_COMPRESSED) and not packed.peek(1):
        raise EOFError("an empty file")  # decompressors would return no data without an error
    if name.endswith(".gz"):
        return gzip.open(packed)
    if name.endswith(".zst"):
        with needed_for("zst files", extra="data"):
            import pyarrow as pa
        return io.BufferedReader(pa.CompressedInputStream(packed, "zstd"))
    return packed


def _parsed(line: bytes, location: Location) -> Raw:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return broken(location, error)
    if not isinstance(value, dict):
        return RecordError(f"{location}: got {type(value).__name__}, want a JSON object")
    return value
