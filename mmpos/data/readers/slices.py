"""Slices of files: neighbouring records that a worker reads while others read those before and after."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath

from mmpos.data.examples import Location
from mmpos.data.readers.base import FileReader, Mark, Raw, Reader, stride
from mmpos.support.checks import integer

__all__ = ["SliceReader", "split_shards"]


@dataclass(frozen=True)
class SliceReader:
    """Reader of neighbouring records of a file, with the numbers that they have in the whole.

    Args:
        reader: of the whole file.
        number: of the slice, from 0.
        slices: of the file.
        begin: its first record.
        stop: number of the record behind its last one; None for all to the end.
    """

    reader: FileReader
    number: int
    slices: int
    begin: Mark
    stop: int | None

    @property
    def source(self) -> str:
        """Path of the file, with the number of the slice in its name."""
        folder, name = os.path.split(self.reader.path)
        suffix = "".join(PurePath(name).suffixes[-1:])
        return os.path.join(folder, f"{name.removesuffix(suffix)}-{self.number:05}-of-{self.slices:05}{suffix}")

    @property
    def path(self) -> str:
        """Path of the file."""
        return self.reader.path

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Raw]]:
        """Read the records start, start + step, … of the file that lie in the slice."""
        start, step = stride(start, step)
        before = max(self.begin.index - start, 0)
        for location, raw in self.reader.records_from(self.begin, start + -(-before // step) * step, step):
            if self.stop is not None and location.index >= self.stop:
                return
            yield location, raw

    def count(self) -> int | None:
        """Return the number of records; of JSON lines, of lines."""
        return None if self.stop is None else self.stop - self.begin.index


def split_shards(readers: Iterable[Reader], slice_bytes: int) -> list[Reader]:
    """Split large files into slices, which together give the records of the file in its order.

    Files of this machine are split: JSON lines and tar files that are not compressed, and Parquet files. Of a file of
    JSON lines all lines are counted, of a tar file the headers are read, and of a Parquet file the footer.

    Args:
        readers: of whole shards.
        slice_bytes: of a slice, which ends behind the record that reaches them; a smaller file is left whole.
    """
    slice_bytes = integer("slice_bytes", slice_bytes, minimum=1)
    return [part for reader in readers for part in _slices(reader, slice_bytes)]


def _slices(reader: Reader, slice_bytes: int) -> list[Reader]:
    if not isinstance(reader, FileReader) or not os.path.isfile(reader.path):  # an object of a store is no file
        return [reader]
    large = os.path.getsize(reader.path) > slice_bytes
    marks = [Mark(0, 0), *(reader.marks(slice_bytes) if large else ())]
    if len(marks) == 1:
        return [reader]
    stops = [*(mark.index for mark in marks[1:]), None]
    return [SliceReader(reader, i, len(marks), begin, stops[i]) for i, begin in enumerate(marks)]
