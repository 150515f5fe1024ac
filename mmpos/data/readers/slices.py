"""Slices of files: ranges of consecutive records, read by different workers in parallel."""

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
    """Reader of a range of consecutive records of a file; records keep their indices in the whole file.

    Args:
        reader: reader of the whole file.
        number: number of the slice, counted from 0.
        slices: number of slices of the file.
        begin: mark of the first record.
        stop: one past the index of the last record; None reads to the end of the file.
    """

    reader: FileReader
    number: int
    slices: int
    begin: Mark
    stop: int | None

    @property
    def source(self) -> str:
        """Path of the file, with the slice number added to its name."""
        folder, name = os.path.split(self.reader.path)
        suffix = "".join(PurePath(name).suffixes[-1:])
        return os.path.join(folder, f"{name.removesuffix(suffix)}-{self.number:05}-of-{self.slices:05}{suffix}")

    @property
    def path(self) -> str:
        """Path of the file."""
        return self.reader.path

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Raw]]:
        """Read the records start, start + step, … of the file, skipping those outside the slice."""
        start, step = stride(start, step)
        before = max(self.begin.index - start, 0)
        for location, raw in self.reader.records_from(self.begin, start + -(-before // step) * step, step):
            if self.stop is not None and location.index >= self.stop:
                return
            yield location, raw

    def count(self) -> int | None:
        """Return the number of records (lines for JSON lines), or None for the last slice."""
        return None if self.stop is None else self.stop - self.begin.index


def split_shards(readers: Iterable[Reader], slice_bytes: int) -> list[Reader]:
    """Split large files into slices that together yield the records of the file in order.

    Only files on this machine are split: uncompressed JSON lines and tar files, and Parquet files. Finding the slices
    requires counting all lines of a JSON lines file, or reading all headers of a tar file or the footer of a Parquet
    file.

    Args:
        readers: readers of whole shards.
        slice_bytes: size of a slice, which ends after the record that reaches this size; smaller files are not split.
    """
    slice_bytes = integer("slice_bytes", slice_bytes, minimum=1)
    return [part for reader in readers for part in _slices(reader, slice_bytes)]


def _slices(reader: Reader, slice_bytes: int) -> list[Reader]:
    if not isinstance(reader, FileReader) or not os.path.isfile(reader.path):  # also False for URLs
        return [reader]
    large = os.path.getsize(reader.path) > slice_bytes
    marks = [Mark(0, 0), *(reader.marks(slice_bytes) if large else ())]
    if len(marks) == 1:
        return [reader]
    stops = [*(mark.index for mark in marks[1:]), None]
    return [SliceReader(reader, i, len(marks), begin, stops[i]) for i, begin in enumerate(marks)]
